"""A ring buffer of buckets of one time step. Pure.

A bucket's number is its start on the clock divided by the step, negative before boot. A step without samples has no bucket. Values
are 32-bit floats, exact to 1 part in 16 million.

On disk, a chunk is the bytes of its arrays, little-endian on all machines with GPUs: numbers (32 bits), minima, means and maxima
(32-bit floats), counts (16 bits).
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import compress
from math import isnan
from operator import mul
from struct import Struct
from sys import byteorder
from typing import Any, NamedTuple, TypeVar

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

    def pop(self, width: int) -> Bucket:
        """Remove the newest bucket, of `width` metrics, and return it."""
        bucket = Bucket(self.mins[-width:], self.means[-width:], self.maxs[-width:], self.counts[-width:])
        del self.numbers[-1]
        for column in self[1:]:
            del column[-width:]
        return bucket


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
_Held = TypeVar("_Held", bytearray, "array[int]", "array[float]")


class Ring:
    """The newest `capacity` buckets of `width` metrics each. `fresh`: how many of them the coarser tier lacks.

    Buckets of one sample each, as nearly always in the finest tier, are an array of numbers and one of values. Others are packed
    one after the other: five arrays of a few numbers take more than their content. Many at once, as of an earlier run, are arrays.
    """

    __slots__ = ("_capacity", "_numbers", "_oldest", "_packed", "_values", "_width", "fresh")

    def __init__(self, width: int, capacity: int) -> None:
        self._width = width
        self._capacity = capacity
        self._oldest = 0  # index of the oldest bucket
        self._numbers, self._values = _NO_NUMBERS, _NO_VALUES
        self._packed: bytearray | Rows | None = None
        self.fresh = 0

    def __len__(self) -> int:
        packed = self._packed
        if isinstance(packed, bytearray):
            return len(packed) // row_bytes(self._width)
        return len(self._numbers if packed is None else packed.numbers)

    @property
    def first(self) -> int | None:
        """Number of the oldest bucket; None without one."""
        return self._number(self._oldest) if self._packed or self._numbers else None

    @property
    def last(self) -> int | None:
        """Number of the newest bucket; None without one."""
        return self._number(self._oldest - 1) if self._packed or self._numbers else None

    def append(self, number: int, bucket: Bucket) -> None:
        """Append a newer bucket."""
        if self._packed is None:
            self._packed = self._part(0, len(self)) if self._numbers else bytearray()
            self._numbers, self._values = _NO_NUMBERS, _NO_VALUES
        packed, at, full = self._packed, self._oldest, len(self) == self._capacity
        if isinstance(packed, bytearray):
            row = _form(self._width).pack(number, *bucket.mins, *bucket.means, *bucket.maxs, *bucket.counts)
            if full:
                packed[at * len(row) : (at + 1) * len(row)] = row
            else:
                packed += row
        elif full:
            packed.numbers[at], cells = number, slice(at * self._width, (at + 1) * self._width)
            packed.mins[cells], packed.means[cells] = array("f", bucket.mins), array("f", bucket.means)
            packed.maxs[cells], packed.counts[cells] = array("f", bucket.maxs), array("H", bucket.counts)
        else:
            packed.add(number, bucket)
        self._oldest = (at + 1) % self._capacity if full else 0

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
                if not self._oldest and len(self) == self._capacity:  # once a turn
                    rows = self._part(0, self._capacity)
                    if max(rows.counts) <= 1:
                        self._packed, self._numbers, self._values = None, rows.numbers, rows.means
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
        width, packed, stop = self._width, self._packed, self._oldest or len(self)
        begin = stop - count
        if packed is None:
            before = self._values[begin * width :] if begin < 0 else _NO_VALUES
            values = (before + self._values[max(begin, 0) * width : stop * width]).tolist()
            if not isnan(sum(values)):
                columns = [values[metric::width] for metric in range(width)]
                middles = [sum(column) / count for column in columns]
                return Bucket(list(map(min, columns)), middles, list(map(max, columns)), [count] * width)
        cells: Sequence[Sequence[Any]]
        if isinstance(packed, bytearray):
            each = row_bytes(width)
            held = (packed[begin * each :] if begin < 0 else b"") + packed[max(begin, 0) * each : stop * each]
            _, *cells = zip(*_form(width).iter_unpack(held), strict=True)
        else:
            rows = self.rows(self._number(begin))
            cells = [column[metric::width] for column in rows[1:] for metric in range(width)]
        kinds = (cells[at : at + width] for at in range(0, 4 * width, width))
        return Bucket(*zip(*map(_merged_column, *kinds), strict=True))

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
        packed, cells = self._packed, slice(begin * width + metric, stop * width, width)
        rows: Iterable[tuple[int, float, float, float, int]]
        if isinstance(packed, bytearray):
            rows = _form(width, metric).iter_unpack(packed[begin * size : stop * size])
        elif packed is not None:
            rows = zip(packed.numbers[begin:stop], *(column[cells] for column in packed[1:]), strict=True)
        else:
            values = self._values[cells]
            rows = zip(self._numbers[begin:stop], values, values, values, _sampled(values), strict=True)
        for number, low, mean, high, count in rows:
            if count:
                yield Point(number * step, low, mean, high, count)

    def _row_at(self, time: float, step: float) -> int:
        """How many buckets start before a time, by bisection."""
        size = len(self)
        number, oldest = self._number, self._oldest
        return bisect_left(range(size), time, key=lambda row: number((oldest + row) % size) * step)

    def _number(self, row: int) -> int:
        packed = self._packed
        if not isinstance(packed, bytearray):
            return (self._numbers if packed is None else packed.numbers)[row]
        at = row * row_bytes(self._width)
        return int.from_bytes(packed[at : at + 4], byteorder, signed=True)

    def _part(self, begin: int, stop: int) -> Rows:
        """A copy of the buckets from index `begin` to `stop`."""
        width, size, packed = self._width, row_bytes(self._width), self._packed
        if packed is None:
            values = self._values[begin * width : stop * width]
            return Rows(self._numbers[begin:stop], values, values[:], values[:], _sampled(values))
        if not isinstance(packed, bytearray):
            return packed.part(begin, stop, width)
        found, words = Rows.empty(), array("H", packed[begin * size : stop * size])
        at, rows = 0, 2 * len(words) // size
        columns: Sequence[array[int] | array[float]] = found
        for column, each in zip(columns, (2, 2 * width, 2 * width, 2 * width, width), strict=True):
            part = array("H", bytes(2 * each * rows))  # word by word of all at once
            for place in range(each):
                part[place::each] = words[at + place :: size // 2]
            at += each
            column.frombytes(part.tobytes())
        return found

    def restore(self, rows: Rows) -> None:
        """Keep the newest of these buckets, which become its own, and no others."""
        self._packed = rows if rows.numbers else None
        self._oldest, self._numbers, self._values = 0, _NO_NUMBERS, _NO_VALUES
        self.shorten(self._capacity)

    def shorten(self, capacity: int) -> None:
        """Keep at most so many buckets, the newest, from now on."""
        size, oldest, width, packed = len(self), self._oldest, self._width, self._packed
        self._capacity, self._oldest = capacity, 0
        if not oldest and size <= capacity:
            return
        begin = oldest + max(size - capacity, 0)

        def kept(held: _Held, each: int) -> _Held:
            over = max(begin - size, 0)
            return held[begin * each : size * each] + held[over * each : oldest * each]

        if packed is None:
            self._numbers, self._values = kept(self._numbers, 1), kept(self._values, width)
        elif isinstance(packed, bytearray):
            self._packed = kept(packed, row_bytes(width))
        else:
            mins, means, maxs = (kept(column, width) for column in (packed.mins, packed.means, packed.maxs))
            self._packed = Rows(kept(packed.numbers, 1), mins, means, maxs, kept(packed.counts, width))


def _merged_column(
    mins: Sequence[float], means: Sequence[float], maxs: Sequence[float], counts: Sequence[int]
) -> tuple[float, float, float, int]:
    """One metric of several buckets, merged; NaN and 0 without samples."""
    total = sum(counts)
    if not total:
        return ABSENT, ABSENT, ABSENT, 0
    if 0 in counts:  # the values beside it are NaN
        mins, means, maxs = (list(compress(values, counts)) for values in (mins, means, maxs))
        counts = list(filter(None, counts))
    mean = sum(map(mul, means, counts)) / total
    return min(mins), mean, max(maxs), min(total, MOST_COUNTED)


_NUMBERS = range(-(2**31), 2**31)
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


def unpack(bodies: Iterable[bytes], width: int, shift: int, kept: range = _NUMBERS) -> Rows:
    """The rows of chunks that end within `kept`, `shift` subtracted. ValueError if one is not of that many metrics."""
    rows = Rows.empty()
    columns: Sequence[array[int] | array[float]] = rows
    for body in bodies:
        count, rest = divmod(len(body), row_bytes(width))
        if rest:
            raise ValueError(f"{len(body)} bytes are not rows of {width} metrics")
        newest = int.from_bytes(body[4 * count - 4 : 4 * count], byteorder, signed=True) - shift
        if newest not in _NUMBERS:
            raise ValueError(f"a row has an invalid number: {newest}")
        if newest in kept:
            at = 0
            for column, each in zip(columns, (4, 4 * width, 4 * width, 4 * width, 2 * width), strict=True):
                column.frombytes(body[at : at + each * count])
                at += each * count
    return rows._replace(numbers=array("i", [number - shift for number in rows.numbers]))
