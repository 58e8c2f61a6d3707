"""Time-based rules: schedules and forecasts. Both only raise the count. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import ClassVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpuscale.autoscaler.domain.inputs import Inputs, InputSeries
from gpuscale.autoscaler.domain.rules.rule import Kind, Proposal, Rule, ceiling

LEVEL_WEIGHT = 0.5
"""Holt's alpha: the weight of the newest value in the level."""
TREND_WEIGHT = 0.3
"""Holt's beta: the weight of the newest growth in the trend."""
HOLT_WINDOW = 900.0
"""Seconds of history for a trend."""
FEWEST = 4
"""Least values for a trend."""


@dataclass(frozen=True, slots=True)
class Period:
    """A time of the week: `weekdays` of 1 (Monday) to 7, all when empty; minutes after midnight, end exclusive."""

    weekdays: frozenset[int]
    start: int
    end: int
    replicas: int

    def holds(self, local: datetime) -> bool:
        """Whether a moment of its time zone is within it."""
        minute = local.hour * 60 + local.minute
        if self.start < self.end:
            return self.start <= minute < self.end and self._on(local)
        # It ends on the next day: the day on which it began counts.
        if minute >= self.start:
            return self._on(local)
        return minute < self.end and self._on(local - timedelta(days=1))

    def _on(self, day: datetime) -> bool:
        return not self.weekdays or day.isoweekday() in self.weekdays


@dataclass(frozen=True, slots=True)
class ScheduleRule(Kind):
    """At least so many replicas at certain times, in a named time zone."""

    periods: tuple[Period, ...]
    time_zone: str = "UTC"
    reads_signal: ClassVar[bool] = False

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """At least the replicas of the current periods; the largest of several."""
        local = inputs.wall.astimezone(ZoneInfo(self.time_zone))
        before = inputs.before
        count = max((period.replicas for period in self.periods if period.holds(local)), default=None)
        if count is None:
            return Proposal(before, f"no period holds at {local:%a %H:%M}", fired=False)
        text = f"at {local:%a %H:%M} at least {count}"
        return Proposal(max(count, before), text, fired=count > before, floor=count)

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """An unknown time zone, and periods of zero length."""
        try:
            ZoneInfo(self.time_zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            yield "time_zone", "must be the name of a time zone, such as Europe/Berlin"
        for index, period in enumerate(self.periods):
            if period.start == period.end:
                yield f"periods[{index}].end", "must differ from start"


class ForecastModel(Enum):
    """How to make a forecast."""

    HOLT = "Holt"
    SEASONAL_NAIVE = "seasonal naive"


@dataclass(frozen=True, slots=True)
class ForecastRule(Kind):
    """At least as many replicas as the signal will need `horizon` seconds ahead."""

    target: float
    model: ForecastModel = ForecastModel.HOLT
    horizon: float | None = None
    season: float = 86_400.0

    @property
    def past(self) -> float:
        """A season, or the history for a trend."""
        return self.season if self.model is ForecastModel.SEASONAL_NAIVE else HOLT_WINDOW

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """At least the replicas that the signal will need when one started now is ready."""
        before, signal = inputs.before, rule.signal
        horizon = self.horizon if self.horizon is not None else inputs.startup
        if horizon is None:
            return Proposal(before, "no replica has become ready yet: the horizon is not known", fired=False)
        history = inputs.history(signal)
        if self.model is ForecastModel.SEASONAL_NAIVE:
            ahead = history.at(inputs.now + horizon - self.season)
        else:
            ahead = holt(history.since(inputs.now - HOLT_WINDOW), inputs.now + horizon)
        if ahead is None:
            return Proposal(before, f"{signal}: too little history for a forecast", fired=False)
        count = ceiling(max(0.0, ahead) / self.target)
        text = f"{signal} will be {ahead:.4g} in {horizon:.3g} s ({self.model.value}): at least {count}"
        return Proposal(max(count, before), text, fired=count > before, floor=count)


def holt(history: InputSeries, moment: float) -> float | None:
    """The value at a later moment, by Holt's double exponential smoothing with unequal steps; None for few values."""
    if len(history.times) < FEWEST:
        return None
    level, trend = history.values[0], 0.0
    for index in range(1, len(history.times)):
        gap = history.times[index] - history.times[index - 1]
        expected = level + trend * gap
        level, before = expected + LEVEL_WEIGHT * (history.values[index] - expected), level
        trend += TREND_WEIGHT * ((level - before) / gap - trend)
    found = level + trend * (moment - history.times[-1])
    return found if math.isfinite(found) else None
