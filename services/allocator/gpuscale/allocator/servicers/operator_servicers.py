"""CapacityService, NodeService, QuotaService and BookingService on the wire: messages to values, one use case, values to messages."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.json_format import MessageToDict

from gpuscale.allocator.domain.architectures import from_config, known
from gpuscale.allocator.domain.bookings import Booking, BookingState
from gpuscale.allocator.domain.cordons import Cordon, spot_of
from gpuscale.allocator.domain.estimate import Estimate, ModelWish, estimate, sized
from gpuscale.allocator.domain.ledger import random_id
from gpuscale.allocator.domain.model import WHOLE
from gpuscale.allocator.domain.ranking import IDLE_MEMORY_PERCENT, IDLE_UTILIZATION_PERCENT, Idleness
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.rebalance import NoMoves
from gpuscale.allocator.servicers.answers import from_reservation, put_gpu, put_score, reason_to_wire
from gpuscale.allocator.servicers.servicer import to_ask
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.allocator.usecases.booking import Calendar
from gpuscale.allocator.usecases.capacity import DEFAULT_TIMEOUT, Capacity
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.allocator.usecases.quotas import Quotas, Standing, etag_of
from gpuscale.allocator.usecases.rebalancing import Rebalancing, RoomProposal, how
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import listed
from gpuscale.common.rpc.feed import LookedAtFeed
from gpuscale.common.rpc.validation import validate
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context, Principal, current_principal, require_tenant

_OBSTACLES: Mapping[Obstacle | None, api.Obstacle.ValueType] = {
    None: api.Obstacle.Value("OBSTACLE_UNSPECIFIED"),
    **{one: api.Obstacle.Value(f"OBSTACLE_{one}") for one in Obstacle},
}


def _from_estimate(found: Estimate) -> api.EstimateRequirementsResponse:
    return api.EstimateRequirementsResponse(
        gpu_count=found.gpu_count,
        memory_bytes=found.memory_bytes,
        notes=found.notes,
        ignored_parameters=found.ignored_parameters,
        parameter_count=found.parameter_count,
        ask=api.Ask(gpu_count=found.gpu_count, min_memory_bytes=found.memory_bytes),
    )


def _from_proposal(one: RoomProposal) -> api.RebalancePlan:
    order = one.waiter.order if one.waiter else None
    message = api.RebalancePlan(holder=order.holder if order else "", message=one.message)
    if order and order.reservation_id:
        message.reservation = names.reservation_name(order.reservation_id)
    for part in one.partitions:
        gpu = names.gpu_name(part.node, part.gpu.uuid)
        message.partitions.add(gpu=gpu, index=part.gpu.index, profiles=part.profiles)
    if isinstance(one.found, NoMoves):
        return message
    message.available, message.cost_gpu_seconds = True, one.found.price
    message.gpus.extend(put_gpu(api.ReservedGpu(), gpu) for gpu in one.found.pick.gpus)
    for move in one.found.moves:
        message.moves.add(
            reservation=names.reservation_name(move.reservation.id),
            holder=move.reservation.holder,
            from_node=names.node_name(move.reservation.gpus[0].node),
            gpus=[put_gpu(api.ReservedGpu(), gpu) for gpu in move.gpus],
            cost_gpu_seconds=move.price,
            message=how(move.reservation),
        )
    return message


@dataclass(frozen=True, slots=True)
class CapacityServicer(api.CapacityServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    capacity: Capacity
    rebalancing: Rebalancing
    settings: AllocatorSettings

    async def CheckAvailability(
        self, request: api.CheckAvailabilityRequest, context: Context
    ) -> api.CheckAvailabilityResponse:
        found = await self.capacity.check(to_ask(request.ask, self.settings), current_principal().tenants[0])
        return api.CheckAvailabilityResponse(
            available=found.available,
            message=found.message,
            reason=reason_to_wire(found.reason),
            gpus=[put_gpu(api.ReservedGpu(), gpu) for gpu in found.gpus],
        )

    async def WaitForAvailability(
        self, request: api.WaitForAvailabilityRequest, context: Context
    ) -> api.WaitForAvailabilityResponse:
        timeout = wire.optional_seconds(request, "timeout")
        found, waited = await self.capacity.wait(
            to_ask(request.ask, self.settings),
            current_principal().tenants[0],
            DEFAULT_TIMEOUT if timeout is None else timeout,
        )
        return api.WaitForAvailabilityResponse(
            available=found.available,
            message=f"after {waited:.1f} s: {found.message}",
            reason=reason_to_wire(found.reason),
            waited=wire.to_duration(waited),
        )

    async def ExplainPlacement(
        self, request: api.ExplainPlacementRequest, context: Context
    ) -> api.ExplainPlacementResponse:
        answer, outlook, remedies = await self.capacity.explain(
            to_ask(request.ask, self.settings), current_principal().tenants[0]
        )
        return api.ExplainPlacementResponse(
            available=answer.available,
            message=answer.message,
            reason=reason_to_wire(answer.reason),
            gpus=[put_gpu(api.ReservedGpu(), gpu) for gpu in answer.gpus],
            constraints=[
                api.ConstraintEffect(
                    constraint=_OBSTACLES[one.obstacle],
                    removed_in_order_count=one.removed_in_order,
                    removed_alone_count=one.removed_alone,
                )
                for one in outlook.effects
            ],
            nodes=[
                api.NodeOutlook(
                    name=names.node_name(one.node.id),
                    obstacle=_OBSTACLES[one.obstacle],
                    message=one.message,
                    fitting_count=one.fitting,
                    gpus=[
                        api.GpuOutlook(
                            name=names.gpu_name(one.node.id, gpu.gpu.uuid),
                            uuid=gpu.gpu.uuid,
                            obstacle=_OBSTACLES[gpu.obstacle],
                            message=gpu.message,
                            score=put_score(api.GpuScore(), gpu.score) if gpu.score else None,
                            reservations=map(names.reservation_name, gpu.reservations),
                        )
                        for gpu in one.gpus
                    ],
                )
                for one in outlook.nodes
            ],
            node_count=outlook.node_count,
            remedies=remedies,
        )

    async def EstimateRequirements(
        self, request: api.EstimateRequirementsRequest, context: Context
    ) -> api.EstimateRequirementsResponse:
        wish = ModelWish(
            model=request.model,
            parameters=MessageToDict(request.parameters),
            parameter_count=wire.or_else(request, "parameter_count", None),
            dtype=request.dtype,
            kv_cache_tokens=wire.or_else(request, "kv_cache_tokens", None),
            kv_cache_bytes_per_token=wire.or_else(request, "kv_cache_bytes_per_token", None),
        )
        if not request.context_tokens:
            return _from_estimate(estimate(wish))
        given = request.HasField("config")
        of = from_config(MessageToDict(request.config)) if given else known(request.model)
        found, needs, fits = sized(
            wish, of, request.context_tokens, request.batch_size or 1, self.capacity.kinds()
        )
        answer = _from_estimate(found)
        answer.weights_bytes, answer.kv_cache_bytes = round(needs.weights), round(needs.kv_cache)
        answer.activation_bytes = round(needs.activations)
        answer.least_memory_bytes, answer.most_memory_bytes = round(needs.least), round(needs.most)
        for fit in fits:
            answer.fits.add(
                model=fit.kind.model,
                memory_total_bytes=fit.kind.memory_bytes,
                gpu_count=fit.split.gpu_count if fit.split else 0,
                tensor_parallel=fit.split.tensor if fit.split else 0,
                pipeline_parallel=fit.split.pipeline if fit.split else 0,
                fleet_count=fit.kind.count,
                message=fit.text,
            )
        return answer

    async def RankNodes(self, request: api.RankNodesRequest, context: Context) -> api.RankNodesResponse:
        idleness = Idleness(
            wire.or_else(request, "max_utilization_percent", IDLE_UTILIZATION_PERCENT),
            wire.or_else(request, "max_memory_percent", IDLE_MEMORY_PERCENT),
            request.gpu_count,
        )
        found = await self.capacity.rank(idleness)
        return api.RankNodesResponse(
            nodes=[
                api.RankedNode(
                    name=names.node_name(one.node.id),
                    idle_gpu_count=one.idle_count,
                    gpu_count=len(one.node.gpus),
                    sufficient=one.sufficient,
                    fallback=one.fallback,
                    message=one.message,
                    mean_utilization_percent=one.mean_utilization_percent,
                    mean_memory_percent=one.mean_memory_percent,
                )
                for one in found
            ],
            fallback=not any(one.sufficient for one in found),
        )

    async def PlanRebalance(
        self, request: api.PlanRebalanceRequest, context: Context
    ) -> api.PlanRebalanceResponse:
        ask = to_ask(request.ask, self.settings) if request.HasField("ask") else None
        found, notes = await self.rebalancing.plan(ask)
        return api.PlanRebalanceResponse(plans=[_from_proposal(one) for one in found], notes=notes)

    async def ApplyRebalance(
        self, request: api.ApplyRebalanceRequest, context: Context
    ) -> api.ApplyRebalanceResponse:
        found, notes = await self.rebalancing.apply()
        return api.ApplyRebalanceResponse(plan=_from_proposal(found) if found else None, notes=notes)


CordonStanding = tuple[Cordon, tuple[str, ...]]
"""A cordon, and the ids of the reservations there."""


@dataclass(slots=True)
class NodeServicer(api.NodeServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    maintenance: Maintenance
    clock: Clock
    feed: LookedAtFeed[CordonStanding] = field(init=False)

    def __post_init__(self) -> None:
        self.feed = LookedAtFeed(
            api.WatchCordonsResponse,
            api.Cordon,
            lambda: {
                names.cordon_name(one.spot.name): self._standing(one) for one in self.maintenance.cordons
            },
            self._show,
        )

    async def CordonNode(self, request: api.CordonNodeRequest, context: Context) -> api.CordonNodeResponse:
        if request.validate_only:
            self.maintenance.expect_known(spot_of(request.name))
            return api.CordonNodeResponse(cordon=self._existing(request.name))
        cordon = await self.maintenance.cordon(
            spot_of(request.name), reason=request.reason, author=current_principal().name
        )
        return api.CordonNodeResponse(cordon=self._message(cordon))

    async def UncordonNode(
        self, request: api.UncordonNodeRequest, context: Context
    ) -> api.UncordonNodeResponse:
        if request.validate_only:
            self.maintenance.expect_liftable(spot_of(request.name), current_principal())
            return api.UncordonNodeResponse()
        await self.maintenance.uncordon(spot_of(request.name), current_principal())
        return api.UncordonNodeResponse()

    async def DrainNode(self, request: api.DrainNodeRequest, context: Context) -> api.DrainNodeResponse:
        if request.validate_only:
            self.maintenance.expect_known(spot_of(request.name))
            return api.DrainNodeResponse(cordon=self._existing(request.name))
        cordon, leaving = await self.maintenance.drain(
            spot_of(request.name),
            reason=request.reason,
            author=current_principal().name,
            grace=wire.optional_seconds(request, "grace"),
        )
        now, wall = self.clock.now(), self.clock.wall()
        return api.DrainNodeResponse(
            cordon=self._show(self._standing(cordon), now, wall),
            reservations=[from_reservation(one, now, wall) for one in leaving],
        )

    async def GetCordon(self, request: api.GetCordonRequest, context: Context) -> api.GetCordonResponse:
        return api.GetCordonResponse(cordon=self._message(self.maintenance.get(spot_of(request.name))))

    async def ListCordons(self, request: api.ListCordonsRequest, context: Context) -> api.ListCordonsResponse:
        cordons, token = listed(
            list(self.maintenance.cordons),
            request,
            api.Cordon,
            key=lambda one: one.spot.name,
            encode=self._message,
        )
        return api.ListCordonsResponse(cordons=cordons, next_page_token=token)

    async def WatchCordons(self, request: api.WatchCordonsRequest, context: Context) -> AsyncGenerator[Any]:
        async for message in self.feed.stream(request):
            yield message

    def _existing(self, name: str) -> api.Cordon | None:
        found = self.maintenance.cordons.get(spot_of(name))
        return None if found is None else self._message(found)

    def _message(self, cordon: Cordon) -> api.Cordon:
        return self._show(self._standing(cordon))

    def _standing(self, cordon: Cordon) -> CordonStanding:
        return cordon, tuple(one.id for one in self.maintenance.reservations(cordon.spot))

    def _show(
        self, standing: CordonStanding, now: float | None = None, wall: datetime | None = None
    ) -> api.Cordon:
        """The message of a cordon, answered at `now` and `wall`, or at this moment."""
        cordon, there = standing
        message = api.Cordon(
            name=names.cordon_name(cordon.spot.name),
            target=cordon.spot.name,
            state=api.Cordon.STATE_CORDONED,
            reason=cordon.reason,
            author=cordon.author,
            create_time=wire.to_timestamp(cordon.created),
            reservations=map(names.reservation_name, there),
        )
        if cordon.deadline is not None:
            message.state = api.Cordon.STATE_DRAINING if there else api.Cordon.STATE_DRAINED
            left = timedelta(seconds=cordon.deadline - (self.clock.now() if now is None else now))
            message.drain_deadline.CopyFrom(wire.to_timestamp((wall or self.clock.wall()) + left))
        return message


@dataclass(slots=True)
class QuotaServicer(api.QuotaServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    quotas: Quotas
    feed: LookedAtFeed[Standing] = field(init=False)

    def __post_init__(self) -> None:
        self.feed = LookedAtFeed(
            api.WatchQuotasResponse,
            api.Quota,
            lambda: {names.quota_name(one.quota.tenant): one for one in self.quotas.every()},
            _from_standing,
        )

    async def SetQuota(self, request: api.SetQuotaRequest, context: Context) -> api.SetQuotaResponse:
        asked, paths = request.quota, {*request.update_mask.paths}
        if not paths <= _QUOTA_FIELDS:
            known = ", ".join(sorted(_QUOTA_FIELDS))
            raise InvalidArgumentError(f"update_mask may name {known}", field="update_mask")
        new: dict[str, Any] = {
            "gpu_milli_limit": wire.or_else(asked, "gpu_milli_limit", None),
            "weight": wire.or_else(asked, "weight", 1.0),
            "gpu_hours_per_month": wire.or_else(asked, "gpu_hours_per_month", None),
        }
        if paths:
            new = {name: value for name, value in new.items() if name in paths}
        tenant = _tenant(asked.name, asked.tenant, "quota.name")
        found = await self.quotas.set(tenant, lambda before: replace(before, **new), etag=asked.etag)
        return api.SetQuotaResponse(quota=_from_standing(found))

    async def DeleteQuota(self, request: api.DeleteQuotaRequest, context: Context) -> api.DeleteQuotaResponse:
        tenant = _tenant(request.name, request.tenant)
        await self.quotas.delete(tenant, etag=request.etag, allow_missing=request.allow_missing)
        return api.DeleteQuotaResponse()

    async def GetQuota(self, request: api.GetQuotaRequest, context: Context) -> api.GetQuotaResponse:
        return api.GetQuotaResponse(quota=_from_standing(self.quotas.get(_tenant(request.name, ""))))

    async def ListQuotas(self, request: api.ListQuotasRequest, context: Context) -> api.ListQuotasResponse:
        found, token = listed(
            self.quotas.every(), request, api.Quota, key=lambda one: one.quota.tenant, encode=_from_standing
        )
        return api.ListQuotasResponse(quotas=found, next_page_token=token)

    async def WatchQuotas(self, request: api.WatchQuotasRequest, context: Context) -> AsyncGenerator[Any]:
        async for message in self.feed.stream(request):
            yield message


_QUOTA_FIELDS = {"gpu_milli_limit", "weight", "gpu_hours_per_month"}


def _tenant(name: str, tenant: str, field: str = "name") -> str:
    """The tenant in a quota's name, or in the field of older clients; InvalidArgumentError if they differ."""
    found = name.removeprefix(names.quota_name("")) if name else tenant
    if not found or (name and (name == found or tenant not in {"", found})):
        raise InvalidArgumentError(f"{field} must look like quotas/{{tenant}}", field=field)
    validate(api.Quota(tenant=found))
    return found


def _from_standing(one: Standing) -> api.Quota:
    return api.Quota(
        name=names.quota_name(one.quota.tenant),
        etag=etag_of(one.quota),
        tenant=one.quota.tenant,
        gpu_milli_limit=one.quota.gpu_milli_limit,
        weight=one.quota.weight,
        gpu_milli_held=one.gpu_milli_held,
        waiting_count=one.waiting,
        gpu_milli_past=one.gpu_milli_past,
        gpu_hours_per_month=one.quota.gpu_hours_per_month,
        gpu_hours_used=one.month.used,
        gpu_hours_booked=one.month.booked,
    )


_LAST = 253_402_214_400.0  # 9999-12-31: a client east of Greenwich has no later time. Older versions booked what ends then
_STATES = {one: api.Booking.State.Value(f"STATE_{one.name}") for one in BookingState}
NOT_KEPT = ("gpu_milli", "gpu_memory_bytes", "mig_profile", "cpu_milli", "host_memory_bytes", "apart_from")
"""Fields of an ask that a booking does not support."""


@dataclass(slots=True)
class BookingServicer(api.BookingServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    calendar: Calendar
    settings: AllocatorSettings
    feed: LookedAtFeed[tuple[Booking, list[str]]] = field(init=False)

    def __post_init__(self) -> None:
        self.feed = LookedAtFeed(
            api.WatchBookingsResponse,
            api.Booking,
            lambda: {one.name: (one, self._claims(one)) for one in self.calendar.bookings.open},
            lambda one: self._message(one[0]),
        )

    async def CreateBooking(
        self, request: api.CreateBookingRequest, context: Context
    ) -> api.CreateBookingResponse:
        wish = to_booking(request, current_principal(), self.settings)
        return api.CreateBookingResponse(booking=self._message(await self.calendar.create(wish)))

    async def GetBooking(self, request: api.GetBookingRequest, context: Context) -> api.GetBookingResponse:
        return api.GetBookingResponse(booking=self._message(self.calendar.bookings.get(_id(request.name))))

    async def ListBookings(
        self, request: api.ListBookingsRequest, context: Context
    ) -> api.ListBookingsResponse:
        found, token = listed(
            [one for one in self.calendar.bookings if one.open or request.show_ended],
            request,
            api.Booking,
            key=lambda one: one.id,
            encode=self._message,
        )
        return api.ListBookingsResponse(bookings=found, next_page_token=token)

    async def WatchBookings(self, request: api.WatchBookingsRequest, context: Context) -> AsyncGenerator[Any]:
        async for message in self.feed.stream(request):
            yield message

    async def CancelBooking(
        self, request: api.CancelBookingRequest, context: Context
    ) -> api.CancelBookingResponse:
        found = await self.calendar.cancel(_id(request.name), current_principal())
        return api.CancelBookingResponse(booking=self._message(found))

    def _claims(self, one: Booking) -> list[str]:
        return [names.reservation_name(held.id) for held in self.calendar.claims(one)]

    def _message(self, one: Booking) -> api.Booking:
        return api.Booking(
            name=one.name,
            start_time=wire.to_timestamp(datetime.fromtimestamp(min(one.start, _LAST), UTC)),
            duration=wire.to_duration(one.end - one.start),
            title=one.title,
            tenant=one.tenant,
            owner=one.owner,
            state=_STATES[one.state],
            gpus=[names.gpu_name(node, uuid) for node, uuid in one.spots],
            end_time=wire.to_timestamp(datetime.fromtimestamp(min(one.end, _LAST), UTC)),
            create_time=wire.to_timestamp(datetime.fromtimestamp(one.created, UTC)),
            note=one.note,
            reservations=self._claims(one),
        )


def to_booking(request: api.CreateBookingRequest, caller: Principal, defaults: AllocatorSettings) -> Booking:
    """The booking of a valid request, without GPUs. Raises InvalidArgumentError, and PermissionDeniedError (OTHER_TENANT)."""
    asked = request.booking
    for one, value in asked.ask.ListFields():
        if one.name in NOT_KEPT and (one.name, value) != ("gpu_milli", WHOLE):
            message = f"a booking reserves whole GPUs, and nothing else of their nodes: leave out {one.name}"
            raise InvalidArgumentError(message, field=f"booking.ask.{one.name}")
    tenant = asked.tenant or caller.tenants[0]
    require_tenant(caller, tenant, "booking.tenant")
    request_id, request.request_id = request.request_id, ""
    fingerprint = f"{wire.fingerprint(request)} {caller.name}"
    request.request_id = request_id
    start = wire.to_datetime(asked.start_time).timestamp()
    return Booking(
        id=request.booking_id or f"b{random_id(start)[1:]}",
        request_id=request_id.lower(),
        fingerprint=fingerprint,
        owner=caller.name,
        tenant=tenant,
        title=asked.title,
        ask=to_ask(asked.ask, defaults, "booking.ask."),
        start=start,
        end=start + wire.seconds(asked.duration),
        created=start,
    )


def _id(name: str) -> str:
    return names.parse(names.BOOKING, name)["booking"]
