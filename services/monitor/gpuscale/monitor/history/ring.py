"""A ring buffer of buckets of one time step. Pure.

A bucket's number is its start on the clock divided by the step, negative before boot. A step without samples has no bucket. Values
are 32-bit floats, exact to 1 part in 16 million.

On disk, a chunk is the bytes of its arrays, little-endian on all machines with GPUs: numbers (32 bits), minima, means and maxima
(32-bit floats), counts (16 bits).
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import compress, pairwise
from math import isnan
from operator import mul
from struct import Struct
from sys import byteorder
from typing import NamedTuple

from gpuscale.monitor.model.metrics import ABSENT

MOST_COUNTED = 0xFFFF
"""The maximum sample count of a bucket."""


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

    def last(self, width: int) -> Bucket:
        """The newest bucket, of `width` metrics."""
        return Bucket(self.mins[-width:], self.means[-width:], self.maxs[-width:], self.counts[-width:])


def _sampled(values: "array[float]") -> "array[int]":
    """The counts of buckets of one sample each."""
    if isnan(sum(values)):  # rare: a value is absent
        return array("H", [value == value for value in values])  # 0 for NaN
    return array("H", [1]) * len(values)


@cache
def _form(width: int, metric: int | None = None) -> Struct:
    """How a bucket is packed: number, minima, means, maxima and counts; or its number and these of one metric."""
    if metric is None:
        return Struct(f"=i{3 * width}f{width}H")
    others = 4 * (width - 1)
    return Struct(f"=i{4 * metric}xf{others}xf{others}xf{others - 2 * metric}xH{2 * (width - 1 - metric)}x")


_NO_NUMBERS, _NO_VALUES = array("i"), array("f")


class Ring:
    """The newest `capacity` buckets of `width` metrics each. `fresh`: how many of them the coarser tier lacks.

    Buckets of one sample each, as nearly always in the finest tier, are an array of numbers and one of values. Others are packed
    one after the other: five arrays of a few numbers take more than their content.
    """

    __slots__ = ("_capacity", "_numbers", "_oldest", "_packed", "_values", "_width", "fresh")

    def __init__(self, width: int, capacity: int) -> None:
        self._width = width
        self._capacity = capacity
        self._oldest = 0  # index of the oldest bucket
        self._numbers, self._values = _NO_NUMBERS, _NO_VALUES
        self._packed: bytearray | None = None
        self.fresh = 0

    def __len__(self) -> int:
        packed = self._packed
        return len(self._numbers) if packed is None else len(packed) // row_bytes(self._width)

    @property
    def first(self) -> int | None:
        """Number of the oldest bucket; None without one."""
        return self._number(self._oldest) if len(self) else None

    @property
    def last(self) -> int | None:
        """Number of the newest bucket; None without one."""
        return self._number((self._oldest or len(self)) - 1) if len(self) else None

    def append(self, number: int, bucket: Bucket) -> None:
        """Append a newer bucket."""
        if self._packed is None:
            self._packed = _packed(self._part(0, len(self)), self._width)
            self._numbers, self._values = _NO_NUMBERS, _NO_VALUES
        row = _form(self._width).pack(number, *bucket.mins, *bucket.means, *bucket.maxs, *bucket.counts)
        if len(self) < self._capacity:
            self._packed += row
            return
        self._packed[self._oldest * len(row) : (self._oldest + 1) * len(row)] = row
        self._oldest = (self._oldest + 1) % self._capacity

    def extend(self, numbers: "array[int]", values: "array[float]") -> None:
        """Append newer buckets with one sample each; `values` has sample after sample."""
        width, done = self._width, 0
        if self._packed is None and not self._numbers:
            self._numbers, self._values = array("i"), array("f")
        while done < len(numbers):
            if self._packed is not None:
                sample = values[done * width : (done + 1) * width]
                self.append(numbers[done], Bucket(sample, sample, sample, _sampled(sample)))
                done += 1
                turned = not self._oldest and len(self) == self._capacity
                if turned and self._all_single():
                    self.restore(self._part(0, self._capacity))
                continue
            full = len(self._numbers) == self._capacity
            begin = self._oldest if full else len(self._numbers)
            end = min(begin + len(numbers) - done, self._capacity)
            stop = done + end - begin
            self._numbers[begin:end] = numbers[done:stop]
            self._values[begin * width : end * width] = values[done * width : stop * width]
            self._oldest = end % self._capacity if full else 0
            done = stop

    def merged(self, count: int) -> Bucket:
        """The newest `count` buckets merged into one."""
        width, stop, size = self._width, self._oldest or len(self), len(self)
        begin = stop - count
        if self._packed is None:
            values = self._values[max(begin, 0) * width : stop * width]
            if begin < 0:
                values = self._values[begin * width :] + values
            if not isnan(sum(values)):
                columns = [values[metric::width] for metric in range(width)]
                middles = [sum(column) / count for column in columns]
                return Bucket(list(map(min, columns)), middles, list(map(max, columns)), [count] * width)
        _, mins, means, maxs, counts = rows = self._part(size + min(begin, 0), size)
        rows.extend(self._part(max(begin, 0), stop))
        found = [
            _merged_column(mins[at::width], means[at::width], maxs[at::width], counts[at::width])
            for at in range(width)
        ]
        return Bucket(*zip(*found, strict=True))

    def rows(self, first: int) -> Rows:
        """A copy of the buckets from number `first` on."""
        begin, size = self._oldest + self._row_at(first, 1.0), len(self)
        found = self._part(begin, size)
        found.extend(self._part(max(begin - size, 0), self._oldest))
        return found

    def points(self, metric: int, step: float, start: float, end: float) -> list[Point]:
        """One metric of the buckets that start in [start, end), in order of time, without those that have no sample."""
        begin, stop, size = self._row_at(start, step), self._row_at(end, step), len(self)
        first, last = begin + self._oldest, stop + self._oldest
        return [
            *self._points(metric, step, first, min(last, size)),
            *self._points(metric, step, max(first - size, 0), last - size),
        ]

    def _points(self, metric: int, step: float, begin: int, stop: int) -> Iterator[Point]:
        """Those of the buckets from index `begin` to `stop`."""
        width, size = self._width, row_bytes(self._width)
        if begin >= stop:
            return
        if self._packed is not None:
            for number, low, mean, high, count in _form(width, metric).iter_unpack(
                self._packed[begin * size : stop * size]
            ):
                if count:
                    yield Point(number * step, low, mean, high, count)
            return
        values = self._values[begin * width + metric : stop * width : width]
        for number, value in zip(self._numbers[begin:stop], values, strict=True):
            if value == value:  # NaN is absent
                yield Point(number * step, value, value, value, 1)

    def _row_at(self, time: float, step: float) -> int:
        """How many buckets start before a time, by bisection."""
        size = len(self)
        return bisect_left(
            range(size), time, key=lambda row: self._number((self._oldest + row) % size) * step
        )

    def _number(self, row: int) -> int:
        if self._packed is None:
            return self._numbers[row]
        at = row * row_bytes(self._width)
        return int.from_bytes(self._packed[at : at + 4], byteorder, signed=True)

    def _part(self, begin: int, stop: int) -> Rows:
        """A copy of the buckets from index `begin` to `stop`."""
        width, size = self._width, row_bytes(self._width)
        if self._packed is None:
            values = self._values[begin * width : stop * width]
            return Rows(self._numbers[begin:stop], values, values[:], values[:], _sampled(values))
        found, words = Rows.empty(), array("H", self._packed[begin * size : stop * size])
        columns: Sequence[array[int] | array[float]] = found
        for column, places in zip(columns, _word_places(width), strict=True):
            part = array("H", bytes(2 * len(places) * (2 * len(words) // size)))
            for at, place in enumerate(places):
                part[at :: len(places)] = words[place :: size // 2]
            column.frombytes(part.tobytes())
        return found

    def _all_single(self) -> bool:
        """Whether no packed bucket has several samples."""
        *_, counts = _word_places(self._width)
        words = array("H", self._packed or b"")
        return all(max(words[place :: row_bytes(self._width) // 2]) <= 1 for place in counts)

    def restore(self, rows: Rows) -> None:
        """Keep the newest of these buckets, and no others."""
        size = len(rows.numbers)
        rows = rows.part(max(size - self._capacity, 0), size, self._width)
        single = rows.counts == _sampled(rows.means) and rows.mins.tobytes() == rows.maxs.tobytes()
        self._packed, self._oldest = None if single else _packed(rows, self._width), 0
        self._numbers, self._values = (rows.numbers, rows.means) if single else (_NO_NUMBERS, _NO_VALUES)


@cache
def _word_places(width: int) -> Sequence[range]:
    """Where each column of `Rows` is in a packed bucket, in words of 16 bits."""
    ends = (2, 2 + 2 * width, 2 + 4 * width, 2 + 6 * width, 2 + 7 * width)
    return [range(begin, end) for begin, end in pairwise((0, *ends))]


def _packed(rows: Rows, width: int) -> bytearray:
    """Buckets one after the other: word by word of all at once, as a loop over ten thousand buckets would hold up others."""
    size = row_bytes(width) // 2
    found = array("H", bytes(2 * size * len(rows.numbers)))
    columns: Sequence[array[int] | array[float]] = rows
    for column, places in zip(columns, _word_places(width), strict=True):
        words = array("H", column.tobytes())
        for at, place in enumerate(places):
            found[place::size] = words[at :: len(places)]
    return bytearray(found.tobytes())


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
