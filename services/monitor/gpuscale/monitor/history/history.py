"""The histories of all nodes and GPUs within a memory budget, and the points and trends in them. Pure."""

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
        self._looked_at = float("-inf")
        self.left_out = 0

    def __len__(self) -> int:
        return len(self._series)

    @property
    def used_bytes(self) -> int:
        """The most memory that all series can take."""
        return sum(count * most_bytes(width, self.kept) for width, count in self._widths.items())

    def make_room(self, width: int = len(GPU_METRICS)) -> bool:
        """Shorten tiers until there is memory for a series of `width` metrics; returns whether there is."""
        while self.used_bytes + most_bytes(width, self.kept) > self._budget:
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

    def restore_finer(self, key: str, rows: Rows) -> None:
        """Add buckets of the second coarsest tier to a restored series."""
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
        """Drop series without a sample for the longest retention, at most once a minute."""
        if now - self._looked_at < LOOK_FOR_ENDED_SECONDS:
            return
        self._looked_at = now
        oldest = now - self.tiers[-1].retention
        for key in [key for key, series in self._series.items() if series.newest() < oldest]:
            del self._series[key]
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
