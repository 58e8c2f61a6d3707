"""The metrics kept over time, and their statistics. Pure.

A sample is a tuple of floats in the order of `GPU_METRICS` or `NODE_METRICS`. NaN means absent, and is in no count, minimum,
maximum or mean.
"""

from dataclasses import dataclass
from enum import Enum

ABSENT = float("nan")

Sample = tuple[float, ...]


class Metric(Enum):
    """A kept reading; numbers are those of the contract."""

    UTILIZATION_PERCENT = 1
    MEMORY_UTILIZATION_PERCENT = 2
    MEMORY_USED_BYTES = 3
    MEMORY_USED_PERCENT = 4
    TEMPERATURE_CELSIUS = 5
    POWER_WATTS = 6
    SM_CLOCK_MHZ = 7
    CPU_PERCENT = 8
    LOAD_1M = 9


GPU_METRICS = (
    Metric.UTILIZATION_PERCENT,
    Metric.MEMORY_UTILIZATION_PERCENT,
    Metric.MEMORY_USED_BYTES,
    Metric.MEMORY_USED_PERCENT,
    Metric.TEMPERATURE_CELSIUS,
    Metric.POWER_WATTS,
    Metric.SM_CLOCK_MHZ,
)
NODE_METRICS = (Metric.CPU_PERCENT, Metric.MEMORY_USED_BYTES, Metric.LOAD_1M, Metric.UTILIZATION_PERCENT)


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of at least one sample of a metric."""

    min: float
    max: float
    mean: float
    count: int


@dataclass(slots=True)
class MetricTally:
    """Running statistics of the samples of a metric."""

    min: float = float("inf")
    max: float = float("-inf")
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Add a sample."""
        self.merge(value, value, value, 1)

    def merge(self, smallest: float, mean: float, largest: float, count: int) -> None:
        """Add `count` samples by their statistics."""
        self.min = min(self.min, smallest)
        self.max = max(self.max, largest)
        self.total += mean * count
        self.count += count

    def stats(self) -> Stats | None:
        """The statistics; None without a sample."""
        if not self.count:
            return None
        # Rounding may put the mean outside minimum and maximum.
        mean = min(max(self.total / self.count, self.min), self.max)
        return Stats(self.min, self.max, mean, self.count)
