"""What ended reservations cost that are on disk and not in memory: the start, a page, a look-up, and to drop some.

python -m bench ended [--records 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Ask, Order, ReservedGpu, Score, State
from gpuscale.allocator.state import integrity as sealing
from gpuscale.allocator.state import schema
from gpuscale.allocator.state.archive import EndedStore
from gpuscale.allocator.state.store import open_store, to_row

BOOT, NOW, WALL = "boot", 1000.0, datetime.now(UTC)
ROW_BYTES = 700


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench ended")
    parser.add_argument("--records", type=int, default=1_000_000)
    records: int = parser.parse_args().records
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(Path(folder) / DATABASE, records))


async def _measure(path: Path, records: int) -> None:
    async with open_store(path, BOOT) as store:
        await store.load()
    size = _fill(path, records)
    print(f"{records:,} records, {size / 1e6:,.0f} MB")
    began = perf_counter()
    async with open_store(path, BOOT) as store:
        await store.load()
        ended = EndedStore(store, BOOT, NOW)
        await ended.totals()
        print(f"{'start':<24}{perf_counter() - began:8.3f} s")
        middle = records // 2
        await _timed("page of 1,000", lambda: ended.page(after=middle, holder="", most=1000))
        await _timed("one by its id", lambda: ended.find(ids=[f"r{middle}-aa"]))
        await _timed("64 dropped", lambda: ended.drop_first(64, records))


async def _timed(what: str, work: Callable[[], Awaitable[object]]) -> None:
    began = perf_counter()
    await work()
    print(f"{what:<24}{perf_counter() - began:8.3f} s")


def _fill(path: Path, records: int) -> int:
    """Write records as `EndedStore.retire` leaves them; returns the size of the file."""
    names = [column.name for column in schema.Table.metadata.tables["ended"].columns]
    values = ", ".join(f":{name}" for name in names)
    counters = {schema.ENDED_RECORDS: records, schema.ENDED_BYTES: records * ROW_BYTES, schema.FENCE: records}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executemany(f"INSERT INTO ended ({', '.join(names)}) VALUES ({values})", _rows(records))
        for name, value in counters.items():
            row = sealing.sealed({"name": name, "value": value})
            connection.execute(
                "INSERT INTO counter (name, value, checksum) VALUES (:name, :value, :checksum)", row
            )
    return path.stat().st_size


def _rows(records: int) -> Iterator[dict[str, object]]:
    ledger, order = (
        Ledger(),
        Order(str(uuid.uuid4()), "f" * 64, "job", "ann", 60.0, {}, Ask(1, 0, 100.0)),
    )
    gpus = [
        ReservedGpu("n0", f"GPU-{index}", index, "A100", simulated=False, score=Score(1.0, ()))
        for index in range(2)
    ]
    live = ledger.confirm(ledger.grant(order, gpus, now=NOW, wall=WALL))
    row = to_row(ledger.close(live, State.RELEASED, now=NOW, wall=WALL), BOOT, 1)
    for fence in range(1, records + 1):
        row |= {
            "id": f"r{fence}-aa",
            "fence": fence,
            "request_id": str(uuid.uuid4()),
            "deadline_seconds": NOW + fence,
        }
        yield row | {"lasting_sum": sealing.lasting_sum(row), "life_sum": sealing.life_sum(row)}
