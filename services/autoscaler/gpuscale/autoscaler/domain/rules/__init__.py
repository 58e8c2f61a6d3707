"""Scaling rules. `rule` has what all kinds share; each other module has some kinds.

A kind is a frozen dataclass with the fields of its message in the contract; `KINDS` lists it.
"""

from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import Kind
from gpuscale.autoscaler.domain.rules.slo import SloRule
from gpuscale.autoscaler.domain.rules.steps import BandRule, RatioRule, StepRule, ThresholdRule
from gpuscale.autoscaler.domain.rules.targets import DrainRule, PanicRule, TargetRule
from gpuscale.autoscaler.domain.rules.timed import ForecastRule, ScheduleRule

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
