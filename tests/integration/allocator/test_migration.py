"""A data directory of the version before: it opens, everything in it is as it was, and what is new in it works."""

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
from gpuscale.allocator.state.integrity import sealed
from gpuscale.allocator.state.operators import CordonStore, QuotaStore
from gpuscale.allocator.state.schema import VERSION
from gpuscale.allocator.state.store import open_store
from gpuscale.allocator.state.usage_ledger import UsageLedger, tally_of
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from tests.support.allocator_values import MIB, NOW, WALL, order, reserved

VERSION_1 = Path(__file__).with_name("state_v1.sql")
"""A dump of a file that version 1 wrote: one live reservation of two GPUs, one that was released."""
VERSION_2 = Path(__file__).with_name("state_v2.sql")
"""One that version 2 wrote: two live reservations, of two GPUs and of half of one that is drained, and one released."""
VERSION_8 = Path(__file__).with_name("state_v8.sql")
"""One that version 8 wrote, which archived two (r1-aa, r2-aa) in a table of their own: one released, and one live of two GPUs."""
REQUEST = "111111-1111-4111-8111-111111111111"
"""How the ids of its requests end."""


def make(dump: Path, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(dump.read_text())


async def test_a_file_of_version_1_is_migrated_in_place(tmp_path: Path) -> None:
    make(VERSION_1, tmp_path / DATABASE)
    for _ in range(2):
        async with open_store(tmp_path / DATABASE, "boot-2") as store:
            saved = await store.load()
        (live, boot), (over, _) = saved.reservations
        assert (live.id, live.fence, live.state) == ("r1-aa", 1, State.ACTIVE)
        assert (live.deadline, boot) == (4600.0, "boot-1")
        gpus = [(gpu.uuid, gpu.milli, gpu.member) for gpu in live.gpus]
        assert gpus == [("n0-0", 1000, 0), ("n0-1", 1000, 0)]
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


@pytest.mark.parametrize("version", [4, 7, 8])
async def test_what_an_earlier_version_archived_stays_archived(tmp_path: Path, version: int) -> None:
    """It is found, dropped and counted, and nothing is granted again for its request. Up to version 7 holds were counted."""
    make(VERSION_8, path := tmp_path / DATABASE)
    counted = sealed({"name": "rows", "value": 2 if version == 8 else 4})
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"PRAGMA user_version = {version}")
        connection.execute("REPLACE INTO counter VALUES (:name, :value, :checksum)", counted)
        for old in ("DROP INDEX ended_by_id", "DROP TABLE usage") if version == 4 else ():
            connection.execute(old)
    for _ in range(2):
        async with open_store(path, "boot-1") as store:
            (over, _), (live, _) = (await store.load()).reservations
            ended = EndedStore(store, "boot-1", NOW)
            first, second = await ended.find(ids=["r1-aa"], requests=[f"22{REQUEST}", over.request_id])
            assert [one.id for one in (first, second, over, live)] == ["r1-aa", "r2-aa", "r3-aa", "r4-aa"]
            again = Ledger(4).grant(order(f"11{REQUEST}"), [reserved("GPU-a")], now=NOW, wall=WALL)
            with pytest.raises(UnavailableError) as caught:
                await store.save([again], [])
            assert caught.value.metadata == {"request_ids": f"11{REQUEST}"}
    async with open_store(path, "boot-1") as store:
        await store.save([], [Ledger().close(live, State.RELEASED, now=NOW, wall=WALL)])
        ended = EndedStore(store, "boot-1", NOW)
        assert (await ended.retire([3, 4], 4)).records == 4
        assert (await ended.drop_first(3, 4)).records == 1
        assert (await store.load()).reservations == []
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.execute("DELETE FROM reservation")
    async with open_store(path, "boot-1") as store:
        with pytest.raises(FailedPreconditionError, match="0 rows of archived reservation, but 1 were"):
            await store.load()


async def test_of_what_version_6_knew_the_use_nothing_is_said_of_the_hardware(tmp_path: Path) -> None:
    make(VERSION_8, path := tmp_path / DATABASE)
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


@pytest.mark.parametrize("dump", [VERSION_1, VERSION_2, VERSION_8], ids=["1", "2", "8"])
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
            of_all = "FROM sqlite_master AS one, pragma_table_info(one.name) AS its WHERE one.type = 'table'"
            without_rowid = "(SELECT wr FROM pragma_table_list(one.name))"
            kinds = f'SELECT one.name, {without_rowid}, its.name, its.type, "notnull", pk {of_all}'
            columns.append(sorted(connection.execute(kinds)))
            kinds = "SELECT type, name, tbl_name FROM sqlite_master WHERE type != 'table' AND sql IS NOT NULL"
            guards.append(sorted(connection.execute(kinds)))
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection, pytest.raises(sqlite3.IntegrityError):
        connection.execute("UPDATE reservation SET archived = 1 WHERE state = 'active'")
    assert columns[0] == columns[1]
    assert guards[0] == guards[1]


@pytest.mark.parametrize("dump", [VERSION_1, VERSION_8], ids=["1", "8"])
async def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path, dump: Path) -> None:
    path, version = tmp_path / DATABASE, int(dump.stem[-1])
    make(dump, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE hold_before (x)")
    with pytest.raises(FailedPreconditionError, match="cannot be used"):
        async with open_store(path, "boot"):
            pass
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)
        assert connection.execute("SELECT count(*) FROM hold").fetchone() == (2,)
        columns = [row[1] for row in connection.execute("PRAGMA table_info(reservation)")]
        assert ("tenant" in columns, "archived" in columns) == (version == 8, False)
