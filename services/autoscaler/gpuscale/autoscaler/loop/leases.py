"""Reservations of replicas at the allocator: taken, kept alive while the replicas live, and given back once they have ended."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaLease, asked_to_stop
from gpuscale.autoscaler.loop.hub import AdapterHub
from gpuscale.autoscaler.loop.wakes import Wakes
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.specs import ask_to_wire
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, NotFoundError
from gpuscale.common.names import endpoint_name, replica_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, Clock, hit_async
from gpuscale.common.store.store import Store
from gpuscale.common.wire import to_duration


@dataclass(frozen=True, slots=True)
class ReplicaGrant:
    """GPUs that were reserved, and the id of the node they are on."""

    lease: ReplicaLease
    node: str


class Reservations:
    """Reserves, renews and releases. Every call may be repeated: that is what the request id of a replica is for."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = allocator_api.AllocatorServiceStub(channel)

    async def reserve(self, replica: Replica, tenant: str = "") -> ReplicaGrant | None:
        """The GPUs of a replica, on one of its `nodes`: newly granted, or as granted to an earlier call for it.

        `tenant`: whose quota they count against; our own where it is empty.

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
            tenant=tenant,
        )
        with rpc_errors():
            answer = await self._stub.Reserve(request, timeout=RPC_TIMEOUT)
        granted = answer.reservation
        if granted.state != allocator_api.Reservation.STATE_ACTIVE:
            return None
        uuids = tuple(gpu.uuid for gpu in granted.gpus)
        lease = ReplicaLease(granted.name, granted.fence, uuids, answer.lease_token)
        return ReplicaGrant(lease, granted.gpus[0].node)

    async def renew(self, lease: ReplicaLease) -> None:
        """Start a lease anew.

        Raises:
            NotFoundError, FailedPreconditionError: it seems to have ended; `holds` tells for certain.
            GpuscaleError: of other kinds; nobody knows.
        """
        request = allocator_api.RenewReservationRequest(name=lease.reservation, fence=lease.fence)
        with rpc_errors():
            await self._stub.RenewReservation(request, timeout=RPC_TIMEOUT)

    async def holds(self, lease: ReplicaLease) -> bool:
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

    async def release(self, lease: ReplicaLease) -> None:
        """Give the GPUs of a lease back; harmless if it has ended.

        Raises:
            NotFoundError, FailedPreconditionError: there is nothing of ours to release.
            GpuscaleError: of other kinds; it may be held still.
        """
        request = allocator_api.ReleaseReservationRequest(name=lease.reservation, fence=lease.fence)
        with rpc_errors():
            await self._stub.ReleaseReservation(request, timeout=RPC_TIMEOUT)


CONCURRENT = 16
"""Calls of one kind to the allocator at a time."""
RETRY_RENEWAL = 1.0
"""Seconds after which a renewal that nobody answered is tried again."""
LONGEST_WAIT = 60.0
"""Seconds after which the rows are read again even if nobody said that they changed."""

_log = get_logger(__name__)


class LeaseKeeper:
    """Two tasks: one renews, one releases. `changed` tells them that replicas came, ended, or got their GPUs.

    Args:
        store: the autoscaler's store.
        reservations: the allocator.
        clock: what the leases are renewed by.
        hub: tells adapters of replicas that lost their GPUs.
        wakes: told which endpoints that concerns, and who may go on when GPUs were given back.
    """

    def __init__(
        self, store: Store, reservations: Reservations, clock: Clock, hub: AdapterHub, wakes: Wakes
    ) -> None:
        self._store = store
        self._reservations = reservations
        self._clock = clock
        self._hub = hub
        self._wakes = wakes
        self._renew = asyncio.Event()
        self._release = asyncio.Event()
        self._due: dict[str, float] = {}

    def changed(self) -> None:
        """Look at the replicas again."""
        self._renew.set()
        self._release.set()

    async def renew_forever(self) -> None:
        """Renew every lease each third of its ttl, those of silent adapters too; all of them at once at the start."""
        live: list[Replica] = []
        known = await self._leased()
        self._due = {replica.id: self._clock.now() for replica in known or ()}
        while True:
            live = live if known is None else known
            now = self._clock.now()
            self._due = {one.id: self._due.get(one.id, now + one.template.ttl / 3) for one in live}
            await self._each([one for one in live if self._due[one.id] <= now], self._renew_one)
            next_due = min(self._due.values(), default=now + LONGEST_WAIT) - self._clock.now()
            await _wait(self._renew, max(0.0, next_due) if known is not None else RETRY_RENEWAL)
            if known is None or self._renew.is_set():
                self._renew.clear()
                known = await self._leased()

    async def _leased(self) -> list[Replica] | None:
        """The replicas that hold a lease; None where that cannot be read now."""
        try:
            return await self._store.read(store.leased)
        except GpuscaleError as error:
            _log.warning("cannot read which leases to renew", error=error.message)
            return None

    async def _renew_one(self, replica: Replica, lease: ReplicaLease) -> None:
        try:
            await self._reservations.renew(lease)
            lost = ""
        except (NotFoundError, FailedPreconditionError) as error:
            lost = error.message
        except GpuscaleError as error:
            return self._try_again(replica, error)
        try:
            if lost and not await self._reservations.holds(lease):
                await self._note_loss(replica, lost)
        except GpuscaleError as error:
            return self._try_again(replica, error)
        self._due[replica.id] = self._clock.now() + replica.template.ttl / 3
        return None

    def _try_again(self, replica: Replica, error: GpuscaleError) -> None:
        _log.warning("a lease was not renewed", replica=replica.id, error=error.message)
        self._due[replica.id] = self._clock.now() + min(RETRY_RENEWAL, replica.template.ttl / 10)

    async def _note_loss(self, replica: Replica, message: str) -> None:
        """Its GPUs may be somebody else's by now: it is stopped at once."""
        at = Moment(self._clock.now(), self._clock.wall())
        reason = f"lost its reservation: {message}"
        if not await self._store.write(partial(_stop, replica_id=replica.id, reason=reason, at=at)):
            return self._renew.set()  # it has ended meanwhile, and its reservation was released
        name = replica_name(replica.endpoint, replica.id)
        _log.error("a replica lost its GPUs", replica=name, error=message)
        await self._hub.refresh([replica.adapter])
        self._wakes.call(replica.endpoint)
        return None

    async def release_forever(self) -> None:
        """Release the reservation of every replica that has ended, until the allocator has acknowledged it."""
        backoff = Backoff(initial=0.5, cap=10.0)
        while True:
            self._release.clear()
            if await self._release_all():
                backoff.reset()
                await _wait(self._release, LONGEST_WAIT)
            else:
                await _wait(self._release, backoff.next())

    async def _release_all(self) -> bool:
        """Whether nothing is owed any more."""
        try:
            await self._each(await self._store.read(store.owing), self._release_one)
            return not await self._store.read(store.owing)
        except GpuscaleError as error:
            _log.warning("cannot read which leases to release", error=error.message)
            return False

    async def _release_one(self, replica: Replica, lease: ReplicaLease) -> None:
        try:
            await hit_async("autoscaler.replica.before_release")
            with suppress(NotFoundError, FailedPreconditionError):  # nothing of ours is left to release
                await self._reservations.release(lease)
            await hit_async("autoscaler.replica.after_release")
            await self._store.write(partial(_settle, replica_id=replica.id))
        except GpuscaleError as error:
            _log.warning("a reservation was not released", reservation=lease.reservation, error=error.message)
        else:
            self._renew.set()  # it may be one of those that are renewed still
            self._wakes.call(replica.endpoint)
            self._wakes.call_waiting()

    async def _each(
        self, replicas: Iterable[Replica], work: Callable[[Replica, ReplicaLease], Awaitable[None]]
    ) -> None:
        limit = asyncio.Semaphore(CONCURRENT)

        async def one(replica: Replica, lease: ReplicaLease) -> None:
            async with limit:
                await work(replica, lease)

        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                if replica.lease is not None:
                    group.create_task(one(replica, replica.lease), name=f"lease of {replica.id}")


def _stop(connection: Connection, replica_id: str, reason: str, at: Moment) -> bool:
    """Whether there is one to stop."""
    replica = store.replica(connection, replica_id)
    if replica is None or replica.ended:
        return False
    store.save_replica(connection, asked_to_stop(replica, reason, at, hurry=True))
    return True


def _settle(connection: Connection, replica_id: str) -> None:
    replica = store.replica(connection, replica_id)
    if replica is not None:
        store.save_replica(connection, replace(replica, owes_release=False))


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
