"""The disk: an answer leaves only when the change is on it, and a write that fails leaves everything as it was."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.state.store import open_store
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime import tasks
from gpuscale.common.wire import seconds
from tests.support.allocator import Client, Reservation, running
from tests.support.allocator_values import NOW, WALL, order, reserved
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.waiting import eventually

BEFORE_COMMIT = "allocator.store.before_commit"
SetPoints = Callable[[str], None]


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> SetPoints:
    """Set the failpoints of this process, as the environment variable would."""

    def set_points(text: str) -> None:
        monkeypatch.setattr(tasks, "_points", tasks.parse_failpoints(text))

    return set_points


async def test_a_grant_that_cannot_be_written_is_no_grant(tmp_path: Path, points: SetPoints) -> None:
    request_id = str(uuid4())
    async with running(tmp_path, FakeFleet(node_message("n0", count=1))) as client:
        points(f"{BEFORE_COMMIT}=error")
        with pytest.raises(UnavailableError) as caught:
            await client.reserve(request_id=request_id)
        assert caught.value.reason == "FAILPOINT"
        assert (await client.page(show_ended=True)).reservations == []
        points("")
        granted = await client.reserve(request_id=request_id)
        assert [gpu.uuid for gpu in granted.gpus] == ["n0-0"]


async def test_an_answer_waits_for_the_disk_and_nobody_sees_the_grant_before(
    tmp_path: Path, points: SetPoints
) -> None:
    async with running(tmp_path, FakeFleet(node_message("n0", count=1))) as client:
        points(f"{BEFORE_COMMIT}=sleep:0.5")
        started = asyncio.get_running_loop().time()
        asking = asyncio.create_task(client.reserve())
        await eventually(lambda: _is_held(client))
        assert await client.live() == []
        granted = await asking
        assert asyncio.get_running_loop().time() - started >= 0.5
        points("")
        assert [one.name for one in await client.live()] == [granted.name]


async def test_a_repetition_waits_for_the_first_call_and_gets_its_grant(
    tmp_path: Path, points: SetPoints
) -> None:
    request_id = str(uuid4())
    async with running(tmp_path, FakeFleet(node_message("n0", count=4))) as client:
        points(f"{BEFORE_COMMIT}=sleep:0.3")
        answers = await asyncio.gather(*(client.reserve(request_id=request_id) for _ in range(5)))
        points("")
        assert len({one.name for one in answers}) == 1
        assert len(await client.live()) == 1


async def test_a_caller_who_gives_up_does_not_undo_the_grant(tmp_path: Path, points: SetPoints) -> None:
    request_id = str(uuid4())
    async with running(tmp_path, FakeFleet(node_message("n0", count=4))) as client:
        points(f"{BEFORE_COMMIT}=sleep:0.5")
        asking = asyncio.create_task(client.reserve(request_id=request_id))
        await eventually(lambda: _is_held(client))
        asking.cancel()
        points("")
        granted = await client.reserve(request_id=request_id)
        assert granted.state == Reservation.STATE_ACTIVE
        assert [one.name for one in await client.live()] == [granted.name]


async def test_renewal_and_release_that_cannot_be_written_change_nothing(
    tmp_path: Path, points: SetPoints
) -> None:
    clock = ManualClock()
    async with running(tmp_path, FakeFleet(node_message("n0", count=1)), clock=clock) as client:
        granted = await client.reserve(ttl=60)
        clock.advance(20)
        points(f"{BEFORE_COMMIT}=error")
        for call in (client.renew, client.release):
            with pytest.raises(UnavailableError):
                await call(granted)
        points("")
        found = await client.get(granted.name)
        assert (found.state, seconds(found.remaining)) == (Reservation.STATE_ACTIVE, 40)
        assert (await client.release(granted)).state == Reservation.STATE_RELEASED


async def test_several_releases_at_once_over_a_failing_disk_free_the_gpu_once(
    tmp_path: Path, points: SetPoints
) -> None:
    """One of them fails, the next one writes, the third finds it done; the GPU is then another's for good."""
    async with running(tmp_path, FakeFleet(node_message("n0", count=1))) as client:
        granted = await client.reserve()
        points("allocator.end.before_commit=error")
        answers = await asyncio.gather(*(client.release(granted) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(answer, UnavailableError) for answer in answers)
        points("")
        answers = await asyncio.gather(*(client.release(granted) for _ in range(3)))
        assert {answer.state for answer in answers} == {Reservation.STATE_RELEASED}
        again = await client.reserve()
        await client.release(granted)
        assert [one.name for one in await client.live()] == [again.name]


async def test_a_lease_whose_end_cannot_be_written_stays_held_and_ends_later(
    tmp_path: Path, points: SetPoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tries, hit = ManualClock(), list[str](), tasks.hit_async

    async def noted(name: str) -> None:
        tries.append(name)
        await hit(name)

    monkeypatch.setattr(tasks, "hit_async", noted)
    async with running(tmp_path, FakeFleet(node_message("n0", count=1)), clock=clock) as client:
        granted = await client.reserve(ttl=60)
        points("allocator.end.before_commit=error")
        clock.advance(60)
        await eventually(lambda: tries.count("allocator.end.before_commit") >= 2)
        assert (await client.get(granted.name)).state == Reservation.STATE_ACTIVE
        assert await _is_held(client)
        points("")
        await eventually(lambda: _expired(client, granted))
        assert len((await client.reserve()).gpus) == 1


async def test_the_database_itself_refuses_a_second_grant_for_a_request(tmp_path: Path) -> None:
    wish = order("id")
    one, other = Ledger(), Ledger(fence=10)
    async with open_store(tmp_path / DATABASE, "boot") as store:
        first = one.confirm(one.grant(wish, [reserved("GPU-a")], now=NOW, wall=WALL))
        second = other.confirm(other.grant(wish, [reserved("GPU-b")], now=NOW, wall=WALL))
        await store.save([first], [])
        with pytest.raises(UnavailableError):
            await store.save([second], [])


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM hold",
        "UPDATE hold SET gpu_uuid = 'GPU-x'",
        "UPDATE hold SET milli = 1",
        "INSERT INTO hold SELECT 'GPU-x', id, 1000 FROM reservation WHERE state = 'active'",
        "UPDATE reservation SET state = 'released'",
        "DELETE FROM reservation",
        "DELETE FROM hold; DELETE FROM reservation WHERE state = 'active'",
        "DELETE FROM reservation WHERE state = 'released'",
        "DELETE FROM counter WHERE name = 'rows'",
    ],
)
async def test_holds_that_do_not_match_are_refused_and_the_file_is_kept(tmp_path: Path, damage: str) -> None:
    fleet = FakeFleet(node_message("n0", count=1))
    async with running(tmp_path, fleet) as client:
        await client.release(await client.reserve())
        await client.reserve()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection, connection:
        connection.executescript(damage)
    before = left(tmp_path)
    with pytest.raises(FailedPreconditionError) as caught:
        async with running(tmp_path, fleet):
            pass
    assert caught.value.reason == "STATE_INCONSISTENT"
    assert left(tmp_path) == before


def left(data_dir: Path) -> dict[str, bytes]:
    """The files of the state, the witness among them; a look makes an empty log where there is none."""
    return {
        file.name: file.read_bytes()
        for file in data_dir.iterdir()
        if file.stat().st_size and not file.name.endswith("-shm")
    }


async def _is_held(client: Client) -> bool:
    """Whether a GPU is held, asked by a request that no GPU here is large enough for."""
    with pytest.raises(FailedPreconditionError) as caught:
        await client.reserve(memory=1_000_000)
    return "held" in caught.value.metadata


async def _expired(client: Client, one: Reservation) -> bool:
    return (await client.get(one.name)).state == Reservation.STATE_EXPIRED
