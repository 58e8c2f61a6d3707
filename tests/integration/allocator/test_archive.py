"""Reservations that ended: out of memory, on disk within bounds, found where somebody asks; and a disk that is full."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import timedelta
from itertools import count as count_from
from pathlib import Path
from uuid import uuid4

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy.exc import IntegrityError

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.ledger import RETENTION, Ledger
from gpuscale.allocator.domain.model import State
from gpuscale.allocator.state import archive
from gpuscale.allocator.state.archive import Archive, EndedStore, RecordFilter, Totals
from gpuscale.allocator.state.store import AllocatorStore, open_store
from gpuscale.allocator.usecases import leases
from gpuscale.api.allocator import v1 as api
from gpuscale.common import errors
from gpuscale.common.runtime import tasks
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.wire import to_timestamp
from tests.support.allocator import Client, Reservation, reserve_request, running
from tests.support.allocator_values import NOW, WALL, order, reserved
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.postgresql import PostgresServer
from tests.support.small_disk import fill, small_disk
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("lead_outlasts_stalls")

BOOT = "boot"


@pytest.fixture(autouse=True)
def retired(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Memory keeps two that ended, and the archive looks often; the fences of those that left memory."""
    monkeypatch.setattr(archive, "IN_MEMORY", 2)
    monkeypatch.setattr(archive, "PERIOD", 0.02)
    monkeypatch.setattr(archive, "DUE_PERIOD", 0.0)
    found: set[int] = set()
    retire = EndedStore.retire

    async def noted(self: EndedStore, fences: Collection[int], fence: int) -> Totals:
        totals = await retire(self, fences, fence)
        found.update(fences)
        return totals

    monkeypatch.setattr(EndedStore, "retire", noted)
    return found


@pytest.fixture(params=["file", "PostgreSQL"])
def database(request: pytest.FixtureRequest) -> SecretUrl | None:
    """Where the state is; None for a file."""
    if request.param == "file":
        return None
    server: PostgresServer = request.getfixturevalue("postgresql")
    return server.database()


async def spent(client: Client, count: int, holder: str = "test") -> list[Reservation]:
    """Reservations that were released, oldest first."""
    return [await client.release(await client.reserve(holder=holder)) for _ in range(count)]


async def batch(client: Client, *request_ids: str) -> list[str]:
    """The names of what is granted for them, a GPU each, in one call."""
    asked = [reserve_request(request_id=one) for one in request_ids]
    answer = await client.stub.BatchReserve(api.BatchReserveRequest(requests=asked), timeout=60)
    return [one.name for one in answer.reservations]


async def listed(client: Client, **fields: object) -> list[str]:
    """The names of all pages of two."""
    return [one.name for one in await client.listed(show_ended=True, page_size=2, **fields)]


async def test_what_left_memory_is_found_as_before(
    tmp_path: Path, retired: set[int], database: SecretUrl | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MAX_PAGE_SIZE", 2)  # that many are looked at for a page
    fleet, clock, request_id = FakeFleet(node_message("n0", count=2)), ManualClock(), str(uuid4())
    options = {"clock": clock, "database": database}
    async with running(tmp_path, fleet, **options) as client:
        first = await client.release(await client.reserve(request_id=request_id))
        others = await spent(client, 4) + await spent(client, 2, holder="other")
        live = await client.reserve()
        names = [one.name for one in (first, *others, live)]
        await eventually(lambda: len(retired) == 5)
        token = (await client.page(show_ended=True, page_size=2)).next_page_token
    async with running(tmp_path, fleet, **options) as client:
        assert await listed(client) == names
        page = await client.page(show_ended=True, page_size=2, page_token=token)
        assert [one.name for one in page.reservations] == names[2:4], "a page is one still"
        assert await listed(client, holder="other") == names[5:7]
        assert await listed(client, filter="holder:tes AND fence > 3") == [*names[3:5], live.name]
        assert await listed(client, order_by="fence desc") == names[::-1]
        assert [one.name for one in await client.live()] == [live.name]
        assert await client.get(first.name) == first
        assert await client.release(others[0]) == others[0]
        with pytest.raises(errors.FailedPreconditionError) as caught:
            await client.renew(others[1])
        assert caught.value.reason == "RESERVATION_ENDED"
        assert (await client.reserve(request_id=request_id)).name == first.name
        with pytest.raises(errors.AlreadyExistsError):
            await client.reserve(request_id=request_id, ttl=77)
        assert await listed(client) == names


async def test_who_held_a_gpu_is_found_on_disk_too(
    tmp_path: Path, retired: set[int], database: SecretUrl | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few records a page looks at, and until they are forgotten, which is said."""
    monkeypatch.setattr(archive, "LOOKED_AT", 2)
    fleet, clock = FakeFleet(node_message("n0", count=2, period=10 * RETENTION)), ManualClock()
    async with running(tmp_path, fleet, clock=clock, database=database) as client:
        begun = clock.wall()
        made = list[Reservation]()
        for _ in range(4):  # an hour each: one GPU of two, then the other
            for gpu in ("n0-0", "n0-1"):
                one = await client.reserve(gpus=[f"nodes/n0/gpus/{gpu}"], ttl=7200)
                clock.advance(3600)
                made.append(await client.release(one))
        live = await client.reserve(gpus=[made[0].gpus[0].name], ttl=86_400)
        await eventually(lambda: len(retired) == 6)
        of_first = [*made[::2], live]

        def at(hours: float) -> Timestamp:
            return to_timestamp(begun + timedelta(hours=hours))

        def named(*some: Reservation) -> list[str]:
            return [one.name for one in some]

        on_first: dict[str, object] = {"filter": "gpus.uuid:n0-0 AND gpus.node:n0 AND holder = test"}
        assert await listed(client, gpu_uuid="n0-0") == await listed(client, **on_first) == named(*of_first)
        assert await listed(client, **on_first, order_by="fence desc") == named(*of_first)[::-1]
        assert not await listed(client, filter="gpus.node:n1", order_by="fence")
        assert await listed(client, gpu_uuid="n0-0", since=at(2.5), until=at(4.5)) == named(made[2], made[4])
        assert await listed(client, since=at(3.5), until=at(3.5)) == named(made[3]), "at a moment"
        assert await listed(client, since=at(7.5)) == named(made[7], live)
        assert await listed(client, until=at(0.5)) == named(made[0])
        page = await client.page(show_ended=True, gpu_uuid="n0-9")
        assert (len(page.reservations), page.next_page_token != "") == (0, True), "two are looked at"
        assert not page.HasField("kept_since")
        clock.advance(RETENTION - 4.5 * 3600)
        await eventually(
            lambda: client.page(show_ended=True, page_size=1), lambda page: page.kept_since == at(3)
        )
        assert (await listed(client))[:2] == named(made[3], made[4])
        with pytest.raises(errors.InvalidArgumentError) as caught:
            await client.page(since=at(2), until=at(1))
        assert "until" in caught.value.message


async def test_a_request_whose_grant_left_memory_is_not_granted_again(
    tmp_path: Path, retired: set[int], database: SecretUrl | None
) -> None:
    """Whether a GPU is free for it, or it would have to wait; and others that are granted beside it are."""
    fleet, requests = FakeFleet(node_message("n0", count=1)), [str(uuid4()) for _ in range(6)]
    async with running(tmp_path, fleet, database=database) as client:
        first = [await client.release(await client.reserve(request_id=one)) for one in requests]
        await eventually(lambda: len(retired) >= 4)
        assert (await client.reserve(request_id=requests[0])).name == first[0].name
        held = await client.reserve()
        assert (await client.reserve(request_id=requests[1])).name == first[1].name
        assert [one.name for one in await client.live()] == [held.name]
        assert await batch(client, requests[2]) == [first[2].name], "refused, then found"


async def test_a_batch_may_repeat_what_left_memory(
    tmp_path: Path, retired: set[int], database: SecretUrl | None
) -> None:
    fleet, asked = FakeFleet(node_message("n0", count=24)), str(uuid4())
    async with running(tmp_path, fleet, database=database) as client:
        ended = await client.release(await client.reserve(request_id=asked))
        await spent(client, 2)
        await eventually(lambda: retired)
        *fresh, again = await batch(client, *(str(uuid4()) for _ in range(20)), asked)
        assert again == ended.name
        assert [one.name for one in await client.live()] == fresh


async def test_a_batch_may_repeat_what_leaves_memory_before_it_is_told(
    tmp_path: Path, retired: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is granted beside it is written first; meanwhile another reservation ends."""
    asked = str(uuid4())
    async with running(tmp_path, FakeFleet(node_message("n0", count=2))) as client:
        ended = await client.release(await client.reserve(request_id=asked))
        await spent(client, 1)
        held = await client.reserve()
        late = tasks.parse_failpoints("allocator.reserve.before_reply=sleep:0.5")
        monkeypatch.setattr(tasks, "_points", late)
        batched = asyncio.create_task(batch(client, asked, str(uuid4())))
        await eventually(client.live, lambda found: len(found) == 2)
        await client.release(held)
        await eventually(lambda: retired)
        assert (await batched)[0] == ended.name


async def test_there_are_no_more_than_the_settings_say(tmp_path: Path, database: SecretUrl | None) -> None:
    fleet, clock = FakeFleet(node_message("n0", count=1, period=10 * RETENTION)), ManualClock()
    async with running(tmp_path, fleet, clock=clock, database=database, ended_max_records=3) as client:
        names = [one.name for one in await spent(client, 8)]
        await eventually(lambda: listed(client), lambda found: found == names[5:])
        clock.advance(RETENTION + 1)
        await eventually(lambda: listed(client), lambda found: found == [])


@asynccontextmanager
async def archived(path: Path, count: int, limits: Totals) -> AsyncGenerator[tuple[Archive, AllocatorStore]]:
    """An archive whose ledger has so many that ended."""
    numbers = count_from(1)
    ledger, clock = Ledger(new_id=lambda _: f"r{next(numbers)}"), ManualClock()
    async with open_store(path, BOOT) as store:
        await store.load()
        for _ in range(count):
            one = ledger.grant(order(), [reserved("GPU-a")], now=NOW, wall=WALL)
            await store.save([one], [])
            ledger.confirm(one)
            over = ledger.close(one, State.RELEASED, now=NOW, wall=WALL)
            await store.save([], [over])
            ledger.settle(over)
        found = Archive(ledger, EndedStore(store, BOOT, clock.now()), limits, clock)
        await found.open()
        yield found, store


async def test_what_is_not_on_disk_is_not_asked_for(tmp_path: Path) -> None:
    async with archived(tmp_path / DATABASE, 2, Totals(1000, 20_000)) as (found, _):
        await found.tidy()
    assert await found.page(RecordFilter(), after=0, most=10) == ((), 0), "of a file that is closed"


async def test_they_take_no_more_bytes_than_the_settings_say(tmp_path: Path) -> None:
    async with archived(tmp_path / DATABASE, 200, Totals(1000, 20_000)) as (found, store):
        await found.tidy()
        totals = await EndedStore(store, BOOT, 0.0).totals()
        assert 10_000 < totals.bytes <= 20_000
        kept, _ = await found.store.page(RecordFilter(), after=0, most=1000)
        assert len(kept) == totals.records < 100
        assert max(one.fence for one in kept) == 198  # the last two are in memory


async def test_the_file_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuscale.common.store.sqlite_store.MOST_FREE_PAGES", 4)
    async with archived(tmp_path / DATABASE, 600, Totals(1000, 1 << 30)) as (found, _):
        await found.tidy()
    large = (tmp_path / DATABASE).stat().st_size
    async with open_store(tmp_path / DATABASE, BOOT) as store:
        await store.load()
        ended = EndedStore(store, BOOT, 0.0)
        while (await ended.totals()).records:
            await ended.drop_first(64, 600)
    assert (tmp_path / DATABASE).stat().st_size < large / 2


async def test_a_damaged_record_is_refused_when_it_is_read(tmp_path: Path) -> None:
    async with archived(tmp_path / DATABASE, 5, Totals(1000, 1 << 30)) as (found, _):
        await found.tidy()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection, connection:
        connection.execute("UPDATE reservation SET holder = 'eve' WHERE fence = 2")
    async with open_store(tmp_path / DATABASE, BOOT) as store:
        await store.load()
        ended = EndedStore(store, BOOT, 0.0)
        assert len(await ended.find(ids=["r1", "r3"])) == 2
        with pytest.raises(errors.FailedPreconditionError) as caught:
            await ended.find(ids=["r2"])
        assert caught.value.reason == "STATE_INCONSISTENT"


async def test_what_is_archived_is_left_as_it_is(tmp_path: Path) -> None:
    """By what comes late, or twice; and what is live is not archived."""
    async with archived(tmp_path / DATABASE, 5, Totals(1000, 1 << 30)) as (found, store):
        live = found.ledger.grant(order(), [reserved("GPU-b")], now=NOW, wall=WALL)
        await store.save([live], [])
        await found.tidy()
        old = await found.store.find(ids=["r1", "r2", "r3"])
        await store.save([], [replace(one, end_reason="again") for one in old])
        await store.forget(old, 6)
        assert (await found.store.retire([1, 2, 3, live.fence], 6)).records == 3
        assert await found.store.find(ids=["r1", "r2", "r3", "r6"]) == old
        assert [one.id for one, _ in (await store.load()).reservations] == ["r4", "r5", "r6"]
        again = Ledger(100).grant(order(live.request_id), [], now=NOW, wall=WALL)
        with pytest.raises(errors.UnavailableError) as caught:
            await store.save([again], [])
        assert caught.value.reason == "STATE_CONFLICT"
        by_hand = "UPDATE reservation SET archived = 1 WHERE state = 'active'"
        with pytest.raises(IntegrityError):
            await store.change(lambda connection: connection.exec_driver_sql(by_hand))


async def test_on_a_full_disk_records_go_before_their_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        async with archived(disk / DATABASE, 150, Totals(1000, 1 << 30)) as (found, store):
            await found.tidy()
            assert (await found.store.totals()).records == 148
            fill(disk)
            numbers = count_from()
            while not store.short:
                await store.save_ranks({f"n{(rank := next(numbers))}": rank})
            for _ in range(3):
                await found.tidy()
            assert (await found.store.totals()).records == 0
            assert caplog.text.count("records of ended reservations early") == 1
