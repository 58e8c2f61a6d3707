"""What a signal shows now, judged by its age and its value, and what it showed before. Pure: time is an argument.

The past is in memory only: after a restart what needs a window holds until the window has filled again.
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
    Burst,
    InputSeries,
    Observation,
    ObservationStatus,
    TaskReport,
    aggregate,
)
from gpuscale.autoscaler.domain.queues import QueueReading, QueueState, Rates
from gpuscale.autoscaler.domain.spec import EndpointSpec, OnMissing, QueueCount, QueueSignal, Signal

_RATES = frozenset({QueueCount.RATE_IN, QueueCount.RATE_OUT, QueueCount.OLDEST_AGE})
_MINDS_SILENCE = frozenset({OnMissing.HOLD, OnMissing.LAST})
"""With these, sources that are silent are no smaller matter than a signal that is: with the others they are left out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a source last said.

    Attributes:
        values: one for each GPU, host, replica or series; one for a queue.
        at: when they were read, in seconds on the clock of `now`; None where they never were.
        problem: why there are none; empty where there are.
        silent_count: how many of the sources said nothing.
        proven_empty: it shows that no work is left, waiting or in hand.
        tasks: of a signal of tasks, what they need.
    """

    values: tuple[float, ...] = ()
    at: float | None = None
    problem: str = ""
    silent_count: int = 0
    proven_empty: bool = False
    tasks: TaskReport | None = None

    def joined(self, how: Aggregation) -> float:
        """Its values as one; the first that is no number, or too large for one, which aggregation could hide."""
        strange = next((value for value in self.values if not abs(value) <= LARGEST), None)
        return aggregate(self.values, how) if strange is None else strange


def queue_sample(source: QueueSignal, reading: QueueReading | None) -> Sample:
    """What a queue watcher last said; `reading` is None where there is no such watcher.

    A reading counts only while the queue can be read: once the last attempt failed the signal is missing, however
    young the count before it was, since a broker that is lost says nothing about its queue.
    """
    if reading is None:
        return Sample(problem=f"there is no watcher {source.watcher}")
    if reading.state is not QueueState.OK or reading.observed_at is None:
        problem = f"queue {reading.state.value}" + (f": {reading.message}" if reading.message else "")
        return Sample(at=reading.observed_at, problem=problem)
    if source.count in _RATES and reading.rates is not None:
        return _rate_sample(source.count, reading, reading.rates, reading.observed_at)
    value = _count(source.count, reading)
    if value is None:
        what = "the broker does not tell the unacknowledged messages; its management API would"
        if source.count in _RATES:
            what = "rates are not known; a watcher reads them that says so, from the management API"
        return Sample(at=reading.observed_at, problem=what)
    return Sample((value,), reading.observed_at, proven_empty=reading.total == 0)


def _rate_sample(count: QueueCount, reading: QueueReading, rates: Rates, observed_at: float) -> Sample:
    at = min(observed_at, rates.at)
    if count is not QueueCount.OLDEST_AGE:
        rate = rates.published if count is QueueCount.RATE_IN else rates.delivered
        return Sample((rate,), at, proven_empty=reading.total == 0)
    if rates.oldest_age is None:
        return Sample(
            at=at, problem="no message waits, or the one that does has no timestamp of its publisher"
        )
    return Sample((rates.oldest_age,), at, proven_empty=reading.total == 0)


def observe(signal: Signal, sample: Sample, now: float, history: InputSeries | None = None) -> Observation:
    """The observation of a signal at `now`; `history` holds its earlier values, the sample's own included.

    A negative count of a queue is no count, nothing that is not finite is a number, and nothing that 64 bits do not hold.
    """
    age = None if sample.at is None else max(0.0, now - sample.at)
    if sample.problem or not sample.values or age is None:
        detail = sample.problem or "nothing was reported"
        return _absent(signal, ObservationStatus.MISSING, detail, history, now, age=age)
    value = sample.joined(signal.across)
    if not abs(value) <= LARGEST or (value < 0 and isinstance(signal.source, QueueSignal)):
        what = "count" if isinstance(signal.source, QueueSignal) else "number"
        detail = f"{value} is no {what}" + (" of 64 bits" if LARGEST < abs(value) < math.inf else "")
        return _absent(signal, ObservationStatus.INVALID, detail, history, now, value=value, age=age)
    if age > signal.oldest:
        detail = f"{age:.1f} s old, more than {signal.oldest:g} s"
        return _absent(signal, ObservationStatus.STALE, detail, history, now, value=value, age=age)
    if signal.window is not None and history is not None:
        recent = history.since(now - signal.window).values
        value = aggregate(recent, signal.over_window) if recent else value
    return Observation(
        signal.id,
        ObservationStatus.OK,
        value,
        age,
        _silence(sample),
        proven_empty=sample.proven_empty,
        silent_count=sample.silent_count if signal.on_missing in _MINDS_SILENCE else 0,
        told_count=len(sample.values),
        across=signal.across,
        tasks=sample.tasks,
    )


def _silence(sample: Sample) -> str:
    if not sample.silent_count:
        return ""
    return f"{sample.silent_count} of {sample.silent_count + len(sample.values)} said nothing"


def _count(count: QueueCount, reading: QueueReading) -> float | None:
    counts = {
        QueueCount.READY: reading.ready,
        QueueCount.UNACKED: reading.unacked,
        QueueCount.TOTAL: reading.total,
    }
    return counts.get(count)


def _absent(
    signal: Signal,
    status: ObservationStatus,
    detail: str,
    history: InputSeries | None,
    now: float,
    *,
    value: float | None = None,
    age: float | None = None,
) -> Observation:
    """What stands for a value that cannot be had, as the signal says."""
    shown = value if value is not None and math.isfinite(value) else None
    observation = Observation(signal.id, status, shown, age, detail)
    match signal.on_missing:
        case OnMissing.ZERO:
            return replace(
                observation, status=ObservationStatus.OK, value=0.0, detail=f"{detail}; 0 stands for it"
            )
        case OnMissing.IGNORE:
            return replace(observation, ignored=True)
        case OnMissing.LAST:
            return _last(observation, signal, history, now)
        case OnMissing.HOLD:
            return observation


def _last(observation: Observation, signal: Signal, history: InputSeries | None, now: float) -> Observation:
    """The last value, for as long as it may stand for one that cannot be had."""
    if history is None or not history.times or now - history.times[-1] > signal.oldest + signal.last_ttl:
        return observation
    age = max(0.0, now - history.times[-1])
    detail = f"{observation.detail}; its last value stands for it"
    return replace(observation, status=ObservationStatus.OK, value=history.values[-1], age=age, detail=detail)


SHORTEST_KEPT = 300.0
"""Seconds of every signal that are kept at least."""
SAMPLES_KEPT = 1_000
"""Samples of a signal that are kept to be shown; samples in a row that read the same are one."""
_STATUSES = tuple(ObservationStatus)


@dataclass(frozen=True, slots=True)
class EndpointPast:
    """The past of an endpoint: its signals by id, what its pace goes by, and what its panic rules know."""

    memory: Memory | None = None
    bursts: Mapping[str, Burst] = field(default_factory=dict[str, Burst])
    series: Mapping[str, InputSeries] = field(default_factory=dict[str, InputSeries])

    def with_samples(self, spec: EndpointSpec, samples: Mapping[str, Sample]) -> EndpointPast:
        """With the values of new samples; signals that the spec has no more are forgotten."""
        keep = kept_seconds(spec)
        return replace(
            self,
            series={
                one.id: _added(self.series.get(one.id, InputSeries()), one, samples.get(one.id), keep)
                for one in spec.signals
            },
        )

    def observations(
        self, spec: EndpointSpec, samples: Mapping[str, Sample], now: float
    ) -> dict[str, Observation]:
        """What every signal of the spec shows now."""
        return {
            one.id: observe(one, samples.get(one.id, Sample()), now, self.series.get(one.id))
            for one in spec.signals
        }


def kept_seconds(spec: EndpointSpec) -> float:
    """Seconds of the past that the rules and signals of a spec look at."""
    windows = [signal.window or 0.0 for signal in spec.signals]
    return max([SHORTEST_KEPT, *windows, *(rule.kind.past for rule in spec.rules)])


def _added(series: InputSeries, signal: Signal, sample: Sample | None, keep: float) -> InputSeries:
    if sample is None or sample.at is None or sample.problem or not sample.values:
        return series
    value = sample.joined(signal.across)
    return series.added(sample.at, value, keep) if abs(value) <= LARGEST else series


@dataclass(frozen=True, slots=True)
class Shown:
    """What a signal showed from `first` to `last`, in seconds since 1970; `value` is None where there was none."""

    first: float
    last: float
    value: float | None
    status: ObservationStatus


class Samples:
    """What one signal showed at each evaluation: the last `SAMPLES_KEPT`, at 25 bytes each, for there may be many signals."""

    def __init__(self) -> None:
        self._first, self._last, self._values = array("d"), array("d"), array("d")
        self._statuses = array("b")

    def note(self, one: Observation, at: float) -> None:
        """Add what it shows at `at`, in seconds since 1970."""
        value = math.nan if one.value is None else one.value
        status = _STATUSES.index(one.status)
        if self._last and self._statuses[-1] == status and _same(self._values[-1], value):
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
    """The samples of signals by id, with what they show now; signals that are evaluated no more are forgotten."""
    kept: dict[str, Samples] = {}
    for one in observations:
        kept[one.signal] = samples.get(one.signal) or Samples()
        kept[one.signal].note(one, at)
    return kept


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
