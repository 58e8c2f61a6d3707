"""The disk: an answer leaves only when the change is on it, and a write that fails leaves everything as it was."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from google.protobuf.message import Message

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.jobs import JobMember, ReservedJob
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import State
from gpuscale.allocator.state.store import AllocatorStore, open_store
from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.common.runtime import tasks
from gpuscale.common.secrets import DatabaseUnavailableError
from gpuscale.common.security.auth import CALLER_KEY
from gpuscale.common.store.store import Store
from gpuscale.common.wire import seconds, to_duration
from tests.support.allocator import Client, Reservation, allocator_client, running
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


async def test_what_cannot_be_written_is_as_if_it_had_never_been_asked_for(
    tmp_path: Path, points: SetPoints
) -> None:
    clock, request_id = ManualClock(), str(uuid4())
    async with running(tmp_path, FakeFleet(node_message("n0", count=2)), clock=clock) as client:
        held = await client.reserve(ttl=60)
        clock.advance(20)
        points(f"{BEFORE_COMMIT}=error")
        with pytest.raises(UnavailableError) as caught:
            await client.reserve(request_id=request_id)
        assert caught.value.reason == "FAILPOINT"
        for call in (client.renew, client.release):
            with pytest.raises(UnavailableError):
                await call(held)
        points("")
        [found] = (await client.page(show_ended=True)).reservations
        assert (found.state, seconds(found.remaining)) == (Reservation.STATE_ACTIVE, 40)
        assert len((await client.reserve(request_id=request_id)).gpus) == 1
        assert (await client.release(held)).state == Reservation.STATE_RELEASED


async def test_where_the_disk_is_full_grants_stop_ends_go_on_and_the_next_start_misses_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a disk without a byte takes is for tests/fault/common/test_full_disk.py."""
    fleet = FakeFleet(node_message("n0", count=2))
    async with running(tmp_path, fleet) as client:
        held = await client.reserve()
        with monkeypatch.context() as full:
            full.setattr(AllocatorStore, "short", True)
            assert (await client.release(held)).state == Reservation.STATE_RELEASED
            with pytest.raises(UnavailableError, match="the disk of the state is full") as caught:
                await client.reserve()
            assert caught.value.reason == "DISK_FULL"
    async with running(tmp_path, fleet) as client:
        assert len((await client.reserve(2)).gpus) == 2


@pytest.mark.parametrize(("role", "why"), [("operator", ""), ("admin", ": the disk is full")])
async def test_an_answer_tells_that_nothing_can_be_written_or_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, why: str
) -> None:
    """And why, to admins: it may have the address of the database."""
    monkeypatch.setattr(Store, "problem", problems := dict[str, str]())
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=1))) as client:

        async def told() -> object:
            request = api.ListReservationsRequest()
            call = client.allocator.ListReservations(
                request, metadata=((CALLER_KEY, f"{role}/ann"),), timeout=30
            )
            await call
            return dict(await call.trailing_metadata()).get(PROBLEM_KEY)

        async def told_of_a_full_disk() -> bool:
            problems["allocator"] = "the disk is full"  # a commit in between takes it away
            return await told() == f"the allocator cannot write its state{why}"

        assert await told() is None
        await eventually(told_of_a_full_disk)
        problems |= {"allocator": "", "autoscaler": "of another service of this process"}
        monkeypatch.setattr(Store, "slow", {"allocator": (time.monotonic() - 61.0, 3.4)})
        assert await told() is None
        monkeypatch.setattr("gpuscale.common.store.store.SLOW", 0.0)
        await client.reserve()
        assert str(await told()).startswith("a commit of the allocator's state took ")


async def test_cordons_quotas_and_bookings_that_cannot_be_written_change_nothing(
    tmp_path: Path, points: SetPoints
) -> None:
    clock = ManualClock()
    fleet = FakeFleet(*(node_message(name, count=1) for name in ("n0", "n1")))
    booking = api.Booking(ask=api.Ask(gpu_count=1), duration=to_duration(3600))
    booking.start_time.FromDatetime(clock.wall() + timedelta(days=2))
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        nodes, quotas, bookings = client.nodes, client.quotas, client.bookings

        async def seen() -> list[Message]:
            return [
                await client.allocator.ListReservations(api.ListReservationsRequest()),
                await nodes.ListCordons(api.ListCordonsRequest()),
                await quotas.ListQuotas(api.ListQuotasRequest()),
                await bookings.ListBookings(api.ListBookingsRequest()),
            ]

        await client.reserve(1, "me", ttl=600, nodes=["nodes/n0"])
        await nodes.CordonNode(api.CordonNodeRequest(name="nodes/n1", reason="fan"))
        await quotas.SetQuota(api.SetQuotaRequest(quota=api.Quota(tenant="ann", weight=2)))
        before = await seen()
        points(f"{BEFORE_COMMIT}=error")
        for call, asked in (  # one after the other: a cordon keeps others away until its write has failed
            (nodes.CordonNode, api.CordonNodeRequest(name="nodes/n0")),
            (nodes.DrainNode, api.DrainNodeRequest(name="nodes/n0")),
            (nodes.UncordonNode, api.UncordonNodeRequest(name="nodes/n1")),
            (quotas.SetQuota, api.SetQuotaRequest(quota=api.Quota(tenant="ann", weight=3))),
            (quotas.DeleteQuota, api.DeleteQuotaRequest(tenant="ann")),
            (bookings.CreateBooking, api.CreateBookingRequest(booking=booking, request_id=str(uuid4()))),
        ):
            with pytest.raises(UnavailableError):
                await call(asked)
        points("")
        assert await seen() == before


async def test_an_answer_waits_for_the_disk_and_is_that_of_whoever_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile nobody sees the grant, which a caller who gives up does not undo."""
    request_id, on_disk = str(uuid4()), threading.Event()
    async with running(tmp_path, FakeFleet(node_message("n0", count=4))) as client:
        monkeypatch.setattr(tasks, "hit", lambda name: name == BEFORE_COMMIT and on_disk.wait(60))
        first, *others = [asyncio.create_task(client.reserve(request_id=request_id)) for _ in range(5)]
        await eventually(lambda: _is_held(client))
        assert await client.live() == []
        first.cancel()
        assert not any(one.done() for one in others)
        on_disk.set()
        answers = await asyncio.gather(*others)
        answers.append(await client.reserve(request_id=request_id))
        assert {one.state for one in answers} == {Reservation.STATE_ACTIVE}
        [granted] = await client.live()
        assert {one.name for one in answers} == {granted.name}


async def test_what_a_write_came_to_that_nobody_waited_for_is_told_as_by_one_that_is_waited_for(
    tmp_path: Path,
) -> None:
    database = DatabaseUnavailableError("the state at a host cannot be used", reason="STATE_UNAVAILABLE")
    busy, bug = ResourceExhaustedError("too much", reason="STORE_BUSY", retry_after=1.0), KeyError("a bug")
    async with open_store(tmp_path / DATABASE, "boot") as store:
        assert await store.why(database, []) is database, "not everybody may read where it is"
        told = await store.why(busy, [])
        assert (told.reason, told.retry_after) == ("STORE_BUSY", 1.0)
        with pytest.raises(KeyError):
            await store.why(bug, [])


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


async def test_the_database_itself_refuses_a_second_grant_for_a_request(tmp_path: Path) -> None:
    wish = order("id")
    one, other = Ledger(), Ledger(fence=10)
    async with open_store(tmp_path / DATABASE, "boot") as store:
        first = one.confirm(one.grant(wish, [reserved("GPU-a")], now=NOW, wall=WALL))
        second = other.confirm(other.grant(wish, [reserved("GPU-b")], now=NOW, wall=WALL))
        await store.save([first], [])
        with pytest.raises(UnavailableError):
            await store.save([second], [])


async def test_a_job_that_begins_and_leaves_in_one_write_holds_nothing(tmp_path: Path) -> None:
    """Its end frees only what it holds then."""
    ledger, job = Ledger(), ReservedJob("t", "train")
    async with open_store(tmp_path / DATABASE, "boot") as store:
        await store.load()
        placed = ledger.grant(replace(order(), keep=True, job=job), [], now=NOW, wall=WALL, wait=100)
        await store.save([ledger.confirm(placed)], [])
        begun = ledger.begin(placed.id, [reserved("GPU-a")], NOW, WALL, 0)
        left = ledger.leave(placed.id, JobMember(0, "nodes/n0", 7, WALL, WALL, 3, "failed", None), 100, NOW)
        await store.save([], [begun, left], [begun, left])
        closed = ledger.close(left, State.RELEASED, now=NOW, wall=WALL)
        await store.save([], [closed])
        ledger.settle(closed)
        await store.save([ledger.grant(order(), [reserved("GPU-a")], now=NOW, wall=WALL)], [])
        assert [one.state for one, _ in (await store.load()).reservations] == [State.RELEASED, State.ACTIVE]


async def _is_held(client: Client) -> bool:
    """Whether a GPU is held, asked by a request that no GPU here is large enough for."""
    with pytest.raises(FailedPreconditionError) as caught:
        await client.reserve(memory=1_000_000)
    return "held" in caught.value.metadata
