"""Reads resources by name, or lists them.

Names are as typed (`gpuscale.cli.grammar.nouns`). A GPU is also known by its UUID, the beginning of it (`GPU-6afc`), or node
and index (`host-1/0`), as tables show them.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console.cells import View, short
from gpuscale.cli.console.output import Chosen
from gpuscale.cli.console.terminal import note, pause
from gpuscale.cli.grammar.nouns import canonical, full_name, is_uuid, tenant_of
from gpuscale.cli.grammar.parameters import decoded, local_text
from gpuscale.client import Client, GpuscaleError, Mirror, pages, watch
from gpuscale.client.asks import default_holder
from gpuscale.common import names
from gpuscale.common.errors import DeadlineExceededError, InvalidArgumentError, NotFoundError
from gpuscale.common.filters import compile_filter, compile_order
from gpuscale.common.rpc.wrapped_channel import NOT_LEADER
from gpuscale.common.wire import ANY_TIME, TimeRange, to_datetime, to_timestamp

M = TypeVar("M", bound=Message)


@dataclass
class About:
    """What to list, by default everything: of the GPU with the UUID `gpu`, and of a time.

    `chosen` is what the options of `get` choose of a `view`, `fields` all that a watch needs to send, `silent` that of the session.
    """

    gpu: str = ""
    time: TimeRange = ANY_TIME
    chosen: Chosen = Chosen()
    view: View[Any] | None = None
    fields: Sequence[str] = ()
    silent: dict[str, GpuscaleError] | None = None
    _told: set[str] = field(default_factory=set[str])

    def filter_of(self, kind: Any) -> str:
        """The API's filter of what is chosen, for messages of a type."""
        return "" if self.view is None else self.chosen.to_filter(kind, self.view)

    def items(self, service: Any, request: Any, what: str = "", limit: int | None = None) -> list[Any]:
        """All items of a List method, or the first `limit`; completes the request.

        Where the time begins before what is kept, a note says once that `what` may be missing.
        """
        begin = self.time.since or self.time.until
        past = bool(begin)
        asked = {"gpu_uuid": self.gpu, "uuid": self.gpu, "show_ended": past, "show_resolved": past}
        for name, value in asked.items():
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
        for page in self._pages(getattr(service, method), request):
            kept = to_datetime(page.kept_since) if what and page.HasField("kept_since") else None
            if begin is not None and kept is not None and begin < kept and what not in self._told:
                self._told.add(what)
                note(f"{what} before {local_text(kept)} may be missing: they are kept no longer")
            found += getattr(page, listed.name)
            if limit and len(found) >= limit:
                break
        return found[:limit]

    def _pages(self, method: Any, request: Any) -> Iterator[Any]:
        """The pages of a list; an error at once if it, or two others of its service, were silent before, or nobody leads that.

        Where its service, or two others, were silent, it is waited for a moment.
        """
        name, package = request.DESCRIPTOR.full_name, request.DESCRIPTOR.file.package
        of_service = {key: one for key, one in (self.silent or {}).items() if key.startswith(f"{package}.")}
        if self.silent and name in self.silent:
            raise self.silent[name]
        for key, one in of_service.items():
            if len(of_service) > 1 or one.reason == NOT_LEADER:  # and not one list
                asked = key.rpartition(".")[2].removesuffix("Request")
                message = f"not asked for, since {asked} was not answered: {one.message}"
                raise type(one)(message, reason=one.reason)
        with _noting(self.silent, name):
            yield from pages(partial(method, **_patience(self.silent, request, method)), request)


def _patience(silent: Iterable[str] | None, request: Any, method: Any) -> dict[str, float]:
    """The time limit of a list; a short one where its service was silent, or two others, as all go through what hangs."""
    services = {one.rpartition(".")[0] for one in silent or ()}
    waited = len(services) > 1 or request.DESCRIPTOR.file.package in services
    return {"timeout": min(MOMENT, method.timeout)} if waited else {}


@contextmanager
def _noting(silent: dict[str, GpuscaleError] | None, name: str) -> Generator[None]:
    """Add an error of a request that was waited for in vain to `silent`."""
    try:
        yield
    except GpuscaleError as error:
        if silent is not None and (isinstance(error, DeadlineExceededError) or error.reason == NOT_LEADER):
            silent[name] = error
        raise


EVERYTHING = About()
MOMENT = 2.0
"""Most seconds for a list after others did not come in time."""


def _named(service: Any, request: type[Any], pattern: str, typed: Sequence[str]) -> list[Any]:
    """Resources by name, with a Get method of a service."""
    method = getattr(service, request.__name__.removesuffix("Request"))
    answers = [method(request(name=full_name(pattern, name))) for name in typed]
    return [getattr(one, one.DESCRIPTOR.fields[0].name) for one in answers]


def _reader(api: Any, service: str, pattern: str, noun: str, nouns: str = "") -> Reader[Any]:
    """Reads resources by the Get method of a service of the client, or all of them by its List method."""
    one, every = getattr(api, f"Get{noun}Request"), getattr(api, f"List{nouns or noun + 's'}Request")

    def read(client: Client, typed: Sequence[str] = (), about: About = EVERYTHING) -> list[Any]:
        of = getattr(client, service)
        return _named(of, one, pattern, typed) if typed else about.items(of, every())

    return read


Reader: TypeAlias = Callable[..., list[M]]
nodes: Reader[monitor_api.Node] = _reader(monitor_api, "fleet", names.NODE, "Node")
join_tokens: Reader[monitor_api.JoinToken] = _reader(monitor_api, "joining", names.JOINING, "JoinToken")
recordings: Reader[monitor_api.Recording] = _reader(monitor_api, "recordings", names.RECORDING, "Recording")
endpoints: Reader[api.Endpoint] = _reader(api, "endpoints", names.ENDPOINT, "Endpoint")
watchers: Reader[api.QueueWatcher] = _reader(api, "queue_watchers", names.WATCHER, "QueueWatcher")
adapters: Reader[api.Adapter] = _reader(api, "adapters", names.ADAPTER, "Adapter")
backtests: Reader[api.Backtest] = _reader(api, "backtests", names.BACKTEST, "Backtest")
rules: Reader[api.EndpointRule] = _reader(api, "rules", names.RULE, "Rule")
policies: Reader[allocator_api.UsePolicy] = _reader(
    allocator_api, "policies", names.POLICY, "UsePolicy", "UsePolicies"
)
targets: Reader[allocator_api.NotificationTarget] = _reader(
    allocator_api, "notifications", names.TARGET, "NotificationTarget"
)
budgets: Reader[allocator_api.PowerBudget] = _reader(allocator_api, "power", names.BUDGET, "PowerBudget")


def changes(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING
) -> list[allocator_api.PowerChange]:
    """Changes of power caps, newest first: by the name of the change or its budget, or all. Raises NotFoundError: one is none of them."""
    ids = [one.rpartition("/")[2] for one in typed]
    asked = " OR ".join(f'power_budget = "budgets/{one}" OR name = "changes/{one}"' for one in ids)
    found = about.items(client.power, allocator_api.ListPowerChangesRequest(filter=asked))
    for one in sorted({*ids} - {short(name) for of in found for name in (of.name, of.power_budget)}):
        try:
            budgets(client, [one])
        except NotFoundError:
            raise NotFoundError(f"there is no power change and no budget {one}") from None
    return found


def acts(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING, *, limit: int | None = None
) -> list[allocator_api.PolicyAct]:
    """What policies did, newest first: by the name of the act or its policy, or all. Raises NotFoundError: there is no such act or policy."""
    policy_of: dict[str, str] = {}
    for one in typed:
        is_act = names.match(names.POLICY, canonical(one)) is None and "/" in one
        name = full_name(names.ACT if is_act else names.POLICY, one)
        policy_of[name] = name.partition("/acts/")[0]
    asked = " OR ".join(f'{"policy" if of == one else "name"} = "{one}"' for one, of in policy_of.items())
    found = about.items(client.policies, allocator_api.ListPolicyActsRequest(filter=asked), limit=limit)
    for one in sorted({*policy_of} - {name for act in found for name in (act.name, act.policy)}):
        policies(client, [policy_of[one]])
        if policy_of[one] != one:
            raise NotFoundError(f"{one} not found")
    return found


def notifications(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING
) -> list[allocator_api.Notification]:
    """Undelivered notifications, by name or all."""
    asked = " OR ".join(f'name = "{full_name(names.NOTIFICATION, one)}"' for one in typed)
    return about.items(client.notifications, allocator_api.ListNotificationsRequest(filter=asked))


def named(client: Client, typed: Sequence[str], noun: str = "") -> tuple[list[str], list[str]]:
    """(full names, UUIDs) of nodes and GPUs, or of the `noun`: `host-1`, `host-1/gpu-…`, `host-1/0`, or a UUID."""
    uuids = [one for one in typed if is_uuid(one) and noun != "nodes"]
    others = [one for one in typed if one not in uuids]
    return spots(lambda: nodes(client), others, noun), uuids


def spots(of: Callable[[], Iterable[monitor_api.Node]], typed: Sequence[str], noun: str = "") -> list[str]:
    """The full names of nodes and GPUs, typed in any form; `noun`, which is `nodes` or `gpus`, accepts only these.

    `of` reads the nodes, to find a GPU by its UUID or index.

    Raises:
        InvalidArgumentError: one is neither a node nor a GPU, or not what `noun` allows.
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


_INDEX_OR_PREFIX = re.compile(r"[^/]+/\d+|(GPU|MIG|SIM)-[0-9A-Fa-f][0-9A-Fa-f-]*")  # nodes are in lower case
_LEAST_PREFIX = len("GPU-") + 1
_MOST_NAMED = 8


class _Gpus:
    def __init__(self, gpus: Iterable[types_api.Gpu]) -> None:
        self._by: dict[str, list[types_api.Gpu]] = defaultdict(list)
        for gpu in gpus:
            _, node, _, uuid = gpu.name.split("/")
            for key in (gpu.name, f"{node}/{uuid}", f"{node}/{gpu.index}", uuid):
                self._by[key].append(gpu)

    def find(self, typed: str) -> types_api.Gpu:
        """The GPU of that name.

        Raises:
            NotFoundError: there is none.
            InvalidArgumentError: the name is ambiguous.
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
    """GPUs of these nodes, by name or all. The API does not list GPUs, so they are filtered and sorted here."""
    found = [gpu for node in of for gpu in node.snapshot.gpus]
    if typed:
        return list(map(_Gpus(found).find, typed))
    meets = compile_filter(about.filter_of(types_api.Gpu.DESCRIPTOR), types_api.Gpu)
    return sorted(filter(meets, found), key=compile_order(about.chosen.order_by, types_api.Gpu))


def _gpus_of_all(client: Client, typed: Sequence[str] = ()) -> list[types_api.Gpu]:
    return gpus(nodes(client), typed)


def gpu_uuid(client: Client, typed: str) -> str:
    """The UUID of a GPU typed in any form; a complete UUID need not exist any more."""
    try:
        return _gpus_of_all(client, [typed])[0].uuid
    except NotFoundError:
        if is_uuid(typed):
            return typed
        raise


def told(client: Client, service: str, silent: dict[str, GpuscaleError] | None = None) -> dict[str, str]:
    """What a service tells beside an answer: its version, who leads and its problem. `silent` is that of a session."""
    methods: dict[str, tuple[Any, Any]] = {
        "fleet": (client.fleet.ListNodes, monitor_api.ListNodesRequest),
        "allocator": (client.allocator.ListReservations, allocator_api.ListReservationsRequest),
        "autoscaler": (client.endpoints.ListEndpoints, api.ListEndpointsRequest),
    }
    method, request = methods[service]
    with _noting(silent, request.DESCRIPTOR.full_name):
        _, call = method.with_call(request(page_size=1), **_patience(silent, request, method))
    return {key: str(value) for key, value in call.trailing_metadata() or ()}


def reservations(
    client: Client,
    typed: Sequence[str] = (),
    about: About = EVERYTHING,
    *,
    holder: str = "",
    ended: bool = False,
    of_jobs: bool = False,
) -> list[allocator_api.Reservation]:
    """Reservations by name or title, or the open ones, of one holder if given."""
    if typed:
        found = [reservation_name(client, one) for one in typed]
        return _named(client.allocator, allocator_api.GetReservationRequest, names.RESERVATION, found)
    only = "job:*" if of_jobs else ""
    request = allocator_api.ListReservationsRequest(holder=holder, show_ended=ended, filter=only)
    return about.items(client.allocator, request, "reservations that ended")


def jobs(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING, *, ended: bool = False
) -> list[allocator_api.Reservation]:
    """The reservations of jobs, by name or all."""
    if typed:
        return [job(client, one) for one in typed]
    return reservations(client, about=about, ended=ended, of_jobs=True)


def job(client: Client, typed: str) -> allocator_api.Reservation:
    """The reservation of a job, by its name or title: the newest that is open, else the newest. Raises NotFoundError: there is none."""
    noun, _, text = canonical(typed).rpartition("/")
    if noun in {"jobs", "reservations"} or RESERVATION_ID.fullmatch(typed):
        [found] = reservations(client, [text])
        named = [found] if found.HasField("job") else []
    else:
        named = _titled(client, typed)
    if not named:
        raise NotFoundError(f"there is no job {typed}; list all with: gpuscalectl get jobs -a")
    return named[0]


def reservation_name(client: Client, typed: str) -> str:
    """The full name of a reservation, by its name or the title of its job: of the one that is open, else of the newest.

    Raises InvalidArgumentError: several that are open have that title, or it is no name.
    """
    asked = canonical(typed).startswith("reservations/")
    if RESERVATION_ID.fullmatch(typed):
        with suppress(NotFoundError):  # then it is a title that looks like an id
            _named(client.allocator, allocator_api.GetReservationRequest, names.RESERVATION, [typed])
            asked = True
    found = [] if asked else _titled(client, typed)
    if several := [short(one.name) for one in found if not one.HasField("end_time")][1:]:
        ids = ", ".join(sorted([short(found[0].name), *several]))
        raise InvalidArgumentError(f"{len(several) + 1} jobs are titled {typed!r}: {ids}; use the id")
    return found[0].name if found else full_name(names.RESERVATION, typed)


def _titled(client: Client, title: str) -> list[allocator_api.Reservation]:
    """The reservations of the jobs with a title, one's own if any: the open ones first, the newest first."""
    title = decoded(title)
    found = [one for one in jobs(client, ended=True) if one.job.title == title]
    own = [one for one in found if one.holder == default_holder()]
    return sorted(own or found, key=lambda one: (one.HasField("end_time"), -one.create_time.ToNanoseconds()))


RESERVATION_ID = re.compile("r[a-z2-7]{12}")
"""The ids that the allocator makes."""


def holders(of: Iterable[allocator_api.Reservation]) -> Mapping[str, str]:
    """The holder of each reserved GPU, by UUID: it may be held under an earlier name of its host."""
    return {gpu.uuid: reservation.holder for reservation in of for gpu in reservation.gpus}


def replicas(
    client: Client,
    typed: Sequence[str] = (),
    about: About = EVERYTHING,
    *,
    endpoint: str = "",
    ended: bool = False,
) -> list[api.Replica]:
    """Replicas by name, or all, of one endpoint if given."""
    if typed:
        return _named(client.endpoints, api.GetReplicaRequest, names.REPLICA, typed)
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = api.ListReplicasRequest(parent=parent, show_ended=ended)
    return about.items(client.endpoints, request, "replicas that ended")


def decisions(
    client: Client,
    typed: Sequence[str] = (),
    about: About = EVERYTHING,
    *,
    endpoint: str = "",
    limit: int | None = 20,
) -> list[api.Decision]:
    """Decisions by name; or the newest `limit`, newest first, of one endpoint if given."""
    if typed:
        return _named(client.decisions, api.GetDecisionRequest, names.DECISION, typed)
    parent = full_name(names.ENDPOINT, endpoint) if endpoint else ""
    request = api.ListDecisionsRequest(parent=parent, page_size=limit or 1000)
    return about.items(client.decisions, request, "decisions", limit)


def health(
    client: Client,
    typed: Sequence[str] = (),
    about: About = EVERYTHING,
    *,
    node: str = "",
    ended: bool = False,
) -> list[monitor_api.HealthEvent]:
    """Health events by name; or the open ones, and the `ended` if asked for, newest first, of one node if given."""
    if typed:
        return _named(client.health, monitor_api.GetHealthEventRequest, names.HEALTH_EVENT, typed)
    parent = full_name(names.NODE, node) if node else ""
    request = monitor_api.ListHealthEventsRequest(parent=parent, show_resolved=ended, page_size=1000)
    return about.items(client.health, request, "health events that were over")


def processes(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING, *, node: str = ""
) -> list[monitor_api.NodeProcess]:
    """Processes on GPUs by name or id, or all, of one node if given. Raises NotFoundError: there is none of that name or id."""
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
        raise NotFoundError(f"no process {missing[0]} runs on these GPUs")
    return [one for name in typed for one in named[canonical(name)]]


def cordons(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING
) -> list[allocator_api.Cordon]:
    """The cordons of these nodes and GPUs, or all. Raises NotFoundError: one is not cordoned."""
    found = about.items(client.nodes, allocator_api.ListCordonsRequest())
    by_name = {item.target or item.name: item for item in found}  # an allocator of 0.x names no target
    wanted = spots(lambda: nodes(client), typed)
    for name in wanted:
        if name not in by_name:
            raise NotFoundError(f"{name} is not cordoned: not found")
    return [by_name[name] for name in wanted] if typed else found


def quotas(client: Client, typed: Sequence[str] = (), about: About = EVERYTHING) -> list[allocator_api.Quota]:
    """Quotas by tenant, or all; a tenant without one is listed while it holds or waits for GPUs."""
    if typed:
        wanted = [allocator_api.GetQuotaRequest(name=names.quota_name(tenant_of(one))) for one in typed]
        return [client.quotas.GetQuota(request).quota for request in wanted]
    return about.items(client.quotas, allocator_api.ListQuotasRequest())


def bookings(
    client: Client, typed: Sequence[str] = (), about: About = EVERYTHING, *, ended: bool = False
) -> list[allocator_api.Booking]:
    """Bookings by name; or the open ones, and the `ended` if asked for, earliest first."""
    if typed:
        return _named(client.bookings, allocator_api.GetBookingRequest, names.BOOKING, typed)
    request = allocator_api.ListBookingsRequest(show_ended=ended, order_by="start_time")
    return about.items(client.bookings, request)


def metrics(client: Client, typed: Sequence[str] = (), about: About = EVERYTHING) -> list[api.ReportedMetric]:
    """Metrics that programs report of these replicas, or endpoints with their replicas; or all."""
    parents = [
        full
        if names.match(names.ENDPOINT, full := canonical(one))
        else full_name(names.REPLICA if "/" in one else names.ENDPOINT, one)
        for one in typed
    ]
    asked = [api.ListMetricsRequest(parent=one) for one in parents or [""]]
    return [metric for request in asked for metric in about.items(client.metrics, request)]


def presets(client: Client) -> list[api.Preset]:
    """All presets."""
    return EVERYTHING.items(client.presets, api.ListPresetsRequest())


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
"""Reads each kind of resource, by name or all."""


def short_names(client: Client, kind: str) -> list[str]:
    """The names of all resources of a kind, as tables show them; UUIDs of GPUs."""
    if kind == "gpus":
        return [gpu.uuid for gpu in _gpus_of_all(client)]
    if kind == "presets":
        return [short(preset.name) for preset in presets(client)]
    if kind == "quotas":
        return [quota.tenant for quota in quotas(client)]
    return [short(item.name) for item in READERS[kind](client)]


LEAST = 0.2
"""Least seconds between two reads, so that changes that come together are read together."""
NODES_MILLIS = 2000
"""Least time between two updates of the nodes: every busy one changes each second."""
_LESS = (api.ListDecisionsRequest, api.ListRulesRequest)
"""Lists that a watch does not send in full; it says when to ask."""


class Streams:
    """The watches of all lists that a command reads; `polled` if there is a list without one."""

    def __init__(self, client: Client) -> None:
        self.polled = False
        self._client = client
        self._changed = threading.Event()
        self._by: dict[tuple[str, bytes], Mirror] = {}

    def pause(self, every: float, *, away: bool) -> None:
        """Wait for a change; at most `every` seconds while a service is away, and exactly that long if a list is polled."""
        if self.polled:
            pause(every)
            return
        time.sleep(LEAST)
        self._changed.wait(max(0.0, every - LEAST) if away else None)
        self._changed.clear()

    def items(self, service: Any, request: Any, fields: Sequence[str] = ()) -> list[Any] | None:
        """What a List method would return, with these `fields` or all; None if it must be called, as before a watch is complete."""
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
        """Follow a watch until the client is closed; resumes after a lost connection."""
        try:
            for message in watch(method, request, resume=True):
                if mirror.take(message):
                    self._changed.set()
        except GpuscaleError:
            # The List method, called from now on, says what is wrong.
            mirror.complete, self.polled = False, True
            self._changed.set()
