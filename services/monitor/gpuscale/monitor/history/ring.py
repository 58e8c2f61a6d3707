"""Buckets of one step of time, oldest overwritten, in arrays that never grow beyond what was agreed. Pure.

A bucket has a number: the seconds of the clock at its begin, divided by the step; 32 bits are 68 years of seconds, and
it is below 0 before the boot of the host. A step without a sample has no bucket and takes no memory. Values are kept with 24 bits, which is 1 part in 16 million.
"""

from array import array
from collections.abc import Sequence
from itertools import compress
from math import isnan
from operator import mul
from typing import NamedTuple, TypeVar

from gpuscale.monitor.model.metrics import ABSENT

MOST_COUNTED = 0xFFFF
"""A bucket counts no more samples than this."""
_Number = TypeVar("_Number", int, float)


class Bucket(NamedTuple):
    """Minimum, mean, maximum and count of samples of each metric; NaN and 0 of one without a sample."""

    mins: Sequence[float]
    means: Sequence[float]
    maxs: Sequence[float]
    counts: Sequence[int]


class Point(NamedTuple):
    """One metric in one bucket: begin in seconds of the clock, minimum, mean, maximum, and count of samples."""

    start: float
    min: float
    mean: float
    max: float
    samples: int


class Rows(NamedTuple):
    """Buckets by time, as arrays: a number for each, and the metrics of one after those of the other."""

    numbers: "array[int]"
    mins: "array[float]"
    means: "array[float]"
    maxs: "array[float]"
    counts: "array[int]"

    @classmethod
    def empty(cls) -> "Rows":
        """No bucket."""
        return cls(array("i"), array("f"), array("f"), array("f"), array("H"))

    def add(self, number: int, bucket: Bucket) -> None:
        """Add a bucket; its number is above those before."""
        self.numbers.append(number)
        self.mins.extend(bucket.mins)
        self.means.extend(bucket.means)
        self.maxs.extend(bucket.maxs)
        self.counts.extend(bucket.counts)

    def extend(self, rows: "Rows") -> None:
        """Add buckets; their numbers are above those before."""
        self.numbers.extend(rows.numbers)
        self.mins.extend(rows.mins)
        self.means.extend(rows.means)
        self.maxs.extend(rows.maxs)
        self.counts.extend(rows.counts)

    def part(self, begin: int, stop: int, width: int) -> "Rows":
        """The buckets at these places, of `width` metrics, as copies."""
        numbers, mins, means, maxs, counts = self
        cells = slice(begin * width, stop * width)
        return Rows(numbers[begin:stop], mins[cells], means[cells], maxs[cells], counts[cells])

    def last(self, width: int) -> Bucket:
        """The newest bucket, of `width` metrics."""
        return Bucket(self.mins[-width:], self.means[-width:], self.maxs[-width:], self.counts[-width:])


class Ring:
    """The newest `capacity` buckets of `width` metrics each, by time."""

    def __init__(self, width: int, capacity: int) -> None:
        self._width = width
        self._capacity = capacity
        self._oldest = 0  # row of the oldest bucket
        self._numbers, self._mins, self._means, self._maxs, self._counts = Rows.empty()

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def first(self) -> int | None:
        """Number of the oldest bucket; None of an empty ring."""
        return self._numbers[self._oldest] if self._numbers else None

    @property
    def last(self) -> int | None:
        """Number of the newest bucket; None of an empty ring."""
        return self._numbers[self._oldest - 1] if self._numbers else None

    @property
    def _rows(self) -> Rows:
        return Rows(self._numbers, self._mins, self._means, self._maxs, self._counts)

    def append(self, number: int, bucket: Bucket) -> None:
        """Add a bucket; its number is above those before."""
        if len(self._numbers) < self._capacity:
            self._numbers.append(number)
            self._mins.extend(bucket.mins)
            self._means.extend(bucket.means)
            self._maxs.extend(bucket.maxs)
            self._counts.extend(bucket.counts)
            return
        begin = self._oldest * self._width
        end = begin + self._width
        self._numbers[self._oldest] = number
        self._mins[begin:end] = array("f", bucket.mins)
        self._means[begin:end] = array("f", bucket.means)
        self._maxs[begin:end] = array("f", bucket.maxs)
        self._counts[begin:end] = array("H", bucket.counts)
        self._oldest = (self._oldest + 1) % self._capacity

    def extend(self, numbers: "array[int]", values: "array[float]") -> None:
        """Add buckets of a single sample each, row by row; their numbers are above those before, and rise."""
        counts = array("H", [1]) * len(values)
        if isnan(sum(values)):  # rarely is something absent
            counts = array("H", [value == value for value in values])  # NaN is not
        width, done = self._width, min(self._capacity - len(self._numbers), len(numbers))
        if done:
            cells = values[: done * width]
            self._numbers.extend(numbers[:done])
            for column in (self._mins, self._means, self._maxs):
                column.extend(cells)
            self._counts.extend(counts[: done * width])
        while done < len(numbers):
            rows = min(len(numbers) - done, self._capacity - self._oldest)
            source = slice(done * width, (done + rows) * width)
            target = slice(self._oldest * width, (self._oldest + rows) * width)
            self._numbers[self._oldest : self._oldest + rows] = numbers[done : done + rows]
            cells = values[source]
            for column in (self._mins, self._means, self._maxs):
                column[target] = cells
            self._counts[target] = counts[source]
            self._oldest = (self._oldest + rows) % self._capacity
            done += rows

    def merged(self, rows: int) -> Bucket:
        """The newest so many buckets as one."""
        _, mins, means, maxs, counts = self._newest(rows)
        width = self._width
        if min(counts) == max(counts) == 1:  # as nearly always in the finest tier: each is one whole sample
            columns = [means[metric::width] for metric in range(width)]
            middles = [sum(column) / rows for column in columns]
            return Bucket(list(map(min, columns)), middles, list(map(max, columns)), [rows] * width)
        found = [
            _merged_column(mins[at::width], means[at::width], maxs[at::width], counts[at::width])
            for at in range(width)
        ]
        return Bucket(*zip(*found, strict=True))

    def rows(self, first: int) -> Rows:
        """The buckets from a number on, as copies."""
        begin, size = self._oldest + self._row_at(first, 1.0), len(self)
        found = self._rows.part(begin, size, self._width)
        found.extend(self._rows.part(max(begin - size, 0), self._oldest, self._width))
        return found

    def restore(self, rows: Rows) -> None:
        """Fill an empty ring with buckets, the newest of them where they are too many."""
        size = len(rows.numbers)
        self._rows.extend(rows.part(max(size - self._capacity, 0), size, self._width))

    def points(self, metric: int, step: float, start: float, end: float) -> list[Point]:
        """One metric of the buckets that begin in [start, end), by time; those without a sample are left out."""
        begin, stop = self._row_at(start, step), self._row_at(end, step)
        if begin >= stop:
            return []
        numbers = self._column(self._numbers, 0, begin, stop, width=1)
        mins, means, maxs, counts = (
            self._column(values, metric, begin, stop, width=self._width)
            for values in (self._mins, self._means, self._maxs, self._counts)
        )
        rows = zip(numbers, mins, means, maxs, counts, strict=True)
        return [Point(row[0] * step, row[1], row[2], row[3], int(row[4])) for row in rows if row[4]]

    def _newest(self, rows: int) -> Rows:
        """The newest so many buckets, as copies."""
        stop = self._oldest or len(self)
        found = self._rows.part(max(stop - rows, 0), stop, self._width)
        if stop >= rows:
            return found
        size = len(self)
        before = self._rows.part(size - (rows - stop), size, self._width)
        before.extend(found)
        return before

    def _row_at(self, time: float, step: float) -> int:
        """How many buckets begin before a time, from the oldest on; bisection."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._numbers[(self._oldest + middle) % len(self)] * step < time:
                low = middle + 1
            else:
                high = middle
        return low

    def _column(
        self, values: "array[_Number]", metric: int, begin: int, stop: int, *, width: int
    ) -> "array[_Number]":
        """The values of one metric in rows counted from the oldest, of an array with `width` values to the row."""
        begin, stop, size = self._oldest + begin, self._oldest + stop, len(self)
        if begin >= size:
            begin, stop = begin - size, stop - size
        column = values[begin * width + metric : min(stop, size) * width : width]
        return column + values[metric : (stop - size) * width : width] if stop > size else column


def _merged_column(
    mins: "array[float]", means: "array[float]", maxs: "array[float]", counts: "array[int]"
) -> tuple[float, float, float, int]:
    """One metric of several buckets as one; NaN and 0 where none of them has a sample."""
    total = sum(counts)
    if not total:
        return ABSENT, ABSENT, ABSENT, 0
    if 0 in counts:  # the values beside it are NaN
        mins, means, maxs = (array("f", compress(values, counts)) for values in (mins, means, maxs))
        counts = array("H", filter(None, counts))
    mean = sum(map(mul, means, counts)) / total
    return min(mins), mean, max(maxs), min(total, MOST_COUNTED)
