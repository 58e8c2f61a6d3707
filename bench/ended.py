"""What archived reservations cost: the start, a page, a look-up, to drop some, and what is granted and archived beside them.

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
from time import perf_counter, process_time

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Ask, Order, Reservation, ReservedGpu, Score, State
from gpuscale.allocator.state import integrity as sealing
from gpuscale.allocator.state import schema
from gpuscale.allocator.state.archive import BATCH, EndedStore, RecordFilter
from gpuscale.allocator.state.store import AllocatorStore, open_store, to_row

BOOT, NOW, WALL = "boot", 1000.0, datetime.now(UTC)
ROW_BYTES = 700
BESIDE = 4096
"""Reservations that are granted beside the archived ones, in each of three turns."""


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
        await _timed("page of 1,000", lambda: ended.page(RecordFilter(), after=middle, most=1000))
        await _timed("one by its id", lambda: ended.find(ids=[f"r{middle}-aa"]))
        await _timed("64 dropped", lambda: ended.drop_first(64, records))
        for _ in range(3):
            await _beside(store, ended, Ledger(records + 1))
            records += BESIDE


async def _beside(store: AllocatorStore, ended: EndedStore, ledger: Ledger) -> None:
    """Grant, end and archive `BESIDE` reservations, 32 in a transaction; CPU of all threads a reservation, and seconds in all."""
    cpu, began, over = process_time(), perf_counter(), list[Reservation]()
    for _ in range(BESIDE // 32):
        some = [ledger.confirm(_grant(ledger)) for _ in range(32)]
        await store.save(some, [])
        ends = [ledger.close(one, State.RELEASED, now=NOW, wall=WALL) for one in some]
        await store.save([], ends)
        for one in ends:
            ledger.settle(one)
        over += ends
    cpu, cpu_of_archiving = process_time() - cpu, process_time()
    for start in range(0, BESIDE, BATCH):
        await ended.retire([one.fence for one in over[start : start + BATCH]], ledger.fence)
    cpu_of_archiving = process_time() - cpu_of_archiving
    print(
        f"{BESIDE:,} granted and ended {cpu / BESIDE * 1e6:5.0f} us of CPU each,"
        f" archived {cpu_of_archiving / BESIDE * 1e6:5.0f}; {perf_counter() - began:.2f} s in all"
    )


async def _timed(what: str, work: Callable[[], Awaitable[object]]) -> None:
    began = perf_counter()
    await work()
    print(f"{what:<24}{perf_counter() - began:8.3f} s")


def _fill(path: Path, records: int) -> int:
    """Write records as `EndedStore.retire` leaves them; returns the size of the file."""
    names = [column.name for column in schema.Table.metadata.tables["reservation"].columns]
    values = ", ".join(f":{name}" for name in names)
    counters = {schema.ENDED_RECORDS: records, schema.ENDED_BYTES: records * ROW_BYTES, schema.FENCE: records}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executemany(
            f"INSERT INTO reservation ({', '.join(names)}) VALUES ({values})", _rows(records)
        )
        for name, value in counters.items():
            row = sealing.sealed({"name": name, "value": value})
            connection.execute(
                "INSERT INTO counter (name, value, checksum) VALUES (:name, :value, :checksum)", row
            )
    return path.stat().st_size


def _grant(ledger: Ledger) -> Reservation:
    order = Order(str(uuid.uuid4()), "f" * 64, "job", "ann", 60.0, {}, Ask(1, 0, 100.0))
    score, index = Score(1.0, ()), (ledger.fence + 1) % 4096
    gpus = [
        ReservedGpu("n0", f"GPU-{index}-{nth}", nth, "A100", simulated=False, score=score) for nth in range(2)
    ]
    return ledger.grant(order, gpus, now=NOW, wall=WALL)


def _rows(records: int) -> Iterator[dict[str, object]]:
    ledger = Ledger()
    live = ledger.confirm(_grant(ledger))
    row = to_row(ledger.close(live, State.RELEASED, now=NOW, wall=WALL), BOOT, 1) | {"archived": 1}
    for fence in range(1, records + 1):
        row |= {
            "id": f"r{fence}-aa",
            "fence": fence,
            "request_id": str(uuid.uuid4()),
            "deadline_seconds": NOW + fence,
        }
        yield row | sealing.sums(row)
