"""When leases are ended: within half a second of their deadline, but never before renewals that waited in a stall.

On virtual time, with a store that keeps nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpuscale.allocator.domain.ledger import RETENTION, Ledger
from gpuscale.allocator.domain.model import Node, NodeState, Reservation, State
from gpuscale.allocator.state.commits import Changes, Commits
from gpuscale.allocator.usecases.endings import BATCH, LATE, START_DELAY, TICK, Losses, Sweeper
from gpuscale.common.errors import NotFoundError
from gpuscale.common.runtime.tasks import TaskScope
from tests.support.allocator_values import NOW, WALL, gpu, node, order, reserved
from tests.support.clock import LoopClock
from tests.unit.allocator.queue_site import NoDisk

pytestmark = pytest.mark.looptime

WITHIN = 0.5
"""Seconds after its deadline by which a lease has ended: promised, and not what the sweeper happens to do."""


class Room:
    """A ledger that is being swept."""

    def __init__(self) -> None:
        self.clock = LoopClock()
        self.ledger = Ledger()
        self.store = NoDisk()

    def lease(self, ttl: float, uuid: str = "GPU-a") -> Reservation:
        granted = self.ledger.grant(order(ttl=ttl), [reserved(uuid)], now=self.clock.now(), wall=WALL)
        return self.ledger.confirm(granted)

    def state(self, one: Reservation) -> State:
        return self.ledger.get(one.id).state


@asynccontextmanager
async def swept(after: float = START_DELAY) -> AsyncGenerator[Room]:
    """A sweeper that is past its start delay."""
    room = Room()
    async with TaskScope() as tasks:
        commits = Commits(room.ledger, room.store, Changes())
        tasks.spawn("write changes", commits.run())
        tasks.spawn("sweep", Sweeper(room.ledger, room.store, commits, room.clock).run())
        await asyncio.sleep(after)
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
    async with swept(after=0) as room:
        lease = room.lease(0.5)
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


AFTER = 10.0
BOTH = node("n0", gpu("GPU-a"), gpu("GPU-b", index=1))
ONE = node("n0", gpu("GPU-a"))


class Vanishing:
    """Losses at the moments that a test says."""

    def __init__(self, ledger: Ledger) -> None:
        self.now = NOW
        self.losses = Losses(ledger, None, SimpleNamespace(now=lambda: self.now), AFTER)

    def observe(self, node: Node, now: float) -> None:
        self.now = now
        self.losses.seen([node])

    def lost(self, now: float) -> Mapping[str, set[str]]:
        self.now = now
        return self.losses.lost()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def held(ledger: Ledger) -> Reservation:
    gpus = [reserved("GPU-a"), reserved("GPU-b", index=1)]
    return ledger.confirm(ledger.grant(order(), gpus, now=NOW, wall=WALL))


def test_a_gpu_that_stays_away_is_lost(ledger: Ledger, held: Reservation) -> None:
    vanishing = Vanishing(ledger)
    vanishing.observe(BOTH, NOW)
    vanishing.observe(ONE, NOW + 1)
    vanishing.observe(ONE, NOW + 5)
    assert vanishing.lost(NOW + 10.9) == {}
    assert vanishing.lost(NOW + 11) == {held.id: {"GPU-b"}}


def test_a_gpu_that_fell_off_its_bus_is_lost_although_it_is_named(ledger: Ledger, held: Reservation) -> None:
    vanishing = Vanishing(ledger)
    vanishing.observe(node("n0", gpu("GPU-a"), gpu("GPU-b", index=1, trouble="LOST")), NOW)
    assert vanishing.lost(NOW + 10) == {held.id: {"GPU-b"}}


def test_a_gpu_that_was_split_into_instances_is_lost_as_a_whole(ledger: Ledger, held: Reservation) -> None:
    """Its instances are given to others once the lease has ended."""
    vanishing = Vanishing(ledger)
    split = node("n0", gpu("GPU-a"), gpu("GPU-b", index=1), replace(gpu("MIG-b", index=2), parent="GPU-b"))
    vanishing.observe(split, NOW)
    assert vanishing.lost(NOW + 10) == {held.id: {"GPU-b"}}


@pytest.mark.parametrize(
    "other",
    [
        BOTH,
        replace(ONE, state=NodeState.STALE),
        replace(ONE, state=NodeState.OFFLINE),
        replace(ONE, gpus=(), gpu_problem="NVML: driver not loaded"),
        replace(ONE, reported=False),
        node("n0", gpu("GPU-a"), gpu("GPU-b", index=1, trouble="HUNG")),
    ],
)
def test_a_gpu_that_came_back_or_cannot_be_seen_is_not(
    ledger: Ledger, held: Reservation, other: Node
) -> None:
    vanishing = Vanishing(ledger)
    vanishing.observe(ONE, NOW)
    vanishing.observe(other, NOW + 9)
    assert vanishing.lost(NOW + 100) == {}
    vanishing.observe(ONE, NOW + 20)
    assert vanishing.lost(NOW + 29) == {}, "its time begins anew"
    assert vanishing.lost(NOW + 30) == {held.id: {"GPU-b"}}


def test_a_gpu_that_nobody_holds_any_more_is_nobodys_loss(ledger: Ledger, held: Reservation) -> None:
    vanishing = Vanishing(ledger)
    vanishing.observe(ONE, NOW)
    ledger.settle(ledger.close(held, State.RELEASED, now=NOW, wall=WALL))
    assert vanishing.lost(NOW + 10) == {}


def test_a_node_that_is_gone_for_good_has_lost_all_its_gpus(ledger: Ledger, held: Reservation) -> None:
    vanishing = Vanishing(ledger)
    gone = replace(BOTH, state=NodeState.OFFLINE, gpus=(), forgotten=True)
    vanishing.observe(gone, NOW)
    assert vanishing.lost(NOW + 9.9) == {}
    assert vanishing.lost(NOW + 10) == {held.id: {"GPU-a", "GPU-b"}}
    vanishing.observe(BOTH, NOW + 11)
    assert vanishing.lost(NOW + 30) == {}, "it reports again"
