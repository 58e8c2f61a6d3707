"""The history of one node or GPU: a ring for each tier, each fed by the finer one. Pure: times are arguments.

A sample goes into the open bucket of the finest tier. When a later sample opens the next bucket, the one before is put
into its ring; when that begins a new bucket of the coarser tier, the finer buckets of the last one are put together
there, and so on. So every sample is kept once in each tier, and costs one bucket of the finest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from gpuscale.monitor.history.metrics import ABSENT, Sample, Stats, Tally
from gpuscale.monitor.history.ring import MOST_COUNTED, Bucket, Point, Ring, Rows, bucket_of

BYTES_OF_NUMBER = 4
BYTES_OF_METRIC = 3 * 4 + 2
"""Minimum, mean and maximum as 32-bit floats, and a count of 16 bits."""
_ARRAY_SLACK = 1.125
"""An array that grows by appending is this much larger than its content at most."""
_MOST_OPEN = 16
"""So many samples of the open bucket are held before they are put together."""

_NOTHING = Stats(ABSENT, ABSENT, ABSENT, 0)


@dataclass(frozen=True, slots=True)
class Tier:
    """Buckets of `step` seconds, kept for `retention` seconds."""

    step: float
    retention: float

    @property
    def capacity(self) -> int:
        """How many buckets are kept."""
        return ceil(self.retention / self.step)


def most_bytes(width: int, tiers: Sequence[Tier]) -> int:
    """The most memory that the values of one series take, with `width` metrics."""
    row = BYTES_OF_NUMBER + width * BYTES_OF_METRIC
    return ceil(sum(tier.capacity for tier in tiers) * row * _ARRAY_SLACK)


class Series:
    """Samples of `width` metrics over time, in tiers from the finest to the coarsest.

    Each tier's step is a whole multiple of the one before, and a tier keeps at least one step of the next.
    """

    def __init__(self, width: int, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._rings = [Ring(width, tier.capacity) for tier in tiers]
        self._fresh = [0] * len(tiers)  # buckets of each tier that the coarser one has not got yet
        self._ratios = [round(coarse.step / fine.step) for fine, coarse in pairwise(tiers)]
        self._open_number = -1
        self._open: list[Bucket] = []
        self._restored_until = float("-inf")  # what a run before had in finer steps is kept in the coarsest
        self._width = width

    def add(self, at: float, sample: Sample) -> None:
        """Take in a sample; one from before the open bucket is left out."""
        number = int(at // self._tiers[0].step)
        if number > self._open_number:
            self._close()
            self._open_number = number
        elif number < self._open_number:
            return
        self._open.append(bucket_of(sample))
        if len(self._open) > _MOST_OPEN:
            self._open = [_together(self._open, self._width)]

    def newest(self) -> float:
        """Begin of the open bucket."""
        return self._open_number * self._tiers[0].step

    def oldest(self) -> float | None:
        """Begin of the oldest bucket that is kept; None before the first sample."""
        firsts = [
            ring.first * tier.step
            for ring, tier in zip(self._rings, self._tiers, strict=True)
            if ring.first is not None
        ]
        return min(firsts, default=self.newest() if self._open else None)

    def points(self, metric: int, tier: int, start: float, end: float) -> list[Point]:
        """One metric in [start, end) by the buckets of a tier; what that has not got yet by those of the finer ones."""
        found: list[Point] = []
        if tier < len(self._rings) - 1 and start < self._restored_until:
            found = self._rings[-1].points(
                metric, self._tiers[-1].step, start, min(end, self._restored_until)
            )
            start = self._restored_until
        for index in range(tier, -1, -1):
            ring, step = self._rings[index], self._tiers[index].step
            found += ring.points(metric, step, start, end)
            if ring.last is not None:
                start = max(start, (ring.last + 1) * step)
        if self._open and start <= self.newest() < end:
            bucket = _together(self._open, self._width)
            if bucket.counts[metric]:
                values = bucket.mins[metric], bucket.means[metric], bucket.maxs[metric]
                found.append(Point(self.newest(), *values, bucket.counts[metric]))
        return found

    def coarsest(self, first: int) -> Rows:
        """Buckets of the coarsest tier from a number on, and what the tier before has for the next one."""
        rows = self._rings[-1].rows(first)
        fresh, last = self._fresh[-2], self._rings[-2].last
        if fresh and last is not None:
            rows.add(last // self._ratios[-1], self._rings[-2].merged(fresh))
        return rows

    def restore(self, rows: Rows) -> None:
        """Begin, before the first sample, with buckets of the coarsest tier; the last of them may go on."""
        last = rows.numbers[-1]
        self._rings[-1].restore(rows.part(0, len(rows.numbers) - 1, self._width))
        self._restored_until = last * self._tiers[-1].step
        self._rings[-2].append(last * self._ratios[-1], rows.last(self._width))
        self._fresh[-2] = 1
        self._open_number = round(self._restored_until / self._tiers[0].step)

    def _close(self) -> None:
        if self._open:
            bucket = self._open[0] if len(self._open) == 1 else _together(self._open, self._width)
            self._append(0, self._open_number, bucket)
            self._open = []

    def _append(self, tier: int, number: int, bucket: Bucket) -> None:
        ring = self._rings[tier]
        if tier + 1 < len(self._tiers):
            ratio = self._ratios[tier]
            last = ring.last
            if last is not None and number // ratio > last // ratio:
                self._append(tier + 1, last // ratio, ring.merged(self._fresh[tier]))
                self._fresh[tier] = 0
            self._fresh[tier] += 1
        ring.append(number, bucket)


def _together(buckets: Sequence[Bucket], width: int) -> Bucket:
    """Several buckets as one."""
    tallies = [Tally() for _ in range(width)]
    for bucket in buckets:
        for metric, tally in enumerate(tallies):
            if bucket.counts[metric]:
                tally.merge(
                    bucket.mins[metric], bucket.means[metric], bucket.maxs[metric], bucket.counts[metric]
                )
    stats = [tally.stats() or _NOTHING for tally in tallies]
    return Bucket(
        [one.min for one in stats],
        [one.mean for one in stats],
        [one.max for one in stats],
        [min(one.count, MOST_COUNTED) for one in stats],
    )
