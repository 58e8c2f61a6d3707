"""A file of an earlier version opens, everything in it is as it was, and what is new in this version works."""

import sqlite3
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpuscale.autoscaler.state import backtest_store, decision_log, store
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Store
from tests.support.autoscaler_values import endpoint, lease, replica, spec

DROPPED = {
    9: ("decision_by_time",),
    10: ("endpointrow.delete_time", "replicarow.end_reason"),
    11: ("backtestrow", "backtestreportrow"),
}
"""Tables, columns and indexes that a version lacks and the next one has."""


def opened(path: Path) -> AbstractAsyncContextManager[Store]:
    file = Sqlite(path, store.METADATA, store.VERSION, store.MIGRATIONS)
    return Store.open(file, name="autoscaler")


def make_old(path: Path, version: int) -> None:
    """Turn a file into one of an earlier version."""
    with closing(sqlite3.connect(path)) as old, old:
        for lacking in (one for at in range(version, store.VERSION) for one in DROPPED[at]):
            table, _, column = lacking.partition(".")
            known = {row[1] for row in old.execute(f"PRAGMA table_info({table})")}
            if column in known:
                old.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
            elif not column:
                found = old.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchone()
                old.execute(f"DROP {found[0]} {table}" if found else "SELECT 1")
        old.execute(f"PRAGMA user_version={version}")


def test_every_version_is_tried() -> None:
    assert DROPPED.keys() == store.MIGRATIONS.keys() == set(range(9, store.VERSION))


@pytest.mark.parametrize("version", DROPPED)
async def test_a_file_of_an_earlier_version_is_taken_over_with_all_that_it_has(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "a.db"
    made, waits, runs = endpoint(spec(), desired=3), replica(), replica(1, lease=lease())
    async with opened(path) as state:
        await state.write(partial(store.save_endpoint, one=made))
        for one in (waits, runs):
            await state.write(partial(store.add_replica, one=one))
    make_old(path, version)
    for _ in range(2):
        async with opened(path) as state:
            assert await state.read(store.endpoints) == [made]
            assert await state.read(store.replicas) == [waits, runs]
            assert await state.read(backtest_store.load) == []
            assert await state.read(partial(decision_log.last, endpoint=made.id)) is None
            granted = replace(runs, lease=lease(2))
            await state.write(partial(store.save_replica, one=granted))
            assert await state.read(store.replicas) == [waits, granted]
            await state.write(partial(store.save_replica, one=runs))
    with closing(sqlite3.connect(path)) as migrated, closing(sqlite3.connect(tmp_path / "new.db")) as new:
        async with opened(tmp_path / "new.db"):
            pass
        indexes = "SELECT name FROM sqlite_master WHERE type = 'index' ORDER BY name"
        assert migrated.execute(indexes).fetchall() == new.execute(indexes).fetchall()


@pytest.mark.parametrize("version", [8, store.VERSION + 1])
async def test_a_file_of_another_version_is_refused_and_stays(tmp_path: Path, version: int) -> None:
    """One that is older than the first that is migrated (docs/adr/0038), or newer."""
    path = tmp_path / "a.db"
    async with opened(path):
        pass
    with closing(sqlite3.connect(path)) as later, later:
        later.execute(f"PRAGMA user_version={version}")
    with pytest.raises(FailedPreconditionError) as refused:
        async with opened(path):
            pass
    assert refused.value.reason == "STATE_VERSION"
    with closing(sqlite3.connect(path)) as later:
        assert later.execute("PRAGMA user_version").fetchone() == (version,)
