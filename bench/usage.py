"""What it costs to know who used what: the disk of a year, reports over it, and a look at all GPUs of a large fleet.

python -m bench usage [--gpus 200] [--days 365] [--reservations 6] [--nodes 4000]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sqlite3
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from uuid import UUID

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.accounting import DAY, Account, granted_since
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import (
    Ask,
    Gpu,
    Node,
    NodeState,
    Order,
    Reservation,
    ReservedGpu,
    Score,
    State,
    moved,
)
from gpuscale.allocator.domain.usage import GpuUsage, UseState
from gpuscale.allocator.state.store import open_store
from gpuscale.allocator.state.usage_ledger import UsageLedger, rows_of
from gpuscale.allocator.usecases.accounting import LOOK, Accounting
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.common.runtime.tasks import SystemClock

BOOT, WALL = "boot", datetime.now(UTC)
TODAY = int(WALL.timestamp() * 1000) // DAY
PER_NODE = 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench usage")
    for name, default in (("gpus", 200), ("days", 365), ("reservations", 6), ("nodes", 4000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_year(Path(folder) / DATABASE, asked.gpus, asked.days, asked.reservations))
    asyncio.run(_looks(asked.nodes))


async def _year(path: Path, gpus: int, days: int, reservations: int) -> None:
    async with open_store(path, BOOT) as store:
        await store.load()
    rows = _fill(path, gpus, days, reservations)
    async with open_store(path, BOOT) as store:
        await store.load()
        ledger, began = UsageLedger(store), perf_counter()
        await ledger.tidy(TODAY, 10 * days)
        print(
            f"{rows:,} rows of {days} days of {gpus} GPUs; those over 90 days added up in {perf_counter() - began:.1f} s"
        )
        for what, dimensions in (
            ("user", ("owner",)),
            ("label", ("labels",)),
        ):
            began = perf_counter()
            found = await ledger.query(TODAY - days, TODAY + 1, dimensions)
            print(f"{'report by ' + what:<24}{perf_counter() - began:8.3f} s, {len(found):,} sums")
    with closing(sqlite3.connect(path)) as connection:
        pages, free, size, kept = connection.execute(
            "SELECT p.page_count, f.freelist_count, s.page_size, (SELECT count(*) FROM usage)"
            " FROM pragma_page_count p, pragma_freelist_count f, pragma_page_size s"
        ).fetchone()
    print(
        f"{'disk':<24}{pages * size / 1e6:8.0f} MB, {(pages - free) * size / 1e6:.0f} MB in use by {kept:,} rows"
    )


def _fill(path: Path, gpus: int, days: int, reservations: int) -> int:
    """Write the rows of a year as the allocator leaves them; returns how many there are."""
    chance, ledger, count = random.Random(1), Ledger(), 0
    seen = GpuUsage(UseState.BUSY, 40 << 30, utilization_percent=71.5, power_watts=300.0)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        for day in range(TODAY - days, TODAY):
            for gpu in range(gpus):
                for _ in range(reservations):
                    user = chance.randrange(50)
                    one = _granted(ledger, f"user{user}", [_gpu(gpu)])
                    account = Account(one, granted_since(one))
                    length = chance.randrange(60_000, DAY // reservations)
                    account.look(account.until + length, day * DAY + DAY // 2, {_gpu(gpu).uuid: seen})
                    rows = rows_of(account, "", "released")
                    names = ", ".join(f":{name}" for name in rows[0])
                    put = f"INSERT INTO usage ({', '.join(rows[0])}) VALUES ({names})"
                    connection.executemany(put, rows)
                    count += len(rows)
    return count


def _gpu(number: int) -> ReservedGpu:
    uuid = f"GPU-{UUID(int=number + (7 << 100))}"
    node = f"host-{number // PER_NODE}"
    return ReservedGpu(
        node, uuid, number % PER_NODE, "NVIDIA H100 80GB HBM3", simulated=False, score=Score(1.0, ())
    )


def _granted(ledger: Ledger, owner: str, gpus: list[ReservedGpu]) -> Reservation:
    labels = {"team": f"team{hash(owner) % 8}", "project": f"project{hash(owner) % 20}"}
    ask = Ask(len(gpus), 0, 100.0)
    order = Order(f"{owner}-{ledger.fence}", "f", "job", owner, 60.0, labels, ask, tenant=labels["team"])
    granted = ledger.grant(order, gpus, now=1000.0, wall=WALL)
    ledger.settle(granted)
    return moved(granted, state=State.ACTIVE)


async def _looks(nodes: int) -> None:
    """All GPUs of a fleet held, a reservation a node: the CPU of one look at them, as a share of the time between two."""
    clock, ledger, view = SystemClock(), Ledger(), FleetView({})
    nothing: Any = None  # is written
    accounting = Accounting(ledger, view, nothing, clock, 1830)
    until = clock.now() + 3600
    for node in range(nodes):
        held = [_gpu(node * PER_NODE + nth) for nth in range(PER_NODE)]
        shown = tuple(
            Gpu(
                one.uuid,
                one.index,
                one.model,
                simulated=True,
                trouble="",
                memory_total_bytes=80 << 30,
                memory_free_bytes=40 << 30,
                utilization_percent=71.5,
                fresh_until=until,
                energy_joules=1.0,
            )
            for one in held
        )
        view.apply([Node(held[0].node, node, NodeState.ONLINE, shown)], full=False)
        order = Order(str(node), "f", "job", "ann", 60.0, {}, Ask(PER_NODE, 0, 100.0))
        accounting.note(ledger.confirm(ledger.grant(order, held, now=clock.now(), wall=WALL)))
    took: list[float] = []
    for _ in range(3):
        began = process_time()
        await accounting.look()
        took.append(process_time() - began)
    share = 100 * min(took) / LOOK
    print(
        f"{'look at':<24}{nodes * PER_NODE:,} GPUs: {min(took):.3f} s of CPU each {LOOK:g} s, {share:.1f} % of a core"
    )


if __name__ == "__main__":
    main()
