"""Use cases of accounting: sample the use of GPUs, keep the accounts, and report who used what.

Sampling costs no call: each node with leases sends complete readings within 10 s anyway (docs/adr/0029, 0041). Accounts of
ended reservations are written with the end. Live ones are written at their first renewal, which overwrites their start on disk,
and every CHECKPOINT seconds: a kill loses nothing of what was granted, and at most that much of what was used.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from math import ceil
from typing import NoReturn

from gpuscale.allocator.domain import accounting
from gpuscale.allocator.domain.durations import Durations, Kin, kin_of, lasted
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.domain.usage import gpus_of, read_since
from gpuscale.allocator.state import usage_ledger
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.common.errors import GpuscaleError, NotFoundError
from gpuscale.common.names import reservation_name
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import Clock, in_slices, uninterrupted

LOOK = 10.0
"""Seconds between looks: as often as readings of held GPUs are sure to arrive."""
CHECKPOINT = 6
"""Looks between checkpoints."""
LEARNED_DAYS = 30
"""Days of the ledger from which durations are learned at start."""
PAST = 300.0
"""Seconds between reloads of past use."""
TIDY = 360
"""Looks between tidying of the ledger: an hour."""
SLICE, WRITTEN = 16, 64
"""Reservations that are looked at, or written, before other calls run: about 1 ms."""
TENANTS, OTHER = 100, "other"
"""Tenants with their own figures; later ones are combined."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GpuStatistics:
    """The use of one GPU by a reservation: `tally` counts from its grant."""

    uuid: str
    node: str
    model: str
    milli: int
    tally: accounting.Tally


@dataclass(eq=False)
class Accounting:
    """The accounts of all live reservations. `run` must run, after `restore`.

    `tell` is called with each reservation whose use has changed, `turn` when a calendar month has begun. `totals` adds up, by
    tenant and since the start, what was granted and used in microseconds of whole GPUs. `months` has what was granted in the
    months around the start and later, `durations` how long reservations lasted.
    """

    ledger: Ledger
    view: FleetView
    usage: usage_ledger.UsageLedger
    clock: Clock
    keep_days: int
    tell: Callable[[Reservation], None] = lambda _: None
    turn: Callable[[], None] = lambda: None
    totals: dict[str, accounting.Tally] = field(default_factory=dict[str, accounting.Tally], init=False)
    months: accounting.MonthlyUse = field(default_factory=accounting.MonthlyUse, init=False)
    durations: Durations = field(default_factory=Durations, init=False)
    _today: int = field(default=0, init=False)
    _accounts: dict[str, accounting.Account] = field(
        default_factory=dict[str, accounting.Account], init=False
    )
    _fresh: dict[str, Reservation] = field(default_factory=dict[str, Reservation], init=False)
    """As granted, of those without an account: one is opened at the first look or change."""
    _unread: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]], init=False)
    """The day, and what was granted, of those whose end is being written without an account."""
    _states: dict[str, list[str]] = field(default_factory=dict[str, list[str]], init=False)
    _saved_at: float = field(default=float("-inf"), init=False)

    async def restore(self, saved: Sequence[tuple[Reservation, str]], current: Sequence[Reservation]) -> None:
        """Open the accounts of what was on disk, each with the boot of its deadline; `current` is the same in this boot."""
        self._today = self._wall() // accounting.DAY
        month = accounting.month_of(accounting.month_of(self._today)[0] - 1)
        for _ in range(3):  # the wall clock may be set back a little
            for used in await self.usage.query(*month, ["tenant"]):
                self.months[month[0], used.tenant] += used.tally.granted
            month = accounting.month_of(month[1])
        for owner, tenant, number, milli, lasts in await self.usage.lasted(self._today - LEARNED_DAYS):
            self.durations.add(Kin(owner, tenant, number, milli), lasts / 1000)
        pairs = zip(saved, current, strict=True)
        held = [(one, boot, now) for (one, boot), now in pairs if one.live and one.gpus]
        standings = await self.usage.standings([one.id for one, _, _ in held])
        for one, boot, now in held:
            there = standings.get(one.id)
            known = there.until_ms if there and there.boot_id == boot else None
            self._put(accounting.resumed(one, now, known, there.part if there else 0, self._wall()))

    def beside(self, changed: Iterable[Reservation]) -> usage_ledger.Work | None:
        """What to write with reservations that change: the last rows of ended ones, the first of continuing ones."""
        rows: usage_ledger.Rows = []
        never_read: usage_ledger.Rows = []
        now, wall = self.clock.now(), self._wall()
        for one in changed:
            live, first = one.live, self._fresh.get(one.id)
            if first is not None:
                if not live and (unread := self._rows_unread(first, one, now, wall)):
                    never_read += unread
                    continue
                self._opened(first)
            account = self._accounts.get(one.id)
            if live and one.gpus and (account is None or account.reservation.fence != one.fence):
                account = self._opened(one)
            left = live and one.waiting  # to restart
            if account is None or (live and account.kept and not left):
                continue
            if live and not left:
                account.count(account.until, wall)
                rows += usage_ledger.rows_of(account, self.clock.boot_id)
            else:
                end = accounting.granted_since(one) if left else accounting.ended_at(one)
                if account.seen:
                    account.count(end, wall, last=True)
                else:  # it was short: readings since it began cover all its time
                    self._look(account, now, wall, end, account.until / 1000)
                rows += usage_ledger.rows_of(account, "", "" if left else str(one.end_cause))
        return usage_ledger.putting(rows, never_read) if rows or never_read else None

    def _rows_unread(self, first: Reservation, one: Reservation, now: float, wall: int) -> usage_ledger.Rows:
        """The rows of a reservation that ends on the day of its grant, if none of its GPUs was read since; else none."""
        since, end = accounting.granted_since(first), accounting.ended_at(one)
        [(day, piece), *others] = accounting.by_day(end - since if end > since else 0, wall)
        milli, node_of = {gpu.uuid: gpu.milli for gpu in first.gpus}, self.view.get
        read = [gpu for gpu in first.gpus if read_since(gpu, node_of, now, since / 1000)]
        if read or others or len(milli) < len(first.gpus):
            return []
        self._unread[one.id] = day, piece * sum(milli.values())
        return usage_ledger.unread_rows(
            first, accounting.first_part(first) + 1, day, piece, end, str(one.end_cause)
        )

    def note(self, one: Reservation, _news: bool = True) -> None:
        """A reservation was granted, changed or ended, and that is on disk."""
        if not one.live:
            day, granted = self._unread.pop(one.id, (0, 0))
            if self._fresh.pop(one.id, None) is not None:
                self._total(one.tenant).granted += granted
                self.months[accounting.month_of(day)[0], one.tenant] += granted
            self._accounts.pop(one.id, None)
            if (seconds := lasted(one)) is not None:
                self.durations.add(kin_of(one), seconds)
        elif one.waiting:
            self._accounts.pop(one.id, None)
        elif account := self._accounts.get(one.id):
            account.kept = True
        elif one.gpus:
            self._fresh[one.id] = one

    async def run(self) -> NoReturn:
        """Look, write and tidy, for ever."""
        writing = Attempts(_log, "cannot write the usage ledger", GpuscaleError)
        for nth in count(1):
            await asyncio.sleep(LOOK)
            await self.look()
            with writing:
                if nth % CHECKPOINT == 0:
                    await self.checkpoint()
                if nth % TIDY == 1:
                    await self.tidy()
        raise AssertionError("unreachable")

    async def look(self) -> None:
        """Look once at every reservation that holds GPUs."""
        before, self._states = self._states, {}
        yesterday, self._today = self._today, self._wall() // accounting.DAY
        if accounting.month_of(yesterday) != accounting.month_of(self._today):
            self.turn()
        async for account in in_slices(self._all(), SLICE):
            one = self._open(account)
            if one is not None:
                self._states[one.id] = states = self._look(account, self.clock.now(), self._wall())
                if before.get(one.id) != states:
                    self.tell(one)

    async def tidy(self) -> None:
        """Merge and drop old rows. Raises like `Store.write`.

        Live accounts are written first, so that no row still growing is of an old day, whatever the wall clock did.
        """
        today = self._wall() // accounting.DAY
        await self.checkpoint()
        await self.usage.tidy(today, self.keep_days)

    @uninterrupted
    async def checkpoint(self) -> None:
        """Write the accounts of all live reservations. Raises like `Store.write`."""
        self._saved_at, accounts = self.clock.now(), filter(self._open, self._all())
        while batch := [*islice(accounts, WRITTEN)]:
            for one in batch:  # what is counted here is queued before any end: the store writes in order
                one.count(accounting.millis(self.clock.now()), self._wall())
            parts = [one.part for one in batch]
            await self.usage.put(
                [row for one in batch for row in usage_ledger.rows_of(one, self.clock.boot_id)]
            )
            for one, part in zip(batch, parts, strict=True):
                one.kept = True  # of the entries on disk, the last one keeps growing
                one.entries = [entry for entry in one.entries[:-1] if entry.part > part] + one.entries[-1:]

    async def query(self, first: int, last: int, dimensions: Collection[str]) -> list[usage_ledger.Used]:
        """Use in the UTC days from `first` to before `last`; for live reservations, up to LOOK seconds ago."""
        if self.clock.now() - self._saved_at > LOOK:
            with suppress(GpuscaleError):  # what cannot be written now is missing here, and written later
                await self.checkpoint()
        return await self.usage.query(first, last, dimensions)

    async def statistics(self, reservation_id: str) -> tuple[str, Sequence[GpuStatistics]]:
        """How a reservation ended, empty if it lives, and its use of each GPU. NotFoundError if nothing is known any more."""
        if (fresh := self._fresh.get(reservation_id)) and not self.ledger.closing(reservation_id):
            self._opened(fresh)
        account = self._accounts.get(reservation_id)
        if account is not None and self._open(account):
            self._look(account, self.clock.now(), self._wall())
        rows = usage_ledger.rows_of(account, "") if account else []
        parts = {row["part"] for row in rows}
        found: dict[str, GpuStatistics] = {}
        outcome = ""
        for row in [*await self.usage.of_reservation(reservation_id), *rows]:
            if row in rows or row["part"] not in parts:
                outcome, uuid, tally = outcome or row["outcome"], row["gpu_uuid"], usage_ledger.tally_of(row)
                tally = found[uuid].tally.plus(tally) if uuid in found else tally
                found[uuid] = GpuStatistics(uuid, row["node"], row["model"], row["milli"], tally)
        if not found:
            raise NotFoundError(
                f"no usage is known of reservation {reservation_id}: it never existed, held no GPU, or ended more"
                f" than {usage_ledger.ROLL_AFTER} days ago",
                metadata={"name": reservation_name(reservation_id)},
            )
        return outcome, [*found.values()]

    def _all(self) -> Iterator[accounting.Account]:
        """The accounts of live reservations; one granted since the last look gets its own in turn, unless its end is being written."""
        for key in [*self._accounts, *self._fresh]:
            if (fresh := self._fresh.get(key)) and not self.ledger.closing(key):
                yield self._opened(fresh)
            elif account := self._accounts.get(key):
                yield account

    def _opened(self, one: Reservation) -> accounting.Account:
        self._fresh.pop(one.id, None)
        return self._put(accounting.Account(one, accounting.granted_since(one), accounting.first_part(one)))

    def _total(self, tenant: str) -> accounting.Tally:
        return self.totals.get(tenant) or self.totals.setdefault(
            tenant if len(self.totals) < TENANTS else OTHER, accounting.Tally()
        )

    def _put(self, account: accounting.Account) -> accounting.Account:
        one = account.reservation
        account.total = self._total(one.tenant)
        for entry in account.entries:
            granted = sum(tally.granted * account.milli[uuid] for uuid, tally in entry.gpus.items())
            self.months[accounting.month_of(entry.day)[0], one.tenant] += granted
        account.months = self.months
        self._accounts[one.id] = account
        return account

    def _open(self, account: accounting.Account) -> Reservation | None:
        """The current reservation of an account; None if its end is being written, or was."""
        one = account.reservation
        now = None if self.ledger.closing(one.id) else self.ledger.live.get(one.id)
        return now if now and now.fence == one.fence else None

    def _look(
        self,
        account: accounting.Account,
        now: float,
        wall: int,
        at: int | None = None,
        since: float | None = None,
    ) -> list[str]:
        seen = gpus_of(account.reservation, self.view.get, self.ledger.use, now, since)
        account.look(accounting.millis(now) if at is None else at, wall, seen)
        return [one.state for one in seen.values()]

    def _wall(self) -> int:
        return accounting.millis(self.clock.wall().timestamp())


@dataclass(eq=False)
class FairShare:
    """Keeps `past`: what each tenant held on average, by the usage ledger. `run` must run if past use counts."""

    usage: usage_ledger.UsageLedger
    clock: Clock
    half_life: float
    past: dict[str, float] = field(default_factory=dict[str, float], init=False)

    async def run(self) -> NoReturn:
        """Reload it every five minutes, for ever; never without a half-life."""
        if not self.half_life:
            await asyncio.Event().wait()
        while True:
            try:
                await self.look()
            except GpuscaleError as error:
                _log.warning("cannot read past use", problem=error.message)
            await asyncio.sleep(PAST)

    async def look(self) -> None:
        """Read the last days, as many as count."""
        today = accounting.millis(self.clock.wall().timestamp()) // accounting.DAY
        days = range(today, today - ceil(accounting.HALVES * self.half_life) - 1, -1)
        used = [await self.usage.query(day, day + 1, ["tenant"]) for day in days]
        granted = [{one.tenant: one.tally.granted for one in of_day} for of_day in used]
        self.past.clear()
        self.past |= accounting.decayed(granted, self.half_life)
