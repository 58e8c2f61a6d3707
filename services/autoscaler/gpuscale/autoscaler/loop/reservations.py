"""The allocator, as a client: reservations for replicas."""

from dataclasses import dataclass

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.replicas import Lease, Replica
from gpuscale.autoscaler.wire.translate import ask_to_wire
from gpuscale.common.errors import NotFoundError
from gpuscale.common.names import endpoint_name, replica_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import to_duration


@dataclass(frozen=True, slots=True)
class Grant:
    """GPUs that were reserved, and the id of the node they are on."""

    lease: Lease
    node: str


class Reservations:
    """Reserves, renews and releases. Every call may be repeated: that is what the request id of a replica is for."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = allocator_api.AllocatorServiceStub(channel)

    async def reserve(self, replica: Replica) -> Grant | None:
        """The GPUs of a replica, on one of its `nodes`: newly granted, or as granted to an earlier call for it.

        Returns:
            None where an earlier call was granted a reservation that has ended meanwhile.

        Raises:
            ResourceExhaustedError: NO_CAPACITY; nothing was reserved.
            FailedPreconditionError: UNSATISFIABLE, and others; nothing was reserved.
            NotFoundError: the allocator does not know one of the nodes; nothing was reserved.
            AlreadyExistsError: an earlier call for the replica asked for other nodes.
            GpuscaleError: of other kinds; it may have been reserved.
        """
        template = replica.template
        request = allocator_api.ReserveRequest(
            request_id=replica.request_id,
            holder=replica_name(replica.endpoint, replica.id),
            ask=ask_to_wire(template, replica.nodes),
            ttl=to_duration(template.ttl),
            labels={"endpoint": endpoint_name(replica.endpoint)},
        )
        with rpc_errors():
            answer = await self._stub.Reserve(request, timeout=RPC_TIMEOUT)
        granted = answer.reservation
        if granted.state != allocator_api.Reservation.STATE_ACTIVE:
            return None
        uuids = tuple(gpu.uuid for gpu in granted.gpus)
        lease = Lease(granted.name, granted.fence, uuids, answer.lease_token)
        return Grant(lease, granted.gpus[0].node)

    async def renew(self, lease: Lease) -> None:
        """Start a lease anew.

        Raises:
            NotFoundError, FailedPreconditionError: it seems to have ended; `holds` tells for certain.
            GpuscaleError: of other kinds; nobody knows.
        """
        request = allocator_api.RenewReservationRequest(name=lease.reservation, fence=lease.fence)
        with rpc_errors():
            await self._stub.RenewReservation(request, timeout=RPC_TIMEOUT)

    async def holds(self, lease: Lease) -> bool:
        """Whether the GPUs of a lease are held by it still.

        Raises:
            GpuscaleError: nobody knows.
        """
        request = allocator_api.GetReservationRequest(name=lease.reservation)
        try:
            with rpc_errors():
                found = (await self._stub.GetReservation(request, timeout=RPC_TIMEOUT)).reservation
        except NotFoundError:
            return False
        return found.state == allocator_api.Reservation.STATE_ACTIVE and found.fence == lease.fence

    async def release(self, lease: Lease) -> None:
        """Give the GPUs of a lease back; harmless if it has ended.

        Raises:
            NotFoundError, FailedPreconditionError: there is nothing of ours to release.
            GpuscaleError: of other kinds; it may be held still.
        """
        request = allocator_api.ReleaseReservationRequest(name=lease.reservation, fence=lease.fence)
        with rpc_errors():
            await self._stub.ReleaseReservation(request, timeout=RPC_TIMEOUT)
