"""`gpuscalectl preset`: known systems' policies, as manifests that can be applied."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.output import Format, Output
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.options import duration
from gpuscale.cli.grammar.typed import takes

if TYPE_CHECKING:
    from gpuscale.api.autoscaler.v1 import AdapterTier, CapabilitySet, EndpointSpec, PresetWish

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_TRUTH = {"true": 1.0, "false": 0.0}


def parameter(text: str) -> tuple[str, float]:
    """A parameter of a preset, NAME=NUMBER; a usage error where it is none."""
    name, equals, value = text.partition("=")
    try:
        number = _TRUTH[value] if value in _TRUTH else float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no parameter; write it like value=20") from error
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is no parameter; write it like value=20")
    return name, number


def tier(text: str) -> "AdapterTier":
    """A tier of adapters, ADAPTER or ADAPTER=MOST; a usage error where it is neither."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.common import names

    name, equals, most = text.partition("=")
    if not name or (equals and not (most.isascii() and most.isdecimal())):
        raise typer.BadParameter(f"{text!r} is no tier; write it like primary=2")
    return api.AdapterTier(adapter=full_name(names.ADAPTER, name), max_replicas=int(most or 0))


def capability_set(text: str, template: str) -> "CapabilitySet":
    """A capability set, ID:NAME=AMOUNT,...; its groups take as many GPUs as it has of `gpu`.

    Raises:
        typer.BadParameter: it is none.
    """
    from gpuscale.api.autoscaler import v1 as api

    name, colon, listed = text.partition(":")
    amounts: dict[str, int] = {}
    for part in filter(None, listed.split(",")):
        capability, equals, amount = part.partition("=")
        if not capability or (equals and not (amount.isascii() and amount.isdecimal())):
            raise typer.BadParameter(f"{text!r} is no capability set; write it like big:gpu=2,high_memory")
        amounts[capability] = int(amount) if equals else -1
    if not name or not colon:
        raise typer.BadParameter(f"{text!r} is no capability set; write it like big:gpu=2,high_memory")
    gpus = abs(amounts.get("gpu", 0))
    made = api.ReplicaTemplate(template=template, gpu_count=gpus)
    return api.CapabilitySet(id=name, capabilities=amounts, template=made)


@dataclass(frozen=True, kw_only=True)
class Wishing:
    """What a preset is made for, as it was typed."""

    watcher: Annotated[str, typer.Option(metavar="NAME", help="Queue watcher that counts the work.")] = ""
    metric: Annotated[
        str,
        typer.Option(metavar="NAME", help="Metric reported for the endpoint that counts it, in its place."),
    ] = ""
    template: Annotated[str, typer.Option(metavar="NAME", help="Command template of a replica.")] = "worker"
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each replica.")] = 1
    capability_sets: Annotated[
        list[str] | None,
        typer.Option(
            "--capability-set",
            metavar="ID:NAME[=AMOUNT],...",
            help="Of opengris_capability: a set, whose groups take as many GPUs as it has of gpu; may be repeated.",
        ),
    ] = None
    tiers: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="ADAPTER[=MOST]",
            help="Adapter that is filled, up to so many replicas, before the next; may be repeated.",
        ),
    ] = None
    min_replicas: Annotated[int, typer.Option("--min", min=0, help="Fewest replicas.")] = 1
    max_replicas: Annotated[int, typer.Option("--max", min=0, help="Most replicas.")] = 16
    slots: Annotated[
        int, typer.Option(min=1, help="Pieces of work that a replica has in hand at a time.")
    ] = 1
    goal: Annotated[
        float, typer.Option(parser=duration, metavar="DURATION", help="How long work may wait.")
    ] = 30.0
    service_time: Annotated[
        float | None,
        typer.Option(
            parser=duration, metavar="DURATION", help="Time that a piece takes; learnt when not given."
        ),
    ] = None
    parameters: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=NUMBER", help="What differs from the original; may be repeated."),
    ] = None

    def message(self, preset: str) -> "PresetWish":
        """The wish for a preset."""
        from gpuscale.api.autoscaler import v1 as api
        from gpuscale.cli.console.resources import full_name
        from gpuscale.common import names
        from gpuscale.common.wire import to_duration

        return api.PresetWish(
            preset=preset,
            watcher=full_name(names.WATCHER, self.watcher) if self.watcher else "",
            metric=self.metric,
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            template=api.ReplicaTemplate(
                template=self.template, gpu_count=self.gpus, tiers=map(tier, self.tiers or ())
            ),
            slots=self.slots,
            goal=to_duration(self.goal),
            service_time=None if self.service_time is None else to_duration(self.service_time),
            parameters=dict(map(parameter, self.parameters or ())),
            capability_sets=[capability_set(one, self.template) for one in self.capability_sets or ()],
        )


def write_manifest(output: Output, name: str, spec: "EndpointSpec") -> None:
    """Write an endpoint as a manifest: YAML, unless JSON is wanted."""
    data = manifest(name, spec)
    (output if output.format is Format.JSON else Output(Format.YAML)).write_data(data)


def manifest(name: str, spec: "EndpointSpec") -> Mapping[str, object]:
    """The manifest of an endpoint."""
    from google.protobuf.json_format import MessageToDict

    return {"kind": "Endpoint", "name": name, "spec": MessageToDict(spec)}


@app.command("list")
def list_presets(context: typer.Context) -> None:
    """What presets there are; `-o wide` says what may be set of each."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.views.asking import PRESETS

    session = session_of(context)
    with session.connect() as client:
        found = list(client.presets.ListPresets(api.ListPresetsRequest()).presets)
    session.output.write_list(found, PRESETS)


@app.command("show")
@takes("wishing", Wishing)
def show_preset(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="PRESET", help="Its name, or a policy text of OpenGRIS Scaler.", show_default=False
        ),
    ],
    wishing: Wishing,
    endpoint: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the endpoint.")] = "",
) -> None:
    """Write the endpoint that a preset makes, for `apply -f`; nothing is created."""
    from gpuscale.api.autoscaler import v1 as api

    session = session_of(context)
    request = api.RenderPresetRequest(wish=wishing.message(name))
    with session.connect() as client:
        found = client.presets.RenderPreset(request)
    for one in found.notes:
        note(one)
    named = endpoint or request.wish.watcher.rpartition("/")[2] or found.preset.replace("_", "-")
    write_manifest(session.output, named, found.spec)
