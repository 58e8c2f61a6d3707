"""AllocatorService on the wire: messages to values, one use case, values to messages."""

from typing import TypeAlias

import grpc

from gpuscale.allocator import translate
from gpuscale.allocator.model import Reservation
from gpuscale.allocator.service import Allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.auth import current_principal
from gpuscale.common.clock import Clock

_Reserve: TypeAlias = grpc.aio.ServicerContext[api.ReserveRequest, api.ReserveResponse]
_Renew: TypeAlias = grpc.aio.ServicerContext[api.RenewReservationRequest, api.RenewReservationResponse]
_Release: TypeAlias = grpc.aio.ServicerContext[api.ReleaseReservationRequest, api.ReleaseReservationResponse]
_Get: TypeAlias = grpc.aio.ServicerContext[api.GetReservationRequest, api.GetReservationResponse]
_List: TypeAlias = grpc.aio.ServicerContext[api.ListReservationsRequest, api.ListReservationsResponse]


class AllocatorServicer(api.AllocatorServiceServicer):
    """The RPCs. Requests have been validated against the contract and callers authenticated before they come here."""

    def __init__(self, allocator: Allocator, settings: AllocatorSettings, clock: Clock) -> None:
        self._allocator = allocator
        self._settings = settings
        self._clock = clock

    async def Reserve(self, request: api.ReserveRequest, context: _Reserve) -> api.ReserveResponse:
        """Grant GPUs."""
        order = translate.to_order(request, current_principal().name, self._settings)
        granted = await self._allocator.reserve(order)
        return api.ReserveResponse(reservation=self._message(granted))

    async def RenewReservation(
        self, request: api.RenewReservationRequest, context: _Renew
    ) -> api.RenewReservationResponse:
        """Start a lease anew."""
        ttl = wire.optional_seconds(request, "ttl")
        renewed = await self._allocator.renew(_id(request.name), request.fence, ttl, current_principal())
        return api.RenewReservationResponse(reservation=self._message(renewed))

    async def ReleaseReservation(
        self, request: api.ReleaseReservationRequest, context: _Release
    ) -> api.ReleaseReservationResponse:
        """Give GPUs back."""
        released = await self._allocator.release(_id(request.name), request.fence, current_principal())
        return api.ReleaseReservationResponse(reservation=self._message(released))

    async def GetReservation(
        self, request: api.GetReservationRequest, context: _Get
    ) -> api.GetReservationResponse:
        """Look one up."""
        return api.GetReservationResponse(reservation=self._message(self._allocator.get(_id(request.name))))

    async def ListReservations(
        self, request: api.ListReservationsRequest, context: _List
    ) -> api.ListReservationsResponse:
        """List a page of them."""
        reservations, token = self._allocator.list_reservations(
            holder=request.holder,
            ended=request.show_ended,
            page_size=request.page_size,
            page_token=request.page_token,
        )
        return api.ListReservationsResponse(
            reservations=[self._message(one) for one in reservations], next_page_token=token
        )

    def _message(self, reservation: Reservation) -> api.Reservation:
        return translate.from_reservation(reservation, self._clock.now(), self._clock.wall())


def _id(name: str) -> str:
    return names.parse(names.RESERVATION, name)["reservation"]
