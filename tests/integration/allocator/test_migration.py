"""A data directory of the version before: it opens, everything in it is as it was, and what is new in it works."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import State
from gpuscale.allocator.state.archive import EndedStore
from gpuscale.allocator.state.opening import open_store
from gpuscale.allocator.state.schema import FORGOTTEN, VERSION
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from tests.support.allocator_values import NOW, WALL, order, reserved


async def make_version_5(path: Path) -> None:
    """A file of one reservation that lives and one that ended, whose ledger has forgotten others without a note of it."""
    async with open_store(path, "boot") as store:
        await store.load()
        ledger = Ledger(fence=7)
        live = ledger.confirm(ledger.grant(order(), [reserved("GPU-a")], now=NOW, wall=WALL))
        over = ledger.confirm(ledger.grant(order(), [reserved("GPU-b")], now=NOW, wall=WALL))
        await store.save([live, over], [])
        await store.save([], [ledger.close(over, State.RELEASED, now=NOW, wall=WALL)])
        archive = EndedStore(store, "boot", NOW)
        await archive.retire([over.id], ledger.fence)
        await archive.drop_first(1, ledger.fence)
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("DELETE FROM counter WHERE name = ?", (FORGOTTEN,)).rowcount == 1
        connection.execute("PRAGMA user_version = 5")


async def test_what_an_older_ledger_forgot_without_a_note_is_not_denied(tmp_path: Path) -> None:
    """It kept its highest fence once it forgot a reservation: an empty answer about that time must not say that nothing was."""
    await make_version_5(tmp_path / DATABASE)
    begun = time.time()
    seen: list[int] = []
    for _ in range(2):
        async with open_store(tmp_path / DATABASE, "boot-2") as store:
            saved = await store.load()
            assert [gpu.uuid for one, _ in saved.reservations for gpu in one.gpus] == ["GPU-a"]
            seen.append(await EndedStore(store, "boot-2", NOW).forgotten())
    assert begun <= seen[0] == seen[1] <= time.time() + 1, "noted once"
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [(1000, 1000, False), (1000, 1, False), (500, 500, True), (500, 501, False), (1, 1000, False)],
)
async def test_the_database_itself_refuses_more_of_a_gpu_than_there_is(
    tmp_path: Path, first: int, second: int, fits: bool
) -> None:
    grants = [
        ledger.confirm(ledger.grant(order(), [reserved("GPU-a", milli=milli)], now=NOW, wall=WALL))
        for ledger, milli in ((Ledger(fence=10), first), (Ledger(fence=20), second))
    ]
    async with open_store(tmp_path / DATABASE, "boot") as store:
        await store.load()
        await store.save(grants[:1], [])
        if fits:
            await store.save(grants[1:], [])
        else:
            with pytest.raises(UnavailableError) as caught:
                await store.save(grants[1:], [])
            assert caught.value.reason == "STATE_CONFLICT"
        assert len((await store.load()).reservations) == (2 if fits else 1)


@pytest.mark.parametrize("version", [4, VERSION + 1])
async def test_a_file_of_another_version_is_refused_and_stays(tmp_path: Path, version: int) -> None:
    """One that is older than the first that is migrated (docs/adr/0038), or newer."""
    path = tmp_path / DATABASE
    await make_version_5(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(FailedPreconditionError, match=f"has schema version {version}") as refused:
        async with open_store(path, "boot"):
            pass
    assert refused.value.reason == "STATE_VERSION"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)
