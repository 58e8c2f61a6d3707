"""Reading resources: whole lists, or those of given names.

Names are as typed (`gpuscale.cli.grammar.nouns`); a GPU may also be its UUID alone, the beginning of one (`GPU-6afc`), or
node and index (`host-1/0`), as tables print them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console.cells import short
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.nouns import canonical, full_name, is_uuid
from gpuscale.cli.grammar.parameters import local_text
from gpuscale.client import Client, pages
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError, NotFoundError
from gpuscale.common.wire import ANY_TIME, TimeRange, to_datetime, to_timestamp


class NamedResource(Protocol):
    """A resource of the contract."""

    @property
    def name(self) -> str:
        """Its resource name."""
        ...


N = TypeVar("N", bound=NamedResource)


@dataclass
class About:
    """What a list is about: a GPU by its UUID, and a time. All where nothing is said."""

    gpu: str = ""
    time: TimeRange = ANY_TIME
    _told: set[str] = field(default_factory=set[str])

    def pages(self, method: Callable[[Any], Any], request: Any, what: str) -> Iterator[Any]:
        """The pages of a list; where its time begins before what is kept, that is said once.

        Args:
            method: the List method.
            request: its request, which is used up.
            what: what may be missing then.
        """
        begin = self.time.since or self.time.until
        asked: Mapping[str, object] = {"gpu_uuid": self.gpu, "uuid": self.gpu, "show_ended": bool(begin)}
        for name, value in {**asked, "show_resolved": bool(begin)}.items():
            if value and name in request.DESCRIPTOR.fields_by_name:
                setattr(request, name, value)
        if self.time.since is not None:
            request.since.CopyFrom(to_timestamp(self.time.since))
        if self.time.until is not None:
            request.until.CopyFrom(to_timestamp(self.time.until))
        for page in pages(method, request):
            kept = to_datetime(page.kept_since) if page.HasField("kept_since") else None
            if begin is not None and kept is not None and begin < kept and what not in self._told:
                self._told.add(what)
                note(f"{what} before {local_text(kept)} may be missing: they are kept no longer")
            yield page


EVERYTHING = About()


def chosen(items: Iterable[N], pattern: str, typed: Sequence[str]) -> list[N]:
    """The items of these names in their order; all items where no name is given.

    Raises:
        NotFoundError: one of them is not there.
    """
    if not typed:
        return list(items)
    by_name = {item.name: item for item in items}
    wanted = [full_name(pattern, name) for name in typed]
    for name in wanted:
        if name not in by_name:
            raise NotFoundError(f"{name} not found")
    return [by_name[name] for name in wanted]


def named(client: Client, typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """(resource names, UUIDs) of nodes and GPUs: `host-1`, `host-1/gpu-…`, `host-1/0`, or a UUID alone."""
    uuids = [one for one in typed if is_uuid(one)]
    others = [one for one in typed if one not in uuids]
    return spots(lambda: nodes(client), others), uuids


def spots(of: Callable[[], Iterable[monitor_api.Node]], typed: Sequence[str], noun: str = "") -> list[str]:
    """The resource names of nodes and GPUs, in full, as tables print them, or the beginning of a UUID.

    Args:
        of: reads the nodes; called where a GPU has to be looked up by its UUID alone or its index.
        typed: what was typed.
        noun: `nodes` or `gpus` where only these are meant.

    Raises:
        InvalidArgumentError: one can be neither a node nor a GPU, or is not what the noun says.
        NotFoundError: no GPU has the UUID or index.
    """
    known: _Gpus | None = None
    found: list[str] = []
    for one in typed:
        text = canonical(names.cordoned(one)).removeprefix("gpus/")
        if names.match(names.NODE, text) is not None:
            name = text
        elif is_uuid(text) or _INDEX_OR_PREFIX.fullmatch(text):
            known = known or _Gpus(gpu for node in of() for gpu in node.snapshot.gpus)
            name = known.find(text).name
        elif "/" not in text:
            name = full_name(names.NODE, text)
        else:
            name = full_name(names.GPU, text.lower())
        if noun and ("gpus" if "/gpus/" in name else "nodes") != noun:
            raise InvalidArgumentError(f"{one!r} is not a {noun.removesuffix('s')}")
        found.append(name)
    return found


# Ids of nodes are in lower case.
_INDEX_OR_PREFIX = re.compile(r"[^/]+/\d+|(GPU|MIG)-[0-9A-Fa-f][0-9A-Fa-f-]*")


_LEAST_PREFIX = len("GPU-") + 1
_MOST_NAMED = 8


class _Gpus:
    """GPUs by every name that people use for them."""

    def __init__(self, gpus: Iterable[types_api.Gpu]) -> None:
        self._by: dict[str, list[types_api.Gpu]] = defaultdict(list)
        for gpu in gpus:
            _, node, _, uuid = gpu.name.split("/")
            for key in (gpu.name, f"{node}/{uuid}", f"{node}/{gpu.index}", uuid):
                self._by[key].append(gpu)

    def find(self, typed: str) -> types_api.Gpu:
        """The one of that name.

        Raises:
            NotFoundError: there is none.
            InvalidArgumentError: it may be several.
        """
        wanted = canonical(typed).removeprefix("gpus/").lower()
        match = self._by.get(wanted, [])
        if not match and len(wanted) >= _LEAST_PREFIX:
            begun = (gpu for found in self._by.values() for gpu in found)
            match = list({gpu.name: gpu for gpu in begun if gpu.uuid.lower().startswith(wanted)}.values())
        if not match:
            raise NotFoundError(f"GPU {typed} not found; list GPUs with: gpuscalectl get gpus -o name")
        if len(match) > 1:
            uuids = ", ".join(gpu.uuid for gpu in match[:_MOST_NAMED])
            raise InvalidArgumentError(f"{typed} may be any of {uuids}; use the UUID")
        return match[0]


def nodes(client: Client, typed: Sequence[str] = ()) -> list[monitor_api.Node]:
    """The nodes of these names, or all."""
    if typed:
        wanted = [monitor_api.GetNodeRequest(name=full_name(names.NODE, name)) for name in typed]
        return [client.fleet.GetNode(request).node for request in wanted]
    return [
        item for page in pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()) for item in page.nodes
    ]


def gpus(of: Iterable[monitor_api.Node], typed: Sequence[str] = ()) -> list[types_api.Gpu]:
    """GPUs of these nodes, all or those of these names."""
    found = [gpu for node in of for gpu in node.snapshot.gpus]
    return list(map(_Gpus(found).find, typed)) if typed else found


def gpu_uuid(client: Client, typed: str) -> str:
    """The UUID of a GPU in any spelling; in full also of one that is gone."""
    try:
        return _Gpus(gpu for node in nodes(client) for gpu in node.snapshot.gpus).find(typed).uuid
    except NotFoundError:
        if is_uuid(typed):
            return typed
        raise


def reservations(
    client: Client,
    typed: Sequence[str] = (),
    *,
    holder: str = "",
    ended: bool = False,
    about: About = EVERYTHING,
) -> list[allocator_api.Reservation]:
    """The reservations of these names, or all that are held, or those of one holder, a GPU and a time."""
    if typed:
        wanted = [
            allocator_api.GetReservationRequest(name=full_name(names.RESERVATION, name)) for name in typed
        ]
        return [client.allocator.GetReservation(request).reservation for request in wanted]
    request = allocator_api.ListReservationsRequest(holder=holder, show_ended=ended)
    found = about.pages(client.allocator.ListReservations, request, "reservations that ended")
    return [item for page in found for item in page.reservations]


def jobs(
    client: Client, typed: Sequence[str] = (), *, ended: bool = False
) -> list[allocator_api.Reservation]:
    """The reservations with the jobs of these names, or with all jobs."""
    if typed:
        return [job(client, one) for one in typed]
    return [one for one in reservations(client, ended=ended) if one.HasField("job")]


def job(client: Client, typed: str) -> allocator_api.Reservation:
    """The reservation with the job of this name; or of this title, the newest of those that live, or of all.

    Raises:
        NotFoundError: there is none.
    """
    noun, _, text = canonical(typed).rpartition("/")
    if noun in {"jobs", "reservations"} or RESERVATION_ID.fullmatch(text):
        [found] = reservations(client, [text])
        named = [found] if found.HasField("job") else []
    else:
        named = [one for one in jobs(client, ended=True) if one.job.title == text]
    if not named:
        raise NotFoundError(f"there is no job {typed}; list all with: gpuscalectl get jobs -a")
    return max(named, key=lambda one: (not one.HasField("end_time"), one.create_time.ToNanoseconds()))


RESERVATION_ID = re.compile("r[a-z2-7]{12}")
"""What the allocator calls reservations."""


def holders(of: Iterable[allocator_api.Reservation]) -> Mapping[str, str]:
    """Who holds each reserved GPU: name of the GPU -> holder."""
    return {gpu.name: reservation.holder for reservation in of for gpu in reservation.gpus}


def endpoints(client: Client, typed: Sequence[str] = ()) -> list[autoscaler_api.Endpoint]:
    """The endpoints of these names, or all."""
    if typed:
        wanted = [autoscaler_api.GetEndpointRequest(name=full_name(names.ENDPOINT, name)) for name in typed]
        return [client.endpoints.GetEndpoint(request).endpoint for request in wanted]
    request = autoscaler_api.ListEndpointsRequest()
    return [item for page in pages(client.endpoints.ListEndpoints, request) for item in page.endpoints]


def replicas(
    client: Client,
    typed: Sequence[str] = (),
    *,
    endpoint: str = "",
    ended: bool = False,
    about: About = EVERYTHING,
) -> list[autoscaler_api.Replica]:
    """The replicas of these names, or all, or those of one endpoint, a GPU and a time."""
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = autoscaler_api.ListReplicasRequest(parent=parent, show_ended=ended or bool(typed))
    found = about.pages(client.endpoints.ListReplicas, request, "replicas that ended")
    return chosen((item for page in found for item in page.replicas), names.REPLICA, typed)


def watchers(client: Client, typed: Sequence[str] = ()) -> list[autoscaler_api.QueueWatcher]:
    """The queue watchers of these names, or all."""
    if typed:
        wanted = [
            autoscaler_api.GetQueueWatcherRequest(name=full_name(names.WATCHER, name)) for name in typed
        ]
        return [client.queue_watchers.GetQueueWatcher(request).queue_watcher for request in wanted]
    request = autoscaler_api.ListQueueWatchersRequest()
    return [
        item
        for page in pages(client.queue_watchers.ListQueueWatchers, request)
        for item in page.queue_watchers
    ]


def decisions(
    client: Client,
    typed: Sequence[str] = (),
    *,
    endpoint: str = "",
    limit: int | None = 20,
    about: About = EVERYTHING,
) -> list[autoscaler_api.Decision]:
    """The decisions of these names, or the newest `limit`, newest first, of all endpoints or of one, and of a time."""
    if typed:
        wanted = [autoscaler_api.GetDecisionRequest(name=full_name(names.DECISION, name)) for name in typed]
        return [client.decisions.GetDecision(request).decision for request in wanted]
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = autoscaler_api.ListDecisionsRequest(parent=parent, page_size=limit or 1000)
    found = about.pages(client.decisions.ListDecisions, request, "decisions")
    return list(islice((item for page in found for item in page.decisions), limit))


def health(
    client: Client,
    typed: Sequence[str] = (),
    *,
    node: str = "",
    ended: bool = False,
    about: About = EVERYTHING,
) -> list[monitor_api.HealthEvent]:
    """Events of these names; or those that last, or all, of a node or of all, a GPU and a time, newest first."""
    if typed:
        wanted = [monitor_api.GetHealthEventRequest(name=full_name(names.HEALTH_EVENT, one)) for one in typed]
        return [client.health.GetHealthEvent(one).health_event for one in wanted]
    parent = full_name(names.NODE, node) if node else ""
    request = monitor_api.ListHealthEventsRequest(parent=parent, show_resolved=ended, page_size=1000)
    found = about.pages(client.health.ListHealthEvents, request, "health events that were over")
    return [item for page in found for item in page.health_events]


def adapters(client: Client, typed: Sequence[str] = ()) -> list[autoscaler_api.Adapter]:
    """The worker adapters of these names, or all."""
    request = autoscaler_api.ListAdaptersRequest()
    found = (item for page in pages(client.adapters.ListAdapters, request) for item in page.adapters)
    return chosen(found, names.ADAPTER, typed)


def cordons(client: Client, typed: Sequence[str] = ()) -> list[allocator_api.Cordon]:
    """The cordons of these nodes and GPUs, or all.

    Raises:
        NotFoundError: there is no cordon on one of them.
    """
    request = allocator_api.ListCordonsRequest()
    found = [item for page in pages(client.nodes.ListCordons, request) for item in page.cordons]
    by_name = {item.target or item.name: item for item in found}  # an allocator of 0.x names no target
    wanted = spots(lambda: nodes(client), typed)
    for name in wanted:
        if name not in by_name:
            raise NotFoundError(f"{name} is not cordoned: not found")
    return [by_name[name] for name in wanted] if typed else found


def quotas(client: Client) -> list[allocator_api.Quota]:
    """The quotas of all tenants; those without one are listed while they hold or wait for something."""
    request = allocator_api.ListQuotasRequest()
    return [item for page in pages(client.quotas.ListQuotas, request) for item in page.quotas]


def rules(
    client: Client, endpoint: str = "", kind: str = "", signal: str = "", *, disabled: bool | None = None
) -> list[autoscaler_api.EndpointRule]:
    """All rules, or those of an endpoint, of a kind, or that read a signal."""
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = autoscaler_api.ListRulesRequest(parent=parent, kind=kind, signal=signal, disabled=disabled)
    return [item for page in pages(client.rules.ListRules, request) for item in page.rules]


def recordings(client: Client, typed: Sequence[str] = ()) -> list[monitor_api.Recording]:
    """The recordings of these names, or all."""
    if typed:
        wanted = [monitor_api.GetRecordingRequest(name=full_name(names.RECORDING, name)) for name in typed]
        return [client.recordings.GetRecording(request).recording for request in wanted]
    request = monitor_api.ListRecordingsRequest()
    return [item for page in pages(client.recordings.ListRecordings, request) for item in page.recordings]


def backtests(client: Client, typed: Sequence[str] = ()) -> list[autoscaler_api.Backtest]:
    """The backtests of these names, or all, newest first."""
    if typed:
        wanted = [autoscaler_api.GetBacktestRequest(name=full_name(names.BACKTEST, name)) for name in typed]
        return [client.backtests.GetBacktest(request).backtest for request in wanted]
    request = autoscaler_api.ListBacktestsRequest()
    return [item for page in pages(client.backtests.ListBacktests, request) for item in page.backtests]


def presets(client: Client) -> list[autoscaler_api.Preset]:
    """All presets."""
    request = autoscaler_api.ListPresetsRequest()
    return [item for page in pages(client.presets.ListPresets, request) for item in page.presets]


_READERS: Mapping[str, Callable[[Client], Sequence[NamedResource]]] = {
    "nodes": nodes,
    "reservations": reservations,
    "jobs": jobs,
    "endpoints": endpoints,
    "replicas": replicas,
    "watchers": watchers,
    "decisions": decisions,
    "adapters": adapters,
    "cordons": cordons,
    "recordings": recordings,
    "rules": rules,
    "backtests": backtests,
}


def short_names(client: Client, kind: str) -> list[str]:
    """The names of all resources of a kind as tables print them; UUIDs of GPUs."""
    if kind == "gpus":
        return [gpu.uuid for gpu in gpus(nodes(client))]
    if kind == "presets":
        return [short(preset.name) for preset in presets(client)]
    if kind == "quotas":
        return [quota.tenant for quota in quotas(client)]
    return ["/".join(item.name.split("/")[1::2]) for item in _READERS[kind](client)]
