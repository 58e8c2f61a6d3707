"""AllocatorService on the wire: messages to values, one use case, values to messages; and the translation of asks and GPUs."""

import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

from gpuscale.allocator.domain import model
from gpuscale.allocator.domain.jobs import ReservedJob
from gpuscale.allocator.domain.ledger import Tokens
from gpuscale.allocator.domain.usage import ReservationUsage
from gpuscale.allocator.servicers import answers
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.allocator.state.archive import IN_MEMORY, RecordFilter
from gpuscale.allocator.usecases.leases import LeaseClaim, Leases, Records, every
from gpuscale.allocator.usecases.reserving import Reserving
from gpuscale.allocator.usecases.restarting import Restarting
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.errors import InvalidArgumentError, PermissionDeniedError
from gpuscale.common.filters import compile_filter, listed_in_turns, required_texts
from gpuscale.common.rpc.feed import FeedView, ResourceFeed
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.common.rpc.validation import contradictions, validate
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security import auth
from gpuscale.common.store.store import Store

_One = TypeVar(
    "_One",
    api.ReserveResponse,
    api.ReserveAndWatchResponse,
    api.RenewReservationResponse,
    api.ReleaseReservationResponse,
)
_Several = TypeVar("_Several", api.BatchReserveResponse, api.BatchReleaseResponse)
_Asked: TypeAlias = tuple[str, bool, bool]
_Told: TypeAlias = tuple[
    model.Reservation, ReservationUsage | None, Sequence[str], api.GetReservationResponse
]


def _tell_problem(context: auth.Context) -> None:
    """Say beside the answer that no state can be written now, or was slowly in the last minute."""
    if text := Store.trouble("allocator", why=auth.is_admin()):
        context.set_trailing_metadata((*context.trailing_metadata(), (PROBLEM_KEY, text)))


@dataclass(slots=True)
class AllocatorServicer(api.AllocatorServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    reserving: Reserving
    restarting: Restarting
    records: Records
    settings: AllocatorSettings
    clock: Clock
    tokens: Tokens
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    leases: Leases = field(init=False)
    feed: ResourceFeed[model.Reservation] = field(init=False)
    watched: bool = field(default=False, init=False)
    told: OrderedDict[_Asked, _Told] = field(default_factory=OrderedDict[_Asked, _Told], init=False)

    def __post_init__(self) -> None:
        self.leases = self.restarting.leases
        self.feed = ResourceFeed(
            api.WatchReservationsResponse,
            lambda one, kind: self._told(one, fenced=bool(kind)).reservation,
            shared=SHARED,
            kept=IN_MEMORY,
        )

    def note(self, one: model.Reservation, wakes: bool = True) -> None:
        """Tell watchers, if there are any, of a changed reservation; without `wakes`, only its deadline changed."""
        if not self.watched:
            return
        name = names.reservation_name(one.id)
        if one.live:
            self.feed.put(name, one, wakes=wakes)
        else:
            self.feed.remove(name, one)

    async def Reserve(self, request: api.ReserveRequest, context: auth.Context) -> api.ReserveResponse:
        order = to_order(request, auth.current_principal(), self.settings)
        if request.keep_place and not (order.job and wire.optional_seconds(request, "wait")):
            raise InvalidArgumentError("keep_place needs a job and a wait", field="keep_place")
        order.keep = request.keep_place
        granted = await self.reserving.reserve(order, wire.optional_seconds(request, "wait") or 0.0)
        return self._put(api.ReserveResponse(lease_token=self.tokens.of_lease(granted)), granted)

    async def ReserveAndWatch(
        self, request: api.ReserveAndWatchRequest, context: auth.Context
    ) -> AsyncIterator[api.ReserveAndWatchResponse]:
        order = to_order(request.reserve, auth.current_principal(), self.settings, "reserve.")
        since = self.clock.now()
        wait = wire.optional_seconds(request.reserve, "wait") or 0.0
        async with aclosing(self.reserving.reserve_and_watch(order, wait)) as news:
            async for one in news:
                if isinstance(one, model.Reservation):
                    yield self._put(api.ReserveAndWatchResponse(lease_token=self.tokens.of_lease(one)), one)
                else:
                    answer = api.ReserveAndWatchResponse()
                    answers.put_place(answer.waiting, one, self.clock.now(), since)
                    yield answer

    async def BatchReserve(
        self, request: api.BatchReserveRequest, context: auth.Context
    ) -> api.BatchReserveResponse:
        for index, one in enumerate(request.requests):
            if wire.optional_seconds(one, "wait"):
                raise InvalidArgumentError("a batch cannot wait", field=f"requests[{index}].wait")
        caller, requests = auth.current_principal(), enumerate(request.requests)
        granted = await self.reserving.reserve_all(
            [to_order(one, caller, self.settings, f"requests[{index}].") for index, one in requests]
        )
        return self._add(api.BatchReserveResponse(lease_tokens=map(self.tokens.of_lease, granted)), granted)

    async def RenewReservation(
        self, request: api.RenewReservationRequest, context: auth.Context
    ) -> api.RenewReservationResponse:
        ttl = wire.optional_seconds(request, "ttl")
        member = answers.to_member(request.member) if request.HasField("member") else None
        lease, caller, ended = to_lease(request), auth.current_principal(), request.ended_attempt
        if ended and (member is None or member.exit_code is None):
            text = "ended_attempt needs a member that has ended, with its exit code"
            raise InvalidArgumentError(text, field="ended_attempt")
        if ended and member is not None:
            renewed = await self.restarting.restart(lease, member, ended, caller)
        else:
            renewed = await self.leases.renew(lease, ttl, caller, member)
        answer = self._put(api.RenewReservationResponse(), renewed)
        answer.reservation.notes.extend(self.notes.get(renewed.id, ()))
        if renewed.revoke_at is not None and (there := self.restarting.next_node(renewed.id)):
            answer.next_node = names.node_name(there)
        return answer

    async def KeepAlive(
        self, request_iterator: AsyncIterator[api.KeepAliveRequest], context: auth.Context
    ) -> AsyncIterator[api.KeepAliveResponse]:
        caller = auth.current_principal()
        async for request in request_iterator:
            validate(request)
            leases = [to_lease(one) for one in request.leases]
            renewals = await self.leases.keep_alive(leases, request.holder, caller)
            now, wall = self.clock.now(), self.clock.wall()
            yield api.KeepAliveResponse(leases=[answers.from_renewal(one, now, wall) for one in renewals])

    async def ReleaseReservation(
        self, request: api.ReleaseReservationRequest, context: auth.Context
    ) -> api.ReleaseReservationResponse:
        released = await self.leases.release([to_lease(request)], auth.current_principal())
        return self._put(api.ReleaseReservationResponse(), released[0])

    async def BatchRelease(
        self, request: api.BatchReleaseRequest, context: auth.Context
    ) -> api.BatchReleaseResponse:
        leases = [to_lease(one) for one in request.requests]
        released = await self.leases.release(leases, auth.current_principal())
        return self._add(api.BatchReleaseResponse(), released)

    async def CheckLease(
        self, request: api.CheckLeaseRequest, context: auth.Context
    ) -> api.CheckLeaseResponse:
        lease, caller = to_lease(request), auth.current_principal()
        node = names.id_of(names.NODE, request.node, "node")
        lowest = self.leases.check(lease, node, request.gpu_uuids, request.lease_token, caller)
        return api.CheckLeaseResponse(lowest_fences=lowest)

    async def GetReservation(
        self, request: api.GetReservationRequest, context: auth.Context
    ) -> api.GetReservationResponse:
        if Store.problem or Store.slow:
            _tell_problem(context)
        found = await self.records.get(reservation_id(request.name))
        if found.waiting:
            await self.reserving.waiting.foresee([found])
        caller = auth.current_principal()  # with a lower role it is somebody else of that name
        own = caller.role >= auth.Role.OPERATOR and (found.made_by or found.owner) == caller.name
        return self._told(found, fenced=_is_shown_fence(found, caller), own=own)

    async def ListReservations(
        self, request: api.ListReservationsRequest, context: auth.Context
    ) -> api.ListReservationsResponse:
        if Store.problem or Store.slow:
            _tell_problem(context)
        meets = compile_filter(request.filter, api.Reservation)
        required = required_texts(request.filter, api.Reservation)
        holder, gpu, node = (required.get(path, "") for path in ("holder", "gpus.uuid", "gpus.node"))
        list_page = partial(
            self.records.list_reservations,
            RecordFilter(request.holder or holder, request.gpu_uuid or gpu, wire.asked_period(request), node),
            ended=request.show_ended,
            keep=(lambda one: meets(self._shown(one))) if request.filter and not request.order_by else None,
        )
        if request.order_by:
            all_of_them = await every(list_page)
            await self.reserving.waiting.foresee(one for one in all_of_them if one.waiting)
            reservations, token = await listed_in_turns(
                all_of_them,
                request,
                api.Reservation,
                # Not by fence: page tokens tell it, also to viewers.
                key=lambda one: f"{one.created.timestamp():020.6f} {one.id}",
                encode=self._shown,
            )
        else:
            found, token = await list_page(page_size=request.page_size, page_token=request.page_token)
            await self.reserving.waiting.foresee(one for one in found if one.waiting)
            reservations = [self._shown(one) for one in found]
        since = await self.records.kept_since() if request.show_ended else None
        return api.ListReservationsResponse(
            reservations=reservations, next_page_token=token, kept_since=wire.optional_timestamp(since)
        )

    async def WatchReservations(
        self, request: api.WatchReservationsRequest, context: auth.Context
    ) -> AsyncGenerator[Any]:
        if not self.watched:
            self.watched = True
            self.restarting.changes.on_change(self.note)
            for one in self.leases.ledger.reservations(ended=False):
                self.note(one)
        caller = auth.current_principal()
        typed = request.holder or request.gpu_uuid or request.revoked
        view = FeedView(
            of=watched(request) if typed else None,
            matches=compile_filter(request.filter, api.Reservation) if request.filter.strip() else None,
            kind=lambda one: "fenced" if _is_shown_fence(one, caller) else "",
        )
        async for message in self.feed.stream(request, view):
            yield message

    def _put(self, answer: _One, one: model.Reservation) -> _One:
        answers.put_reservation(answer.reservation, one, self.clock.now(), self.clock.wall())
        return answer

    def _add(self, answer: _Several, reservations: Iterable[model.Reservation]) -> _Several:
        """Put reservations into an answer, all as of the same moment."""
        now, wall = self.clock.now(), self.clock.wall()
        for one in reservations:
            answers.put_reservation(answer.reservations.add(), one, now, wall)
        return answer

    def _shown(self, reservation: model.Reservation) -> api.Reservation:
        fenced = _is_shown_fence(reservation, auth.current_principal())
        return self._told(reservation, fenced=fenced).reservation

    def _told(self, one: model.Reservation, *, fenced: bool, own: bool = False) -> api.GetReservationResponse:
        """A reservation as a caller sees it, with the lease token for its maker; rebuilt only if more than times has changed."""
        usage, notes = self.records.usage(one), self.notes.get(one.id, ()) if one.live else ()
        known = self.told.get((one.id, fenced, own))
        if known is not None and known[0] is one and known[1] is usage and known[2] == notes:
            answers.put_times(known[3].reservation, one, self.clock.now(), self.clock.wall())
            return known[3]
        answer = api.GetReservationResponse(
            reservation=answers.from_reservation(one, self.clock.now(), self.clock.wall(), usage),
            lease_token=self.tokens.of_lease(one) if own and one.live else "",
        )
        message = answer.reservation
        message.notes.extend(notes)
        if not fenced:
            message.ClearField("fence")
            for member in message.job.members:
                member.ClearField("last_lines")
        if not one.waiting:
            self.told[one.id, fenced, own] = one, usage, notes, answer
            if len(self.told) > answers.REMEMBERED:
                self.told.popitem(last=False)
        elif place := self.reserving.waiting.place(one.request_id):
            message.job.queue_position, message.job.queue_reason = place.position, place.obstacle.message
            message.job.queue_order = place.order
            answers.put_estimate(message.job, place, self.clock.now())
        return answer


def watched(request: api.WatchReservationsRequest) -> Callable[[model.Reservation], bool]:
    """Which reservations a watcher wants; when a planned revocation is taken back, it is sent once more."""
    wanted, told = RecordFilter(request.holder, request.gpu_uuid), set[str]()

    def is_wanted(one: model.Reservation) -> bool:
        if one not in wanted or not request.revoked:
            return one in wanted
        if one.revoke_at is not None:
            told.add(one.id)
            return True
        was_told = one.id in told
        told.discard(one.id)
        return was_told

    return is_wanted


SHARED = 5.0
"""Seconds for which watchers share one message of a reservation, although remaining time and use change."""


def _is_shown_fence(reservation: model.Reservation, caller: auth.Principal) -> bool:
    """Whether a caller sees the fence: the owner, or an admin."""
    own = caller.role >= auth.Role.OPERATOR and reservation.is_of(caller.name)
    return own or caller.role >= auth.Role.ADMIN


_MIB = 1024 * 1024
_GB = 10**9
_MIG_MEMORY = re.compile(r"\.(\d{1,6})gb", re.IGNORECASE)

_POLICY_OF = {number: one for one, number in answers.POLICIES.items()}
_STRATEGIES = {api.GangStrategy.Value(f"GANG_STRATEGY_{one.name}"): one for one in model.GangStrategy}
_SETS = {
    api.GpuSet.GPU_SET_NVLINK: model.GpuSet.NVLINK,
    api.GpuSet.GPU_SET_MEMORY_BALANCED: model.GpuSet.MEMORY_BALANCED,
}


_ASKS_KEPT, _ORDERS_KEPT = 1024, 256
"""Cached asks and orders: callers repeat the same ones."""
_asks: OrderedDict[tuple[bytes, int], tuple[AllocatorSettings, model.Ask]] = OrderedDict()


def to_ask(request: api.Ask, defaults: AllocatorSettings, path: str = "ask.") -> model.Ask:
    """The ask of a valid message, with the settings' defaults.

    InvalidArgumentError names every contradiction, by paths that start with `path`.
    """
    key = request.SerializeToString(deterministic=True), id(defaults)
    known = _asks.get(key)
    if known is not None and known[0] is defaults:
        return known[1]
    if problems := list(contradictions(request, path)):
        first = problems[0]
        raise InvalidArgumentError(f"{first.field} {first.description}", violations=problems)
    least = defaults.default_min_memory_mib * _MIB
    if request.HasField("min_memory_bytes"):
        least = request.min_memory_bytes
    elif request.HasField("gpu_memory_bytes"):
        least = request.gpu_memory_bytes
    elif request.HasField("gpu_milli") and request.gpu_milli < model.WHOLE:
        least = 0  # the memory that goes with the share has to be free, and no more
    elif named := _MIG_MEMORY.search(request.mig_profile):
        least = min(least, int(named.group(1)) * _GB * 9 // 10)
    gpus = [names.parse(names.GPU, name) for name in request.gpus]
    ask = model.Ask(
        gpu_count=request.gpu_count,
        min_memory_bytes=least,
        max_utilization_percent=wire.or_else(
            request, "max_utilization_percent", defaults.default_max_utilization_percent
        ),
        allow_unknown_utilization=wire.or_else(
            request, "allow_unknown_utilization", request.mig_profile != ""
        ),
        policy=_POLICY_OF.get(request.policy, model.Policy(defaults.default_policy)),
        weights=model.Weights(
            wire.or_else(request.weights, "memory", defaults.memory_weight),
            wire.or_else(request.weights, "utilization", defaults.utilization_weight),
        ),
        nodes=_nodes(request.nodes) or frozenset(gpu["node"] for gpu in gpus),
        gpu_milli=wire.or_else(request, "gpu_milli", model.WHOLE),
        gpu_memory_bytes=wire.or_else(request, "gpu_memory_bytes", None),
        mig_profile=request.mig_profile,
        models=tuple(request.models),
        cpu_milli=request.cpu_milli,
        host_memory_bytes=request.host_memory_bytes,
        excluded_nodes=_nodes(request.excluded_nodes),
        gpus=frozenset(gpu["gpu"] for gpu in gpus),
        excluded_gpus=frozenset(names.parse(names.GPU, name)["gpu"] for name in request.excluded_gpus),
        node_labels=tuple(sorted(request.node_labels.items())),
        apart_from=tuple(sorted(request.apart_from.items())),
        gpu_set=_SETS.get(request.gpu_set, model.GpuSet.BEST),
        member_count=wire.or_else(request, "member_count", 1),
        gang_strategy=_STRATEGIES.get(request.gang_strategy, model.GangStrategy.PACK),
        power_limit_watts=wire.or_else(request, "power_limit_watts", None),
    )
    _asks[key] = defaults, ask
    if len(_asks) > _ASKS_KEPT:
        _asks.popitem(last=False)
    return ask


def _nodes(resources: Sequence[str]) -> frozenset[str]:
    return frozenset(names.parse(names.NODE, name)["node"] for name in resources)


_REST = attrgetter(*(one.name for one in fields(model.Order)[1:]))
_orders: OrderedDict[bytes, tuple[auth.Principal, AllocatorSettings, Sequence[Any]]] = OrderedDict()
"""Cached orders without their request id, by what else was sent: shares of a batch mostly differ in their ids alone."""


def to_order(
    request: api.ReserveRequest, caller: auth.Principal, defaults: AllocatorSettings, path: str = ""
) -> model.Order:
    """The order of a valid request, with the settings' defaults and the caller's tenant.

    The fingerprint covers the caller and every field except the request id, as sent. `path` is the request's place in another
    message, such as `requests[3].`.

    Raises:
        InvalidArgumentError: parts of it contradict each other.
        PermissionDeniedError: the caller may not use the tenant's quota (OTHER_TENANT), reserve for the owner
            (OTHER_OWNER), or request the priority (PRIORITY_TOO_HIGH).
    """
    request_id, request.request_id = request.request_id, ""
    sent = request.SerializeToString(deterministic=True)
    request.request_id = request_id
    if (known := _orders.get(sent)) and known[1] is defaults and (known[0] is caller or known[0] == caller):
        return model.Order(request_id.lower(), *known[2])
    tenant, owner = request.tenant or caller.tenants[0], request.owner or caller.name
    if caller.role < auth.Role.ADMIN:
        auth.require_tenant(caller, tenant, f"{path}tenant")
        auth.require_priority(caller, request.priority, f"{path}priority")
        if owner != caller.name and auth.ANY_TENANT not in caller.limits.tenants:
            field = f"{path}owner"
            raise PermissionDeniedError(
                f"{field}: {caller.name} can only reserve for itself, not for {owner}",
                reason="OTHER_OWNER",
                metadata={"field": field, "owner": owner},
            )
    if request.may_preempt and not wire.optional_seconds(request, "wait"):
        raise InvalidArgumentError("may_preempt needs a wait", field=f"{path}may_preempt")
    for label in (one for one in model.OWN_LABELS if one in request.labels) if request.labels else ():
        text = f"{label} is not for holders to set; name the booking, or a power limit, instead"
        raise InvalidArgumentError(text, field=f"{path}labels")
    booking, labels = "", dict(request.labels) if request.labels else {}
    if request.booking:
        booking = labels[model.BOOKING_LABEL] = names.id_of(names.BOOKING, request.booking, f"{path}booking")
    if request.ask.HasField("power_limit_watts"):
        labels[model.POWER_LABEL] = f"{request.ask.power_limit_watts:g}"
    if request.HasField("movable"):
        labels[model.MOVABLE_LABEL] = f"{wire.seconds(request.movable):g}"
    ttl = wire.optional_seconds(request, "ttl")
    order = model.Order(
        request_id=request_id.lower(),
        fingerprint=f"{wire.fingerprint(request, sent)} {caller.name}",
        holder=request.holder,
        owner=owner,
        ttl=defaults.default_ttl_seconds if ttl is None else ttl,
        labels=labels,
        ask=to_ask(request.ask, defaults, f"{path}ask."),
        tenant=tenant,
        priority=request.priority,
        preemptible=request.preemptible,
        may_preempt=request.may_preempt,
        made_by=caller.name if owner != caller.name else "",
        job=ReservedJob(request.job.title, request.job.command, request.job.user)
        if request.HasField("job")
        else None,
        limit=wire.optional_seconds(request, "time_limit") or 0.0,
        booking=booking,
    )
    _orders[sent] = caller, defaults, _REST(order)
    if len(_orders) > _ORDERS_KEPT:
        _orders.popitem(last=False)
    return order


def to_lease(
    message: api.LeaseRenewal
    | api.RenewReservationRequest
    | api.ReleaseReservationRequest
    | api.CheckLeaseRequest,
) -> LeaseClaim:
    """The lease that a message names."""
    return LeaseClaim(reservation_id(message.name), message.fence)


_IS_NAME = names.expression(names.RESERVATION).fullmatch


def reservation_id(name: str) -> str:
    """The id in a reservation name; InvalidArgumentError for any other name."""
    found = _IS_NAME(name)
    return found[1] if found else names.parse(names.RESERVATION, name)["reservation"]
