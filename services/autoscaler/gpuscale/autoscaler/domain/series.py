"""Series: what a signal showed over time, and what a window of it says. Pure.

Times are seconds on one clock that only grows; points come oldest first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

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
    """One value of several.

    P95 is the least value that at least 95 % of the values do not exceed (nearest rank).

    Raises:
        ValueError: there are none.
    """
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
class Series:
    """The values of a signal: `times` ascending, `values` beside them."""

    times: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def added(self, at: float, value: float, keep: float) -> Series:
        """With one more value; what is older than `keep` seconds before it is dropped, but for the last such point.

        A value that is not newer than the last is left out: it is the same reading again. Of more points than are kept the
        older half is thinned, so that they still reach back as far.
        """
        if self.times and at <= self.times[-1]:
            return self
        first = max(0, bisect_right(self.times, at - keep) - 1)
        longer = Series((*self.times[first:], at), (*self.values[first:], value))
        return longer if len(longer.times) <= LONGEST else longer._thinned(2 * keep / LONGEST)

    def _thinned(self, spacing: float) -> Series:
        """With the points of the older half no closer than that."""
        half = len(self.times) // 2
        kept = [0]
        for index in range(1, half):
            if self.times[index] - self.times[kept[-1]] >= spacing:
                kept.append(index)
        kept = [*kept, *range(half, len(self.times))][-LONGEST:]
        return Series(tuple(self.times[one] for one in kept), tuple(self.values[one] for one in kept))

    def since(self, start: float) -> Series:
        """The part from `start` on."""
        first = bisect_left(self.times, start)
        return Series(self.times[first:], self.values[first:])

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


def series_of(points: Iterable[tuple[float, float]]) -> Series:
    """The series of points in the order of time."""
    pairs = list(points)
    return Series(tuple(at for at, _ in pairs), tuple(value for _, value in pairs))
