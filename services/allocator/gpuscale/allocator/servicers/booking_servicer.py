"""BookingService on the wire: messages to values, one use case, values to messages."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gpuscale.allocator.domain.bookings import Booking, BookingState
from gpuscale.allocator.domain.ledger import random_id
from gpuscale.allocator.domain.model import WHOLE
from gpuscale.allocator.servicers.servicer import check_tenant, to_ask
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.allocator.usecases.booking import Calendar
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import listed
from gpuscale.common.rpc.feed import LookedAtFeed
from gpuscale.common.security.auth import Context, Principal, Role, current_principal

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
            start_time=wire.to_timestamp(datetime.fromtimestamp(one.start, UTC)),
            duration=wire.to_duration(one.end - one.start),
            title=one.title,
            tenant=one.tenant,
            owner=one.owner,
            state=_STATES[one.state],
            gpus=[names.gpu_name(node, uuid) for node, uuid in one.spots],
            end_time=wire.to_timestamp(datetime.fromtimestamp(one.end, UTC)),
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
    if caller.role < Role.ADMIN:
        check_tenant(caller, tenant, "booking.tenant")
    request_id, request.request_id = request.request_id, ""
    fingerprint = f"{wire.fingerprint(request)} {caller.name}"
    request.request_id = request_id
    start = wire.to_datetime(asked.start_time).timestamp()
    return Booking(
        id=request.booking_id or f"b{random_id()[1:]}",
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
