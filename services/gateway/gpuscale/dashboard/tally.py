"""How much was reserved, and how much of that did something, over the last day: what idle reservations cost. Pure.

The services keep no such figure, so the dashboard counts while it runs. A moment that was not counted is a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from gpuscale.dashboard.facts import GpuFacts
from gpuscale.dashboard.rows import IDLE_PERCENT

PERIOD = 10.0
"""Seconds between two counts."""
KEPT = 8640
"""Counts that are kept: a day of them."""


@dataclass(frozen=True, slots=True)
class Count:
    """GPUs at a moment (seconds of the epoch). Of a shared GPU its reserved part counts, in all but `total`.

    Attributes:
        at: when.
        total: GPUs there are.
        reserved: those that somebody holds.
        used: those of the reserved that did something: by their utilization, of those that could be read.
        idle: those of the reserved that did nothing.
    """

    at: float
    total: float
    reserved: float
    used: float
    idle: float


def count(gpus: Sequence[GpuFacts], at: float) -> Count:
    """Count them."""
    held = [(gpu.held_milli / 1000.0, gpu.utilization) for gpu in gpus if gpu.held_milli]
    return Count(
        at=at,
        total=len(gpus),
        reserved=sum(share for share, _ in held),
        used=sum(share * used / 100.0 for share, used in held if used is not None),
        idle=sum(share for share, used in held if used is not None and used < IDLE_PERCENT),
    )


class Tally:
    """The counts of the last day."""

    def __init__(self) -> None:
        self._counts: deque[Count] = deque(maxlen=KEPT)

    def add(self, one: Count) -> None:
        """Keep a count; one that is not newer than the last is left out, as when a clock was put back."""
        if not self._counts or one.at > self._counts[-1].at:
            self._counts.append(one)

    def since(self, start: float, end: float, step: float) -> list[Count]:
        """The counts from `start` to `end`, as the means of steps of equal length (at least PERIOD)."""
        return [
            _mean(list(same)) for _, same in groupby(self._from(start, end), key=lambda one: one.at // step)
        ]

    def wasted_hours(self, start: float, end: float) -> float:
        """GPU hours that were reserved and not used; each count stands for the time to the next, at most for PERIOD."""
        counts = self._from(start, end)
        pairs = pairwise(counts)
        lost = sum(max(0.0, one.reserved - one.used) * min(PERIOD, later.at - one.at) for one, later in pairs)
        return lost / 3600.0

    def _from(self, start: float, end: float) -> list[Count]:
        return [one for one in self._counts if start <= one.at <= end]


def _mean(counts: Sequence[Count]) -> Count:
    number = len(counts)
    return Count(
        at=counts[0].at,
        total=sum(one.total for one in counts) / number,
        reserved=sum(one.reserved for one in counts) / number,
        used=sum(one.used for one in counts) / number,
        idle=sum(one.idle for one in counts) / number,
    )
