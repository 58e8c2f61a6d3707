"""The histories of all nodes and GPUs within a memory budget, and the points and trends in them. Pure.

The history of one is a ring of buckets per tier, each fed by the finer one. Samples wait in plain arrays, those of the GPUs of a
node in one, until there are several or someone reads, since thousands of GPUs bring one each second. Completed buckets then move to
the ring of the finest tier. When a bucket of a coarser tier is complete, the finer buckets are merged into it, so each tier has
every sample once.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, isnan
from struct import pack

from gpuscale.monitor.history.ring import MOST_COUNTED, Bucket, Point, Ring, Rows, row_bytes
from gpuscale.monitor.model.metrics import (
    ABSENT,
    GPU_METRICS,
    NODE_METRICS,
    Metric,
    MetricTally,
    Sample,
    Stats,
)

_ARRAY_SLACK = 1.125
"""How much more memory an array takes than its content, at most."""
_MOST_WAITING = 61
"""How many samples wait at most. Of thousands of GPUs all memory is cold when it is touched: better seldom. Saves and readers move them too."""
TURNS = _MOST_WAITING - 1
"""Series take turns in moving their samples, one per step of the finest tier: without saves they would all do so at once."""

LEAST_RETENTION_SECONDS = 3_600.0
"""The coarsest tier is never shortened below this."""
_NEVER = float("-inf")
_NO_NUMBERS, _NO_VALUES = array("i"), array("f")
_NOTHING = Stats(ABSENT, ABSENT, ABSENT, 0)


@dataclass(frozen=True, slots=True)
class Tier:
    """Buckets of `step` seconds each, kept for `retention` seconds."""

    step: float
    retention: float

    @property
    def capacity(self) -> int:
        """How many buckets it keeps."""
        return ceil(self.retention / self.step)


def most_bytes(width: int, tiers: Sequence[Tier]) -> int:
    """The most memory that a series of `width` metrics can take."""
    waiting = _MOST_WAITING * 4 * (1 + width)
    return ceil((sum(tier.capacity for tier in tiers) * row_bytes(width) + waiting) * _ARRAY_SLACK)


def shorter(tiers: Sequence[Tier]) -> Iterator[Sequence[Tier]]:
    """The tiers with ever shorter retention.

    From the finest on, each is cut to what the next one needs. Then the coarsest loses a quarter at a time, down to
    LEAST_RETENTION_SECONDS.
    """
    found = list(tiers)
    for index, coarser in enumerate(found[1:]):
        tier = found[index]
        found[index] = replace(tier, retention=min(tier.retention, 2 * coarser.step))
        yield tuple(found)
    while found[-1].retention > LEAST_RETENTION_SECONDS:
        found[-1] = replace(found[-1], retention=max(found[-1].retention * 0.75, LEAST_RETENTION_SECONDS))
        yield tuple(found)


class HistorySeries:
    """Samples of `width` metrics, in tiers from the finest to the coarsest.

    The step of each tier is a multiple of the finer one's, and each tier keeps at least one step of the next.
    """

    __slots__ = (
        "_merged", "_merged_number", "_numbers", "_open_number", "_restored_until", "_rings", "_tiers", "_turn", "_values",
        "_width", "together",
    )  # fmt: skip

    def __init__(self, width: int, tiers: Sequence[Tier], turn: int = 0) -> None:
        self._tiers = tiers
        self._turn = turn % TURNS
        self._rings = [Ring(width, tier.capacity) for tier in tiers]
        self._open_number = -1  # number of the bucket of the newest sample
        self._merged: Bucket | None = None  # samples of an incomplete bucket, already merged
        self._merged_number = -1
        self._numbers = _NO_NUMBERS  # bucket numbers of waiting samples
        self._values = _NO_VALUES  # their values, sample after sample
        self._restored_until = _NEVER  # start of the newest restored bucket of the coarsest tier
        self._width = width
        self.together: Together | None = None  # where further samples wait

    def add(self, at: float, sample: Sample) -> None:
        """Add a sample; one older than the open bucket is dropped."""
        if self.together is not None:
            self.together.settle()
        number = int(at // self._tiers[0].step)
        if number < self._open_number:
            return
        turns = number != self._open_number and number % TURNS == self._turn
        self._open_number = number
        if not self._numbers:
            self._numbers, self._values = array("i"), array("f")
        self._numbers.append(number)
        self._values.extend(sample)
        if turns or len(self._numbers) >= _MOST_WAITING:
            self._settle()

    def take(self, numbers: "array[int]", values: "array[float]", number: int) -> None:
        """Add samples in order that waited elsewhere; `number` is that of the open bucket."""
        late = bisect_left(numbers, self._open_number)
        self._numbers = self._numbers + numbers[late:]
        self._values = self._values + values[late * self._width :]
        self._open_number = max(self._open_number, number)
        self._settle()

    def shorten(self, tiers: Sequence[Tier]) -> None:
        """Shorten the retention to that of these tiers, which have the same steps."""
        if tiers is self._tiers:
            return
        self._settle()
        self._tiers = tiers
        for ring, tier in zip(self._rings, tiers, strict=True):
            ring.shorten(tier.capacity)

    def newest(self) -> float:
        """Start of the open bucket."""
        waiting = -1 if self.together is None else self.together.newest
        return max(self._open_number, waiting) * self._tiers[0].step

    def oldest(self) -> float | None:
        """Start of the oldest bucket; None before the first sample."""
        self._settle()
        firsts = [
            ring.first * tier.step
            for ring, tier in zip(self._rings, self._tiers, strict=True)
            if ring.first is not None
        ]
        return min(firsts, default=self.newest() if self._merged or self._numbers else None)

    def points(self, metric: int, tier: int, start: float, end: float) -> list[Point]:
        """One metric in [start, end), in buckets of a tier and, for newer samples, of finer tiers."""
        self._settle()
        found: list[Point] = []
        if tier < len(self._rings) - 1 and start < self._restored_until:
            until, ring, step = self._restored_until, self._rings[-2], self._tiers[-2].step
            found = self._rings[-1].points(metric, self._tiers[-1].step, start, min(end, until))
            start = max(start, until)
            if tier < len(self._rings) - 2:  # the last restored bucket, stored under its first step
                found += ring.points(metric, step, start, min(end, until + step))
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

    def coarsest(self, first: int) -> Rows:
        """The buckets of the coarsest tier from number `first` on, including the incomplete one."""
        self._settle()
        rows = self._rings[-1].rows(first)
        ring = self._rings[-2]
        if ring.fresh and ring.last is not None:
            rows.add(ring.last // self._ratio(-2), ring.merged(ring.fresh))
        return rows

    def restore(self, rows: Rows) -> None:
        """Start with buckets of the coarsest tier, before the first sample, which become its own; the last may still grow."""
        last = rows.numbers[-1]
        self._restored_until = last * self._tiers[-1].step
        self._rings[-2].append(last * self._ratio(-2), rows.pop(self._width))
        self._rings[-1].restore(rows)
        self._rings[-2].fresh = 1
        self._open_number = round(self._restored_until / self._tiers[0].step)

    def _settle(self) -> None:
        """Move waiting samples to the rings, except those of the open bucket, which are merged if several."""
        if self.together is not None:
            self.together.settle()
        if not self._numbers:
            return
        numbers, values, width = self._numbers, self._values, self._width
        over = bisect_left(numbers, self._open_number)
        self._numbers, self._values = _NO_NUMBERS, _NO_VALUES
        if over < len(numbers):
            self._numbers, self._values = numbers[over:], values[over * width :]
        if over:
            self._close(numbers[:over], values[: over * width])
        self._end_merged(self._open_number)
        if self._merged is not None or len(self._numbers) > 1:
            self._merged, self._merged_number = self._opened(), self._open_number
            self._numbers, self._values = _NO_NUMBERS, _NO_VALUES

    def _ratio(self, tier: int) -> int:
        """How many buckets of a tier the coarser one's bucket has."""
        return round(self._tiers[tier + 1].step / self._tiers[tier].step)

    def _opened(self) -> Bucket:
        return combined(self._merged, self._values, self._width)

    def _end_merged(self, number: int) -> None:
        """Move the merged bucket to the ring unless it has this number."""
        if self._merged is not None and self._merged_number != number:
            self._append(0, self._merged_number, self._merged)
            self._merged = None

    def _close(self, numbers: "array[int]", values: "array[float]") -> None:
        self._end_merged(numbers[0])
        single = self._merged is None and len(set(numbers)) == len(numbers)
        ratio = self._ratio(0) if len(self._tiers) > 1 else 0
        begin, width = 0, self._width
        while begin < len(numbers):
            if not single:
                end = begin + numbers.count(numbers[begin])
                bucket = combined(self._merged, values[begin * width : end * width], width)
                self._merged = None
                self._append(0, numbers[begin], bucket)
                begin = end
                continue
            # Buckets of one sample move together, up to the end of a bucket of the next tier.
            end = len(numbers)
            if ratio:
                end = bisect_left(numbers, (numbers[begin] // ratio + 1) * ratio, begin)
                self._begin(0, numbers[begin])
                self._rings[0].fresh += end - begin
            self._rings[0].extend(numbers[begin:end], values[begin * width : end * width])
            begin = end

    def _begin(self, tier: int, number: int) -> None:
        """Complete the coarser bucket before `number` if that begins a new one."""
        ring, ratio = self._rings[tier], self._ratio(tier)
        last = ring.last
        if last is not None and number // ratio > last // ratio:
            self._append(tier + 1, last // ratio, ring.merged(ring.fresh))
            ring.fresh = 0

    def _append(self, tier: int, number: int, bucket: Bucket) -> None:
        if tier + 1 < len(self._tiers):
            self._begin(tier, number)
            self._rings[tier].fresh += 1
        self._rings[tier].append(number, bucket)


def combined(before: Bucket | None, values: "array[float]", width: int) -> Bucket:
    """A bucket, None for an empty one, with samples of `width` values added."""
    tallies = [MetricTally() for _ in range(width)]
    for metric, tally in enumerate(tallies):
        if before is not None and before.counts[metric]:
            tally.merge(before.mins[metric], before.means[metric], before.maxs[metric], before.counts[metric])
        for value in values[metric::width]:
            if not isnan(value):
                tally.add(value)
    metrics = [tally.stats() or _NOTHING for tally in tallies]
    cells = [(stats.min, stats.mean, stats.max, min(stats.count, MOST_COUNTED)) for stats in metrics]
    return Bucket(*zip(*cells, strict=True))


class Together:
    """Samples of the GPUs of a node, read at the same time, that wait in one array; none without `series`, once one ended."""

    __slots__ = ("_history", "_numbers", "_turn", "_values", "series")

    def __init__(self, history: "History", series: Sequence[HistorySeries], turn: int) -> None:
        self._history = history
        self._numbers, self._values = _NO_NUMBERS, _NO_VALUES  # per sample by metric, each of all GPUs
        self._turn = turn % TURNS
        self.series = series

    @property
    def newest(self) -> int:
        """Number of the newest bucket that waits; -1 without one."""
        return self._numbers[-1] if self._numbers else -1

    def add(self, at: float, values: "array[float]") -> None:
        """Add a sample of each GPU, metric by metric, unless it is older than the newest."""
        number, newest = int(at // self._history.kept[0].step), self.newest
        if number < newest:
            return
        if number != newest and (number % TURNS == self._turn or len(self._numbers) >= _MOST_WAITING):
            self.settle(number)
        elif len(self._numbers) >= _MOST_WAITING:
            self.settle()
        if not self._numbers:
            self._numbers, self._values = array("i"), array("f")
        self._numbers.append(number)
        self._values.frombytes(pack(f"{len(values)}f", *values))

    def settle(self, number: int = -1) -> None:
        """Pass all to their series; `number`: of a bucket that follows, as `add` knows."""
        numbers, values = self._numbers, self._values
        if numbers:
            self._numbers, self._values = _NO_NUMBERS, _NO_VALUES
            for place, series in enumerate(self.series):
                series.shorten(self._history.kept)
                series.take(numbers, values[place :: len(self.series)], max(number, numbers[-1]))

    def end(self) -> None:
        """Let nothing wait here any more."""
        self.settle()
        self.series = ()


LOOK_FOR_ENDED_SECONDS = 60.0


def metrics_of(key: str) -> Sequence[Metric]:
    """The metrics of a key, which is a node's name if it has a slash, else a GPU's UUID."""
    return NODE_METRICS if "/" in key else GPU_METRICS


class History:
    """Series by key, a node's name or a GPU's lower-case UUID. `kept`: the current tiers, finest first.

    Without memory for another series, the tiers of all are shortened, finest first; if that is not enough, its samples are
    counted as `left_out`. A series is dropped after the longest retention without a sample.
    """

    def __init__(self, tiers: Sequence[Tier], budget_bytes: int) -> None:
        self.tiers = self.kept = tiers
        self._shorter = shorter(tiers)
        self._budget = budget_bytes
        self._series: dict[str, HistorySeries] = {}
        self._widths: Counter[int] = Counter()
        self._together_count = 0
        self._looked_at = _NEVER
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._series)

    @property
    def used_bytes(self) -> int:
        """The most memory that all series can take."""
        return sum(count * most_bytes(width, self.kept) for width, count in self._widths.items())

    def make_room(self, width: int = len(GPU_METRICS), count: int = 1) -> bool:
        """Shorten tiers until there is memory for `count` series of `width` metrics; returns whether there is."""
        while self.used_bytes + count * most_bytes(width, self.kept) > self._budget:
            tiers = next(self._shorter, None)
            if tiers is None:
                return False
            self.kept = tiers
        return True

    def add(self, key: str, at: float, sample: Sample) -> None:
        """Add a sample in the order of `NODE_METRICS` or `GPU_METRICS`."""
        found = self._series.get(key) or self._begin(key, len(sample))
        if found is None:
            self.leave_out()
        else:
            found.shorten(self.kept)
            found.add(at, sample)

    def together(self, keys: Sequence[str]) -> Together | None:
        """Where samples of these GPUs can wait together; None without memory for all."""
        found = [self._series.get(key) or self._begin(key, len(GPU_METRICS)) for key in keys]
        series = [one for one in found if one is not None]
        if len(series) < len(keys):
            return None
        self._together_count += 1
        together = Together(self, series, self._together_count)
        for one in series:
            if one.together is not None:
                one.together.end()
            one.together = together
        return together

    def leave_out(self) -> None:
        """Count a sample that is not kept, unless history is off."""
        self.left_out += bool(self._budget)

    def get(self, key: str) -> HistorySeries | None:
        """The series of a key; None without one."""
        found = self._series.get(key)
        if found is not None:
            found.shorten(self.kept)
        return found

    def all(self) -> Iterator[tuple[str, HistorySeries]]:
        """All current keys and series."""
        return iter(list(self._series.items()))

    def restore(self, key: str, rows: Rows) -> bool:
        """Start a series with stored buckets of the coarsest tier; returns whether there was memory for it."""
        series = self._begin(key, len(metrics_of(key)))
        if series is not None:
            series.restore(rows)
        return series is not None

    def _begin(self, key: str, width: int) -> HistorySeries | None:
        """A new series of `width` metrics; None if there is no memory for it."""
        if not self.make_room(width):
            return None
        self._widths[width] += 1
        found = self._series[key] = HistorySeries(width, self.kept, turn=len(self._series))
        return found

    def forget_ended(self, now: float) -> None:
        """Drop series without a sample for the longest retention, at most once a minute."""
        if now - self._looked_at < LOOK_FOR_ENDED_SECONDS:
            return
        self._looked_at = now
        oldest = now - self.tiers[-1].retention
        for key in [key for key, series in self._series.items() if series.newest() < oldest]:
            if (together := self._series.pop(key).together) is not None:
                together.end()
            self._widths[len(metrics_of(key))] -= 1


SECONDS_PER_HOUR = 3600.0
LEAST_TREND_SECONDS = 300.0
"""The shortest span with a trend."""


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The tier to read points from, and their step in seconds, a multiple of the tier's."""

    tier: int
    step: float


@dataclass(frozen=True, slots=True)
class Trend:
    """Statistics of one metric, and its growth per hour, None if the samples span less than 5 minutes."""

    stats: Stats
    slope_per_hour: float | None


def plan(tiers: Sequence[Tier], span: float, age: float, step: float, most_points: int) -> QueryPlan:
    """How to read `span` seconds that started `age` seconds ago, with at most `most_points` per metric.

    Chooses the coarsest sufficient tier among those that reach back to the start, or else the one that reaches farthest.
    `step`: the requested step, 0 for the shortest possible.
    """
    reaching = [index for index, tier in enumerate(tiers) if tier.retention >= age] or [len(tiers) - 1]
    wanted = max(step, span / max(most_points - 1, 1), tiers[reaching[0]].step)
    chosen = max((index for index in reaching if tiers[index].step <= wanted), default=reaching[0])
    base = tiers[chosen].step
    return QueryPlan(chosen, base * ceil(wanted / base - 1e-9))


def spread(points: Sequence[Point], step: float) -> list[Point]:
    """Points in order of time, merged into one per step."""
    found: list[Point] = []
    for number, group in groupby(points, key=lambda point: point.start // step):
        tally = MetricTally()
        for point in group:
            tally.merge(point.min, point.mean, point.max, point.samples)
        stats = tally.stats()
        if stats is not None:
            found.append(Point(number * step, stats.min, stats.mean, stats.max, stats.count))
    return found


def trend(points: Sequence[Point]) -> Trend | None:
    """The trend of points by weighted least squares; None without a sample."""
    tally = MetricTally()
    for point in points:
        tally.merge(point.min, point.mean, point.max, point.samples)
    stats = tally.stats()
    if stats is None:
        return None
    middle = sum(point.start * point.samples for point in points) / stats.count
    spreading = sum(point.samples * (point.start - middle) ** 2 for point in points)
    if spreading == 0.0 or points[-1].start - points[0].start < LEAST_TREND_SECONDS:
        return Trend(stats, None)
    moving = sum(point.samples * (point.start - middle) * (point.mean - stats.mean) for point in points)
    return Trend(stats, moving / spreading * SECONDS_PER_HOUR)
