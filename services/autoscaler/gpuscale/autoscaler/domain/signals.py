"""What queue watchers read, current values of signals, judged by age and validity, and their past. Pure: time is an argument.

An unreadable count is None, never zero: a rule that sees None holds (seeds/000 counted every broker error as an empty queue,
and scaled in). The past is in memory only: after a restart, whatever needs a window holds until it has filled again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import NamedTuple, TypeVar

import re2

from gpuscale.autoscaler.domain.engine import Memory
from gpuscale.autoscaler.domain.inputs import (
    LARGEST,
    Aggregation,
    InputSeries,
    Observation,
    ObservationStatus,
    Remembered,
    TaskReport,
    aggregate,
)
from gpuscale.autoscaler.domain.spec import EndpointSpec, OnMissing, QueueCount, QueueSignal, Signal

T = TypeVar("T")

DEFAULT_INTERVAL = 1.0
LARGEST_COUNT = 2**63 - 1
"""More messages than our answers can hold, or any broker has."""
DEFAULT_VIRTUAL_HOST = "/"


class QueueState(Enum):
    """Whether a queue can be read."""

    PENDING = "pending"
    """Not read yet."""
    OK = "ok"
    """Read; single counts may still be unknown."""
    UNREACHABLE = "unreachable"
    """The broker cannot be reached."""
    AUTH_FAILED = "auth_failed"
    """The broker refuses the user or password, or the user's access to the queue."""
    NOT_FOUND = "not_found"
    """The broker has no such queue or virtual host."""
    TIMEOUT = "timeout"
    """The broker does not answer in time."""
    ERROR = "error"
    """The broker sent an unexpected answer, or the configuration no longer names it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The broker's own statistics of a queue."""

    published: float  # messages published per second
    delivered: float  # messages delivered per second
    at: float  # when that was read, in seconds since boot
    # how long the message at its head had waited then; None if unknown, or none waits
    oldest_age: float | None = None


class QueueReading(NamedTuple):
    """The last reading of a queue. A tuple, since one is made for every queue of every sweep."""

    state: QueueState  # whether it can be read now
    ready: int | None = None  # messages that no consumer has taken; None when unknown
    unacked: int | None = None  # messages taken and not yet acknowledged; None when unknown
    consumers: int | None = None  # None when unknown
    # seconds since boot of the last success; None before the first. It outlives a failure, unlike the counts
    observed_at: float | None = None
    message: str = ""  # why it has this state, without secrets; may be empty
    rates: Rates | None = None  # rates per second; None when unknown
    queue_count: int = 1  # number of queues it covers

    @property
    def total(self) -> int | None:
        """Ready and unacknowledged messages together; None unless both are known."""
        if self.ready is None or self.unacked is None:
            return None
        return self.ready + self.unacked


PENDING = QueueReading(QueueState.PENDING, message="not read yet")


@dataclass(frozen=True, slots=True)
class QueueFailure:
    """Why a queue could not be read: a state other than OK and PENDING, and one sentence without secrets."""

    state: QueueState
    message: str


def failed(previous: QueueReading, failure: QueueFailure) -> QueueReading:
    """The reading after a failure: no counts, and the time of the last success before it."""
    return QueueReading(failure.state, observed_at=previous.observed_at, message=failure.message)


def combined(readings: Sequence[QueueReading]) -> QueueReading:
    """The sum of one or more readings: each sum is known if all of its parts are."""
    if not readings:
        raise ValueError("there is nothing to add up")
    if len(readings) == 1:
        return readings[0]
    whole = QueueReading(
        QueueState.OK,
        observed_at=min(_known(one.observed_at for one in readings), default=None),
        queue_count=sum(one.queue_count for one in readings),
    )
    lost = [one for one in readings if one.state is not QueueState.OK]
    if lost:
        return whole._replace(state=lost[0].state, message=lost[0].message)
    rates = _known(one.rates for one in readings)
    # The oldest message is known if it is known of each queue that has one.
    ages = _known(one.rates.oldest_age for one in readings if one.rates is not None and one.ready != 0)
    return whole._replace(
        ready=_total(one.ready for one in readings),
        unacked=_total(one.unacked for one in readings),
        consumers=_total(one.consumers for one in readings),
        message=next(filter(None, (one.message for one in readings)), ""),
        rates=Rates(
            math.fsum(one.published for one in rates),
            math.fsum(one.delivered for one in rates),
            min(one.at for one in rates),
            max(ages, default=None),
        )
        if rates
        else None,
    )


def _known(values: Iterable[T | None]) -> list[T]:
    """The values, if all are known; else none."""
    known: list[T] = []
    for one in values:
        if one is None:
            return []
        known.append(one)
    return known


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum of one or more counts, if all are known."""
    known = _known(counts)
    return countable(sum(known)) if known else None


def countable(count: int | None) -> int | None:
    """A count that 64 bits hold; of a larger one nothing is known."""
    return None if count is not None and count > LARGEST_COUNT else count


class QueueTarget(NamedTuple):
    """What to read of a broker: a queue by name, or all whose names match a pattern.

    A tuple, since it is looked up several times for every queue of every sweep, and a tuple's hash is cheapest.
    """

    broker: str  # its configured name
    virtual_host: str  # where the queues are
    queue: str  # the name, or the pattern
    pattern: bool = False  # whether `queue` is one
    rates: bool = False  # whether rates are read too


@dataclass(frozen=True, slots=True)
class WatchSpec:
    """What to watch: queues by name, or by one pattern, as a `QueueTarget` each, and the interval in seconds."""

    broker: str
    virtual_host: str
    queues: tuple[str, ...]
    pattern: bool = False
    rates: bool = False
    interval: float = DEFAULT_INTERVAL

    @property
    def targets(self) -> Sequence[QueueTarget]:
        """What to read for it; the readings are added up."""
        return [
            QueueTarget(self.broker, self.virtual_host, queue, self.pattern, self.rates)
            for queue in self.queues
        ]


@dataclass(frozen=True, slots=True)
class Watcher:
    """A queue watcher: its id, what it watches, and the tag of this version of its spec."""

    id: str
    spec: WatchSpec
    etag: str
    create_time: datetime


def of_totals(ready: int, unacked: int, observed_at: float, consumers: int | str) -> QueueReading:
    """The reading if the management API answered; `consumers` is their number, or why it is unknown."""
    if isinstance(consumers, int):
        return QueueReading(QueueState.OK, ready, unacked, consumers, observed_at)
    return QueueReading(QueueState.OK, ready, unacked, None, observed_at, consumers)


def next_sweep(now: float, interval: float) -> float:
    """When to read a queue again: the next multiple of its interval, in seconds of one clock.

    Queues with the same interval are read at the same instants, so that a single request serves them all; instants missed
    because of a slow broker are skipped.
    """
    after = (math.floor(now / interval) + 1) * interval
    return after if after > now else after + interval


def _compiled(pattern: str) -> re2.Pattern:
    options = re2.Options()
    options.max_mem = 1 << 15  # the worst that fits takes a few milliseconds for a name of 255 characters
    options.never_capture = True
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        said: bytes = error.args[0]
        raise ValueError(f"must be a regular expression of RE2: {said.decode('utf-8', 'replace')}") from None


def pattern_problem(pattern: str) -> str:
    """What is wrong with a pattern, for error messages; empty for a valid one."""
    try:
        _compiled(pattern)
    except ValueError as error:
        return str(error)
    return ""


class NamePattern:
    """A pattern that caches its matches, as queues seldom change; ValueError if it is invalid."""

    def __init__(self, pattern: str) -> None:
        self._pattern = _compiled(pattern)
        self._known: dict[str, bool] = {}

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The names that it was not matched with yet."""
        return [name for name in names if name not in self._known]

    def learn(self, names: Iterable[str]) -> None:
        """Match it with names. RE2 lets other threads run meanwhile."""
        self._known |= {name: self._pattern.fullmatch(name) is not None for name in names}

    def of(self, names: Collection[str]) -> list[str]:
        """The queue names that match as a whole."""
        self.learn(self.unknown(names))
        self._known = {name: self._known[name] for name in names}
        return [name for name, matched in self._known.items() if matched]


_RATES = frozenset({QueueCount.RATE_IN, QueueCount.RATE_OUT, QueueCount.OLDEST_AGE})
_MINDS_SILENCE = frozenset({OnMissing.HOLD, OnMissing.LAST})
"""With these, silent sources matter as much as a silent signal; with others they are left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a source last said."""

    values: tuple[float, ...] = ()  # one per GPU, host, replica or series; one for a queue
    # when they were read, in seconds on the clock of `now`; None if never
    at: float | None = None
    problem: str = ""  # why there are none; else empty
    silent_count: int = 0  # how many of the sources said nothing
    proven_empty: bool = False  # it shows that no work is left, waiting or in hand
    tasks: TaskReport | None = None  # for a signal of tasks, what they need
    silence: str = ""  # which of the sources said nothing, and why, if known

    def joined(self, how: Aggregation) -> float:
        """Its values combined; the first invalid or too large one, which aggregation could hide."""
        strange = next((value for value in self.values if not abs(value) <= LARGEST), None)
        return aggregate(self.values, how) if strange is None else strange


def queue_sample(source: QueueSignal, reading: QueueReading | None) -> Sample:
    """What a queue watcher last said; `reading` is None if there is no such watcher.

    A reading only counts while the queue can be read: after a failed attempt the signal is missing, however recent the last
    count, since a lost broker says nothing about its queue.
    """
    if reading is None:
        return Sample(problem=f"there is no watcher {source.watcher}")
    if reading.state is not QueueState.OK or reading.observed_at is None:
        problem = f"queue {reading.state.value}" + (f": {reading.message}" if reading.message else "")
        return Sample(at=reading.observed_at, problem=problem)
    at, rates = reading.observed_at, reading.rates
    known: dict[QueueCount, float | None] = {}
    if source.count not in _RATES:
        known = {
            QueueCount.READY: reading.ready,
            QueueCount.UNACKED: reading.unacked,
            QueueCount.TOTAL: reading.total,
        }
        problem = "the broker does not report unacknowledged messages over AMQP; its management API does"
    elif rates is None:
        problem = "rates are unknown; a watcher with rates enabled reads them from the management API"
    else:
        at = min(at, rates.at)
        known = {
            QueueCount.RATE_IN: rates.published,
            QueueCount.RATE_OUT: rates.delivered,
            QueueCount.OLDEST_AGE: rates.oldest_age,
        }
        problem = "no message waits, or the oldest has no timestamp of its publisher"
    value = known.get(source.count)
    if value is None:
        return Sample(at=at, problem=problem)
    return Sample((value,), at, proven_empty=reading.total == 0)


def observe(signal: Signal, sample: Sample, now: float, history: InputSeries | None = None) -> Observation:
    """The observation of a signal at `now`; `history` holds its earlier values, including the sample's.

    A negative queue count, a value that is not finite, or one beyond 64 bits is invalid.
    """
    age = None if sample.at is None else max(0.0, now - sample.at)
    status, value, detail = _judged(signal, sample, age)
    if status is not ObservationStatus.OK or value is None:
        return _stood_in(Observation(signal.id, status, value, age, detail), signal, history, now)
    if signal.window is not None and history is not None:
        recent = history.since(now - signal.window).values
        value = aggregate(recent, signal.over_window) if recent else value
    silent, told = sample.silent_count, len(sample.values)
    return Observation(
        signal.id,
        ObservationStatus.OK,
        value,
        age,
        f"{silent} of {silent + told} said nothing{sample.silence and f': {sample.silence}'}"
        if silent
        else "",
        proven_empty=sample.proven_empty,
        silent_count=silent if signal.on_missing in _MINDS_SILENCE else 0,
        told_count=told,
        across=signal.across,
        tasks=sample.tasks,
    )


def _judged(signal: Signal, sample: Sample, age: float | None) -> tuple[ObservationStatus, float | None, str]:
    """Whether a sample counts, its value if finite, and why it does not count."""
    if sample.problem or not sample.values or age is None:
        return ObservationStatus.MISSING, None, sample.problem or "nothing was reported"
    value = sample.joined(signal.across)
    what = "count" if isinstance(signal.source, QueueSignal) else "number"
    if not abs(value) <= LARGEST or (value < 0 and what == "count"):
        bits = "64-bit " if LARGEST < abs(value) < math.inf else ""
        shown = value if math.isfinite(value) else None
        return ObservationStatus.INVALID, shown, f"{value} is not a {bits}{what}"
    if age > signal.oldest:
        return ObservationStatus.STALE, value, f"{age:.1f} s old, more than {signal.oldest:g} s"
    return ObservationStatus.OK, value, ""


def _stood_in(absent: Observation, signal: Signal, history: InputSeries | None, now: float) -> Observation:
    """The substitute for an unavailable value, as the signal configures; the last value only for its max age."""
    if signal.on_missing is OnMissing.ZERO:
        detail = f"{absent.detail}; 0 is used instead"
        return replace(absent, status=ObservationStatus.OK, value=0.0, detail=detail)
    if signal.on_missing is OnMissing.IGNORE:
        return replace(absent, ignored=True)
    if signal.on_missing is OnMissing.HOLD or history is None or not history.times:
        return absent
    age = max(0.0, now - history.times[-1])
    if age > signal.oldest + signal.last_ttl:
        return absent
    detail = f"{absent.detail}; its last value is used instead"
    return replace(absent, status=ObservationStatus.OK, value=history.values[-1], age=age, detail=detail)


SHORTEST_KEPT = 300.0
"""Least seconds of history kept per signal."""
SAMPLES_KEPT = 1_000
"""Most samples of a signal kept for display; equal consecutive samples count once."""
_STATUSES = tuple(ObservationStatus)


@dataclass(frozen=True, slots=True)
class EndpointPast:
    """The past of an endpoint: its signals by id, its pace's memory, and its rules' memory."""

    memory: Memory | None = None
    bursts: Mapping[str, Remembered] = field(default_factory=dict[str, Remembered])
    series: Mapping[str, InputSeries] = field(default_factory=dict[str, InputSeries])

    def with_samples(self, spec: EndpointSpec, samples: Mapping[str, Sample]) -> EndpointPast:
        """Add the values of new samples; signals no longer in the spec are forgotten."""
        keep = kept_seconds(spec)
        series: dict[str, InputSeries] = {}
        for one in spec.measured:
            series[one.id] = self.series.get(one.id, InputSeries())
            sample = samples.get(one.id)
            if sample is None or sample.at is None or sample.problem or not sample.values:
                continue
            value = sample.joined(one.across)
            if abs(value) <= LARGEST:
                series[one.id] = series[one.id].added(sample.at, value, keep)
        return replace(self, series=series)

    def observations(
        self, spec: EndpointSpec, samples: Mapping[str, Sample], now: float
    ) -> dict[str, Observation]:
        """The current observation of every signal of the spec."""
        return {
            one.id: observe(one, samples.get(one.id, Sample()), now, self.series.get(one.id))
            for one in spec.measured
        }


def kept_seconds(spec: EndpointSpec) -> float:
    """Seconds of the past that the rules and signals of a spec use."""
    windows = [signal.window or 0.0 for signal in spec.measured]
    return max([SHORTEST_KEPT, *windows, *(rule.kind.past for rule in spec.rules)])


@dataclass(frozen=True, slots=True)
class Shown:
    """A signal's value from `first` to `last`, in seconds since 1970; `value` is None if there was none."""

    first: float
    last: float
    value: float | None
    status: ObservationStatus


class Samples:
    """A signal's values at its evaluations: the last `SAMPLES_KEPT`, at 25 bytes each, as there may be many signals."""

    def __init__(self) -> None:
        self._first, self._last, self._values = array("d"), array("d"), array("d")
        self._statuses = array("b")

    def note(self, one: Observation, at: float) -> None:
        """Add its value at `at`, in seconds since 1970."""
        value = math.nan if one.value is None else one.value
        status = _STATUSES.index(one.status)
        if self._last and self._statuses[-1] == status:
            before = self._values[-1]
            if before == value or (math.isnan(before) and math.isnan(value)):
                self._last[-1] = at
                return
        if len(self._first) >= SAMPLES_KEPT:
            for kept in (self._first, self._last, self._values, self._statuses):
                del kept[0]
        self._first.append(at)
        self._last.append(at)
        self._values.append(value)
        self._statuses.append(status)

    def __iter__(self) -> Iterator[Shown]:
        """Oldest first."""
        for first, last, value, status in zip(
            self._first, self._last, self._values, self._statuses, strict=True
        ):
            yield Shown(first, last, None if math.isnan(value) else value, _STATUSES[status])


def noted(
    samples: Mapping[str, Samples], observations: Iterable[Observation], at: float
) -> dict[str, Samples]:
    """The samples of signals by id, with their current values; signals no longer evaluated are forgotten."""
    kept: dict[str, Samples] = {}
    for one in observations:
        kept[one.signal] = samples.get(one.signal) or Samples()
        kept[one.signal].note(one, at)
    return kept
