"""Reading resources: whole lists, or those of given names.

Names are as typed (`gpuscale.cli.grammar.nouns`); a GPU may also be its UUID alone, the beginning of one (`GPU-6afc`), or
node and index (`host-1/0`), as tables print them.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message_factory import GetMessageClass

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console.cells import View, short
from gpuscale.cli.console.output import Chosen
from gpuscale.cli.console.terminal import note, pause
from gpuscale.cli.grammar.nouns import canonical, full_name, is_uuid, tenant_of
from gpuscale.cli.grammar.parameters import local_text
from gpuscale.client import Client, GpuscaleError, Mirror, pages, watch
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError, NotFoundError
from gpuscale.common.filters import compile_filter, compile_order
from gpuscale.common.wire import ANY_TIME, TimeRange, to_datetime, to_timestamp


@dataclass
class About:
    """What a list is about: a GPU by its UUID, a time, what the options of `get` choose of a view, and of which fields a watch tells.

    All where nothing is said.
    """

    gpu: str = ""
    time: TimeRange = ANY_TIME
    chosen: Chosen = Chosen()
    view: View[Any] | None = None
    fields: Sequence[str] = ()
    _told: set[str] = field(default_factory=set[str])

    def filter_of(self, kind: Any) -> str:
        """The filter of what is chosen, for messages of a type."""
        return "" if self.view is None else self.chosen.to_filter(kind, self.view)

    def items(self, service: Any, request: Any, what: str = "", limit: int | None = None) -> list[Any]:
        """The items of a List method; notes once if the time begins before what is kept.

        Args:
            service: that has the method.
            request: of the method, which is used up.
            what: what may be missing then.
            limit: how many are wanted.
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
        method = type(request).__name__.removesuffix("Request")
        listed = request.DESCRIPTOR.file.message_types_by_name[f"{method}Response"].fields[0]
        if self.view is not None:
            filters = request.filter, self.filter_of(listed.message_type)
            request.filter, request.order_by = " AND ".join(filter(None, filters)), self.chosen.order_by
        streams = self.chosen.watched.streams if self.chosen.watched else None
        known = streams.items(service, request, self.fields) if streams else None
        if known is not None:
            return known
        found = list[Any]()
        for page in pages(getattr(service, method), request):
            kept = to_datetime(page.kept_since) if what and page.HasField("kept_since") else None
            if begin is not None and kept is not None and begin < kept and what not in self._told:
                self._told.add(what)
                note(f"{what} before {local_text(kept)} may be missing: they are kept no longer")
            found += getattr(page, listed.name)
            if limit and len(found) >= limit:
                break
        return found[:limit]


EVERYTHING = About()


def _named(service: Any, request: type[Any], pattern: str, typed: Sequence[str]) -> list[Any]:
    """The resources of these names, by a Get method of a service."""
    method = getattr(service, request.__name__.removesuffix("Request"))
    answers = [method(request(name=full_name(pattern, name))) for name in typed]
    return [getattr(one, one.DESCRIPTOR.fields[0].name) for one in answers]


def _reader(service: str, pattern: str, one: type[Any], every: type[Any]) -> Callable[..., list[Any]]:
    """What reads the resources of these names by the Get method of a service, or all of them by its List method."""

    def read(client: Client, typed: Sequence[str] = (), about: About = EVERYTHING) -> list[Any]:
        of = getattr(client, service)
        return _named(of, one, pattern, typed) if typed else about.items(of, every())

    return read


nodes: Callable[..., list[monitor_api.Node]] = _reader(
    "fleet", names.NODE, monitor_api.GetNodeRequest, monitor_api.ListNodesRequest
)
endpoints: Callable[..., list[autoscaler_api.Endpoint]] = _reader(
    "endpoints", names.ENDPOINT, autoscaler_api.GetEndpointRequest, autoscaler_api.ListEndpointsRequest
)
watchers: Callable[..., list[autoscaler_api.QueueWatcher]] = _reader(
    "queue_watchers",
    names.WATCHER,
    autoscaler_api.GetQueueWatcherRequest,
    autoscaler_api.ListQueueWatchersRequest,
)
adapters: Callable[..., list[autoscaler_api.Adapter]] = _reader(
    "adapters", names.ADAPTER, autoscaler_api.GetAdapterRequest, autoscaler_api.ListAdaptersRequest
)
recordings: Callable[..., list[monitor_api.Recording]] = _reader(
    "recordings", names.RECORDING, monitor_api.GetRecordingRequest, monitor_api.ListRecordingsRequest
)
backtests: Callable[..., list[autoscaler_api.Backtest]] = _reader(
    "backtests", names.BACKTEST, autoscaler_api.GetBacktestRequest, autoscaler_api.ListBacktestsRequest
)
rules: Callable[..., list[autoscaler_api.EndpointRule]] = _reader(
    "rules", names.RULE, autoscaler_api.GetRuleRequest, autoscaler_api.ListRulesRequest
)


policies: Callable[..., list[allocator_api.UsePolicy]] = _reader(
    "policies", names.POLICY, allocator_api.GetUsePolicyRequest, allocator_api.ListUsePoliciesRequest
)
targets: Callable[..., list[allocator_api.NotificationTarget]] = _reader(
    "notifications",
    names.TARGET,
    allocator_api.GetNotificationTargetRequest,
    allocator_api.ListNotificationTargetsRequest,
)


budgets: Callable[..., list[allocator_api.PowerBudget]] = _reader(
    "power", names.BUDGET, allocator_api.GetPowerBudgetRequest, allocator_api.ListPowerBudgetsRequest
)


def changes(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING
) -> list[allocator_api.PowerChange]:
    """How caps were changed for these budgets, the changes of these names, or all; newest first."""
    ids = (one.rpartition("/")[2] for one in typed)
    asked = " OR ".join(f'power_budget = "budgets/{one}" OR name = "changes/{one}"' for one in ids)
    return about.items(client.power, allocator_api.ListPowerChangesRequest(filter=asked))


def acts(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING, *, limit: int | None = None
) -> list[allocator_api.PolicyAct]:
    """What these policies did, the acts of these names, or all; newest first."""
    asked = " OR ".join(
        f'name = "{full_name(names.ACT, one)}"'
        if names.match(names.POLICY, canonical(one)) is None and "/" in one
        else f'policy = "{full_name(names.POLICY, one)}"'
        for one in typed
    )
    return about.items(client.policies, allocator_api.ListPolicyActsRequest(filter=asked), limit=limit)


def notifications(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING
) -> list[allocator_api.Notification]:
    """The notifications of these names, or all that were not delivered."""
    asked = " OR ".join(f'name = "{full_name(names.NOTIFICATION, one)}"' for one in typed)
    return about.items(client.notifications, allocator_api.ListNotificationsRequest(filter=asked))


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
_INDEX_OR_PREFIX = re.compile(r"[^/]+/\d+|(GPU|MIG|SIM)-[0-9A-Fa-f][0-9A-Fa-f-]*")


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
        """The resource of that name.

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


def gpus(
    of: Iterable[monitor_api.Node], typed: Sequence[str] = (), about: About = EVERYTHING
) -> list[types_api.Gpu]:
    """GPUs of these nodes, all or those of these names; the API lists none, so they are filtered and ordered here."""
    found = [gpu for node in of for gpu in node.snapshot.gpus]
    if typed:
        return list(map(_Gpus(found).find, typed))
    meets = compile_filter(about.filter_of(types_api.Gpu.DESCRIPTOR), types_api.Gpu)
    return sorted(filter(meets, found), key=compile_order(about.chosen.order_by, types_api.Gpu))


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
    about: About = EVERYTHING,
    *,
    holder: str = "",
    ended: bool = False,
    of_jobs: bool = False,
) -> list[allocator_api.Reservation]:
    """The reservations of these names, or all that are held, or those of one holder, a GPU and a time."""
    if typed:
        return _named(client.allocator, allocator_api.GetReservationRequest, names.RESERVATION, typed)
    only = "job:*" if of_jobs else ""
    request = allocator_api.ListReservationsRequest(holder=holder, show_ended=ended, filter=only)
    return about.items(client.allocator, request, "reservations that ended")


def jobs(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING, *, ended: bool = False
) -> list[allocator_api.Reservation]:
    """The reservations with the jobs of these names, or with all jobs."""
    if typed:
        return [job(client, one) for one in typed]
    return reservations(client, about=about, ended=ended, of_jobs=True)


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


def replicas(
    client: Client,
    typed: Sequence[str] = (),
    about: About = EVERYTHING,
    *,
    endpoint: str = "",
    ended: bool = False,
) -> list[autoscaler_api.Replica]:
    """The replicas of these names, or all, or those of one endpoint, a GPU and a time."""
    if typed:
        return _named(client.endpoints, autoscaler_api.GetReplicaRequest, names.REPLICA, typed)
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = autoscaler_api.ListReplicasRequest(parent=parent, show_ended=ended)
    return about.items(client.endpoints, request, "replicas that ended")


def decisions(
    client: Client,
    typed: Sequence[str] = (),
    about: About = EVERYTHING,
    *,
    endpoint: str = "",
    limit: int | None = 20,
) -> list[autoscaler_api.Decision]:
    """The decisions of these names, or the newest `limit`, newest first, of all endpoints or of one, and of a time."""
    if typed:
        return _named(client.decisions, autoscaler_api.GetDecisionRequest, names.DECISION, typed)
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = autoscaler_api.ListDecisionsRequest(parent=parent, page_size=limit or 1000)
    return about.items(client.decisions, request, "decisions", limit)


def health(
    client: Client,
    typed: Sequence[str] = (),
    about: About = EVERYTHING,
    *,
    node: str = "",
    ended: bool = False,
) -> list[monitor_api.HealthEvent]:
    """Events of these names; or those that last, or all, of a node or of all, a GPU and a time, newest first."""
    if typed:
        return _named(client.health, monitor_api.GetHealthEventRequest, names.HEALTH_EVENT, typed)
    parent = full_name(names.NODE, node) if node else ""
    request = monitor_api.ListHealthEventsRequest(parent=parent, show_resolved=ended, page_size=1000)
    return about.items(client.health, request, "health events that were over")


def processes(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING, *, node: str = ""
) -> list[monitor_api.NodeProcess]:
    """The processes of these names or ids, or all, on the GPUs of a node or of all.

    Raises:
        NotFoundError: one of them is on no GPU.
    """
    parent = full_name(names.NODE, node) if node else ""
    listed = about.items(client.fleet, monitor_api.ListProcessesRequest(parent=parent, page_size=1000))
    found = [one for one in listed if one.gpu.endswith(about.gpu.lower())]
    if not typed:
        return found
    named: dict[str, list[monitor_api.NodeProcess]] = defaultdict(list)
    for one in found:
        for name in (one.name, short(one.name), str(one.process.pid)):
            named[name].append(one)
    if missing := [name for name in typed if canonical(name) not in named]:
        raise NotFoundError(f"no process {missing[0]} is on a GPU that is asked for")
    return [one for name in typed for one in named[canonical(name)]]


def cordons(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING
) -> list[allocator_api.Cordon]:
    """The cordons of these nodes and GPUs, or all.

    Raises:
        NotFoundError: there is no cordon on one of them.
    """
    found = about.items(client.nodes, allocator_api.ListCordonsRequest())
    by_name = {item.target or item.name: item for item in found}  # an allocator of 0.x names no target
    wanted = spots(lambda: nodes(client), typed)
    for name in wanted:
        if name not in by_name:
            raise NotFoundError(f"{name} is not cordoned: not found")
    return [by_name[name] for name in wanted] if typed else found


def quotas(client: Client, typed: Sequence[str] = (), about: About = EVERYTHING) -> list[allocator_api.Quota]:
    """The quotas of these tenants, or of all; those without one are listed while they hold or wait for something."""
    if typed:
        wanted = [allocator_api.GetQuotaRequest(name=names.quota_name(tenant_of(one))) for one in typed]
        return [client.quotas.GetQuota(request).quota for request in wanted]
    return about.items(client.quotas, allocator_api.ListQuotasRequest())


def bookings(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING, *, ended: bool = False
) -> list[allocator_api.Booking]:
    """These bookings, or all that are open, and with `ended` those that are over; the earliest first."""
    if typed:
        return _named(client.bookings, allocator_api.GetBookingRequest, names.BOOKING, typed)
    request = allocator_api.ListBookingsRequest(show_ended=ended, order_by="start_time")
    return about.items(client.bookings, request)


def metrics(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING
) -> list[autoscaler_api.ReportedMetric]:
    """The metrics that programs report of these endpoints, with their replicas, and of these replicas; or all."""
    parents = [
        full
        if names.match(names.ENDPOINT, full := canonical(one))
        else full_name(names.REPLICA if "/" in one else names.ENDPOINT, one)
        for one in typed
    ]
    asked = [autoscaler_api.ListMetricsRequest(parent=one) for one in parents or [""]]
    return [metric for request in asked for metric in about.items(client.metrics, request)]


def presets(client: Client) -> list[autoscaler_api.Preset]:
    """All presets."""
    return EVERYTHING.items(client.presets, autoscaler_api.ListPresetsRequest())


def _gpus_of_all(client: Client, typed: Sequence[str] = ()) -> list[types_api.Gpu]:
    return gpus(nodes(client), typed)


READERS: Mapping[str, Callable[..., Sequence[Any]]] = {
    "nodes": nodes,
    "gpus": _gpus_of_all,
    "processes": processes,
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
    "metrics": metrics,
    "quotas": quotas,
    "bookings": bookings,
    "policies": policies,
    "acts": acts,
    "targets": targets,
    "notifications": notifications,
    "budgets": budgets,
    "changes": changes,
    "health": health,
}
"""What reads each kind of resource: all there are, or those of the names that were typed."""


def short_names(client: Client, kind: str) -> list[str]:
    """The names of all resources of a kind as tables print them; UUIDs of GPUs."""
    if kind == "gpus":
        return [gpu.uuid for gpu in gpus(nodes(client))]
    if kind == "presets":
        return [short(preset.name) for preset in presets(client)]
    if kind == "quotas":
        return [quota.tenant for quota in quotas(client)]
    return ["/".join(item.name.split("/")[1::2]) for item in READERS[kind](client)]


LEAST = 0.2
"""Seconds between two readings, at least: changes that come together are read together."""
NODES_MILLIS = 2000
"""Least time between two updates of the nodes, in which each that works changes every second."""
_LESS = (api.ListDecisionsRequest, api.ListRulesRequest)
"""Lists of which no watch tells all: it says when to ask."""


class Streams:
    """The watches of all lists that a command reads.

    Attributes:
        polled: whether there is a list without a watch.
    """

    def __init__(self, client: Client) -> None:
        self.polled = False
        self._client = client
        self._changed = threading.Event()
        self._by: dict[tuple[str, bytes], Mirror] = {}

    def pause(self, every: float, *, away: bool) -> None:
        """Return after a change; after so many seconds where a list is polled, and at the latest then while a service is away."""
        if self.polled:
            pause(every)
            return
        time.sleep(LEAST)
        self._changed.wait(max(0.0, every - LEAST) if away else None)
        self._changed.clear()

    def items(self, service: Any, request: Any, fields: Sequence[str] = ()) -> list[Any] | None:
        """What a List method would answer, of `fields` if not of all; None where it must be asked, at first and wherever its watch tells less."""
        whole = not isinstance(request, _LESS)
        if isinstance(request, api.ListRulesRequest):  # parts of endpoints
            service, request = self._client.endpoints, api.ListEndpointsRequest()
        noun = type(request).__name__.removeprefix("List").removesuffix("Request")
        name = "WatchHealth" if noun == "HealthEvents" else f"Watch{noun}"
        method = getattr(service, name, None)
        if method is None:
            self.polled = True
            return None
        wanted: Any = GetMessageClass(request.DESCRIPTOR.file.message_types_by_name[f"{name}Request"])()
        known = wanted.DESCRIPTOR.fields_by_name
        for given, value in request.ListFields():
            if given.name in known:
                setattr(wanted, given.name, value)
            else:
                whole = whole and given.name == "page_size"
        if fields and "read_mask" in known:
            wanted.read_mask.paths.extend(fields)
        if "min_interval" in known:
            wanted.min_interval.FromMilliseconds(NODES_MILLIS)
        key = name, wanted.SerializeToString()
        if key not in self._by:
            self._by[key] = Mirror()
            threading.Thread(target=self._follow, args=(self._by[key], method, wanted), daemon=True).start()
        return [*self._by[key].items.values()] if whole and self._by[key].complete else None

    def _follow(self, mirror: Mirror, method: Any, request: Any) -> None:
        """Follow a watch until the client is closed; after a lost connection it resumes."""
        try:
            for message in watch(method, request, resume=True):
                if mirror.take(message):
                    self._changed.set()
        except GpuscaleError:
            mirror.complete, self.polled = False, True  # asked from now on, which reports what is wrong
            self._changed.set()
