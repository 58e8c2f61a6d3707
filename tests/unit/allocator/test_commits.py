"""Changes are written in groups: alone at once, together where several callers are at work; virtual time throughout."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

import pytest

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.state import commits
from gpuscale.common.errors import AbortedError, FailedPreconditionError, GpuscaleError, UnavailableError
from gpuscale.common.runtime import tasks
from tests.support.allocator_values import WALL, order, reserved
from tests.unit.allocator.queue_site import Disk

pytestmark = pytest.mark.looptime

FSYNC = 0.001
WORK = 0.00025
TURNS = 10


class CountingDisk(Disk):
    """A store that takes as long as an fsync and notes when it was written and how much; `errors` are of the first writes."""

    def __init__(self) -> None:
        self.groups: list[tuple[float, int]] = []
        self.begun = 0
        self.errors: list[Exception] = []

    async def save(self, added: Sequence[Reservation], changed: Sequence[Reservation], *_: object) -> None:
        self.groups.append((asyncio.get_running_loop().time(), len(added) + len(changed)))
        await asyncio.sleep(FSYNC)
        if self.errors:
            raise self.errors.pop(0)

    def begin(self, *what: Any) -> None:
        self.begun += 1
        super().begin(*what)

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.groups]


class Desk:
    """Commits on a disk of its own, and callers who reserve one GPU each."""

    def __init__(self, *letters: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self.disk = CountingDisk()
        self.ledger = Ledger()
        self.changes = commits.Changes()
        self.commits = commits.Commits(self.ledger, self.disk, self.changes, *letters)  # pyright: ignore[reportArgumentType]
        self._number = 0

    def grant(self, count: int = 1) -> commits.Outcome:
        return self.commits.grant([self._granted() for _ in range(count)])

    def _granted(self) -> Reservation:
        self._number += 1
        gpus = [reserved(f"gpu-{self._number}")]
        return self.ledger.grant(order(f"request-{self._number}"), gpus, now=0.0, wall=WALL)


@asynccontextmanager
async def desk() -> AsyncGenerator[Desk]:
    of = Desk()
    async with tasks.TaskScope() as scope:
        scope.spawn("write changes", of.commits.run())
        yield of


async def test_a_change_that_comes_alone_is_written_at_once() -> None:
    async with desk() as of:
        for _ in range(3):
            began = asyncio.get_running_loop().time()
            assert await of.grant() is None
            assert asyncio.get_running_loop().time() - began == pytest.approx(FSYNC)
            await asyncio.sleep(1.0)
    assert of.disk.sizes == [1, 1, 1]


async def test_a_change_that_comes_alone_is_begun_in_its_own_turn_of_the_loop_and_others_wait_for_it() -> (
    None
):
    async with desk() as of:
        await asyncio.sleep(0)
        first = of.grant()
        assert of.disk.begun == 1
        others = [of.grant(), of.grant(2)]
        assert [await one for one in (first, *others)] == [None] * 3
        assert (of.disk.begun, of.disk.sizes) == (1, [1, 3])


@pytest.mark.parametrize(("point", "begun"), [("store", 1), ("end", 1), ("reserve", 0)])
async def test_a_failpoint_of_another_step_does_not_change_how_a_change_is_written(
    monkeypatch: pytest.MonkeyPatch, point: str, begun: int
) -> None:
    points = tasks.parse_failpoints(f"allocator.{point}.before_commit=sleep:1")
    monkeypatch.setattr(tasks, "_points", points)
    async with desk() as of:
        await asyncio.sleep(0)
        assert await of.grant() is None
        assert of.disk.begun == begun


@pytest.mark.parametrize("refusal", [AbortedError, FailedPreconditionError])
async def test_a_change_that_the_state_refuses_is_undone_before_those_that_came_meanwhile_are_written(
    refusal: type[GpuscaleError],
) -> None:
    async with desk() as of:
        await asyncio.sleep(0)
        of.disk.errors.append(refusal("refused", reason="WHY"))
        first, second = of.grant(), of.grant(2)
        assert getattr(await first, "reason", None) == "WHY"
        assert await second is None
        assert [one.request_id for one in of.ledger.reservations(ended=False)] == ["request-2", "request-3"]
        assert await of.grant() is None
        assert of.disk.sizes == [1, 2, 1]


async def test_a_change_that_cannot_be_written_is_undone_at_once() -> None:
    async with desk() as of:
        await asyncio.sleep(0)
        of.disk.errors.append(error := UnavailableError("no disk", reason="STATE_UNAVAILABLE"))
        assert await of.grant() is error
        assert not of.ledger.live
        assert of.disk.sizes == [1]


async def test_nothing_follows_on_a_change_that_is_written_after_the_stop() -> None:
    told: list[object] = []
    async with desk() as of:
        await asyncio.sleep(0)
        of.changes.on_change(lambda one, _: told.append(one))
        of.grant().on_settled(told.append)
    await asyncio.sleep(1)
    assert (of.disk.sizes, told) == ([1], [])


def fail(*_: object) -> NoReturn:
    raise KeyError("a bug")


@pytest.mark.parametrize("asked", ["letters", "told"])
async def test_an_error_of_who_is_asked_or_told_of_a_change_ends_the_task(asked: str) -> None:
    of = Desk(fail if asked == "letters" else lambda _: ())
    if asked == "told":
        of.changes.on_change(fail)
    writing = asyncio.create_task(of.commits.run())
    await asyncio.sleep(0)
    with suppress(KeyError):
        of.commits.end([of._granted()])
    with pytest.raises(KeyError, match="a bug"):
        async with asyncio.timeout(1):
            await writing


@pytest.mark.parametrize("callers", [4, 16, 64])
async def test_callers_who_come_one_after_the_other_are_written_together(callers: int) -> None:
    """One loop is at work for all of them: a request takes WORK of it, so that no two of them come at once."""
    async with desk() as of:
        loop_is_free = asyncio.Lock()

        async def caller() -> None:
            for _ in range(TURNS):
                async with loop_is_free:
                    await asyncio.sleep(WORK)
                    outcome = of.grant()
                assert await outcome is None

        await asyncio.gather(*(caller() for _ in range(callers)))
    sizes = of.disk.sizes
    assert sum(sizes) == callers * TURNS
    assert sum(size * size for size in sizes) / sum(sizes) >= min(callers, commits.ENOUGH) * 0.7


async def test_a_batch_counts_as_many_as_it_holds() -> None:
    """A change of many reservations is worth a write of its own: nobody is waited for."""
    async with desk() as of:
        await asyncio.gather(*(of.grant() for _ in range(commits.ENOUGH)))
        began = asyncio.get_running_loop().time()
        assert await of.grant(commits.ENOUGH) is None
        assert asyncio.get_running_loop().time() - began == pytest.approx(FSYNC)


async def test_callers_who_come_seldom_wait_no_longer_than_some_writes() -> None:
    """Their requests do not depend on answers: one comes each 0.9 writes, so that there is always another to wait for."""
    async with desk() as of:
        took: list[float] = []

        async def caller(place: int) -> None:
            await asyncio.sleep(place * FSYNC * 0.9)
            began = asyncio.get_running_loop().time()
            assert await of.grant() is None
            took.append(asyncio.get_running_loop().time() - began)

        await asyncio.gather(*(caller(place) for place in range(150)))
    assert max(took) <= FSYNC * (commits.WRITES + 3)


async def test_a_group_of_fewer_than_came_before_is_written_after_a_pause() -> None:
    async with desk() as of:
        await asyncio.gather(*(of.grant() for _ in range(commits.ENOUGH)))
        began = asyncio.get_running_loop().time()
        assert await of.grant() is None
        assert asyncio.get_running_loop().time() - began == pytest.approx(2 * FSYNC)


async def test_no_group_stays_open_longer_than_its_window_nor_grows_beyond_its_most() -> None:
    async with desk() as of:
        await asyncio.gather(*(of.grant() for _ in range(commits.ENOUGH)))
        began = asyncio.get_running_loop().time()
        first = of.grant()
        for _ in range(commits.ENOUGH - 2):
            await asyncio.sleep(FSYNC * 0.9)
            of.grant()
        assert await first is None
        assert of.disk.groups[1][0] - began <= min(commits.WRITES * FSYNC, commits.WINDOW) + FSYNC
        many = [of.grant() for _ in range(commits.MAX_GROUP + 10)]
        for one in many:
            assert await one is None
    assert max(of.disk.sizes) == commits.MAX_GROUP


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


WRITE = 0.001


def learnt(*groups: tuple[int, int], seconds: float = WRITE) -> commits.GroupWindow:
    """What groups (changes, and changes that came while they were written) have taught."""
    window = commits.GroupWindow()
    for group, came in groups:
        window.wrote(group, came, seconds)
    return window


def test_whoever_comes_while_a_group_is_written_is_waited_for_with_the_next() -> None:
    window = learnt((2, 3))
    assert window.expected == 5
    assert window.pause(4, 0.0) == pytest.approx(WRITE)
    assert window.pause(5, 0.0) == 0.0


def test_a_crowd_is_found_however_few_of_it_are_seen_at_a_time() -> None:
    window = commits.GroupWindow()
    for _ in range(16):
        window.wrote(window.expected, 2, WRITE)
    assert window.expected == commits.ENOUGH


def test_a_crowd_that_left_is_soon_not_waited_for() -> None:
    window = learnt((20, 12), *[(1, 0)] * 12)
    assert window.expected == 1


def test_a_slow_disk_is_worth_a_longer_wait_within_bounds() -> None:
    window = learnt(*[(8, 8)] * 60, seconds=0.004)
    assert window.pause(2, 0.0) == pytest.approx(0.004, rel=0.01)
    assert window.pause(2, commits.WRITES * 0.004) == 0.0
    hung = learnt(*[(8, 8)] * 30, (8, 8), seconds=WRITE)
    hung.wrote(8, 8, 1.0)
    hung.wrote(8, 8, WRITE)
    hung.wrote(8, 8, WRITE)
    assert hung.pause(2, 0.0) < 0.03, "one write that hung is soon forgotten"
    slow = learnt(*[(8, 8)] * 60, seconds=1.0)
    assert slow.pause(2, 0.0) == pytest.approx(commits.WINDOW)
    assert slow.pause(2, commits.WINDOW) == 0.0


async def test_followers_are_told_whether_more_than_the_deadline_changed() -> None:
    async with desk() as of:
        told: list[tuple[float | None, float, bool]] = []
        of.changes.on_change(lambda one, wakes: told.append((one.revoke_at, one.ttl, wakes)))
        await of.commits.grant([of._granted()])
        [granted] = of.ledger.reservations(ended=False)
        renewed = of.ledger.renew(granted.id, granted.fence, None, now=50.0)
        await of.commits.change([granted], [renewed])
        revoked = of.ledger.revoke(granted.id, 500.0, "a drain")
        await of.commits.change([renewed], [revoked])
        longer = of.ledger.renew(granted.id, granted.fence, 900.0, now=70.0)
        await of.commits.change([revoked], [longer])
        ttl = granted.ttl
        assert told == [(None, ttl, True), (None, ttl, False), (500.0, ttl, True), (500.0, 900.0, True)]
