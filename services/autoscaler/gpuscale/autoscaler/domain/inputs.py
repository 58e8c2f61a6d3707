"""What rules go by: values of signals over time, and what tasks need of workers. Pure.

Times are seconds on one clock that only grows. `None` means "unknown", and is never zero. Whether a worker can run a task
follows OpenGRIS Scaler: the capabilities of the task have to be a subset of its own. Amounts count here (a worker with
gpu: 1 cannot run a task that needs gpu: 2), where the original goes by names alone.
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
"""Most points that are kept of one signal."""
LARGEST = 2.0**63
"""What 64 bits count: no signal is beyond it, so that nothing that is reckoned from a few of them is infinite."""


class Aggregation(Enum):
    """How several values become one."""

    AVG = "avg"
    MIN = "min"
    MAX = "max"
    SUM = "sum"
    P95 = "p95"


def aggregate(values: Sequence[float], how: Aggregation) -> float:
    """One value of at least one. P95: the least that 95 % of them do not exceed (nearest rank)."""
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
        """With one more value; what is older than `keep` seconds before it is dropped, but for the last such point.

        A value that is not newer than the last is left out: it is the same reading again. Of more points than are kept the
        older half is thinned, so that they still reach back as far.
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
        """Mean of the values from `start` on; None where there are none."""
        part = self.since(start).values
        return math.fsum(part) / len(part) if part else None

    def at(self, moment: float) -> float | None:
        """The last value at a moment or before it; None where there is none."""
        index = bisect_right(self.times, moment) - 1
        return self.values[index] if index >= 0 else None

    def slope(self, start: float) -> float | None:
        """Change a second, from the first to the last value from `start` on; None for fewer than two values."""
        part = self.since(start)
        if len(part.times) < 2:
            return None
        return (part.values[-1] - part.values[0]) / (part.times[-1] - part.times[0])


def series_of(points: Iterable[tuple[float, float]]) -> InputSeries:
    """The series of points in the order of time."""
    pairs = list(points)
    return InputSeries(tuple(at for at, _ in pairs), tuple(value for _, value in pairs))


Amounts: TypeAlias = Mapping[str, int]
"""Capabilities by name, with how much of each."""
ANY = -1
"""Of a task: any amount of it will do. Of a worker: it has it without bound."""


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
    """So many tasks, waiting or running, that need the same."""

    capabilities: Amounts
    tasks: int


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """So many workers that can do the same; of a report 0 stands for as many as were asked for."""

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
    """What is known of a capability set when rules are read."""

    before: int  # groups aimed at until now
    groups: tuple[WorkerGroup, ...] = ()  # the one that would be stopped first at the front
    reported: Amounts | None = None  # by its newest group, where that is not what was asked for


NO_SETS: Mapping[str, SetState] = {}


@dataclass(frozen=True, slots=True)
class GiveWay:
    """That an endpoint gives way to others of higher priority."""

    most: int  # its replicas until they have their GPUs
    to: str  # who they are, in words
    replicas: tuple[str, ...] = ()  # ids of its own whose GPUs they need


_DIGITS = 9
"""Of sums of weights; what differs less is the same."""
MOST_REPLICAS = 10**9
"""More than anybody has, and still a count that a decision has room for."""


@dataclass(frozen=True, slots=True)
class ReplicaWeights:
    """What the replicas of an endpoint count for whose GPU models have weights.

    Rules, and the pace, reckon in capacity, of which a replica of weight 1 is one; bounds hold for replicas. Half a replica
    neither counts as a whole one, nor is it kept for nothing: where the capacity lies between two whole numbers, rules go by
    the lower one, and by the upper one where that does not lead up. What another replica would count for is a guess at the
    best, or at what the newest got while that still starts: what turns out slower is made up for at the next evaluation, and
    none has to stop that was one too many.
    """

    weights: tuple[float, ...]  # of those aimed at, the one that would be stopped first at the front
    next: float  # of one more
    speed: float  # mean of those that work

    def of(self, count: int) -> float:
        """What so many count for: the last of these to stop, and others where there are not so many."""
        kept = self.weights[max(0, len(self.weights) - count) :]
        return round(math.fsum(kept) + (count - len(kept)) * self.next, _DIGITS)

    def units(self, count: int) -> Collection[int]:
        """What so many count for in whole numbers, the lower one first."""
        own = self.of(count)
        return sorted({math.floor(own), math.ceil(own)})

    def replicas(self, units: int) -> int:
        """Replicas that count for so much: more than these, or as many as are left while those that stop first can go."""
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
        """What so many that work count for."""
        return round(ready * self.speed, _DIGITS)


@dataclass(frozen=True, slots=True)
class GroupOfReplica:
    """What a replica is in terms of its capability set: as was asked for, and as its adapter reports (None: it does not)."""

    set: str = ""
    asked: WorkerGroup = NO_WORKERS
    reported: WorkerGroup | None = None

    @property
    def actual(self) -> WorkerGroup:
        """What it can do, as far as anybody knows."""
        if self.reported is None:
            return self.asked
        return WorkerGroup(self.reported.capabilities, self.reported.workers or self.asked.workers)


NO_GROUP = GroupOfReplica()
"""Of a replica whose endpoint has no capability sets."""


class ObservationStatus(Enum):
    """Whether the value of a signal counts."""

    OK = "OK"
    MISSING = "MISSING"
    STALE = "STALE"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True)
class Observation:
    """What a signal showed.

    `proven_empty`: a fresh reading shows that no work is left, waiting or in hand. `ignored`: it cannot be had, and is to
    be left out then. `silent_count`: sources, such as replicas, that said nothing and are not to be left out;
    `told_count`: those that did. `across`: how their values became one. `tasks`: of a signal of tasks, what they need.
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
        """What it would show if the silent ones said `value`; of a 95th percentile, the most that could be."""
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
    """What a panic rule remembers of a burst: when the short window was last over, and the most it asked for."""

    over_at: float
    peak: int


@dataclass(frozen=True, slots=True)
class Carried:
    """What replicas were seen to carry, each: requests in work, requests and tokens a second, queue, and latencies in seconds."""

    load: float
    requests: float
    tokens: float
    waiting: float
    ttft: float | None  # None where nobody told it
    itl: float | None
    at: float  # when that was seen last


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a rule of goals knows: what replicas carried, by ascending load, and since when so many are ready."""

    carried: tuple[Carried, ...]
    ready: int
    since: float


Remembered: TypeAlias = Burst | Learnt


@dataclass(frozen=True, slots=True)
class Inputs:
    """What rules go by."""

    before: int  # replicas aimed at until now
    ready: int  # replicas that work
    now: float  # seconds on a clock that only grows
    wall: datetime  # the time of day, aware
    # what the signals show, by id; one that is absent is missing
    observations: Mapping[str, Observation] = field(default_factory=dict[str, Observation])
    # what they showed before, by id, the newest value included
    series: Mapping[str, InputSeries] = field(default_factory=dict[str, InputSeries])
    # when each rule last changed the count, by id
    last_changes: Mapping[str, float] = field(default_factory=dict[str, float])
    bursts: Mapping[str, Remembered] = field(
        default_factory=dict[str, Remembered]
    )  # what rules remember, by id
    startup: float | None = None  # seconds that replicas took to get ready lately; None where none has
    # most replicas that there are GPUs for, those that hold some included; None where nobody knows
    gpu_limit: int | None = None
    # what is known of each capability set, by id
    sets: Mapping[str, SetState] = field(default_factory=lambda: NO_SETS)
    gives_way: GiveWay | None = None  # None where nobody of higher priority lacks GPUs
    # what replicas count for; None where each is one. Rules are given `before` in whole numbers of it
    capacity: ReplicaWeights | None = None

    @property
    def serving(self) -> float:
        """What the replicas that work count for."""
        return self.ready if self.capacity is None else self.capacity.serving(self.ready)

    def history(self, signal: str) -> InputSeries:
        """The series of a signal; an empty one where nothing was seen of it."""
        return self.series.get(signal, InputSeries())

    def observed(self, signals: Iterable[str]) -> tuple[Observation, ...]:
        """What those of the signals show that were looked at."""
        return tuple(self.observations[one] for one in signals if one in self.observations)
