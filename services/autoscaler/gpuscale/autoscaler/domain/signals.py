"""What a signal shows, judged by its age and by whether it is a number at all. Pure: time is an argument."""

import math
from dataclasses import dataclass, replace

from gpuscale.autoscaler.domain.model import (
    Observation,
    ObservationStatus,
    OnMissing,
    QueueCount,
    QueueSignal,
    Signal,
    TaskReport,
)
from gpuscale.autoscaler.domain.queues import QueueReading, QueueState, Rates
from gpuscale.autoscaler.domain.series import LARGEST, Aggregation, Series, aggregate

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


def observe(signal: Signal, sample: Sample, now: float, history: Series | None = None) -> Observation:
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
    history: Series | None,
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


def _last(observation: Observation, signal: Signal, history: Series | None, now: float) -> Observation:
    """The last value, for as long as it may stand for one that cannot be had."""
    if history is None or not history.times or now - history.times[-1] > signal.oldest + signal.last_ttl:
        return observation
    age = max(0.0, now - history.times[-1])
    detail = f"{observation.detail}; its last value stands for it"
    return replace(observation, status=ObservationStatus.OK, value=history.values[-1], age=age, detail=detail)
