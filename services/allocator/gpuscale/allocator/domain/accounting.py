"""Accounting: GPU time granted and used, from grant to end, in milliseconds of the boot clock. Pure.

An account starts with the lease (`granted_since`) and ends with it (`ended_at`). Both times are stored with the reservation, so
a restart continues where the disk left off, and the pieces add up to exactly what was granted. Times are rounded to
milliseconds once. The wall clock only decides which UTC day a piece belongs to: a step of it moves time between days but loses
none.

**A reboot, or a standby on another host**, has a different boot clock. Time on the old clock ends at its last moment on disk:
the last renewal or checkpoint. Time on the new clock starts when the lease is restored. Nobody is charged for the time between,
which no clock measured.

A sample counts for the time since the previous one if that is no more than HOLD ago, and the last sample counts to the end,
within the same limit. All other time is unknown. Energy is the difference of the GPU's counter, and power times the time since
that was read, each multiplied by the share.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import add
from typing import TypeAlias, TypeVar

from gpuscale.allocator.domain.ledger import RETENTION
from gpuscale.allocator.domain.model import WHOLE, HardwareLook, Reservation
from gpuscale.allocator.domain.usage import GpuUsage, UseState

_N = TypeVar("_N", int, float)

DAY = 86_400_000
"""Milliseconds of a day."""
GPU_HOUR = 3_600_000 * WHOLE
"""An hour of a whole GPU, in milliseconds x thousandths."""
HALVES = 6
"""Half-lives after which past use no longer counts."""
HOLD = 30_000
"""Milliseconds for which a look stands."""
PARTS = 1 << 20
"""More parts than an account has."""


def millis(seconds: float) -> int:
    """Seconds of the boot clock in whole milliseconds."""
    return round(seconds * 1000)


def granted_since(one: Reservation) -> int:
    """When the lease of a live reservation was granted or last renewed."""
    return millis(one.deadline - one.ttl)


def first_part(one: Reservation) -> int:
    """The part before the first of an account: each attempt of a job has its own account and parts."""
    return (one.job.attempt - 1) * PARTS if one.job else 0


def ended_at(closed: Reservation) -> int:
    """When a reservation of this boot ended."""
    return millis(closed.deadline - RETENTION)


def by_day(piece: int, end: int) -> list[tuple[int, int]]:
    """Split a piece of time into UTC days (since 1970) and milliseconds; `end` is its end, since 1970."""
    last = (end - 1) // DAY
    begun = end - last * DAY
    if piece <= begun:
        return [(last, piece)]
    first, rest = divmod(last * DAY - (piece - begun), DAY)
    return [(first, DAY - rest), *((day, DAY) for day in range(first + 1, last)), (last, begun)]


@lru_cache(maxsize=64)
def month_of(day: int) -> tuple[int, int]:
    """The first day of the calendar month of a UTC day (since 1970), and of the next month."""
    first = datetime.fromtimestamp(day * DAY / 1000, UTC).replace(day=1)
    after = (first + timedelta(days=32)).replace(day=1)
    return round(first.timestamp()) * 1000 // DAY, round(after.timestamp()) * 1000 // DAY


MonthlyUse: TypeAlias = Counter[tuple[int, str]]
"""What was granted, in milliseconds x thousandths of GPUs, by the first day of a calendar month (UTC) and the tenant."""


@dataclass(slots=True)
class Hardware:
    """Clock, throttling and ECC errors of a GPU while it was held.

    `clock` is the sum of MHz x milliseconds over the `clocked` milliseconds; `throttled` has milliseconds by reason, the last
    two are ECC errors. None is unknown.
    """

    clock: float = 0.0
    clocked: int = 0
    lowest_clock: float | None = None
    throttled: dict[str, int] = field(default_factory=dict[str, int])
    corrected: int | None = None
    uncorrected: int | None = None

    @property
    def mean_clock(self) -> float | None:
        """Mean clock in MHz, over the time for which it was read."""
        return self.clock / self.clocked if self.clocked else None

    def add(self, piece: int, seen: HardwareLook) -> None:
        """Add a piece of time with this sample."""
        if seen.sm_clock_mhz is not None:
            self.clock += piece * seen.sm_clock_mhz
            self.clocked += piece
            self.lowest_clock = of_known(min, self.lowest_clock, seen.sm_clock_mhz)
        for reason in seen.throttled_by:
            self.throttled[reason] = self.throttled.get(reason, 0) + piece

    def errors(self, before: HardwareLook, after: HardwareLook) -> None:
        """Add the errors between two samples."""
        self.corrected = of_known(add, self.corrected, _more(before.ecc_corrected, after.ecc_corrected))
        self.uncorrected = of_known(
            add, self.uncorrected, _more(before.ecc_uncorrected, after.ecc_uncorrected)
        )

    def plus(self, other: "Hardware") -> "Hardware":
        """The sum of both."""
        return Hardware(
            self.clock + other.clock,
            self.clocked + other.clocked,
            of_known(min, self.lowest_clock, other.lowest_clock),
            dict(Counter(self.throttled) + Counter(other.throttled)),
            of_known(add, self.corrected, other.corrected),
            of_known(add, self.uncorrected, other.uncorrected),
        )


@dataclass(slots=True)
class Tally:
    """GPU time granted and its use, in milliseconds; `unknown` is the rest.

    `utilization` is the sum of percent x milliseconds over the `read` milliseconds, `energy` the joules of the share; None is
    unknown.
    """

    granted: int = 0
    busy: int = 0
    idle: int = 0
    read: int = 0
    utilization: float = 0.0
    peak_utilization: float | None = None
    peak_memory: int | None = None
    energy: float | None = None
    hardware: Hardware = field(default_factory=Hardware)

    @property
    def unknown(self) -> int:
        """Time for which the use is unknown."""
        return self.granted - self.busy - self.idle

    @property
    def mean_utilization(self) -> float | None:
        """Mean utilization in percent, over the time for which it was read."""
        return self.utilization / self.read if self.read else None

    def add(self, piece: int, seen: GpuUsage | None) -> None:
        """Add a piece of time with this sample, if there is one."""
        self.count(piece, seen)
        if seen is None:
            return
        self.hardware.add(piece, seen.hardware)
        used = seen.utilization_percent
        if used is not None:
            self.read += piece
            self.utilization += used * piece
        self.peak_utilization = of_known(max, self.peak_utilization, used)
        self.peak_memory = of_known(max, self.peak_memory, seen.memory_bytes)

    def count(self, piece: int, seen: GpuUsage | None) -> None:
        """Like `add`, for the time alone."""
        self.granted += piece
        if seen is None:
            return
        if seen.state is UseState.BUSY:
            self.busy += piece
        elif seen.state is UseState.IDLE:
            self.idle += piece

    def plus(self, other: "Tally") -> "Tally":
        """The sum of both."""
        return Tally(
            self.granted + other.granted,
            self.busy + other.busy,
            self.idle + other.idle,
            self.read + other.read,
            self.utilization + other.utilization,
            of_known(max, self.peak_utilization, other.peak_utilization),
            of_known(max, self.peak_memory, other.peak_memory),
            of_known(add, self.energy, other.energy),
            self.hardware.plus(other.hardware),
        )


@dataclass(slots=True)
class DayEntry:
    """A reservation's use on one day, or on the part of it since a restart: a tally for each GPU by UUID."""

    part: int
    day: int
    gpus: dict[str, Tally]


@dataclass(slots=True)
class Account:
    """The account of a live reservation, counted up to `until`, in milliseconds of the boot clock.

    `entries` are not final on disk; the last one is still growing. Each has its own `part`, so that another day or process
    never changes an entry that is on disk. `kept` says that the start is on disk. `milli` has the shares of its GPUs; what is
    counted is also added, times these, to `total` and `months`. `seen` is the last sample, if there was one.
    """

    reservation: Reservation
    until: int
    part: int = 0
    kept: bool = False
    entries: list[DayEntry] = field(default_factory=list[DayEntry])
    milli: dict[str, int] = field(default_factory=dict[str, int])
    total: Tally | None = None
    months: MonthlyUse | None = None
    seen: Mapping[str, GpuUsage] = field(default_factory=dict[str, GpuUsage])
    _seen_at: int = 0
    _ahead: dict[str, float] = field(default_factory=dict[str, float])
    """Joules from the last reading to the look."""

    def __post_init__(self) -> None:
        self._seen_at = self.until
        for gpu in self.reservation.gpus:
            self.milli[gpu.uuid] = self.milli.get(gpu.uuid, 0) + gpu.milli

    def look(self, to: int, wall: int, seen: Mapping[str, GpuUsage]) -> None:
        """Count up to `to`, when the GPUs were seen like this; `wall` is that time since 1970."""
        gap, before = to - self._seen_at, self.seen
        self._advance(to, wall, seen if gap <= HOLD else {})
        for uuid, usage in seen.items():
            if uuid in before:
                self.entries[-1].gpus[uuid].hardware.errors(before[uuid].hardware, usage.hardware)
            now, last = usage.energy_joules, before[uuid].energy_joules if uuid in before else None
            since = 0 if usage.read_at is None else to - millis(usage.read_at)
            ahead = (usage.power_watts or 0.0) * since / 1000
            if now is not None and last is not None and now >= last:
                self._meter(uuid, now - last + ahead - self._ahead.get(uuid, 0.0))
            elif usage.power_watts is not None and gap <= HOLD:
                self._meter(uuid, usage.power_watts * gap / 1000)
            else:
                ahead = 0.0
            self._ahead[uuid] = ahead
        self.seen, self._seen_at = seen, to

    def count(self, to: int, wall: int, *, last: bool = False) -> None:
        """Like `look`, without a sample; energy since the `last` one is estimated."""
        gap = to - self._seen_at
        seen: Mapping[str, GpuUsage] = self.seen if gap <= HOLD else {}
        self._advance(to, wall, seen)
        for uuid, usage in seen.items() if last else ():
            if usage.power_watts is not None:
                self._meter(uuid, usage.power_watts * gap / 1000)

    def rebase(self, now: int) -> None:
        """Continue from here, on the clock of another boot."""
        self.until = self._seen_at = now

    def _advance(self, to: int, wall: int, seen: Mapping[str, GpuUsage]) -> None:
        piece = max(0, to - self.until)
        for day, part in by_day(piece, wall):
            if self.entries and self.entries[-1].day == day:
                if not part:
                    continue
            else:
                self.part += 1
                self.entries.append(DayEntry(self.part, day, {uuid: Tally() for uuid in self.milli}))
            for uuid, tally in self.entries[-1].gpus.items():
                usage = seen.get(uuid)
                tally.add(part, usage)
                if self.total is not None:
                    self.total.count(part * self.milli[uuid], usage)
            if self.months is not None:
                month = month_of(day)[0]
                self.months[month, self.reservation.tenant] += part * sum(self.milli.values())
        self.until += piece

    def _meter(self, uuid: str, joules: float) -> None:
        tally = self.entries[-1].gpus[uuid]
        tally.energy = max(0.0, (tally.energy or 0.0) + joules * self.milli[uuid] / WHOLE)


def resumed(before: Reservation, after: Reservation, until: int | None, part: int, wall: int) -> Account:
    """The account of a live reservation after a restart: `before` is what was on disk, `after` the same in this boot.

    Both are one object if the boot is the same. `until` is where the account stood on the clock of `before`; None if that is
    not on disk, as before the first renewal. `part` is the last one on disk.
    """
    start, same = granted_since(before) if until is None else until, after is before
    account = Account(after, start, part, kept=same and until is not None)
    if not same:
        account.count(granted_since(before), wall)
        account.rebase(granted_since(after))
    return account


def of_known(pick: Callable[[_N, _N], _N], one: _N | None, other: _N | None) -> _N | None:
    """What `pick` makes of both values, or the known one."""
    return other if one is None else one if other is None else pick(one, other)


def _more(before: int | None, after: int | None) -> int | None:
    """How much a counter grew; after a reset, from 0."""
    return None if before is None or after is None else after - before if after >= before else after


def decayed(by_age: Sequence[Mapping[str, int]], half_life: float) -> dict[str, float]:
    """The thousandths of GPUs that each tenant held on average, where weights halve every `half_life` days.

    `by_age` has what each tenant was granted per day, in milliseconds x thousandths, today first. Slurm's fair share is
    2^(-U/S) for decayed use U and share S, so sorting by it is sorting by U/S.
    """
    weights = [0.5 ** (age / half_life) for age in range(len(by_age))]
    found: dict[str, float] = {}
    for weight, granted in zip(weights, by_age, strict=True):
        for tenant, amount in granted.items():
            found[tenant] = found.get(tenant, 0.0) + weight * amount / DAY
    return {tenant: amount / sum(weights) for tenant, amount in found.items()}
