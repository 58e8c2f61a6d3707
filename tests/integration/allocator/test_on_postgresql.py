"""The allocator's state in PostgreSQL: the same as in a file, and the same refusals by the database itself."""

import asyncio
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpuscale.allocator.app import DATABASE, open_allocator
from gpuscale.allocator.domain.accounting import DAY, Account, granted_since
from gpuscale.allocator.domain.cordons import Cordon, Spot
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import State
from gpuscale.allocator.queueing.model import Quota
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.allocator.state import schema as schema_store
from gpuscale.allocator.state.archive import EndedStore
from gpuscale.allocator.state.integrity import check_seals, sealed
from gpuscale.allocator.state.operators import CordonStore, QuotaStore
from gpuscale.allocator.state.store import SERVICE, AllocatorStore, open_shared_store, open_store
from gpuscale.allocator.state.usage_ledger import UsageLedger, rows_of
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.leadership import Candidate
from tests.integration.allocator.damaged_state import grants
from tests.support.allocator import running
from tests.support.allocator_values import NOW, WALL, order, reserved
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.postgresql import PostgresServer, program

pytestmark = pytest.mark.usefixtures("lead_outlasts_stalls")

BOOT = "boot"
VERSION_8 = Path(__file__).with_name("state_v8_postgresql.sql")
"""What state_v8.sql holds, as version 8 wrote it to PostgreSQL."""
LARGE = 1 << 40
"""More than an integer of PostgreSQL holds."""


@asynccontextmanager
async def opened(url: SecretUrl) -> AsyncGenerator[AllocatorStore]:
    """The state, in a term of its own."""
    async with Candidate(url, SERVICE, "here").term() as term, open_shared_store(url, term, BOOT) as store:
        yield store


async def test_everything_is_there_in_the_next_term(url: SecretUrl) -> None:
    ledger = Ledger(LARGE)
    cordon = Cordon(Spot("n1"), "fans", "bob", WALL, NOW + 600, 600.0)
    async with opened(url) as store:
        await store.save_ranks({"n0": 0, "n1": 1})
        await grants(store, ledger, 4, ended=1)
        wish = replace(order(), labels={"team": "vision é"})
        granted = ledger.grant(wish, [reserved("GPU-x", memory=40_000)], now=NOW, wall=WALL)
        last = replace(ledger.confirm(granted), host_memory_bytes=LARGE, preemptible=True)
        await store.save([last], [])
        for weight in (1.0, 2.0):
            await QuotaStore(store).save(Quota("ann", 8000, weight))
        for until in (None, 600.0):
            await CordonStore(store, BOOT).save([replace(cordon, deadline=until)])
        await CordonStore(store, BOOT).save([cordon])
        before = await store.load()
        await store.forget([before.reservations[0][0]], ledger.fence)
        before = await store.load()
    async with opened(url) as store:
        saved = await store.load()
        assert saved == before
        assert saved.reservations[-1] == (replace(last, state=State.ACTIVE), BOOT)
        assert (len(saved.reservations), saved.fence, saved.ranks) == (4, ledger.fence, {"n0": 0, "n1": 1})
        assert await QuotaStore(store).load() == [Quota("ann", 8000, 2.0)]
        assert await CordonStore(store, BOOT).load(NOW) == ([cordon], [])
        await QuotaStore(store).remove("ann")
        await CordonStore(store, BOOT).remove(cordon.spot)
        await store.forget_rank("n1", 1)
        assert await QuotaStore(store).load() == []
        assert (await store.load()).ranks == {"n0": 0}


async def test_what_has_ended_never_lives_again(url: SecretUrl) -> None:
    ledger = Ledger(0)
    async with opened(url) as store:
        granted = ledger.confirm(ledger.grant(order(), [reserved("GPU-x")], now=NOW, wall=WALL))
        await store.save([granted], [])
        await store.save([], [ledger.close(granted, State.RELEASED, now=NOW, wall=WALL)])
        await store.save([], [replace(granted, deadline=NOW + 999)])
        [(found, _)] = (await store.load()).reservations
    assert found.state is State.RELEASED


@pytest.mark.parametrize("where", ["file", "PostgreSQL"])
@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [(1000, 1000, False), (1000, 1, False), (500, 500, True), (500, 501, False), (1, 1000, False)],
)
async def test_the_database_itself_refuses_more_of_a_gpu_than_there_is(
    tmp_path: Path, request: pytest.FixtureRequest, where: str, first: int, second: int, fits: bool
) -> None:
    """What a migrated file refuses is for test_migration.py."""
    made = [
        ledger.confirm(ledger.grant(order(), [reserved("GPU-a", milli=milli)], now=NOW, wall=WALL))
        for ledger, milli in ((Ledger(fence=10), first), (Ledger(fence=20), second))
    ]
    state = (
        open_store(tmp_path / DATABASE, BOOT) if where == "file" else opened(request.getfixturevalue("url"))
    )
    async with state as store:
        await store.save(made[:1], [])
        if fits:
            await store.save(made[1:], [])
        else:
            with pytest.raises(UnavailableError) as caught:
                await store.save(made[1:], [])
            assert caught.value.reason == "STATE_CONFLICT"
        assert len((await store.load()).reservations) == 1 + fits


CHANGES = {
    "reservation": "UPDATE allocator.reservation SET holder = holder || 'x'",
    "deadline": "UPDATE allocator.reservation SET deadline_seconds = deadline_seconds + 1",
    "gpus": "UPDATE allocator.reservation SET gpus = (replace(gpus::text, 'GPU-x', 'GPU-y'))::json",
    "flag": "UPDATE allocator.reservation SET preemptible = NOT preemptible",
    "counter": "UPDATE allocator.counter SET value = value - 1",
    "rank": "UPDATE allocator.rank SET rank = 7",
    "quota": "UPDATE allocator.quota SET weight = 3",
    "cordon": "UPDATE allocator.cordon SET grace_seconds = 1",
}


async def test_a_row_that_is_not_as_it_was_written_is_refused(
    url: SecretUrl, postgresql: PostgresServer
) -> None:
    """As in a file: each kind of row, and each kind of value in a reservation."""
    database = url.path.strip("/")
    check = partial(check_seals, tables=schema_store.Table.metadata.sorted_tables)
    async with opened(url) as store:
        ledger = Ledger(LARGE)
        await store.save_ranks({"n0": 0})
        await grants(store, ledger, 1, ended=1)
        wish = replace(order(), labels={"team": "vision é"}, preemptible=True)
        granted = ledger.grant(wish, [reserved("GPU-x", memory=40_000)], now=NOW, wall=WALL)
        await store.save([ledger.confirm(granted)], [])
        await QuotaStore(store).save(Quota("ann", 8000, 1.5))
        await CordonStore(store, BOOT).save([Cordon(Spot("n1"), "fans", "bob", WALL, None, None)])
        for name, change in CHANGES.items():
            await store.read(check)
            table = change.split()[1]
            postgresql.run(f"CREATE TABLE kept AS TABLE {table}; {change}", database)
            with pytest.raises(FailedPreconditionError, match="does not match its checksum") as caught:
                await store.read(check)
            assert caught.value.reason == "STATE_INCONSISTENT", name
            # As the tool of PostgreSQL puts rows back: without triggers.
            put_back = f"DELETE FROM {table}; INSERT INTO {table} TABLE kept; DROP TABLE kept"
            postgresql.run(f"SET session_replication_role = replica; {put_back}", database)
    async with opened(url) as store:
        assert len((await store.load()).reservations) == 2
    postgresql.run(CHANGES["quota"], database)
    with pytest.raises(FailedPreconditionError, match="the stored quota ann does not match its checksum"):
        async with opened(url):
            pass


async def test_of_what_version_7_counted_its_holds_are_left_out_there_too(
    url: SecretUrl, postgresql: PostgresServer
) -> None:
    """As in a file: what goes missing afterwards is missed, and what was archived stays so."""
    database = url.path.strip("/")
    postgresql.run(VERSION_8.read_text(), database)
    counted = sealed({"name": "rows", "value": 4})  # two reservations and two holds
    postgresql.run(
        f"UPDATE allocator.counter SET value = 4, checksum = {counted['checksum']} WHERE name = 'rows';"
        "UPDATE allocator.alembic_version SET version_num = '7'",
        database,
    )
    async with opened(url) as store:
        assert len((await store.load()).reservations) == 2
        ended = EndedStore(store, BOOT, NOW)
        [old] = await ended.find(ids=["r1-aa"])
        again = Ledger(4).grant(order(old.request_id), [reserved("GPU-x")], now=NOW, wall=WALL)
        with pytest.raises(UnavailableError, match="what was granted for the request has ended"):
            await store.save([again], [])
        assert (await ended.retire([1, 3, 4], 4)).records == 3, "the last one is live"
        assert (await ended.drop_first(1, 4)).records == 2
    found = postgresql.run("SELECT version_num FROM allocator.alembic_version", database)
    assert found == [(str(schema_store.VERSION),)]
    postgresql.run("DELETE FROM allocator.reservation WHERE archived = 1", database)
    async with opened(url) as store:
        with pytest.raises(FailedPreconditionError, match="0 rows of archived reservation, but 2 were"):
            await store.load()


async def test_no_number_in_the_schema_has_32_bits(url: SecretUrl, postgresql: PostgresServer) -> None:
    async with opened(url):
        small = postgresql.run(
            "SELECT table_name, column_name FROM information_schema.columns"
            f" WHERE table_schema = '{SERVICE}' AND data_type = 'integer' AND table_name <> 'leadership'",
            url.path.strip("/"),
        )
    assert small == []


async def test_leases_go_on_in_the_next_term_and_start_anew_on_another_host(
    url: SecretUrl, tmp_path: Path, postgresql: PostgresServer
) -> None:
    """Nobody knows how the clocks of two hosts compare: whoever takes over gives every lease its full time once."""
    clock, fleet = ManualClock(), FakeFleet(node_message("n0", count=2))
    async with running(tmp_path, fleet, clock=clock, database=url) as client:
        granted = await client.reserve(ttl=60)
        await client.release(await client.reserve())
        clock.advance(20)
    async with running(tmp_path, fleet, clock=clock, database=url) as client:
        assert (await client.get(granted.name)).remaining.seconds == 40
        clock.advance(20)
    clock.reboot()
    async with running(tmp_path, fleet, clock=clock, database=url) as client:
        assert (await client.get(granted.name)).remaining.seconds == 60
        assert (await client.reserve()).fence > granted.fence
        earlier = f"SELECT state FROM allocator.reservation WHERE boot_id <> '{clock.boot_id}'"
        assert await asyncio.to_thread(postgresql.run, earlier, url.path.strip("/")) == []


async def test_without_a_term_a_database_is_refused(url: SecretUrl, tmp_path: Path) -> None:
    """As in `up`, which would else begin a second state, in a file."""
    settings = AllocatorSettings.model_validate({"data_dir": tmp_path, "database": url})
    async with open_channel("127.0.0.1:1") as fleet:
        with pytest.raises(FailedPreconditionError, match="only gpuscale-allocator"):
            async with open_allocator(settings, fleet=fleet, clock=ManualClock()):
                pass


async def test_a_dump_that_is_restored_into_another_database_has_what_was_granted(
    url: SecretUrl, postgresql: PostgresServer, tmp_path: Path
) -> None:
    """The commands of docs/operations.md, while the allocator runs; the schema of another service is there too."""
    dump, psql = program("pg_dump"), program("psql")
    assert dump is not None
    assert psql is not None
    await asyncio.to_thread(postgresql.run, "CREATE SCHEMA autoscaler", url.reveal().rpartition("/")[2])
    fleet, copy, other = FakeFleet(node_message("n1", count=4)), tmp_path / "copy.sql", postgresql.database()
    save = [str(dump), "-n", "allocator", "-n", "autoscaler", "-f", str(copy), url.reveal()]
    load = [str(psql), "-q", "-v", "ON_ERROR_STOP=1", "-o", "/dev/null", "-f", str(copy), other.reveal()]
    async with running(tmp_path / "a", fleet, database=url) as client:
        before = await client.reserve(ttl=3600)
        await asyncio.to_thread(subprocess.run, save, check=True, timeout=60)
        after = await client.reserve(ttl=3600)
    await asyncio.to_thread(subprocess.run, load, check=True, timeout=60)
    async with running(tmp_path / "b", fleet, database=other) as client:
        assert [one.name for one in await client.live()] == [before.name]
        assert (await client.reserve(ttl=3600)).fence == after.fence


async def test_the_usage_ledger_adds_up_there_too(url: SecretUrl) -> None:
    """What is old becomes one row, and stays as much; what runs is found by the next start."""
    ledger, today = Ledger(), 20_000
    granted = ledger.grant(order(), [reserved("GPU-x", milli=300), reserved("GPU-y")], now=NOW, wall=WALL)
    async with opened(url) as store:
        usage = UsageLedger(store)
        for nth, day in enumerate((today - 95, today - 95, today)):
            account = Account(replace(granted, id=f"r{nth}"), granted_since(granted))
            account.count(account.until + 1234, day * DAY + DAY // 2)
            await usage.put(rows_of(account, BOOT, "" if day == today else "released"))
        for _ in range(2):
            await usage.tidy(today, 1000)
        found = await usage.query(0, today + 1, ("owner", "labels"))
        assert [(one.owner, one.tally.granted, one.ends) for one in found] == [("ann", 3 * 1234 * 1300, 2)]
        [old] = await usage.query(0, today, ())
        assert (old.tally.granted, old.tally.unknown) == (2 * 1234 * 1300, 2 * 1234 * 1300)
        assert await usage.of_reservation("r0") == []
        standing = (await usage.standings(["r2"]))["r2"]
        assert (standing.until_ms, standing.boot_id) == (granted_since(granted) + 1234, BOOT)
        await usage.tidy(today + 2000, 1000)
        assert [one.tally.granted for one in await usage.query(0, today + 1, ())] == [1234 * 1300]
