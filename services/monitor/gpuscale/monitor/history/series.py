"""The history of one node or GPU: a ring for each tier, each fed by the finer one. Pure: times are arguments.

A sample waits beside the finest tier, as a row of numbers, until some have come together or somebody asks: thousands
of GPUs are noted each second, and nearly all samples have a bucket of the finest tier to themselves. Then the buckets
that are over go into the ring of the finest tier; when that begins a new bucket of the coarser tier, the finer buckets
of the last one are put together there, and so on. So every sample is kept once in each tier.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, isnan

from gpuscale.monitor.history.ring import MOST_COUNTED, Bucket, Point, Ring, Rows
from gpuscale.monitor.model.metrics import ABSENT, MetricTally, Sample, Stats

BYTES_OF_NUMBER = 4
BYTES_OF_METRIC = 3 * 4 + 2
"""Minimum, mean and maximum as 32-bit floats, and a count of 16 bits."""
_ARRAY_SLACK = 1.125
"""An array that grows by appending is this much larger than its content at most."""
_MOST_WAITING = 16
"""How many samples wait before they are put into the rings."""

LEAST_RETENTION_SECONDS = 3_600.0
"""The coarsest tier always reaches back this far, however many GPUs share the memory."""
_ALL = -(2**31)
"""Number of a bucket that none is before."""
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
    waiting = _MOST_WAITING * BYTES_OF_NUMBER * (1 + width)
    return ceil((sum(tier.capacity for tier in tiers) * row + waiting) * _ARRAY_SLACK)


def shorter(tiers: Sequence[Tier]) -> Iterator[Sequence[Tier]]:
    """Tiers with less and less retention.

    One after the other is given up but for what the next needs, the finest first; then the coarsest loses a quarter again
    and again, down to LEAST_RETENTION_SECONDS.
    """
    found = list(tiers)
    for index, coarser in enumerate(found[1:]):
        tier = found[index]
        found[index] = replace(tier, retention=min(tier.retention, 2 * coarser.step))
        yield tuple(found)
    while found[-1].retention > LEAST_RETENTION_SECONDS:
        retention = max(found[-1].retention * 0.75, LEAST_RETENTION_SECONDS)
        found[-1] = replace(found[-1], retention=retention)
        yield tuple(found)


class HistorySeries:
    """Samples of `width` metrics over time, in tiers from the finest to the coarsest.

    Each tier's step is a whole multiple of the one before, and a tier keeps at least one step of the next.
    """

    def __init__(self, width: int, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._rings = [Ring(width, tier.capacity) for tier in tiers]
        self._fresh = [0] * len(tiers)  # buckets of each tier that the coarser one has not got yet
        self._ratios = [round(coarse.step / fine.step) for fine, coarse in pairwise(tiers)]
        self._step = tiers[0].step
        self._open_number = -1
        self._open: Bucket | None = None  # samples of one bucket that were put together, and its number
        self._open_is = -1
        self._numbers = array("i")  # of the buckets of the samples that wait, and their values row by row
        self._values = array("f")
        self._restored_until = float("-inf")  # what a run before had in finer steps is kept in the coarsest
        self._width = width

    def add(self, at: float, sample: Sample) -> None:
        """Take in a sample; one from before the open bucket is left out."""
        number = int(at // self._step)
        if number < self._open_number:
            return
        self._open_number = number
        self._numbers.append(number)
        self._values.extend(sample)
        if len(self._numbers) >= _MOST_WAITING:
            self._settle()

    def shorten(self, tiers: Sequence[Tier]) -> None:
        """Keep no more than these tiers do: the same ones, with less retention."""
        if tiers is self._tiers:
            return
        self._settle()
        self._tiers = tiers
        for place, tier in enumerate(tiers):
            rows = self._rings[place].rows(_ALL)
            self._rings[place] = Ring(self._width, tier.capacity)
            self._rings[place].restore(rows)

    def newest(self) -> float:
        """Begin of the open bucket."""
        return self._open_number * self._step

    def oldest(self) -> float | None:
        """Begin of the oldest bucket that is kept; None before the first sample."""
        self._settle()
        firsts = [
            ring.first * tier.step
            for ring, tier in zip(self._rings, self._tiers, strict=True)
            if ring.first is not None
        ]
        return min(firsts, default=self.newest() if self._open or self._numbers else None)

    def points(self, metric: int, tier: int, start: float, end: float) -> list[Point]:
        """One metric in [start, end) by the buckets of a tier; what that has not got yet by those of the finer ones."""
        self._settle()
        found: list[Point] = []
        if tier < len(self._rings) - 1 and start < self._restored_until:
            found, start = self._before(metric, tier, start, end)
        for index in range(tier, -1, -1):
            ring, step = self._rings[index], self._tiers[index].step
            found += ring.points(metric, step, start, end)
            if ring.last is not None:
                start = max(start, (ring.last + 1) * step)
        if self._open_number >= 0 and start <= self.newest() < end:
            bucket = self._opened()
            if bucket.counts[metric]:
                values = bucket.mins[metric], bucket.means[metric], bucket.maxs[metric]
                found.append(Point(self.newest(), *values, bucket.counts[metric]))
        return found

    def _before(self, metric: int, tier: int, start: float, end: float) -> tuple[list[Point], float]:
        """What a run before had, by the finest tier that was restored and is not finer; and where the tier itself begins."""
        ring, step, coarse = self._rings[-2], self._tiers[-2].step, self._tiers[-1].step
        begin = self._restored_until
        if ring.first is not None:  # what it has of a coarse bucket whose begin it has not is in that bucket
            begin = min(begin, ceil(ring.first * step / coarse) * coarse)
        found = self._rings[-1].points(metric, self._tiers[-1].step, start, min(end, begin))
        if tier == len(self._rings) - 2:
            return found, max(start, begin)
        last_minute = self._restored_until + step  # it stands under its first step
        found += ring.points(metric, step, max(start, begin), min(end, last_minute))
        return found, self._restored_until

    def finer(self, first: int) -> Rows:
        """Buckets of the tier before the coarsest from a number on."""
        self._settle()
        return self._rings[-2].rows(first)

    def restore_finer(self, rows: Rows) -> None:
        """Add, after `restore` and before the first sample, buckets of the tier before the coarsest.

        Those of the last bucket of the coarsest tier are left out: they are in the one that may go on.
        """
        kept = self._rings[-2].rows(_ALL)
        older = rows.part(0, bisect_left(rows.numbers, kept.numbers[0]), self._width)
        older.extend(kept)
        self._rings[-2] = Ring(self._width, self._tiers[-2].capacity)
        self._rings[-2].restore(older)

    def coarsest(self, first: int) -> Rows:
        """Buckets of the coarsest tier from a number on, and what the tier before has for the next one."""
        self._settle()
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

    def _settle(self) -> None:
        """Put the samples that wait into the rings, but for those of the open bucket."""
        numbers, values, width = self._numbers, self._values, self._width
        if not numbers:
            return
        closed = len(numbers)
        while closed and numbers[closed - 1] == self._open_number:
            closed -= 1
        self._numbers, self._values = numbers[closed:], values[closed * width :]
        if closed:
            self._close(numbers[:closed], values[: closed * width])
        if self._open is not None and self._open_is != self._open_number:
            self._append(0, self._open_is, self._open)
            self._open = None
        if self._open is not None or len(self._numbers) > 1:
            self._open, self._open_is = self._opened(), self._open_number
            self._numbers, self._values = array("i"), array("f")

    def _opened(self) -> Bucket:
        """The open bucket as it is by now."""
        return _together(self._open, self._values, self._width)

    def _close(self, numbers: "array[int]", values: "array[float]") -> None:
        """Put samples into the rings whose buckets are over."""
        width = self._width
        if self._open is not None and self._open_is != numbers[0]:
            self._append(0, self._open_is, self._open)
            self._open = None
        if self._open is None and len(set(numbers)) == len(numbers):
            self._extend(numbers, values)
            return
        begin = 0
        while begin < len(numbers):
            end = begin + numbers.count(numbers[begin])
            bucket = _together(self._open, values[begin * width : end * width], width)
            self._open = None
            self._append(0, numbers[begin], bucket)
            begin = end

    def _extend(self, numbers: "array[int]", values: "array[float]") -> None:
        """Put buckets of a sample each into the finest ring, part by part of the next tier's buckets."""
        begin, width, ring = 0, self._width, self._rings[0]
        ratio = self._ratios[0] if self._ratios else 0
        while begin < len(numbers):
            end = len(numbers)
            if ratio:
                over = (numbers[begin] // ratio + 1) * ratio
                end = bisect_left(numbers, over, begin)
                self._begin(0, numbers[begin])
                self._fresh[0] += end - begin
            ring.extend(numbers[begin:end], values[begin * width : end * width])
            begin = end

    def _begin(self, tier: int, number: int) -> None:
        """A bucket of a tier comes: with the first of a coarser one, the coarser one before it is over."""
        ring, ratio = self._rings[tier], self._ratios[tier]
        last = ring.last
        if last is not None and number // ratio > last // ratio:
            self._append(tier + 1, last // ratio, ring.merged(self._fresh[tier]))
            self._fresh[tier] = 0

    def _append(self, tier: int, number: int, bucket: Bucket) -> None:
        if tier + 1 < len(self._tiers):
            self._begin(tier, number)
            self._fresh[tier] += 1
        self._rings[tier].append(number, bucket)


def _together(before: Bucket | None, values: "array[float]", width: int) -> Bucket:
    """A bucket with more samples, whose values stand row by row."""
    tallies = [MetricTally() for _ in range(width)]
    for metric, tally in enumerate(tallies):
        if before is not None and before.counts[metric]:
            tally.merge(before.mins[metric], before.means[metric], before.maxs[metric], before.counts[metric])
        for value in values[metric::width]:
            if not isnan(value):
                tally.add(value)
    stats = [tally.stats() or _NOTHING for tally in tallies]
    return Bucket(
        [metric.min for metric in stats],
        [metric.mean for metric in stats],
        [metric.max for metric in stats],
        [min(metric.count, MOST_COUNTED) for metric in stats],
    )
