"""The allocator of a fake server."""

from collections.abc import Iterator

import grpc

from gpuscale.api.allocator import v1 as api
from gpuscale.common.wire import page
from gpuscale.testing.ledger import Ledger, lease_status, lease_token


class FakeAllocator:
    """Answers as the real allocator does, for whole GPUs and shares; other wishes of an ask are not looked at."""

    service = "gpuscale.api.allocator.v1.AllocatorService"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def Reserve(self, request: api.ReserveRequest, context: grpc.ServicerContext) -> api.ReserveResponse:
        """Grants, or waits."""
        granted = self._ledger.reserve(request, lambda: not context.is_active())
        return api.ReserveResponse(reservation=granted, lease_token=lease_token(granted))

    def ReserveAndWatch(
        self, request: api.ReserveAndWatchRequest, context: grpc.ServicerContext
    ) -> Iterator[api.ReserveAndWatchResponse]:
        """Says once that it waits, then grants."""
        yield api.ReserveAndWatchResponse(waiting=api.QueuePlace(message="waiting", reason="NO_CAPACITY"))
        granted = self._ledger.reserve(request.reserve, lambda: not context.is_active())
        yield api.ReserveAndWatchResponse(reservation=granted, lease_token=lease_token(granted))

    def RenewReservation(
        self, request: api.RenewReservationRequest, context: grpc.ServicerContext
    ) -> api.RenewReservationResponse:
        """Starts a lease anew."""
        return api.RenewReservationResponse(reservation=self._ledger.renew(request))

    def KeepAlive(
        self, requests: Iterator[api.KeepAliveRequest], context: grpc.ServicerContext
    ) -> Iterator[api.KeepAliveResponse]:
        """Renews what each message names."""
        for request in requests:
            leases = list(request.leases)
            if request.holder:
                held = self._ledger.all(holder=request.holder)
                leases += [api.LeaseRenewal(name=one.name, fence=one.fence) for one in held]
            yield api.KeepAliveResponse(leases=[lease_status(self._ledger, lease) for lease in leases])

    def ReleaseReservation(
        self, request: api.ReleaseReservationRequest, context: grpc.ServicerContext
    ) -> api.ReleaseReservationResponse:
        """Gives GPUs back."""
        return api.ReleaseReservationResponse(reservation=self._ledger.release(request))

    def CheckLease(
        self, request: api.CheckLeaseRequest, context: grpc.ServicerContext
    ) -> api.CheckLeaseResponse:
        """Whether a lease holds GPUs."""
        self._ledger.check(request)
        return api.CheckLeaseResponse()

    def GetReservation(
        self, request: api.GetReservationRequest, context: grpc.ServicerContext
    ) -> api.GetReservationResponse:
        """One reservation."""
        return api.GetReservationResponse(reservation=self._ledger.shown(request.name))

    def ListReservations(
        self, request: api.ListReservationsRequest, context: grpc.ServicerContext
    ) -> api.ListReservationsResponse:
        """A page of reservations, by name."""
        found = self._ledger.all(holder=request.holder, ended=request.show_ended)
        found.sort(key=lambda one: one.name)
        shown, token = page(
            found, key=lambda one: one.name, page_size=request.page_size, page_token=request.page_token
        )
        return api.ListReservationsResponse(reservations=shown, next_page_token=token)

    def WatchReservations(
        self, request: api.WatchReservationsRequest, context: grpc.ServicerContext
    ) -> Iterator[api.WatchReservationsResponse]:
        """All live reservations, then those that changed."""
        told: dict[str, api.Reservation.State.ValueType] = {}
        full = True
        for _ in self._ledger.changes(context.is_active):
            found = self._ledger.all(holder=request.holder, ended=not full)
            news = [one for one in found if told.get(one.name) != one.state]
            told |= {one.name: one.state for one in news}
            if news or full:
                yield api.WatchReservationsResponse(reservations=news, full=full)
            full = False
