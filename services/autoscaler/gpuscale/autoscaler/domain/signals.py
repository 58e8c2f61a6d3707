"""Current values of signals, judged by age and validity, and their past. Pure: time is an argument.

The past is in memory only: after a restart, whatever needs a window holds until it has filled again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

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
from gpuscale.autoscaler.domain.queues import QueueReading, QueueState
from gpuscale.autoscaler.domain.spec import EndpointSpec, OnMissing, QueueCount, QueueSignal, Signal

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
