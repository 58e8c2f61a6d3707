"""Scaling rules: `rule` has what all share, each other module some kinds, whose fields are those of their messages."""

from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import Kind
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
)
"""Every kind of rule that there is."""
