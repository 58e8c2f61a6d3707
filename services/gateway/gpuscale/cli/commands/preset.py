"""`gpuscalectl preset`: the policies of known systems, as manifests to apply."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import Session, command, names_of, one_name
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import COUNT, DURATION, POSITIVE, Parsed, option, pair, shared, takes
from gpuscale.cli.views import autoscaler as views
from gpuscale.common import wire
from gpuscale.common.names import ADAPTER, WATCHER

_TRUTH = {"true": 1.0, "false": 0.0}


def _parameter(text: str) -> tuple[str, float]:
    """A parameter of a preset, NAME=NUMBER."""
    name, value = pair(text, "a parameter", "value=20")
    try:
        return name, _TRUTH[value] if value in _TRUTH else float(value)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a parameter; write it like value=20") from error


def _amount(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def _tier(text: str) -> "api.AdapterTier":
    """A tier of adapters, ADAPTER or ADAPTER=MOST."""
    name, equals, most = text.partition("=")
    try:
        return api.AdapterTier(adapter=full_name(ADAPTER, name), max_replicas=_amount(most) if equals else 0)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a tier; write it like primary=2") from error


def _capability_set(text: str) -> tuple[str, dict[str, int]]:
    """A capability set, ID:NAME=AMOUNT,...: its id, and the amount of each capability, -1 for any."""
    name, colon, listed = text.partition(":")
    parts = [part.partition("=") for part in filter(None, listed.split(","))]
    try:
        amounts = {capability: _amount(amount) if equals else -1 for capability, equals, amount in parts}
    except ValueError:
        colon, amounts = "", {}
    if not name or not colon or "" in amounts:
        raise ValueError(f"{text!r} is not a capability set; write it like big:gpu=2,high_memory")
    return name, amounts


@dataclass(frozen=True, kw_only=True)
class Wishing:
    """The parameters of a preset, as typed."""

    watcher: str = shared(
        default="",
        metavar="NAME",
        help="Queue watcher that measures the load.",
        shell_complete=names_of("watchers"),
    )
    metric: str = shared(
        default="",
        metavar="NAME",
        help="Instead of --watcher: reported metric of the endpoint that measures the load.",
    )
    template: str = shared(default="worker", metavar="NAME", help="Command template of a replica.")
    gpus: int = shared(type=COUNT, default=1, metavar="N", help="GPUs of each replica.")
    capability_sets: tuple[tuple[str, dict[str, int]], ...] = shared(
        "--capability-set",
        many=True,
        type=Parsed("id:name[=amount],...", _capability_set),
        help="For opengris_capability: a capability set; its gpu capability is the number of GPUs per group.",
    )
    tiers: "tuple[api.AdapterTier, ...]" = shared(
        "--tier",
        many=True,
        type=Parsed("adapter[=most]", _tier),
        help="Adapter to fill, up to so many replicas, before the next.",
    )
    min_replicas: int = shared("--min", type=COUNT, default=1, metavar="N", help="Fewest replicas.")
    max_replicas: int = shared("--max", type=COUNT, default=16, metavar="N", help="Most replicas.")
    slots: int = shared(type=POSITIVE, default=1, metavar="N", help="Concurrent requests per replica.")
    goal: float = shared(type=DURATION, default="30s", help="How long a request may wait.")
    service_time: float | None = shared(type=DURATION, help="Duration of a request; learned by default.")
    parameters: tuple[tuple[str, float], ...] = shared(
        "--set", many=True, type=Parsed("name=number", _parameter), help="What differs from the original."
    )

    def message(self, preset: str) -> "api.PresetWish":
        """The wish for a preset."""
        return api.PresetWish(
            preset=preset,
            watcher=full_name(WATCHER, self.watcher) if self.watcher else "",
            metric=self.metric,
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            template=api.ReplicaTemplate(template=self.template, gpu_count=self.gpus, tiers=self.tiers),
            slots=self.slots,
            goal=wire.to_duration(self.goal),
            service_time=None if self.service_time is None else wire.to_duration(self.service_time),
            parameters=dict(self.parameters),
            capability_sets=[
                api.CapabilitySet(
                    id=name,
                    capabilities=amounts,
                    template=api.ReplicaTemplate(
                        template=self.template, gpu_count=abs(amounts.get("gpu", 0))
                    ),
                )
                for name, amounts in self.capability_sets
            ],
        )


def manifest(name: str, spec: "api.EndpointSpec") -> Mapping[str, object]:
    """The manifest of an endpoint."""
    from google.protobuf.json_format import MessageToDict

    return {"kind": "Endpoint", "name": name, "spec": MessageToDict(spec)}


@command("preset list")
def list_presets(session: Session) -> None:
    """List the presets; `-o wide` shows the parameters of each."""
    with session.connect() as client:
        found = lookup.presets(client)
    session.output.write_list(found, views.PRESETS)


@command("preset show keda --watcher jobs | gpuscalectl apply -f -")
@one_name("presets", metavar="PRESET")
@takes("wishing", Wishing)
@option("--name", "endpoint", default="", metavar="NAME", help="Name of the endpoint.")
def show_preset(session: Session, name: str, wishing: Wishing, endpoint: str) -> None:
    """Write a preset as the manifest of an endpoint, for `apply -f`, without creating it.

    PRESET is its name, or a policy string of OpenGRIS Scaler.
    """
    request = api.RenderPresetRequest(wish=wishing.message(name))
    with session.connect() as client:
        found = client.presets.RenderPreset(request)
    for one in found.notes:
        note(one)
    named = (
        endpoint
        or request.wish.watcher.rpartition("/")[2]
        or found.preset.removeprefix("presets/").replace("_", "-")
    )
    session.output.write_data(manifest(named, found.spec))
