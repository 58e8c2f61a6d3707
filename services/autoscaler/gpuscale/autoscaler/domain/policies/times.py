"""Rules that look at the clock: schedules and forecasts. Both only ever raise the count. Pure."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from gpuscale.autoscaler.domain.policies.outcome import Inputs, Proposal
from gpuscale.autoscaler.domain.policies.targets import ceiling
from gpuscale.autoscaler.domain.rules import ForecastModel, ForecastRule, Period, ScheduleRule
from gpuscale.autoscaler.domain.series import Series

LEVEL_WEIGHT = 0.5
"""Holt's alpha: what the newest value weighs in the level."""
TREND_WEIGHT = 0.3
"""Holt's beta: what the newest growth weighs in the trend."""
HOLT_WINDOW = 900.0
"""Seconds of history that a trend is made of."""
FEWEST = 4
"""Values below which there is no trend."""


def schedule(kind: ScheduleRule, inputs: Inputs) -> Proposal:
    """At least the replicas of the periods that hold now; the largest of several."""
    local = inputs.wall.astimezone(ZoneInfo(kind.time_zone))
    holding = [period.replicas for period in kind.periods if _holds(period, local)]
    if not holding:
        return Proposal(inputs.before, f"no period holds at {local:%a %H:%M}", fired=False)
    count = max(holding)
    return Proposal(
        max(count, inputs.before),
        f"at {local:%a %H:%M} at least {count}",
        fired=count > inputs.before,
        floor=count,
    )


def _holds(period: Period, local: datetime) -> bool:
    minute = local.hour * 60 + local.minute
    if period.start < period.end:
        return period.start <= minute < period.end and _on(period, local)
    # It ends on the day after: the day that counts is the one on which it began.
    if minute >= period.start:
        return _on(period, local)
    return minute < period.end and _on(period, local - timedelta(days=1))


def _on(period: Period, day: datetime) -> bool:
    return not period.weekdays or day.isoweekday() in period.weekdays


def forecast(kind: ForecastRule, signal: str, inputs: Inputs) -> Proposal:
    """At least the replicas that the signal will ask for when one that is started now is ready."""
    before = inputs.before
    horizon = kind.horizon if kind.horizon is not None else inputs.startup
    if horizon is None:
        return Proposal(before, "no replica has become ready yet: the horizon is not known", fired=False)
    history = inputs.history(signal)
    if kind.model is ForecastModel.SEASONAL_NAIVE:
        ahead = history.at(inputs.now + horizon - kind.season)
    else:
        ahead = holt(history.since(inputs.now - HOLT_WINDOW), inputs.now + horizon)
    if ahead is None:
        return Proposal(before, f"{signal}: too little history for a forecast", fired=False)
    count = ceiling(max(0.0, ahead) / kind.target)
    text = f"{signal} will be {ahead:.4g} in {horizon:.3g} s ({kind.model.value}): at least {count}"
    return Proposal(max(count, before), text, fired=count > before, floor=count)


def holt(history: Series, moment: float) -> float | None:
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
