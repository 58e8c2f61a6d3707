"""Dates and statistics in messages.

The fleet keeps times on its monotonic clock, and converts them to dates with the current wall clock when asked.
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
    """The same moment on both clocks."""

    now: float
    wall: datetime

    @classmethod
    def of(cls, clock: Clock) -> Self:
        """The current moment."""
        return cls(clock.now(), clock.wall())

    def timestamp(self, at: float) -> Timestamp:
        """The date of a time on the clock."""
        return to_timestamp(self.wall - timedelta(seconds=self.now - at))

    def span(self, start: float, end: float | None) -> tuple[datetime, datetime | None]:
        """The dates of two times on the clock."""
        began = self.wall - timedelta(seconds=self.now - start)
        return began, None if end is None else began + timedelta(seconds=end - start)

    def seconds(self, timestamp: Timestamp) -> float:
        """The time on the clock of a date."""
        return self.now - (self.wall - to_datetime(timestamp)).total_seconds()


_METRICS = {metric: api.Metric.Value(f"METRIC_{metric.name}") for metric in Metric}


def to_stats(metric: Metric, stats: Stats) -> api.MetricStats:
    """Statistics of a metric as a message."""
    return api.MetricStats(
        metric=_METRICS[metric], min=stats.min, max=stats.max, mean=stats.mean, sample_count=stats.count
    )
