"""Inputs of rules: values of signals over time, and what tasks need of workers. Pure.

Times are seconds on one clock that only grows. `None` means "unknown", and is never zero. Whether a worker can run a task
follows OpenGRIS Scaler: the task's capabilities have to be a subset of its own. Amounts count here (a worker with gpu: 1 cannot
run a task that needs gpu: 2), while the original compares names alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TypeAlias

LONGEST = 10_000
"""Most points kept per signal."""
LARGEST = 2.0**63
"""The 64-bit maximum: no signal exceeds it, so that nothing computed from a few of them is infinite."""


class Aggregation(Enum):
    """How several values are combined into one."""

    AVG = "avg"
    MIN = "min"
    MAX = "max"
    SUM = "sum"
    P95 = "p95"


def aggregate(values: Sequence[float], how: Aggregation) -> float:
    """Combine one or more values. P95: the least value that 95 % of them do not exceed (nearest rank)."""
    if not values:
        raise ValueError("there is nothing to aggregate")
    if how is Aggregation.MIN:
        return min(values)
    if how is Aggregation.MAX:
        return max(values)
    if how is Aggregation.P95:
        return sorted(values)[math.ceil(0.95 * len(values)) - 1]
    total = math.fsum(values)
    return total if how is Aggregation.SUM else total / len(values)


@dataclass(frozen=True, slots=True)
class InputSeries:
    """The values of a signal: `times` ascending, `values` beside them."""

    times: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def added(self, at: float, value: float, keep: float) -> InputSeries:
        """Add a value; values older than `keep` seconds before it are dropped, except the last such point.

        A value no newer than the last is ignored: it is the same reading again. Beyond the most points, the older half is
        thinned, so that they still reach back as far.
        """
        if self.times and at <= self.times[-1]:
            return self
        first = max(0, bisect_right(self.times, at - keep) - 1)
        times, values = (*self.times[first:], at), (*self.values[first:], value)
        if len(times) <= LONGEST:
            return InputSeries(times, values)
        half, spacing, kept = len(times) // 2, 2 * keep / LONGEST, [0]
        for index in range(1, half):
            if times[index] - times[kept[-1]] >= spacing:
                kept.append(index)
        kept = [*kept, *range(half, len(times))][-LONGEST:]
        return InputSeries(tuple(times[one] for one in kept), tuple(values[one] for one in kept))

    def since(self, start: float) -> InputSeries:
        """The part from `start` on."""
        first = bisect_left(self.times, start)
        return InputSeries(self.times[first:], self.values[first:])

    def covers(self, start: float) -> bool:
        """Whether it reaches back to `start`."""
        return bool(self.times) and self.times[0] <= start

    def mean(self, start: float) -> float | None:
        """Mean of the values from `start` on; None if there are none."""
        part = self.since(start).values
        return math.fsum(part) / len(part) if part else None

    def at(self, moment: float) -> float | None:
        """The last value at or before a moment; None if there is none."""
        index = bisect_right(self.times, moment) - 1
        return self.values[index] if index >= 0 else None

    def slope(self, start: float) -> float | None:
        """Change per second, from the first to the last value since `start`; None for fewer than two values."""
        part = self.since(start)
        if len(part.times) < 2:
            return None
        return (part.values[-1] - part.values[0]) / (part.times[-1] - part.times[0])


def series_of(points: Iterable[tuple[float, float]]) -> InputSeries:
    """The series of chronological points."""
    pairs = list(points)
    return InputSeries(tuple(at for at, _ in pairs), tuple(value for _, value in pairs))


Amounts: TypeAlias = Mapping[str, int]
"""Capabilities by name, with amounts."""
ANY = -1
"""For a task: any amount will do. For a worker: unlimited."""


def covers(offered: Amounts, needed: Amounts) -> bool:
    """Whether a worker with `offered` can run a task that needs `needed`."""
    for name, amount in needed.items():
        has = offered.get(name, 0)
        if not has if ANY in {has, amount} else has < amount:
            return False
    return True


def in_words(capabilities: Amounts) -> str:
    """Such as `gpu:2, high_memory`."""
    parts = (name if amount == ANY else f"{name}:{amount}" for name, amount in sorted(capabilities.items()))
    return ", ".join(parts) or "nothing special"


@dataclass(frozen=True, slots=True)
class TaskDemand:
    """Tasks, waiting or running, with the same needs."""

    capabilities: Amounts
    tasks: int


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers with the same capabilities; in a report, a count of 0 means as many as requested."""

    capabilities: Amounts
    workers: int


NO_WORKERS = WorkerGroup({}, 0)


@dataclass(frozen=True, slots=True)
class TaskReport:
    """All tasks of an endpoint, and the workers that somebody else started."""

    demands: tuple[TaskDemand, ...] = ()
    unmanaged_workers: tuple[WorkerGroup, ...] = ()

    @property
    def total(self) -> int:
        """How many tasks there are."""
        return sum(one.tasks for one in self.demands)


@dataclass(frozen=True, slots=True)
class SetState:
    """What is known of a capability set when rules are evaluated."""

    before: int  # groups wanted so far
    groups: tuple[WorkerGroup, ...] = ()  # by stop order
    reported: Amounts | None = None  # by its newest group, if that differs from the request


NO_SETS: Mapping[str, SetState] = {}


@dataclass(frozen=True, slots=True)
class GiveWay:
    """An endpoint's concession to others of higher priority."""

    most: int  # its maximum until the others have their GPUs
    to: str  # the others, in words
    replicas: tuple[str, ...] = ()  # ids of its replicas whose GPUs they need


_DIGITS = 9
"""For sums of weights; smaller differences are equal."""
MOST_REPLICAS = 10**9
"""More than anybody has, and still a count that fits into a decision."""


@dataclass(frozen=True, slots=True)
class ReplicaWeights:
    """Weights of the replicas of an endpoint whose GPU models have weights.

    Rules and the pace work in units of capacity, where a replica of weight 1 is one unit; bounds apply to replicas. A fraction
    neither counts as a whole unit nor is ignored: if the capacity lies between two whole numbers, rules use the lower one, and
    the upper one if the lower does not lead up. The weight of another replica is a guess, or what the newest got while that
    still starts: if it turns out slower, the next evaluation makes up for it, and none has to stop that was one too many.
    """

    weights: tuple[float, ...]  # of the wanted ones, by stop order
    next: float  # of one more
    speed: float  # mean of those that work

    def of(self, count: int) -> float:
        """The units of so many replicas: of the last of these to stop, plus more if there are fewer."""
        kept = self.weights[max(0, len(self.weights) - count) :]
        return round(math.fsum(kept) + (count - len(kept)) * self.next, _DIGITS)

    def units(self, count: int) -> Collection[int]:
        """The units of so many replicas as whole numbers, the lower one first."""
        own = self.of(count)
        return sorted({math.floor(own), math.ceil(own)})

    def replicas(self, units: int) -> int:
        """The replicas for so many units: more than these, or those left after stopping as many as possible."""
        count = len(self.weights)
        have = self.of(count)
        if have < units:
            return min(MOST_REPLICAS, count + math.ceil(round((units - have) / self.next, _DIGITS)))
        for weight in self.weights:
            have = round(have - weight, _DIGITS)
            if have < units:
                break
            count -= 1
        return count

    def serving(self, ready: int) -> float:
        """The units of so many ready replicas."""
        return round(ready * self.speed, _DIGITS)


@dataclass(frozen=True, slots=True)
class GroupOfReplica:
    """A replica's capability group: as requested, and as its adapter reports it (None: not reported)."""

    set: str = ""
    asked: WorkerGroup = NO_WORKERS
    reported: WorkerGroup | None = None

    @property
    def actual(self) -> WorkerGroup:
        """What it can do, as far as known."""
        if self.reported is None:
            return self.asked
        return WorkerGroup(self.reported.capabilities, self.reported.workers or self.asked.workers)


NO_GROUP = GroupOfReplica()
"""Of a replica whose endpoint has no capability sets."""


class ObservationStatus(Enum):
    """Whether the value of a signal is usable."""

    OK = "OK"
    MISSING = "MISSING"
    STALE = "STALE"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True)
class Observation:
    """The value of a signal, or why there is none.

    `proven_empty`: a fresh reading shows that no work is left, waiting or in hand. `ignored`: it is unavailable, and is to be
    left out then. `silent_count`: sources, such as replicas, that said nothing and are not to be left out; `told_count`: those
    that did. `across`: how their values were combined. `tasks`: for a signal of tasks, what they need.
    """

    signal: str
    status: ObservationStatus
    value: float | None = None
    age: float | None = None
    detail: str = ""
    proven_empty: bool = False
    ignored: bool = False
    silent_count: int = 0
    told_count: int = 0
    across: Aggregation = Aggregation.AVG
    tasks: TaskReport | None = None

    def with_silent_at(self, value: float) -> float:
        """The value if the silent sources had `value`; for a 95th percentile, an upper bound."""
        own = 0.0 if self.value is None else self.value
        silent, told = self.silent_count, self.told_count
        match self.across:
            case Aggregation.AVG:
                return (own * told + value * silent) / (told + silent)
            case Aggregation.SUM:
                return own + value * silent
            case Aggregation.MIN:
                return min(own, value)
            case Aggregation.MAX | Aggregation.P95:
                return max(own, value)


@dataclass(frozen=True, slots=True)
class Burst:
    """A panic rule's memory of a burst: when the short window last exceeded, and the most it wanted."""

    over_at: float
    peak: int


@dataclass(frozen=True, slots=True)
class Carried:
    """Observed load per replica: requests in work, requests and tokens per second, queue, and latencies in seconds."""

    load: float
    requests: float
    tokens: float
    waiting: float
    ttft: float | None  # None if unknown
    itl: float | None
    at: float  # when that was last seen


@dataclass(frozen=True, slots=True)
class Learnt:
    """A goal rule's knowledge: what replicas carried, by ascending load, and since when so many are ready."""

    carried: tuple[Carried, ...]
    ready: int
    since: float


Remembered: TypeAlias = Burst | Learnt


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of the rules."""

    before: int  # replicas wanted so far
    ready: int  # replicas that are ready
    now: float  # seconds on a clock that only grows
    wall: datetime  # the time of day, aware
    # the values of signals by id; an absent one is missing
    observations: Mapping[str, Observation] = field(default_factory=dict[str, Observation])
    # their earlier values by id, including the newest
    series: Mapping[str, InputSeries] = field(default_factory=dict[str, InputSeries])
    # when each rule last changed the count, by id
    last_changes: Mapping[str, float] = field(default_factory=dict[str, float])
    bursts: Mapping[str, Remembered] = field(
        default_factory=dict[str, Remembered]
    )  # the memory of rules by id
    startup: float | None = None  # seconds that replicas recently took to get ready; None if unknown
    # most replicas for which there are GPUs, including those that hold some; None if unknown
    gpu_limit: int | None = None
    # what is known of each capability set, by id
    sets: Mapping[str, SetState] = field(default_factory=lambda: NO_SETS)
    gives_way: GiveWay | None = None  # None if nobody of higher priority lacks GPUs
    # weights of replicas; None if each is one. Rules get `before` in whole units
    capacity: ReplicaWeights | None = None

    @property
    def serving(self) -> float:
        """The units of the ready replicas."""
        return self.ready if self.capacity is None else self.capacity.serving(self.ready)

    def value(self, signal: str) -> float | None:
        """The usable value of a signal; None if there is none."""
        seen = self.observations.get(signal)
        return seen.value if seen is not None and seen.status is ObservationStatus.OK else None

    def history(self, signal: str) -> InputSeries:
        """The series of a signal; empty if nothing was seen."""
        return self.series.get(signal, InputSeries())

    def observed(self, signals: Iterable[str]) -> tuple[Observation, ...]:
        """The observations of those of the signals that were sampled."""
        return tuple(self.observations[one] for one in signals if one in self.observations)
