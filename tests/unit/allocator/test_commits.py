"""Changes are written in groups: alone at once, together where several callers are at work; virtual time throughout."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from gpuscale.allocator.changes import Changes
from gpuscale.allocator.commits import BREATH, ENOUGH, MAX_GROUP, PAUSE, WINDOW, Commits
from gpuscale.allocator.ledger import Ledger
from gpuscale.allocator.model import Reservation
from gpuscale.allocator.outcome import Outcome
from gpuscale.common.errors import UnavailableError
from gpuscale.common.lifecycle import TaskScope
from tests.support.allocator_values import WALL, order, reserved

pytestmark = pytest.mark.looptime

FSYNC = 0.001


class CountingDisk:
    """A store that takes as long as an fsync and notes when it was written and how much."""

    def __init__(self) -> None:
        self.groups: list[tuple[float, int]] = []

    async def save(self, added: Sequence[Reservation], changed: Sequence[Reservation]) -> None:
        self.groups.append((asyncio.get_running_loop().time(), len(added) + len(changed)))
        await asyncio.sleep(FSYNC)

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.groups]


class Desk:
    """Commits on a disk of its own, and callers who reserve one GPU each."""

    def __init__(self) -> None:
        self.disk = CountingDisk()
        self.ledger = Ledger()
        self.commits = Commits(self.ledger, self.disk, Changes())  # pyright: ignore[reportArgumentType]
        self._number = 0

    def grant(self) -> Outcome:
        self._number += 1
        name = f"request-{self._number}"
        gpus = [reserved(f"gpu-{self._number}")]
        granted = self.ledger.grant(order(name), gpus, suffix="s", now=0.0, wall=WALL)
        return self.commits.grant([granted])


@asynccontextmanager
async def desk() -> AsyncGenerator[Desk]:
    of = Desk()
    async with TaskScope() as tasks:
        tasks.spawn("write changes", of.commits.run())
        yield of


async def test_a_change_that_comes_alone_is_written_at_once() -> None:
    async with desk() as of:
        for _ in range(3):
            began = asyncio.get_running_loop().time()
            assert await of.grant() is None
            assert asyncio.get_running_loop().time() - began == pytest.approx(FSYNC)
            await asyncio.sleep(1.0)
    assert of.disk.sizes == [1, 1, 1]


async def test_callers_who_come_one_after_the_other_are_written_together() -> None:
    """Each comes while the loop is at work for another: without a moment of patience each would be a group of its own."""
    async with desk() as of:

        async def caller(place: int) -> None:
            await asyncio.sleep(place * BREATH / 2)
            for _ in range(5):
                assert await of.grant() is None
                await asyncio.sleep(BREATH * (1 + place % 3) / 4)

        await asyncio.gather(*(caller(place) for place in range(64)))
    assert sum(of.disk.sizes) == 64 * 5
    assert sum(of.disk.sizes) / len(of.disk.sizes) >= ENOUGH


async def test_a_group_that_nobody_joins_is_written_after_a_pause() -> None:
    async with desk() as of:
        await asyncio.gather(*(of.grant() for _ in range(ENOUGH - 1)))
        began = asyncio.get_running_loop().time()
        assert await of.grant() is None
        assert asyncio.get_running_loop().time() - began == pytest.approx(PAUSE + FSYNC)


async def test_no_group_stays_open_longer_than_its_window_nor_grows_beyond_its_most() -> None:
    async with desk() as of:
        first = [of.grant(), of.grant()]
        for _ in range(ENOUGH - 3):
            await asyncio.sleep(PAUSE * 0.9)
            of.grant()
        assert (await first[0], await first[1]) == (None, None)
        assert of.disk.groups[0][0] <= WINDOW + PAUSE
        many = [of.grant() for _ in range(MAX_GROUP + 10)]
        for one in many:
            assert await one is None
    assert max(of.disk.sizes) == MAX_GROUP


async def test_a_caller_who_gives_up_takes_nothing_away_from_one_who_waits_for_the_same() -> None:
    async with desk() as of:
        granted = of.grant()

        async def wait() -> UnavailableError | None:
            return await granted

        gone, stays = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays is None
        assert gone.cancelled()
        assert await granted is None  # known by now
