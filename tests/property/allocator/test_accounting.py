"""What the usage ledger adds up to, over random lives of leases: exactly what was granted, whatever was killed in between."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, create_engine, func, select

from gpuscale.allocator.app import add_figures
from gpuscale.allocator.domain.accounting import DAY, HOLD, Account, by_day, ended_at, granted_since, month_of
from gpuscale.allocator.domain.ledger import Ledger, rebased
from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.state.schema import Table
from gpuscale.allocator.state.usage_ledger import UsageLedger
from gpuscale.allocator.usecases.accounting import Accounting
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime.metrics_text import AT_ONCE, MetricsPage
from tests.support.allocator_values import gpu, node, order, reserved
from tests.support.clock import ManualClock

T = TypeVar("T")
USAGE = Table.metadata.tables["usage"]
ENDS = (State.RELEASED, State.EXPIRED, State.CANCELLED, State.LOST)
SHARES = ((1000,), (250, 250), (333, 1000), (1,))
STEPS = (
    *("pass", "grant", "renew", "end", "look", "checkpoint", "kill", "reboot", "step", "fail", "tidy"),
    *("pass", "renew", "look"),
)


@dataclass
class Disk:
    """What survives a kill: the reservations, each with its boot, and the ledger. A write that is to `fail` leaves no trace."""

    reservations: dict[str, tuple[Reservation, str]] = field(default_factory=dict[str, Any])
    short: bool = False
    fails: bool = False

    def __post_init__(self) -> None:
        self.connection = create_engine("sqlite://").connect()
        Table.metadata.create_all(self.connection, [USAGE])
        self.connection.commit()

    async def change(self, work: Callable[[Connection], T]) -> T:
        await asyncio.sleep(0)  # others run while a thread writes
        if self.fails:
            self.fails = False
            raise UnavailableError("the disk is gone")
        result = work(self.connection)
        self.connection.commit()
        return result

    async def read(self, work: Callable[[Connection], T]) -> T:
        return work(self.connection)


class Life:
    """Lives of an allocator, one after the other, and what each lease was granted: milliseconds by the boot clock, by its id."""

    def __init__(self) -> None:
        self.clock, self.disk = ManualClock(), Disk()
        self.granted: defaultdict[str, int] = defaultdict(int)
        self.since: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.boots = 1
        self._grants = 0

    async def begin(self) -> None:
        self.began = round(self.clock.wall().timestamp() * 1000) // DAY
        saved, boot, now = [*self.disk.reservations.values()], self.clock.boot_id, self.clock.now()
        self.ledger = Ledger()
        self.view = FleetView({})
        self.accounting = Accounting(self.ledger, self.view, UsageLedger(self.disk), self.clock, 100_000)  # type: ignore[arg-type]
        current = [one if of == boot else rebased(one, now) for one, of in saved]
        await self.accounting.restore(saved, current)
        moved = [one for one, (old, _) in zip(current, saved, strict=True) if one is not old and one.live]
        await self.write(moved)
        for one in moved:  # the old boot's clock ends at the last moment that is on disk
            self.granted[one.id] += self.known[one.id] - self.since[one.id]
            self.since[one.id] = self.known[one.id] = granted_since(one)
        self.ledger.restore(current)

    async def write(self, changed: list[Reservation]) -> None:
        work = self.accounting.beside(changed)
        await self.disk.change(work or (lambda _: None))
        for one in changed:
            self.disk.reservations[one.id] = one, self.clock.boot_id

    async def play(self, step: str, number: int) -> None:
        live = [*self.ledger.reservations(ended=False)]
        one = live[number % len(live)] if live else None
        now = self.clock.now()
        match step:
            case "pass":
                self.clock.advance(number / 777)
            case "step":
                self.clock.step_wall((number - 50_000) * 600)
            case "fail":
                self.disk.fails = True
            case "kill" | "reboot":
                if step == "reboot":
                    self.boots += 1
                    self.clock.reboot(f"boot-{self.boots}")
                    self.clock.advance(number / 777)
                self.disk.fails = False
                await self.begin()
            case "look":
                states = (None, 0.0, 99.0)
                held = sorted({part.uuid for one in live for part in one.gpus})
                used = [states[(number + nth) % 3] for nth in range(len(held))]
                fresh = now + number % 2 - 0.5
                shown = [
                    gpu(uuid, utilization=of, fresh_until=fresh) for uuid, of in zip(held, used, strict=True)
                ]
                self.view.apply([node("n0", *shown)], full=True)
                await self.accounting.look()
            case "checkpoint" | "tidy":
                write = self.accounting.tidy if step == "tidy" else self.accounting.checkpoint
                if await self.tried(write()):
                    self.known |= {one.id: round(now * 1000) for one in live}
            case "grant":
                await self.grant(number)
            case _ if one is not None:
                await (self.renew(one, number) if step == "renew" else self.end(one, number))
            case _:
                pass

    async def tried(self, write: Any) -> bool:
        try:
            await write
        except UnavailableError:
            return False
        return True

    async def grant(self, number: int) -> None:
        self._grants += 1
        shares = SHARES[number % len(SHARES)]
        gpus = [reserved(f"GPU-{self._grants}-{nth % 2}", milli=milli) for nth, milli in enumerate(shares)]
        one = self.ledger.grant(order(), gpus, now=self.clock.now(), wall=self.clock.wall())
        if self.disk.fails:
            self.ledger.withdraw(one)
            self.disk.fails = False
            return
        confirmed = self.ledger.confirm(one)
        self.disk.reservations[one.id] = confirmed, self.clock.boot_id
        self.accounting.note(confirmed)
        self.since[one.id] = self.known[one.id] = granted_since(one)

    async def renew(self, before: Reservation, number: int) -> None:
        after = self.ledger.renew(before.id, before.fence, 2.0 + number % 60, self.clock.now())
        if await self.tried(self.write([after])):
            self.accounting.note(after)
            self.known[after.id] = max(self.known[after.id], granted_since(after))
        else:
            self.ledger.undo(before, after)

    async def end(self, one: Reservation, number: int) -> None:
        now, wall = self.clock.now(), self.clock.wall()
        closed = self.ledger.close(one, ENDS[number % len(ENDS)], now=now, wall=wall)
        self.clock.advance(number / 77_777)
        await self.accounting.look()  # while the end is on its way
        if await self.tried(self.write([closed])):
            self.ledger.settle(closed)
            self.accounting.note(closed)
            self.granted[one.id] += ended_at(closed) - self.since.pop(one.id)
        else:
            self.ledger.reopen(closed)


@example([("grant", 0), ("pass", 1), ("checkpoint", 0), ("step", 63_104), ("tidy", 0)])  # by 91 days
@example([("grant", 0), ("renew", 0), ("pass", 777), ("renew", 0), ("reboot", 0)])
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 100_000)), min_size=15, max_size=60))
@settings(max_examples=settings().max_examples // 2)
def test_the_ledger_adds_up_to_what_was_granted_to_the_millisecond(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        life = Life()
        await life.begin()
        for step, number in steps:
            await life.play(step, number)
        life.disk.fails = False
        expected = 0
        for one in [*life.ledger.reservations(ended=False)]:
            await life.end(one, 1)
        for key, millis in life.granted.items():
            milli = sum(part.milli for part in life.disk.reservations[key][0].gpus)
            expected += millis * milli
            rows = await life.accounting.usage.of_reservation(key)
            outcomes = {row["outcome"] for row in rows} - {""}
            # Its days are added up one by one: after a step of the wall clock the last of them may be gone first.
            assert len(outcomes) <= 1
            assert outcomes or any(step == "tidy" for step, _ in steps)
        sums = [func.coalesce(func.sum(USAGE.c[name]), 0) for name in ("granted", "busy", "idle", "ends")]
        found: list[int] = [*life.disk.connection.execute(select(*sums)).one()]
        granted, busy, idle, ends = found
        assert (granted, ends) == (expected, len(life.granted))
        assert 0 <= busy + idle <= granted
        assert sum(total.granted for total in life.accounting.totals.values()) <= granted
        month = month_of(month_of(life.began)[0] - 1)
        for _ in range(3):  # those that were read at the last start, and counted on since
            of_month = USAGE.c.day.between(month[0], month[1] - 1)
            whole = select(func.coalesce(func.sum(USAGE.c.granted), 0)).where(of_month)
            counted = life.accounting.months[month[0], ""]
            assert counted == life.disk.connection.execute(whole).scalar_one()
            month = month_of(month[1])

    asyncio.run(run())


async def test_others_run_between_slices_of_what_all_leases_take(monkeypatch: pytest.MonkeyPatch) -> None:
    life, done, none, begun = Life(), [0], SimpleNamespace(caps=(), sums=()), Account.__post_init__
    await life.begin()

    def count(*_: object) -> None:
        done[-1] += 1

    monkeypatch.setattr(Account, "__post_init__", lambda one: count(begun(one)))
    monkeypatch.setattr(MetricsPage, "add", count)
    others: Any = SimpleNamespace(waiting=dict, longest_wait=lambda _: 0.0, found=none)
    scrape = partial(add_figures, life.accounting, others, others, None, MetricsPage())
    for work in (life.accounting.checkpoint, life.accounting.look, scrape):
        for _ in range(10 * AT_ONCE):
            await life.grant(0)
        life.clock.advance(1.0)
        task = asyncio.create_task(work())
        while not task.done():
            done.append(0)
            await asyncio.sleep(0)
    assert max(done) < 2 * AT_ONCE < 50 * AT_ONCE <= sum(done)


async def test_a_lease_whose_only_reading_came_too_late_has_an_unknown_energy_and_not_none() -> None:
    life = Life()
    await life.begin()
    await life.play("grant", 0)
    [one] = life.ledger.reservations(ended=False)
    life.clock.advance(HOLD / 1000 + 1)
    now = life.clock.now()
    late = replace(gpu(one.gpus[0].uuid, fresh_until=now + 3), power_watts=300.0, read_at=now)
    life.view.apply([node("n0", late)], full=True)
    closed = life.ledger.close(one, State.RELEASED, now=now, wall=life.clock.wall())
    await life.write([closed])
    assert life.disk.connection.execute(select(USAGE.c.energy)).scalar_one() is None


@given(st.integers(0, 10 * DAY), st.integers(DAY, 40_000 * DAY))
def test_a_piece_of_time_is_split_at_midnight_and_stays_as_long_as_it_is(piece: int, end: int) -> None:
    parts = list(by_day(piece, end))
    assert sum(part for _, part in parts) == piece
    assert all(max(day * DAY, end - piece) + part == min((day + 1) * DAY, end) for day, part in parts if part)
