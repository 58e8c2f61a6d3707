"""When leases are ended: within half a second of their deadline, but never before renewals that waited in a stall.

On virtual time, with a store that keeps nothing.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime

import pytest

from gpuscale.allocator.domain.ledger import RETENTION, Ledger
from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.state.commits import Changes, Commits
from gpuscale.allocator.usecases.endings import BATCH, LATE, START_DELAY, TICK, Sweeper
from gpuscale.common.errors import NotFoundError, UnavailableError
from gpuscale.common.runtime.tasks import TaskScope
from tests.support.allocator_values import WALL, order, reserved

pytestmark = pytest.mark.looptime

WITHIN = 0.5
"""Seconds after its deadline by which a lease has ended: promised, and not what the sweeper happens to do."""


class LoopClock:
    """Boot time that passes with the loop's virtual time; `stall` lets it pass while the loop stands still."""

    boot_id = "boot"

    def __init__(self) -> None:
        self.stalled = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.stalled

    def wall(self) -> datetime:
        return WALL


class NoStore:
    """A store that is done at once, or fails while `broken`."""

    short = False

    def __init__(self) -> None:
        self.broken = False
        self.changes: list[int] = []
        self.forgotten: list[int] = []

    async def save(self, added: list[Reservation], changed: list[Reservation]) -> None:
        assert not added
        await self._write()
        self.changes.append(len(changed))

    async def forget(self, ended: list[Reservation], fence: int) -> None:
        await self._write()
        self.forgotten.append(len(ended))

    async def _write(self) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise UnavailableError("the disk is full", reason="DISK_FULL")


class Room:
    """A ledger that is being swept."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.ledger = Ledger()
        self.store = NoStore()

    def lease(self, ttl: float, uuid: str = "GPU-a") -> Reservation:
        granted = self.ledger.grant(order(ttl=ttl), [reserved(uuid)], now=self.clock.now(), wall=WALL)
        return self.ledger.confirm(granted)

    def state(self, one: Reservation) -> State:
        return self.ledger.get(one.id).state


@asynccontextmanager
async def swept() -> AsyncGenerator[Room]:
    """A sweeper that is past its start delay."""
    room = Room()
    async with TaskScope() as tasks:
        commits = Commits(room.ledger, room.store, Changes())
        tasks.spawn("write changes", commits.run())
        tasks.spawn("sweep", Sweeper(room.ledger, room.store, commits, room.clock).run())
        await asyncio.sleep(START_DELAY)
        yield room


async def test_a_lease_ends_at_its_deadline_and_not_before() -> None:
    async with swept() as room:
        lease = room.lease(10)
        await asyncio.sleep(9.9)
        assert room.state(lease) is State.ACTIVE
        await asyncio.sleep(0.1 + WITHIN)
        assert room.state(lease) is State.EXPIRED
        assert not room.ledger.use


async def test_a_renewal_that_shortens_a_lease_is_kept_to_the_second() -> None:
    """The sweeper sleeps towards a later deadline when the nearer one comes up."""
    async with swept() as room:
        lease = room.lease(100)
        await asyncio.sleep(10)
        room.ledger.renew(lease.id, lease.fence, 5.0, room.clock.now())
        await asyncio.sleep(5 + WITHIN)
        assert room.state(lease) is State.EXPIRED


async def test_nothing_ends_in_the_first_seconds_after_the_start() -> None:
    room = Room()
    lease = room.lease(0.5)
    async with TaskScope() as tasks:
        commits = Commits(room.ledger, room.store, Changes())
        tasks.spawn("write changes", commits.run())
        tasks.spawn("sweep", Sweeper(room.ledger, room.store, commits, room.clock).run())
        await asyncio.sleep(START_DELAY - 0.1)
        assert room.state(lease) is State.ACTIVE
        await asyncio.sleep(0.1 + TICK)
        assert room.state(lease) is State.EXPIRED


async def test_after_a_stall_renewals_that_waited_go_first() -> None:
    """The process stood still past the deadline; the renewal is read right after, within the round that is skipped."""
    async with swept() as room:
        lease = room.lease(10)
        given_up = room.lease(10, "GPU-b")
        await asyncio.sleep(5.1)
        room.clock.stalled += 20
        await asyncio.sleep(TICK)
        room.ledger.renew(lease.id, lease.fence, None, room.clock.now())
        await asyncio.sleep(3 * TICK)
        assert room.state(lease) is State.ACTIVE
        assert room.state(given_up) is State.EXPIRED


async def test_a_process_that_is_always_late_still_ends_leases() -> None:
    async with swept() as room:
        lease = room.lease(5)
        for _ in range(40):
            room.clock.stalled += 2 * LATE
            await asyncio.sleep(TICK)
        assert room.state(lease) is State.EXPIRED


async def test_more_than_a_batch_ends_at_once_in_bounded_writes() -> None:
    async with swept() as room:
        leases = [room.lease(5, f"GPU-{index}") for index in range(2 * BATCH + 1)]
        await asyncio.sleep(5 + WITHIN)
        assert {room.state(lease) for lease in leases} == {State.EXPIRED}
        assert room.store.changes == [BATCH, BATCH, 1]


async def test_an_end_that_cannot_be_written_is_tried_again() -> None:
    async with swept() as room:
        lease = room.lease(5)
        room.store.broken = True
        await asyncio.sleep(20)
        assert room.state(lease) is State.ACTIVE
        assert room.ledger.use
        room.store.broken = False
        await asyncio.sleep(2 * TICK)
        assert room.state(lease) is State.EXPIRED


async def test_records_are_forgotten_when_their_time_is_over_even_over_a_broken_disk() -> None:
    async with swept() as room:
        lease = room.lease(5)
        await asyncio.sleep(5 + TICK)
        room.clock.stalled += RETENTION - 10
        await asyncio.sleep(5)
        assert room.state(lease) is State.EXPIRED
        room.store.broken = True
        await asyncio.sleep(5)
        assert room.state(lease) is State.EXPIRED
        room.store.broken = False
        await asyncio.sleep(2 * TICK)
        with pytest.raises(NotFoundError):
            room.ledger.get(lease.id)
        assert room.store.forgotten == [1]
