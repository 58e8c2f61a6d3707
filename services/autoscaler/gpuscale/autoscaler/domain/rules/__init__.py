"""Scaling rules. `rule` has what all kinds share and those that step, `targets` those that propose a count, others one each.

A kind is a frozen dataclass with the fields of its message in the contract; `KINDS` lists it.
"""

from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import BandRule, Kind, RatioRule, StepRule, ThresholdRule
from gpuscale.autoscaler.domain.rules.slo import SloRule
from gpuscale.autoscaler.domain.rules.targets import (
    DrainRule,
    ForecastRule,
    PanicRule,
    ScheduleRule,
    TargetRule,
)

KINDS: tuple[type[Kind], ...] = (
    StepRule,
    BandRule,
    RatioRule,
    ThresholdRule,
    TargetRule,
    PanicRule,
    DrainRule,
    ScheduleRule,
    ForecastRule,
    FormulaRule,
    SloRule,
)
"""Every kind of rule."""
