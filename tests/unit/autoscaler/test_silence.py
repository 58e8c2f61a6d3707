"""Scale-in on a metric that only some report: only as far as it would go with the silent ones at the target."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import Aggregation, Observation, ObservationStatus, Series
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import Kind, Rule, RuleOutcome, Vote, apply_rule
from gpuscale.autoscaler.domain.rules.steps import BandRule, Comparator, RatioRule, StepRule, ThresholdRule
from gpuscale.autoscaler.domain.rules.targets import DrainRule, TargetRule, TargetType
from gpuscale.autoscaler.domain.signals import Sample, observe
from gpuscale.autoscaler.domain.spec import OnMissing, ReplicaSignal, Signal
from tests.support.autoscaler_values import NOW, inputs

LEVEL = TargetRule(50.0, TargetType.VALUE)
STEPPING: tuple[Kind, ...] = (
    StepRule(Comparator.LESS_THAN, 40.0, -1),
    BandRule(low=40.0),
    RatioRule(10.0, 5.0),
    ThresholdRule(50.0, 20.0),
    DrainRule(10.0, 1.0),
    FormulaRule("ceil(s / 50)"),
)


def outcome(
    kind: Kind, value: float, told: int, silent: int, *, across: Aggregation = Aggregation.AVG
) -> RuleOutcome:
    """Of a rule for as many replicas as there are sources; all are ready."""
    seen = Observation(
        "s", ObservationStatus.OK, value, 1.0, silent_count=silent, told_count=told, across=across
    )
    signal = "" if isinstance(kind, FormulaRule) else "s"
    history = Series((NOW - 100.0, NOW - 50.0, NOW), (value,) * 3)
    going_by = inputs(told + silent, seen, series={"s": history})
    return apply_rule(Rule("r", signal, kind, cooldown=0.0), going_by)


def test_the_silent_ones_count_as_at_the_target_when_fewer_are_wanted() -> None:
    """Ten replicas, of which eight are at 10 % of 50: two that tell ask for 2, with two silent ones at 50 for 4."""
    alone = outcome(LEVEL, 10.0, 10, 0)
    assert (alone.vote, alone.step.after) == (Vote.DOWN, 2)
    guarded = outcome(LEVEL, 10.0, 8, 2)
    assert (guarded.vote, guarded.step.after) == (Vote.DOWN, 4)
    assert "2 silent ones at the target" in guarded.step.text


def test_it_holds_where_the_silent_ones_would_keep_the_count() -> None:
    held = outcome(LEVEL, 40.0, 1, 4)
    assert (held.vote, held.step.code) == (Vote.HOLD, Code.SOURCES_SILENT)
    assert "s: 4" in held.step.text


def test_more_are_asked_for_by_those_that_tell() -> None:
    up = outcome(LEVEL, 100.0, 2, 3)
    assert (up.vote, up.step.after) == (Vote.UP, 10)


@pytest.mark.parametrize("kind", STEPPING, ids=lambda kind: type(kind).__name__)
def test_every_other_kind_of_rule_holds(kind: Kind) -> None:
    assert outcome(kind, 1.0, 9, 0).vote is Vote.DOWN
    held = outcome(kind, 1.0, 8, 1)
    assert (held.vote, held.step.code) == (Vote.HOLD, Code.SOURCES_SILENT)


@given(
    st.floats(0, 100), st.integers(1, 20), st.integers(1, 20),
    st.sampled_from(Aggregation), st.sampled_from(TargetType),
)  # fmt: skip
def test_silence_never_leads_to_fewer_than_those_at_the_target_would(
    value: float, told: int, silent: int, across: Aggregation, type_: TargetType
) -> None:
    kind = TargetRule(50.0, type_)
    found = outcome(kind, value, told, silent, across=across)
    spoken = outcome(kind, value, told + silent, 0)
    assert found.step.after >= min(spoken.step.after, told + silent)


def test_a_signal_that_leaves_out_what_is_missing_leaves_out_silent_replicas_too() -> None:
    """Backend.AI averages over the kernels that report."""
    sample = Sample((10.0,), NOW, silent_count=3)
    for on_missing, minded in (
        (OnMissing.HOLD, 3), (OnMissing.LAST, 3), (OnMissing.IGNORE, 0), (OnMissing.ZERO, 0),
    ):  # fmt: skip
        seen = observe(Signal("s", ReplicaSignal("m"), on_missing=on_missing), sample, NOW)
        assert (seen.silent_count, seen.detail) == (minded, "3 of 4 said nothing")
