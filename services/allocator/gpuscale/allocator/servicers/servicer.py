"""AllocatorService on the wire: messages to values, one use case, values to messages."""

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.domain.tokens import Tokens
from gpuscale.allocator.servicers import translate
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.allocator.usecases.leases import Leases
from gpuscale.allocator.usecases.records import Records
from gpuscale.allocator.usecases.reserving import Reserving
from gpuscale.api.allocator import v1 as api
from gpuscale.common import wire
from gpuscale.common.rpc.validation import validate
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context, Role, current_principal

_One = TypeVar(
    "_One",
    api.ReserveResponse,
    api.ReserveAndWatchResponse,
    api.RenewReservationResponse,
    api.ReleaseReservationResponse,
)
_Several = TypeVar("_Several", api.BatchReserveResponse, api.BatchReleaseResponse)


@dataclass(frozen=True, slots=True)
class AllocatorServicer(api.AllocatorServiceServicer):
    """The RPCs. Requests have been validated against the contract and callers authenticated before they come here."""

    reserving: Reserving
    leases: Leases
    records: Records
    settings: AllocatorSettings
    clock: Clock
    tokens: Tokens

    async def Reserve(self, request: api.ReserveRequest, context: Context) -> api.ReserveResponse:
        """Grant GPUs."""
        order = translate.to_order(request, current_principal(), self.settings)
        granted = await self.reserving.reserve(order, wire.optional_seconds(request, "wait") or 0.0)
        return self._put(api.ReserveResponse(lease_token=self.tokens.of_lease(granted)), granted)

    async def ReserveAndWatch(
        self, request: api.ReserveAndWatchRequest, context: Context
    ) -> AsyncIterator[api.ReserveAndWatchResponse]:
        """Grant GPUs, and tell the place in the queue meanwhile."""
        order = translate.to_order(request.reserve, current_principal(), self.settings, "reserve.")
        since = self.clock.now()
        wait = wire.optional_seconds(request.reserve, "wait") or 0.0
        async with aclosing(self.reserving.reserve_and_watch(order, wait)) as news:
            async for one in news:
                if isinstance(one, Reservation):
                    yield self._put(api.ReserveAndWatchResponse(lease_token=self.tokens.of_lease(one)), one)
                else:
                    place = translate.from_place(one, self.clock.now(), since)
                    yield api.ReserveAndWatchResponse(waiting=place)

    async def BatchReserve(
        self, request: api.BatchReserveRequest, context: Context
    ) -> api.BatchReserveResponse:
        """Grant several requests, all or none."""
        orders = translate.to_orders(request, current_principal(), self.settings)
        granted = await self.reserving.reserve_all(orders)
        return self._add(api.BatchReserveResponse(lease_tokens=map(self.tokens.of_lease, granted)), granted)

    async def RenewReservation(
        self, request: api.RenewReservationRequest, context: Context
    ) -> api.RenewReservationResponse:
        """Start a lease anew."""
        ttl = wire.optional_seconds(request, "ttl")
        renewed = await self.leases.renew(translate.to_lease(request), ttl, current_principal())
        return self._put(api.RenewReservationResponse(), renewed)

    async def KeepAlive(
        self, request_iterator: AsyncIterator[api.KeepAliveRequest], context: Context
    ) -> AsyncIterator[api.KeepAliveResponse]:
        """Renew leases, message by message."""
        caller = current_principal()
        async for request in request_iterator:
            validate(request)
            leases = [translate.to_lease(one) for one in request.leases]
            renewals = await self.leases.keep_alive(leases, request.holder, caller)
            now, wall = self.clock.now(), self.clock.wall()
            yield api.KeepAliveResponse(leases=[translate.from_renewal(one, now, wall) for one in renewals])

    async def ReleaseReservation(
        self, request: api.ReleaseReservationRequest, context: Context
    ) -> api.ReleaseReservationResponse:
        """Give GPUs back."""
        released = await self.leases.release([translate.to_lease(request)], current_principal())
        return self._put(api.ReleaseReservationResponse(), released[0])

    async def BatchRelease(
        self, request: api.BatchReleaseRequest, context: Context
    ) -> api.BatchReleaseResponse:
        """Give several back, all or none."""
        leases = [translate.to_lease(one) for one in request.requests]
        released = await self.leases.release(leases, current_principal())
        return self._add(api.BatchReleaseResponse(), released)

    async def CheckLease(self, request: api.CheckLeaseRequest, context: Context) -> api.CheckLeaseResponse:
        """Say whether a lease holds GPUs."""
        lease, caller = translate.to_lease(request), current_principal()
        lowest = self.leases.check(lease, request.node, request.gpu_uuids, request.lease_token, caller)
        return api.CheckLeaseResponse(lowest_fences=lowest)

    async def GetReservation(
        self, request: api.GetReservationRequest, context: Context
    ) -> api.GetReservationResponse:
        """Look one up."""
        found = await self.records.get(translate.reservation_id(request.name))
        own = found.live and found.owner == current_principal().name
        return api.GetReservationResponse(
            reservation=self._report(found), lease_token=self.tokens.of_lease(found) if own else ""
        )

    async def ListReservations(
        self, request: api.ListReservationsRequest, context: Context
    ) -> api.ListReservationsResponse:
        """List a page of them."""
        reservations, token = await self.records.list_reservations(
            holder=request.holder,
            ended=request.show_ended,
            page_size=request.page_size,
            page_token=request.page_token,
        )
        return api.ListReservationsResponse(
            reservations=[self._report(one) for one in reservations], next_page_token=token
        )

    async def WatchReservations(
        self, request: api.WatchReservationsRequest, context: Context
    ) -> AsyncIterator[api.WatchReservationsResponse]:
        """Tell of reservations that change."""
        async for news in self.records.watch(request.holder):
            yield api.WatchReservationsResponse(
                reservations=[self._report(one) for one in news.reservations], full=news.full
            )

    def _put(self, answer: _One, one: Reservation) -> _One:
        """Put a reservation into an answer."""
        translate.put_reservation(answer.reservation, one, self.clock.now(), self.clock.wall())
        return answer

    def _add(self, answer: _Several, reservations: Iterable[Reservation]) -> _Several:
        """Put reservations into an answer, as of one moment."""
        now, wall = self.clock.now(), self.clock.wall()
        for one in reservations:
            translate.put_reservation(answer.reservations.add(), one, now, wall)
        return answer

    def _report(self, reservation: Reservation) -> api.Reservation:
        """The message of a reservation with what its holder makes of it; its fence is for its owner and for admins."""
        usage, caller = self.records.usage(reservation), current_principal()
        message = translate.from_reservation(reservation, self.clock.now(), self.clock.wall(), usage)
        if reservation.owner != caller.name and caller.role < Role.ADMIN:
            message.ClearField("fence")
        return message
