"""A data directory of the version before: it opens, everything in it is as it was, and what is new in it works."""

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.accounting import Hardware
from gpuscale.allocator.domain.cordons import Cordon, Spot
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import State
from gpuscale.allocator.queueing.model import Quota
from gpuscale.allocator.state.archive import EndedStore
from gpuscale.allocator.state.cordons_and_quotas import CordonStore, QuotaStore
from gpuscale.allocator.state.integrity import sealed
from gpuscale.allocator.state.schema import VERSION
from gpuscale.allocator.state.store import open_store
from gpuscale.allocator.state.usage_ledger import UsageLedger, tally_of
from gpuscale.common.errors import FailedPreconditionError
from tests.support.allocator_values import MIB, NOW, WALL, order, reserved

VERSION_1 = Path(__file__).with_name("state_v1.sql")
"""A dump of a file that version 1 wrote: one live reservation of two GPUs, one that was released."""
VERSION_2 = Path(__file__).with_name("state_v2.sql")
"""One that version 2 wrote: two live reservations, of two GPUs and of half of one that is drained, and one released."""


def make_version_1(path: Path) -> None:
    make(VERSION_1, path)


def make(dump: Path, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(dump.read_text())


async def test_a_file_of_version_1_is_migrated_in_place(tmp_path: Path) -> None:
    make_version_1(tmp_path / DATABASE)
    for _ in range(2):
        async with open_store(tmp_path / DATABASE, "boot-2") as store:
            saved = await store.load()
        (live, boot), (over, _) = saved.reservations
        assert (live.id, live.fence, live.state, live.deadline, boot) == (
            "r1-aa",
            1,
            State.ACTIVE,
            4600.0,
            "boot-1",
        )
        assert [(gpu.uuid, gpu.milli, gpu.member) for gpu in live.gpus] == [
            ("n0-0", 1000, 0),
            ("n0-1", 1000, 0),
        ]
        assert (live.tenant, live.owner, live.priority, live.member_count) == ("ann", "ann", 0, 1)
        assert (over.id, over.state) == ("r2-aa", State.RELEASED)
        assert saved.ranks == {"n0": 0}
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)


async def test_a_file_of_version_2_is_migrated_in_place(tmp_path: Path) -> None:
    """Everything in it is as it was, twice over: the second time it is read with its checksums."""
    make(VERSION_2, tmp_path / DATABASE)
    for _ in range(2):
        async with open_store(tmp_path / DATABASE, "boot-1") as store:
            saved = await store.load()
            quotas = await QuotaStore(store).load()
            cordons, _ = await CordonStore(store, "boot-1").load(NOW)
        whole, half, over = [one for one, _ in saved.reservations]
        assert [(gpu.uuid, gpu.milli) for gpu in whole.gpus] == [("n0-0", 1000), ("n0-1", 1000)]
        assert (whole.tenant, whole.priority, whole.preemptible) == ("ann", 3, True)
        assert whole.labels == {"team": "vision é"}
        assert (half.gpus[0].milli, half.gpus[0].memory_bytes) == (500, 40_000 * MIB)
        assert (half.revoke_at, half.end_reason) == (NOW + 600, "nodes/n0 is drained")
        assert (over.state, over.ended) == (State.RELEASED, WALL)
        assert (saved.fence, saved.ranks) == (7, {"n0": 0, "n1": 1})
        assert quotas == [Quota("ann", 8000, 2.0)]
        assert cordons == [Cordon(Spot("n0"), "fans", "bob", WALL, NOW + 600, 600.0)]


async def test_what_version_4_archived_is_found_by_its_id(tmp_path: Path) -> None:
    """Its ids are made of their fences, which later ones do not tell; there was no index of them."""
    path = tmp_path / DATABASE
    async with open_store(path, "boot") as store:
        await store.load()
        ledger = Ledger(new_id=lambda: "r1-aa")
        one = ledger.confirm(ledger.grant(order(), [reserved("GPU-a")], now=NOW, wall=WALL))
        await store.save([one], [])
        await store.save([], [ledger.close(one, State.RELEASED, now=NOW, wall=WALL)])
        await EndedStore(store, "boot", NOW).retire([one.fence], ledger.fence)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP INDEX ended_by_id")
        connection.execute("DROP TABLE usage")
        connection.execute("PRAGMA user_version = 4")
    async with open_store(path, "boot") as store:
        await store.load()
        assert [found.id for found in await EndedStore(store, "boot", NOW).find(ids=["r1-aa"])] == ["r1-aa"]
    with closing(sqlite3.connect(path)) as connection:
        plan = connection.execute("EXPLAIN QUERY PLAN SELECT * FROM ended WHERE id IN ('x')").fetchall()
    assert "ended_by_id" in plan[0][-1]


async def test_of_what_version_6_knew_the_use_nothing_is_said_of_the_hardware(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    async with open_store(path, "boot"):
        pass
    row = {"reservation_id": "r1", "part": 1, "gpu_uuid": "GPU-a", "day": 1, "milli": 1000, "granted": 5000}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE usage DROP COLUMN hardware")
        columns = [column[1] for column in connection.execute("PRAGMA table_info(usage)")]
        values = [row.get(name, 0) for name in columns]
        connection.execute(f"INSERT INTO usage VALUES ({', '.join('?' * len(values))})", values)
        connection.execute("PRAGMA user_version = 6")
    async with open_store(path, "boot") as store:
        [found] = await UsageLedger(store).of_reservation("r1")
    tally = tally_of(found)
    assert (tally.granted, tally.hardware) == (5, Hardware())


async def test_of_what_version_7_counted_its_holds_are_left_out(tmp_path: Path) -> None:
    """A row that went missing before is missed all the same, and so is one that goes later."""
    path, earlier, ledger = tmp_path / DATABASE, tmp_path / "earlier.db", Ledger()
    over, live = [
        ledger.confirm(ledger.grant(order(), [reserved(gpu)], now=NOW, wall=WALL))
        for gpu in ("GPU-a", "GPU-b")
    ]
    async with open_store(path, "boot") as store:
        await store.load()
        await store.save([over], [])
        await store.save([], [ledger.close(over, State.RELEASED, now=NOW, wall=WALL)])
        await store.save([live], [])
    counted = sealed({"name": "rows", "value": 3})  # two reservations and a hold
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "UPDATE counter SET value = :value, checksum = :checksum WHERE name = :name", counted
        )
        connection.execute("PRAGMA user_version = 7")
    shutil.copy(path, earlier)
    async with open_store(path, "boot") as store:
        assert len((await store.load()).reservations) == 2
    for file in (earlier, path):
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("DELETE FROM reservation WHERE state = 'released'")
        async with open_store(file, "boot") as store:
            with pytest.raises(FailedPreconditionError, match="1 rows of reservation, but 2 were written"):
                await store.load()


@pytest.mark.parametrize(("dump", "forgot"), [(VERSION_1, False), (VERSION_2, True)], ids=["1", "2"])
async def test_what_an_older_ledger_forgot_without_a_note_is_not_denied(
    tmp_path: Path, dump: Path, forgot: bool
) -> None:
    """It kept its highest fence once it forgot a reservation: an empty answer about that time must not say that nothing was."""
    make(dump, tmp_path / DATABASE)
    begun = time.time()
    seen: list[int] = []
    for _ in range(2):
        async with open_store(tmp_path / DATABASE, "boot-2") as store:
            await store.load()
            seen.append(await EndedStore(store, "boot-2", NOW).forgotten())
    assert seen[0] == seen[1], "noted once"
    assert begun <= seen[0] <= time.time() + 1 if forgot else seen[0] == 0


@pytest.mark.parametrize("dump", [VERSION_1, VERSION_2], ids=["1", "2"])
async def test_what_was_migrated_is_sealed(tmp_path: Path, dump: Path) -> None:
    make(dump, tmp_path / DATABASE)
    async with open_store(tmp_path / DATABASE, "boot"):
        pass
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection, connection:
        connection.execute("UPDATE reservation SET owner = 'eve' WHERE fence = 1")
    with pytest.raises(FailedPreconditionError, match="the stored reservations does not match its checksum"):
        async with open_store(tmp_path / DATABASE, "boot"):
            pass


@pytest.mark.parametrize("dump", [VERSION_1, VERSION_2], ids=["1", "2"])
async def test_a_migrated_file_refuses_what_a_new_one_does(tmp_path: Path, dump: Path) -> None:
    """The tables of both are the same, to the letter but for names and blanks; so are the refusals."""
    make(dump, tmp_path / DATABASE)
    async with open_store(tmp_path / DATABASE, "boot"):
        pass
    async with open_store(tmp_path / "new.db", "boot"):
        pass
    columns, guards = [], []
    for path in (tmp_path / DATABASE, tmp_path / "new.db"):
        with closing(sqlite3.connect(path)) as connection:
            tables = sorted(
                row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
            )
            columns.append(
                {
                    table: sorted(
                        row[1:4] + row[5:] for row in connection.execute(f"PRAGMA table_info({table})")
                    )
                    for table in tables
                }
            )
            kinds = "SELECT type, name, tbl_name FROM sqlite_master WHERE type != 'table' AND sql IS NOT NULL"
            guards.append(sorted(connection.execute(kinds)))
    assert columns[0] == columns[1]
    assert guards[0] == guards[1]


async def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / DATABASE
    make_version_1(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE hold_before (x)")
    with pytest.raises(FailedPreconditionError, match="cannot be used"):
        async with open_store(path, "boot"):
            pass
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM hold").fetchone() == (2,)
        assert "tenant" not in [row[1] for row in connection.execute("PRAGMA table_info(reservation)")]
