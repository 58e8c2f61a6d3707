"""What several services put into their messages: dates, and the figures of a metric.

What the fleet keeps is dated in seconds of its own clock, which steps of the wall clock do not touch. For display they
become dates by the wall clock as it is when they are asked for.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.monitor import v1 as api
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import to_datetime, to_timestamp
from gpuscale.monitor.model.metrics import Metric, Stats


@dataclass(frozen=True, slots=True)
class Dates:
    """One moment on both clocks."""

    now: float
    wall: datetime

    @classmethod
    def of(cls, clock: Clock) -> Self:
        """This moment."""
        return cls(clock.now(), clock.wall())

    def timestamp(self, at: float) -> Timestamp:
        """The date of a moment in seconds of the clock."""
        return to_timestamp(self.wall - timedelta(seconds=self.now - at))

    def span(self, start: float, end: float | None) -> tuple[datetime, datetime | None]:
        """The dates of two moments in seconds of the clock."""
        began = self.wall - timedelta(seconds=self.now - start)
        return began, None if end is None else began + timedelta(seconds=end - start)

    def seconds(self, timestamp: Timestamp) -> float:
        """A date in seconds of the clock."""
        return self.now - (self.wall - to_datetime(timestamp)).total_seconds()


_METRICS = {metric: api.Metric.Value(f"METRIC_{metric.name}") for metric in Metric}


def to_stats(metric: Metric, stats: Stats) -> api.MetricStats:
    """Figures of one metric as a message."""
    return api.MetricStats(
        metric=_METRICS[metric], min=stats.min, max=stats.max, mean=stats.mean, sample_count=stats.count
    )
