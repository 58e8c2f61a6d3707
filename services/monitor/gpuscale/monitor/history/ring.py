"""A ring buffer of buckets of one time step. Pure.

A bucket's number is its start on the clock divided by the step, negative before boot. A step without samples has no bucket. Values
are 32-bit floats, exact to 1 part in 16 million.

On disk, a chunk is the bytes of its arrays, little-endian on all machines with GPUs: numbers (32 bits), minima, means and maxima
(32-bit floats), counts (16 bits).
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress
from math import isnan
from operator import mul
from typing import NamedTuple, TypeVar

from gpuscale.monitor.model.metrics import ABSENT

MOST_COUNTED = 0xFFFF
"""The maximum sample count of a bucket."""
_Number = TypeVar("_Number", int, float)


class Bucket(NamedTuple):
    """Minimum, mean, maximum and sample count of each metric; NaN and 0 without samples."""

    mins: Sequence[float]
    means: Sequence[float]
    maxs: Sequence[float]
    counts: Sequence[int]


class Point(NamedTuple):
    """One metric in one bucket, which starts at `start` on the clock."""

    start: float
    min: float
    mean: float
    max: float
    samples: int


class Rows(NamedTuple):
    """Buckets in order of time, as arrays of numbers and of metrics, bucket by bucket."""

    numbers: "array[int]"
    mins: "array[float]"
    means: "array[float]"
    maxs: "array[float]"
    counts: "array[int]"

    @classmethod
    def empty(cls) -> "Rows":
        """No buckets."""
        return cls(array("i"), array("f"), array("f"), array("f"), array("H"))

    def add(self, number: int, bucket: Bucket) -> None:
        """Append a newer bucket."""
        self.numbers.append(number)
        self.mins.extend(bucket.mins)
        self.means.extend(bucket.means)
        self.maxs.extend(bucket.maxs)
        self.counts.extend(bucket.counts)

    def extend(self, rows: "Rows") -> None:
        """Append newer buckets."""
        self.numbers.extend(rows.numbers)
        self.mins.extend(rows.mins)
        self.means.extend(rows.means)
        self.maxs.extend(rows.maxs)
        self.counts.extend(rows.counts)

    def part(self, begin: int, stop: int, width: int) -> "Rows":
        """A copy of the buckets from index `begin` to `stop`, of `width` metrics each."""
        numbers, mins, means, maxs, counts = self
        cells = slice(begin * width, stop * width)
        return Rows(numbers[begin:stop], mins[cells], means[cells], maxs[cells], counts[cells])

    def folded(self) -> "Rows":
        """The same rows, with one array for minima, means and maxima if all are alike."""
        _, mins, means, maxs, _ = self
        alike = mins.tobytes() == means.tobytes() == maxs.tobytes()  # NaN would not equal NaN
        return self._replace(mins=means, maxs=means) if alike else self

    def last(self, width: int) -> Bucket:
        """The newest bucket, of `width` metrics."""
        return Bucket(self.mins[-width:], self.means[-width:], self.maxs[-width:], self.counts[-width:])


class Ring:
    """The newest `capacity` buckets of `width` metrics each.

    Its rows are folded until a bucket has several samples, which is rare in the finest tier.
    """

    __slots__ = ("_capacity", "_oldest", "_rows", "_width")

    def __init__(self, width: int, capacity: int) -> None:
        self._width = width
        self._capacity = capacity
        self._oldest = 0  # index of the oldest bucket
        self._rows = Rows.empty().folded()

    def __len__(self) -> int:
        return len(self._rows.numbers)

    @property
    def first(self) -> int | None:
        """Number of the oldest bucket; None without one."""
        return self._rows.numbers[self._oldest] if self._rows.numbers else None

    @property
    def last(self) -> int | None:
        """Number of the newest bucket; None without one."""
        return self._rows.numbers[self._oldest - 1] if self._rows.numbers else None

    def append(self, number: int, bucket: Bucket) -> None:
        """Append a newer bucket."""
        if self._rows.mins is self._rows.maxs:
            means = self._rows.means
            self._rows = self._rows._replace(mins=means[:], maxs=means[:])
        numbers, mins, means, maxs, counts = self._rows
        if len(numbers) < self._capacity:
            self._rows.add(number, bucket)
            return
        cells = slice(self._oldest * self._width, (self._oldest + 1) * self._width)
        numbers[self._oldest] = number
        mins[cells] = array("f", bucket.mins)
        means[cells] = array("f", bucket.means)
        maxs[cells] = array("f", bucket.maxs)
        counts[cells] = array("H", bucket.counts)
        self._oldest = (self._oldest + 1) % self._capacity

    def extend(self, numbers: "array[int]", values: "array[float]") -> None:
        """Append newer buckets with one sample each; `values` has sample after sample."""
        counts = array("H", [1]) * len(values)
        if isnan(sum(values)):  # rare: a value is absent
            counts = array("H", [value == value for value in values])  # 0 for NaN
        rows, width = self._rows, self._width
        columns = (rows.means,) if rows.mins is rows.maxs else (rows.mins, rows.means, rows.maxs)
        done = min(self._capacity - len(self), len(numbers))
        if done:
            rows.numbers.extend(numbers[:done])
            rows.counts.extend(counts[: done * width])
            for column in columns:
                column.extend(values[: done * width])
        while done < len(numbers):
            size = min(len(numbers) - done, self._capacity - self._oldest)
            source = slice(done * width, (done + size) * width)
            target = slice(self._oldest * width, (self._oldest + size) * width)
            rows.numbers[self._oldest : self._oldest + size] = numbers[done : done + size]
            for column in columns:
                column[target] = values[source]
            rows.counts[target] = counts[source]
            self._oldest = (self._oldest + size) % self._capacity
            done += size
            if not self._oldest and len(columns) > 1:  # a whole turn
                self._rows = rows.folded()

    def merged(self, count: int) -> Bucket:
        """The newest `count` buckets merged into one."""
        width, stop, size = self._width, self._oldest or len(self), len(self)
        newest = self._rows.part(max(stop - count, 0), stop, width)
        if stop < count:
            wrapped = self._rows.part(size - (count - stop), size, width)
            wrapped.extend(newest)
            newest = wrapped
        _, mins, means, maxs, counts = newest
        if min(counts) == max(counts) == 1:  # one complete sample each, the usual case in the finest tier
            columns = [means[metric::width] for metric in range(width)]
            middles = [sum(column) / count for column in columns]
            return Bucket(list(map(min, columns)), middles, list(map(max, columns)), [count] * width)
        found = [
            _merged_column(mins[at::width], means[at::width], maxs[at::width], counts[at::width])
            for at in range(width)
        ]
        return Bucket(*zip(*found, strict=True))

    def rows(self, first: int) -> Rows:
        """A copy of the buckets from number `first` on."""
        begin, size = self._oldest + self._row_at(first, 1.0), len(self)
        found = self._rows.part(begin, size, self._width)
        found.extend(self._rows.part(max(begin - size, 0), self._oldest, self._width))
        return found

    def restore(self, rows: Rows) -> None:
        """Fill an empty ring with the newest of these buckets."""
        size = len(rows.numbers)
        self._rows = rows.part(max(size - self._capacity, 0), size, self._width).folded()

    def points(self, metric: int, step: float, start: float, end: float) -> list[Point]:
        """One metric of the buckets that start in [start, end), in order of time, without those that have no sample."""
        begin, stop = self._row_at(start, step), self._row_at(end, step)
        if begin >= stop:
            return []
        numbers = self._column(self._rows.numbers, 0, begin, stop, width=1)
        mins, means, maxs, counts = (
            self._column(values, metric, begin, stop, width=self._width) for values in self._rows[1:]
        )
        rows = zip(numbers, mins, means, maxs, counts, strict=True)
        return [Point(row[0] * step, row[1], row[2], row[3], int(row[4])) for row in rows if row[4]]

    def _row_at(self, time: float, step: float) -> int:
        """How many buckets start before a time, by bisection."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._rows.numbers[(self._oldest + middle) % len(self)] * step < time:
                low = middle + 1
            else:
                high = middle
        return low

    def _column(
        self, values: "array[_Number]", metric: int, begin: int, stop: int, *, width: int
    ) -> "array[_Number]":
        """One metric of the rows `begin` to `stop`, counted from the oldest, of `width` values each."""
        begin, stop, size = self._oldest + begin, self._oldest + stop, len(self)
        if begin >= size:
            begin, stop = begin - size, stop - size
        column = values[begin * width + metric : min(stop, size) * width : width]
        return column + values[metric : (stop - size) * width : width] if stop > size else column


def _merged_column(
    mins: "array[float]", means: "array[float]", maxs: "array[float]", counts: "array[int]"
) -> tuple[float, float, float, int]:
    """One metric of several buckets, merged; NaN and 0 without samples."""
    total = sum(counts)
    if not total:
        return ABSENT, ABSENT, ABSENT, 0
    if 0 in counts:  # the values beside it are NaN
        mins, means, maxs = (array("f", compress(values, counts)) for values in (mins, means, maxs))
        counts = array("H", filter(None, counts))
    mean = sum(map(mul, means, counts)) / total
    return min(mins), mean, max(maxs), min(total, MOST_COUNTED)


CHUNK = 30
"""Steps per stored chunk: half an hour of the coarsest tier."""


def row_bytes(width: int) -> int:
    """Bytes of a bucket of `width` metrics: its number, and of each metric three 32-bit floats and a count of 16 bits."""
    return 4 + width * (3 * 4 + 2)


def chunks(rows: Rows, width: int, shift: int) -> Iterator[tuple[int, bytes]]:
    """Chunks of rows of `width` metrics, as number and bytes. Stored numbers have `shift` added."""
    stored = array("i", [number + shift for number in rows.numbers])
    begin = 0
    while begin < len(stored):
        chunk = stored[begin] // CHUNK
        end = begin + sum(number // CHUNK == chunk for number in stored[begin : begin + CHUNK])
        part = rows._replace(numbers=stored).part(begin, end, width)
        yield chunk, b"".join(column.tobytes() for column in part)
        begin = end


def unpack(body: bytes, width: int, shift: int) -> Rows:
    """The rows of a chunk, with `shift` subtracted from their numbers. ValueError if it is not of that many metrics."""
    count, rest = divmod(len(body), row_bytes(width))
    if rest:
        raise ValueError(f"{len(body)} bytes are not rows of {width} metrics")
    rows = Rows.empty()
    at = 0
    for column in rows:
        size = (count if column is rows.numbers else count * width) * column.itemsize
        column.frombytes(body[at : at + size])
        at += size
    try:
        return rows._replace(numbers=array("i", [number - shift for number in rows.numbers]))
    except OverflowError as error:
        raise ValueError(f"a row has an invalid number: {error}") from error
