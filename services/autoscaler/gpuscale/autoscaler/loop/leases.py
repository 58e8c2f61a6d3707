"""Keeps the reservations of replicas alive while they live, and gives them back once they have ended."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from gpuscale.autoscaler.domain.replicas import Lease, Moment, Replica, asked_to_stop
from gpuscale.autoscaler.loop.hub import AdapterHub
from gpuscale.autoscaler.loop.reservations import Reservations
from gpuscale.autoscaler.loop.wakes import Wakes
from gpuscale.autoscaler.state import replica_store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, NotFoundError
from gpuscale.common.names import replica_name
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.failpoints import hit_async
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff
from gpuscale.common.store.store import Store

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
            return await self._store.read(replica_store.leased)
        except GpuscaleError as error:
            _log.warning("cannot read which leases to renew", error=error.message)
            return None

    async def _renew_one(self, replica: Replica, lease: Lease) -> None:
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
            await self._each(await self._store.read(replica_store.owing), self._release_one)
            return not await self._store.read(replica_store.owing)
        except GpuscaleError as error:
            _log.warning("cannot read which leases to release", error=error.message)
            return False

    async def _release_one(self, replica: Replica, lease: Lease) -> None:
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
        self, replicas: Iterable[Replica], work: Callable[[Replica, Lease], Awaitable[None]]
    ) -> None:
        limit = asyncio.Semaphore(CONCURRENT)

        async def one(replica: Replica, lease: Lease) -> None:
            async with limit:
                await work(replica, lease)

        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                if replica.lease is not None:
                    group.create_task(one(replica, replica.lease), name=f"lease of {replica.id}")


def _stop(connection: Connection, replica_id: str, reason: str, at: Moment) -> bool:
    """Whether there is one to stop."""
    replica = replica_store.replica(connection, replica_id)
    if replica is None or replica.ended:
        return False
    replica_store.save_replica(connection, asked_to_stop(replica, reason, at, hurry=True))
    return True


def _settle(connection: Connection, replica_id: str) -> None:
    replica = replica_store.replica(connection, replica_id)
    if replica is not None:
        replica_store.save_replica(connection, replace(replica, owes_release=False))


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
