"""Scaling rules as immutable values, and how they work together.

Durations are seconds. None means "not stated": the property beside it says what holds then. docs/autoscaling.md says
what each kind does, and `gpuscale.autoscaler.domain.policies` does it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

STEP_COOLDOWN = 300.0
"""Cooldown of a rule that steps, where it states none; a proportional one has none."""
LONGEST_LEARNT = 600.0
"""Most seconds that a stabilization window grows to by itself."""
PROPORTIONAL_STABILIZATION = 60.0
"""Stabilization down of an endpoint with a proportional rule, where it states none."""


class Comparator(Enum):
    """How a signal is compared with a threshold; strict as named."""

    LESS_THAN = "<"
    LESS_THAN_OR_EQUAL = "<="
    GREATER_THAN = ">"
    GREATER_THAN_OR_EQUAL = ">="

    def holds(self, value: float, threshold: float) -> bool:
        """Whether `value` compares true with `threshold`."""
        return _COMPARE[self](value, threshold)


_COMPARE: Mapping[Comparator, Callable[[float, float], bool]] = {
    Comparator.LESS_THAN: operator.lt,
    Comparator.LESS_THAN_OR_EQUAL: operator.le,
    Comparator.GREATER_THAN: operator.gt,
    Comparator.GREATER_THAN_OR_EQUAL: operator.ge,
}


@dataclass(frozen=True, slots=True)
class StepRule:
    """Adds `step` replicas (takes them away where it is negative) while the signal compares true."""

    comparator: Comparator
    threshold: float
    step: int


@dataclass(frozen=True, slots=True)
class BandRule:
    """Adds `step_up` replicas above `high`, takes `step_down` away below `low`."""

    low: float | None = None
    high: float | None = None
    step_up: int = 1
    step_down: int = 1


@dataclass(frozen=True, slots=True)
class RatioRule:
    """Adds a replica where there is more than `up_above` work for each, takes one away below `down_below`."""

    up_above: float = 10.0
    down_below: float = 1.0
    proportional_down: bool = False
    guarded: bool = False


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """Adds `step` replicas above one depth, takes them away at another or below it."""

    up_above: float
    down_at: float = 0.0
    step: int = 1


class TargetType(Enum):
    """What a target is compared with: the work of all replicas together, or a level that more replicas lower."""

    AVERAGE_VALUE = "average value"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class TargetRule:
    """Keeps a signal at a target, in proportion."""

    value: float
    type: TargetType = TargetType.AVERAGE_VALUE
    tolerance_up: float = 0.1
    tolerance_down: float = 0.1


@dataclass(frozen=True, slots=True)
class PanicRule:
    """Keeps a signal at a target by its mean over a long window, and by a short one while it bursts."""

    capacity: float
    utilization: float = 0.7
    stable_window: float = 60.0
    panic_window: float | None = None
    panic_threshold: float = 2.0
    max_up_rate: float = 1000.0
    max_down_rate: float = 2.0

    @property
    def short(self) -> float:
        """Length of the short window."""
        return self.stable_window / 10 if self.panic_window is None else self.panic_window


@dataclass(frozen=True, slots=True)
class DrainRule:
    """Enough replicas to serve what arrives and to work off what waits within a deadline.

    Where there is no `busy_signal`, the rule's signal counts the work in hand too.
    """

    deadline: float
    service_time: float | None = None
    slots: float = 1.0
    utilization: float = 0.8
    busy_signal: str = ""
    rate_signal: str = ""
    window: float = 60.0
    tolerance: float = 0.15


@dataclass(frozen=True, slots=True)
class Period:
    """A time of the week: `weekdays` of 1 (Monday) to 7, all when empty; minutes after midnight, the end exclusive."""

    weekdays: frozenset[int]
    start: int
    end: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """At least so many replicas at certain times, in a time zone by its name."""

    periods: tuple[Period, ...]
    time_zone: str = "UTC"


class ForecastModel(Enum):
    """How a forecast is made."""

    HOLT = "Holt"
    SEASONAL_NAIVE = "seasonal naive"


@dataclass(frozen=True, slots=True)
class ForecastRule:
    """At least as many replicas as the signal will ask for `horizon` seconds ahead."""

    target: float
    model: ForecastModel = ForecastModel.HOLT
    horizon: float | None = None
    season: float = 86_400.0


@dataclass(frozen=True, slots=True)
class FormulaRule:
    """As many replicas as a formula over signals says."""

    expression: str


Kind = (
    StepRule
    | BandRule
    | RatioRule
    | ThresholdRule
    | TargetRule
    | PanicRule
    | DrainRule
    | ScheduleRule
    | ForecastRule
    | FormulaRule
)
PROPORTIONAL = (TargetRule, PanicRule, DrainRule, FormulaRule)
"""Kinds that say how many replicas there should be, and not how many more or fewer."""
WITHOUT_SIGNAL = (ScheduleRule, FormulaRule)
"""Kinds that name no signal of their own."""


class Direction(Enum):
    """Which way a rule may change the count."""

    BOTH = "both"
    UP = "up"
    DOWN = "down"


class BoundMode(Enum):
    """What happens to a count beyond a bound: it goes as far as the bound, or nothing happens."""

    CLAMP = "clamp"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Rule:
    """One scaling rule. Its own bounds hold for what this rule leads to, and for nothing else."""

    id: str
    signal: str
    kind: Kind
    disabled: bool = False
    priority: int = 0
    cooldown: float | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    direction: Direction = Direction.BOTH
    bound_mode: BoundMode = BoundMode.CLAMP

    @property
    def rest(self) -> float:
        """Least seconds between two changes by this rule; over when exactly that much has passed."""
        if self.cooldown is not None:
            return self.cooldown
        steps = isinstance(self.kind, StepRule | BandRule | RatioRule | ThresholdRule)
        return STEP_COOLDOWN if steps else 0.0


class Combine(Enum):
    """How the outcomes of rules become one."""

    SAFEST = "safest"
    FIRST_MATCH = "first match"
    PRIORITY = "priority"
    SUM_STEPS = "sum of steps"


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Most change in a period: in replicas, or in percent of the count at its beginning."""

    period: float
    replicas: int | None = None
    percent: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the count may go one way.

    `startups`: the window of a reduction doubles with each time that replicas which were given up were needed again soon
    (`pace.regrets`), until it is so many times as long as replicas take to start, or `LONGEST_LEARNT`: what is needed again
    and again, and takes long to get back, is kept.
    """

    stabilization: float | None = None
    limits: tuple[RateLimit, ...] = ()
    strictest: bool = False
    disabled: bool = False
    cooldown: float = 0.0
    startups: float = 0.0

    def window(self, startup: float | None, regrets: int) -> float:
        """Seconds of its stabilization window, where replicas take `startup` seconds to be ready."""
        stated = self.stabilization or 0.0
        longest = min(LONGEST_LEARNT, self.startups * (startup or 0.0))
        return max(stated, min(longest, stated * 2.0**regrets))


UNPACED = Pace()
"""As fast as rules ask."""


class ScalingMode(Enum):
    """Whether decisions are acted on."""

    ACTIVE = "active"
    SHADOW = "shadow"
