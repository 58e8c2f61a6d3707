"""What a signal shows, judged by its age and by whether it is a number at all. Pure: time is an argument."""

import math

from gpuscale.autoscaler.model import Observation, ObservationStatus, QueueCount, Signal
from gpuscale.autoscaler.queues.model import QueueReading, QueueState


def observe(signal: Signal, reading: QueueReading | None, now: float) -> Observation:
    """The observation of a queue signal at `now`.

    A reading counts only while the queue can be read: once the last attempt failed the signal is missing, however
    young the count before it was, since a broker that is lost says nothing about its queue. `reading` is None where
    there is no such watcher.
    """
    if reading is None:
        return _unusable(signal, ObservationStatus.MISSING, f"there is no watcher {signal.source.watcher}")
    age = None if reading.observed_at is None else max(0.0, now - reading.observed_at)
    if reading.state is not QueueState.OK or age is None:
        detail = f"queue {reading.state.value}" + (f": {reading.message}" if reading.message else "")
        return _unusable(signal, ObservationStatus.MISSING, detail, age=age)
    value = _count(signal.source.count, reading)
    if value is None:
        detail = "the broker does not tell the unacknowledged messages; its management API would"
        return _unusable(signal, ObservationStatus.MISSING, detail, age=age)
    if not math.isfinite(value) or value < 0:
        return _unusable(signal, ObservationStatus.INVALID, f"{value} is no count", value=value, age=age)
    if age > signal.oldest:
        detail = f"{age:.1f} s old, more than {signal.oldest:g} s"
        return _unusable(signal, ObservationStatus.STALE, detail, value=value, age=age)
    return Observation(signal.id, ObservationStatus.OK, value, age, proven_empty=reading.total == 0)


def _count(count: QueueCount, reading: QueueReading) -> float | None:
    if count is QueueCount.READY:
        return reading.ready
    return reading.unacked if count is QueueCount.UNACKED else reading.total


def _unusable(
    signal: Signal,
    status: ObservationStatus,
    detail: str,
    *,
    value: float | None = None,
    age: float | None = None,
) -> Observation:
    shown = value if value is not None and math.isfinite(value) else None
    return Observation(signal.id, status, shown, age, detail)
