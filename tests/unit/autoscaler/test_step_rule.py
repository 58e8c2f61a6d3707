"""The step rule, as a table: what each rule makes of the count, at and around every boundary."""

import pytest

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import Observation, ObservationStatus
from gpuscale.autoscaler.domain.rules.rule import Rule, RuleOutcome, Vote
from gpuscale.autoscaler.domain.rules.rule import apply_rule as apply
from tests.support.autoscaler_values import NOW, down, inputs, rule, seen, up


def apply_rule(
    one: Rule, before: int, observation: Observation | None, last_change: float | None, now: float
) -> RuleOutcome:
    shown = () if observation is None else (observation,)
    last = {} if last_change is None else {one.id: last_change}
    return apply(one, inputs(before, *shown, last_changes=last, now=now))


@pytest.mark.parametrize(
    ("comparison", "value", "fires"),
    [
        ("> 10", 10, False),
        ("> 10", 10.000001, True),
        (">= 10", 10, True),
        (">= 10", 9.999999, False),
        ("< 10", 10, False),
        ("< 10", 9.999999, True),
        ("<= 10", 10, True),
        ("<= 10", 10.000001, False),
    ],
)
def test_comparators_are_strict_as_named(comparison: str, value: float, fires: bool) -> None:
    outcome = apply_rule(rule("r", comparison, 1), 3, seen(value), None, NOW)
    assert outcome.step.code is (Code.FIRED if fires else Code.NOT_MET)
    assert outcome.step.after == (4 if fires else 3)


@pytest.mark.parametrize(
    ("one", "before", "after", "code", "vote"),
    [
        (up(step=3), 2, 5, Code.FIRED, Vote.UP),
        (down(comparison="> 0", step=-3), 5, 2, Code.FIRED, Vote.DOWN),
        # A step that would cross the rule's own bound is clamped, never skipped (Backend.AI #13848).
        (up(step=3, max_replicas=5), 4, 5, Code.CLAMPED_TO_RULE_MAX, Vote.UP),
        (up(step=3, max_replicas=5), 2, 5, Code.FIRED, Vote.UP),
        (down(comparison="> 0", step=-3, min_replicas=2), 4, 2, Code.CLAMPED_TO_RULE_MIN, Vote.DOWN),
        # Below its own min, an up rule leads to it (in the seed it never fires again).
        (up(step=1, min_replicas=3), 1, 3, Code.CLAMPED_TO_RULE_MIN, Vote.UP),
        (down(comparison="> 0", step=-1, max_replicas=3), 9, 3, Code.CLAMPED_TO_RULE_MAX, Vote.DOWN),
        # At its bound there is nothing to change: one that wants more holds, one that wants less does not ask.
        (up(step=1, max_replicas=5), 5, 5, Code.CLAMPED_TO_RULE_MAX, Vote.HOLD),
        (down(comparison="> 0", step=-1, min_replicas=5), 5, 5, Code.CLAMPED_TO_RULE_MIN, Vote.NONE),
        # A bound never turns a step around: the count was brought beyond it by somebody else.
        (up(step=1, max_replicas=5), 8, 8, Code.CLAMPED_TO_RULE_MAX, Vote.HOLD),
        (down(comparison="> 0", step=-1, min_replicas=5), 2, 2, Code.CLAMPED_TO_RULE_MIN, Vote.NONE),
    ],
)
def test_a_step_is_clamped_to_the_rules_own_bounds(
    one: Rule, before: int, after: int, code: Code, vote: Vote
) -> None:
    outcome = apply_rule(one, before, seen(100), None, NOW)
    assert (outcome.step.before, outcome.step.after) == (before, after)
    assert (outcome.step.code, outcome.vote) == (code, vote)


@pytest.mark.parametrize(
    ("passed", "code"),
    [(0.0, Code.COOLDOWN), (59.999, Code.COOLDOWN), (60.0, Code.FIRED), (60.001, Code.FIRED)],
)
def test_the_cooldown_is_over_when_exactly_that_much_has_passed(passed: float, code: Code) -> None:
    outcome = apply_rule(up(cooldown=60.0), 1, seen(11), NOW - passed, NOW)
    assert outcome.step.code is code


def test_the_cooldown_is_300_s_unless_stated() -> None:
    assert apply_rule(up(), 1, seen(11), NOW - 299.9, NOW).step.code is Code.COOLDOWN
    assert apply_rule(up(), 1, seen(11), NOW - 300.0, NOW).step.code is Code.FIRED


def test_a_rule_that_wants_more_holds_while_it_rests() -> None:
    """What is short of replicas is not scaled in by another rule meanwhile."""
    assert apply_rule(up(), 1, seen(11), NOW, NOW).vote is Vote.HOLD
    assert apply_rule(down(), 3, seen(0), NOW, NOW).vote is Vote.NONE


def test_a_cooldown_of_zero_rests_not_at_all() -> None:
    assert apply_rule(up(cooldown=0.0), 1, seen(11), NOW, NOW).step.code is Code.FIRED


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (ObservationStatus.MISSING, Code.SIGNAL_MISSING),
        (ObservationStatus.STALE, Code.SIGNAL_STALE),
        (ObservationStatus.INVALID, Code.SIGNAL_INVALID),
    ],
)
@pytest.mark.parametrize("value", [None, 0.0, 1e9])
def test_an_unknown_signal_holds_whatever_its_last_value(
    status: ObservationStatus, code: Code, value: float | None
) -> None:
    for one in (up(), down()):
        outcome = apply_rule(one, 3, seen(value, status=status), None, NOW)
        assert (outcome.step.code, outcome.vote, outcome.step.after) == (code, Vote.HOLD, 3)


def test_a_signal_that_was_not_observed_at_all_holds() -> None:
    outcome = apply_rule(up(), 3, None, None, NOW)
    assert (outcome.step.code, outcome.vote) == (Code.SIGNAL_MISSING, Vote.HOLD)


def test_a_disabled_rule_is_skipped_even_where_its_signal_is_unknown() -> None:
    outcome = apply_rule(up(disabled=True), 3, seen(None), None, NOW)
    assert (outcome.step.code, outcome.vote) == (Code.DISABLED, Vote.NONE)


def test_the_text_says_what_was_compared() -> None:
    assert apply_rule(up(step=2), 1, seen(120), None, NOW).step.text == "queue = 120 > 10: +2"
    assert apply_rule(up(), 1, seen(4), None, NOW).step.text == "not queue = 4 > 10"
