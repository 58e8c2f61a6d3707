"""The histories of all nodes and GPUs within a memory budget, and the points and trends that are read from them. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from gpuscale.monitor.history.ring import Point, Rows
from gpuscale.monitor.history.series import HistorySeries, Tier, most_bytes, shorter
from gpuscale.monitor.model.metrics import GPU_METRICS, NODE_METRICS, Metric, MetricTally, Sample, Stats

LOOK_FOR_ENDED_SECONDS = 60.0
DEFAULT_TIERS = (Tier(1.0, 600.0), Tier(10.0, 6 * 3600.0), Tier(60.0, 7 * 86400.0))
"""1 s for 10 min, 10 s for 6 h, 1 min for 7 d."""


def metrics_of(key: str) -> Sequence[Metric]:
    """The metrics of a key: a key with a slash is the name of a node, any other the UUID of a GPU."""
    return NODE_METRICS if "/" in key else GPU_METRICS


class History:
    """Series by key: the name of a node, or the UUID of a GPU in lower case. `kept` are the tiers, finest first.

    If there is no memory for another series, the tiers of all are shortened, the finest first; if that is not enough, its
    samples count as `left_out`. A series is dropped once its last sample is older than the longest retention.
    """

    def __init__(self, tiers: Sequence[Tier], budget_bytes: int) -> None:
        self.tiers = self.kept = tiers
        self._shorter = shorter(tiers)
        self._budget = budget_bytes
        self._series: dict[str, HistorySeries] = {}
        self._widths: Counter[int] = Counter()
        self._looked_at = float("-inf")
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._series)

    @property
    def used_bytes(self) -> int:
        """The most memory that all series together can take."""
        return sum(count * most_bytes(width, self.kept) for width, count in self._widths.items())

    def make_room(self, width: int = len(GPU_METRICS)) -> bool:
        """Shorten tiers until there is memory for another series of `width` metrics; whether there is."""
        while self.used_bytes + most_bytes(width, self.kept) > self._budget:
            tiers = next(self._shorter, None)
            if tiers is None:
                return False
            self.kept = tiers
        return True

    def add(self, key: str, at: float, sample: Sample) -> None:
        """Add what was read of a node or GPU, in the order of `NODE_METRICS` or `GPU_METRICS`."""
        found = self._series.get(key) or self._begin(key, len(sample))
        if found is None:
            self.leave_out()
        else:
            found.shorten(self.kept)
            found.add(at, sample)

    def leave_out(self) -> None:
        """Count a sample that is not kept; without a budget nobody wants history."""
        self.left_out += bool(self._budget)

    def get(self, key: str) -> HistorySeries | None:
        """The series of a key; None if there is none."""
        found = self._series.get(key)
        if found is not None:
            found.shorten(self.kept)
        return found

    def all(self) -> Iterator[tuple[str, HistorySeries]]:
        """Every key and its series, as of now."""
        return iter(list(self._series.items()))

    def restore(self, key: str, rows: Rows) -> bool:
        """Start a series with buckets of the coarsest tier that an earlier run left; whether there was memory for it."""
        series = self._begin(key, len(metrics_of(key)))
        if series is not None:
            series.restore(rows)
        return series is not None

    def restore_finer(self, key: str, rows: Rows) -> None:
        """Add buckets of the tier before the coarsest to a series that was restored."""
        found = self._series.get(key)
        if found is not None:
            found.shorten(self.kept)
            found.restore_finer(rows)

    def _begin(self, key: str, width: int) -> HistorySeries | None:
        """A new series of `width` metrics; None if there is no memory for it."""
        if not self.make_room(width):
            return None
        self._widths[width] += 1
        found = self._series[key] = HistorySeries(width, self.kept, turn=len(self._series))
        return found

    def forget_ended(self, now: float) -> None:
        """Drop series without a sample for the longest retention. Looks at most once a minute, however often it is called."""
        if now - self._looked_at < LOOK_FOR_ENDED_SECONDS:
            return
        self._looked_at = now
        oldest = now - self.tiers[-1].retention
        for key in [key for key, series in self._series.items() if series.newest() < oldest]:
            del self._series[key]
            self._widths[len(metrics_of(key))] -= 1


SECONDS_PER_HOUR = 3600.0
LEAST_TREND_SECONDS = 300.0
"""A shorter time says nothing about an hour."""


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """The tier that points are read from, and the seconds between them, a multiple of that tier's step."""

    tier: int
    step: float


@dataclass(frozen=True, slots=True)
class Trend:
    """Figures of one metric over a span, and its growth per hour; None if the samples cover less than 5 minutes."""

    stats: Stats
    slope_per_hour: float | None


def plan(tiers: Sequence[Tier], span: float, age: float, step: float, most_points: int) -> QueryPlan:
    """How to show `span` seconds that started `age` seconds ago, with at most `most_points` for each metric.

    Of the tiers that reach back to the start of the span, it takes the coarsest that is fine enough; if none does, the one
    that reaches back farthest. `step` is the step asked for; 0 means as short as possible.
    """
    reaching = [index for index, tier in enumerate(tiers) if tier.retention >= age] or [len(tiers) - 1]
    wanted = max(step, span / max(most_points - 1, 1), tiers[reaching[0]].step)
    chosen = max((index for index in reaching if tiers[index].step <= wanted), default=reaching[0])
    base = tiers[chosen].step
    return QueryPlan(chosen, base * ceil(wanted / base - 1e-9))


def spread(points: Sequence[Point], step: float) -> list[Point]:
    """Points merged into one for each step; they come and go in order of time."""
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
    """The trend of one metric, by weighted least squares over its points; None without a sample."""
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
