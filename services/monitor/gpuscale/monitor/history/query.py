"""From what is kept to what was asked for: which tier, which step, points, and trends. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from gpuscale.monitor.history.ring import Point
from gpuscale.monitor.history.series import Tier
from gpuscale.monitor.model.metrics import Stats, Tally

SECONDS_PER_HOUR = 3600.0
LEAST_TREND_SECONDS = 300.0
"""What less time has shown says nothing of an hour."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Where points are taken from, and how far apart they are put: `step` is a multiple of the tier's."""

    tier: int
    step: float


@dataclass(frozen=True, slots=True)
class Trend:
    """Figures of one metric over a span, and how much it grows in an hour; None where the samples reach over less than 5 min."""

    stats: Stats
    slope_per_hour: float | None


def plan(tiers: Sequence[Tier], span: float, age: float, step: float, most_points: int) -> Plan:
    """How to answer for `span` seconds that began `age` seconds ago, with at most `most_points` a metric.

    The tier reaches back to the begin of the span, or else as far back as there is one; of those that do, it is the
    coarsest that is fine enough. `step` is what was asked for, 0 for as short as may be.
    """
    reaching = [index for index, tier in enumerate(tiers) if tier.retention >= age] or [len(tiers) - 1]
    wanted = max(step, span / max(most_points - 1, 1), tiers[reaching[0]].step)
    chosen = max((index for index in reaching if tiers[index].step <= wanted), default=reaching[0])
    base = tiers[chosen].step
    return Plan(chosen, base * ceil(wanted / base - 1e-9))


def spread(points: Sequence[Point], step: float) -> list[Point]:
    """Points by time, put together to one for each step."""
    found: list[Point] = []
    for number, group in groupby(points, key=lambda point: point.start // step):
        tally = Tally()
        for point in group:
            tally.merge(point.min, point.mean, point.max, point.samples)
        stats = tally.stats()
        if stats is not None:
            found.append(Point(number * step, stats.min, stats.mean, stats.max, stats.count))
    return found


def trend(points: Sequence[Point]) -> Trend | None:
    """Where one metric is going, by weighted least squares over its points; None without a sample."""
    tally = Tally()
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
