"""A file of an earlier version opens, everything in it is as it was, and what is new in this version works."""

import sqlite3
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpuscale.autoscaler.backtest.world import RecordedReading
from gpuscale.autoscaler.signals.watchers import QueueWatchers
from gpuscale.autoscaler.state import backtest_store, store, watcher_store
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Store
from tests.support.autoscaler_values import endpoint, lease, replica, spec

DROPPED = {
    1: ("watcherrow.pattern", "watcherrow.rates"),
    2: ("readingrow",),
    3: ("replicarow.lease_token",),
    4: ("readingrow.since", "repetitionrow"),
    5: ("endpointrow.sets", "replicarow.worker_group"),
    6: ("endpointrow.tenant",),
    7: ("endpointrow.creator",),
    8: ("replicarow.revocation",),
    9: ("decision_by_time",),
    10: ("endpointrow.delete_time", "replicarow.end_reason"),
    11: ("backtestrow", "backtestreportrow"),
}
"""Tables, columns and indexes that a version lacks and the next one has."""
PLAIN = "62e8e41e71323853210c366dabbee2686573de31ae51268211a4ee1b03afcc36"
WITH_RATES = "6c263d394c7c7f08e8aa33b45deb2442cd3aa7aa693631877ebaf30732838425"
"""What earlier versions stored of the request that made the watcher."""


def opened(path: Path) -> AbstractAsyncContextManager[Store]:
    return Store.open(Sqlite(path, store.METADATA, store.VERSION, store.MIGRATIONS), name="autoscaler")


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
        columns = "id, broker, virtual_host, queue, interval_seconds, etag, create_time_us, request_id, request_fingerprint"
        more, stated = ("", "") if version == 1 else (", pattern, rates", ", 1, 1")
        values = f"'jobs', 'default', '/', 'q', 2.5, 'e', 0, 'r', '{WITH_RATES if stated else PLAIN}'"
        old.execute(f"INSERT INTO watcherrow ({columns}{more}) VALUES ({values}{stated})")
        old.execute(f"PRAGMA user_version={version}")


def test_every_version_is_tried() -> None:
    assert DROPPED.keys() == store.MIGRATIONS.keys() == set(range(1, store.VERSION))


@pytest.mark.parametrize("version", DROPPED)
async def test_a_file_of_an_earlier_version_is_taken_over_with_all_that_it_has(
    tmp_path: Path, version: int
) -> None:
    """Leases of before version 4 have no token: their replicas were admitted when they started."""
    path = tmp_path / "a.db"
    made, waits, runs = endpoint(spec(), desired=3), replica(), replica(1, lease=lease())
    async with opened(path) as state:
        await state.write(partial(store.save_endpoint, one=made))
        for one in (waits, runs):
            await state.write(partial(store.add_replica, one=one))
    make_old(path, version)
    expected = runs if version >= 4 else replace(runs, lease=replace(lease(), token=""))
    measured = RecordedReading(1000.0, 1.0, 0.0, since=970.0)
    for _ in range(2):
        async with opened(path) as state:
            [watcher] = await state.read(watcher_store.load)
            assert (watcher.watcher.spec.pattern, watcher.watcher.spec.rates) == (version > 1,) * 2
            watchers = QueueWatchers(state, {}, SystemClock(), lambda _: ())
            await watchers.load()
            again = await watchers.create("jobs", watcher.watcher.spec, request_id="r")
            assert again == watcher.watcher, "a request that is repeated across an upgrade is known"
            assert await state.read(store.endpoints) == [made]
            assert await state.read(store.replicas) == [waits, expected]
            await state.write(partial(watcher_store.keep, readings=[("e", measured)]))
            kept = partial(watcher_store.readings, endpoint="e", since=0.0, until=2000.0)
            assert await state.read(kept) == [measured]
            assert await state.read(backtest_store.load) == []
            granted = replace(expected, lease=lease(2))
            await state.write(partial(store.save_replica, one=granted))
            assert await state.read(store.replicas) == [waits, granted]
            await state.write(partial(store.save_replica, one=expected))
    with closing(sqlite3.connect(path)) as migrated, closing(sqlite3.connect(tmp_path / "new.db")) as new:
        async with opened(tmp_path / "new.db"):
            pass
        indexes = "SELECT name FROM sqlite_master WHERE type = 'index' ORDER BY name"
        assert migrated.execute(indexes).fetchall() == new.execute(indexes).fetchall()
