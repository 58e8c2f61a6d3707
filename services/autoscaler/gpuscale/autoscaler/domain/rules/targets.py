"""Rules that propose a count: by a target, by the time of the week, by a forecast. Pure.

`TargetRule` is the algorithm of the HorizontalPodAutoscaler (kubernetes: replica_calculator.go) with its tolerance, for the
total of all replicas (KEDA, Ray Serve) or for a level; `PanicRule` that of Knative's pod autoscaler (knative/serving:
pkg/autoscaler/scaling/autoscaler.go). `DrainRule` is our own. Schedules and forecasts only raise the count.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import ClassVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import Burst, Inputs, InputSeries, Observation
from gpuscale.autoscaler.domain.rules.rule import EXACT, Kind, Proposal, Rule, ceiling


class TargetType(Enum):
    """What a target is compared with: the total work of all replicas, or a level that more replicas lower."""

    AVERAGE_VALUE = "average value"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class TargetRule(Kind):
    """Keeps a signal at a target, proportionally."""

    value: float
    type: TargetType = TargetType.AVERAGE_VALUE
    tolerance_up: float = 0.1
    tolerance_down: float = 0.1
    proportional: ClassVar[bool] = True

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """The replicas that bring the signal to its target; the current count within the tolerance."""
        before = inputs.before
        total = self.type is TargetType.AVERAGE_VALUE
        # A level says something of the replicas that work; where none does it stands for one.
        base = before if total else inputs.serving or 1
        count = ceiling(value / self.value) if total else ceiling(base * value / self.value)
        said = f"{rule.signal} = {value:g} with a target of {self.value:g}{' each' if total else ''}"
        if base > 0:
            share = value / (self.value * base) if total else value / self.value
            if -self.tolerance_down - EXACT <= share - 1 <= self.tolerance_up + EXACT:
                return Proposal(before, f"{said} is within the tolerance", fired=False)
            if not total and (count > before) != (share > 1) and count != before:
                # Replicas on their way up are not ready yet, so the level asks for fewer than are aimed at already.
                return Proposal(
                    before, f"{said} asks for {count}, and {before} are on their way", fired=False
                )
        return Proposal(count, f"{said} asks for {count}", fired=count != before)

    def with_silent(self, rule: Rule, seen: Observation, inputs: Inputs) -> Proposal:
        """The count if the silent ones are at the target."""
        return self.propose(rule, seen.with_silent_at(self.value), inputs)


@dataclass(frozen=True, slots=True)
class PanicRule(Kind):
    """Keeps a signal at a target by its mean over a long window, and over a short one during bursts."""

    capacity: float
    utilization: float = 0.7
    stable_window: float = 60.0
    panic_window: float | None = None
    panic_threshold: float = 2.0
    max_up_rate: float = 1000.0
    max_down_rate: float = 2.0
    proportional: ClassVar[bool] = True

    @property
    def short(self) -> float:
        """Length of the short window."""
        return self.stable_window / 10 if self.panic_window is None else self.panic_window

    @property
    def past(self) -> float:
        """Its long window."""
        return self.stable_window

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """What the mean of the long window wants; in a burst, the most that the short one wanted."""
        signal, now, before = rule.signal, inputs.now, inputs.before
        history = inputs.history(signal)
        stable, short = history.mean(now - self.stable_window), history.mean(now - self.short)
        if stable is None or short is None:
            return Proposal(before, f"{signal}: nothing in its windows", code=Code.WINDOW_NOT_FULL)
        wanted, rushed = (ceiling(mean / self.capacity / self.utilization) for mean in (stable, short))
        ready = inputs.serving or 1
        known = inputs.bursts.get(rule.id)
        burst = known if isinstance(known, Burst) and now - known.over_at < self.stable_window else None
        most, least = math.ceil(self.max_up_rate * ready), math.floor(ready / self.max_down_rate)
        if rushed / ready >= self.panic_threshold:
            burst = Burst(now, burst.peak if burst else before)
        if burst is not None:
            burst = Burst(burst.over_at, max(burst.peak, min(max(rushed, wanted), most)))
            count = max(burst.peak, before)
            text = f"{signal} bursts: {short:g} over {self.short:g} s asks for {rushed}; never fewer while it does"
            return Proposal(count, text, fired=count != before, burst=burst)
        count = min(max(wanted, least), most)
        text = f"{signal} = {stable:g} over {self.stable_window:g} s asks for {wanted}"
        if count < before and not history.covers(now - self.stable_window):
            return Proposal(before, f"{text}, but the window is not full yet", code=Code.WINDOW_NOT_FULL)
        return Proposal(count, text, fired=count != before)

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """A short window longer than the long one."""
        if self.short > self.stable_window:
            yield "panic_window", "must be at most stable_window"


@dataclass(frozen=True, slots=True)
class DrainRule(Kind):
    """Enough replicas to serve what arrives and to work off what waits within a deadline.

    replicas = ceil(max(in hand / (slots x utilization), in hand / slots + waiting x S / (slots x deadline))), where S is the
    time that one piece of work takes. The room that utilization leaves works off what waits, and more replicas do only where
    it does not in time. It is at most `headroom` square roots of what is in hand, by which chance moves it. In hand is what
    will be when a replica started now is ready: arrivals x S in the end, of which work that is longer than that is short by then.

    Arrivals are measured if a signal reports them. Otherwise they are computed: work in hand leaves at busy / S (Little's law),
    and arrivals are departures plus growth. Without a `busy_signal`, the rule's signal counts work in hand too.

    Waiting work only needs more replicas while it waits: with `catch_up_held`, the least time from a change to a reduction, a
    stabilization window keeps what is needed without it.
    """

    deadline: float
    service_time: float | None = None
    slots: float = 1.0
    utilization: float = 0.8
    headroom: float | None = None
    busy_signal: str = ""
    rate_signal: str = ""
    window: float = 60.0
    tolerance: float = 0.15
    catch_up_held: float | None = None
    proportional: ClassVar[bool] = True

    @property
    def past(self) -> float:
        """Its window."""
        return self.window

    def also_reads(self, signals: Iterable[str]) -> frozenset[str]:
        """The signals of what is in hand and of what arrives."""
        return frozenset({self.busy_signal, self.rate_signal} & set(signals))

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """The replicas that keep up and work off what waits within the deadline."""
        signal, start = rule.signal, inputs.now - self.window
        for name in filter(None, (self.busy_signal, self.rate_signal)):
            if inputs.value(name) is None:
                return Proposal(inputs.before, f"{name} is not available", code=Code.SIGNAL_MISSING)
        # Pieces waiting, pieces in hand (on average), and growth a second of both.
        growth = inputs.history(signal).slope(start) or 0.0
        if self.busy_signal:
            history = inputs.history(self.busy_signal)
            waiting, busy = value, history.mean(start) or 0.0
            growth += history.slope(start) or 0.0
        else:
            # The signal counts what is in hand too, which is at most what the replicas have room for.
            room = inputs.serving * self.slots
            part = inputs.history(signal).since(start).values or (value,)
            waiting, busy = max(0.0, value - room), sum(min(seen, room) for seen in part) / len(part)
        rate = inputs.history(self.rate_signal).mean(start) if self.rate_signal else None
        service, leaving = self.service_time, (rate or 0.0) - growth
        if service is None and leaving > 0 and busy > 0:
            service = busy / leaving  # Little's law
        if service is None:
            text = f"{signal} = {value:g}: the service time is not known yet"
            return Proposal(max(inputs.before, int(value > 0)), text, code=Code.WINDOW_NOT_FULL)
        arrivals = max(0.0, busy / service + growth if rate is None else rate)
        # What is in hand is seen half a window late.
        ahead = min(service, math.inf if inputs.startup is None else inputs.startup + self.window / 2)
        load = busy + (arrivals - busy / service) * ahead
        keep_up = load / self.slots / self.utilization
        spare = keep_up * (1 - self.utilization)
        if self.headroom is not None:
            enough = self.headroom * math.sqrt(max(load, 0.0)) / self.slots
            if enough < spare:
                keep_up, spare = load / self.slots + enough, enough
        catch_up = waiting * service / self.slots / self.deadline
        then = f" in {ahead:.3g} s" if ahead < service else ""
        text = (
            f"{signal} = {value:g}: {arrivals:.3g}/s of {service:.3g} s need {keep_up:.2f}{then} with {spare:.2f} to spare,"
            f" and {waiting:g} waiting within {self.deadline:g} s {catch_up:.2f}"
        )
        found = self._enough(signal, text, keep_up, max(catch_up - spare, 0.0), inputs)
        since = inputs.now - inputs.last_changes.get(rule.id, -math.inf)
        if found.count >= inputs.before or self.catch_up_held is None or since >= self.catch_up_held:
            return found
        text = f"{found.text}, but it last changed the count {since:.1f} s ago"
        return replace(found, count=inputs.before, text=text, fired=False)

    def _enough(self, signal: str, text: str, keep_up: float, catch_up: float, inputs: Inputs) -> Proposal:
        needed = keep_up + catch_up
        if math.isnan(needed):
            return Proposal(
                inputs.before, f"{text}: this gives no number of replicas", code=Code.SIGNAL_INVALID
            )
        count, lasting = ceiling(needed), None if self.catch_up_held is None else ceiling(keep_up)
        text += f": {count}"
        if abs(needed - inputs.before) <= self.tolerance * inputs.before:
            return Proposal(inputs.before, f"{text}, within the tolerance", fired=False, lasting=lasting)
        if count < inputs.before and not inputs.history(signal).covers(inputs.now - self.window):
            text += ", but the window is not full yet"
            return Proposal(inputs.before, text, code=Code.WINDOW_NOT_FULL)
        return Proposal(count, text, fired=count != inputs.before, lasting=lasting)

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """Signals that are none of the endpoint's, and too little to know the time of a piece of work by."""
        for name, signal in (("busy_signal", self.busy_signal), ("rate_signal", self.rate_signal)):
            if signal and signal not in signals:
                yield name, "must be the id of a signal of this endpoint"
        if self.service_time is None and not (self.busy_signal and self.rate_signal):
            yield "service_time", "must be set, or busy_signal and rate_signal"


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
