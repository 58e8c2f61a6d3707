"""Rules that step, at and around every boundary, and rules that go by the clock."""

from datetime import UTC, datetime
from typing import Any

import pytest

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import Observation, ObservationStatus, series_of
from gpuscale.autoscaler.domain.rules.rule import (
    BandRule,
    Direction,
    Kind,
    RatioRule,
    Rule,
    RuleOutcome,
    ThresholdRule,
    Vote,
    apply_rule,
)
from gpuscale.autoscaler.domain.rules.targets import ForecastModel, ForecastRule, Period, ScheduleRule, holt
from tests.support.autoscaler_values import NOW, down, inputs, seen, up


def applied(
    one: Rule, before: int, observation: Observation | None, last_change: float | None, now: float
) -> RuleOutcome:
    shown = () if observation is None else (observation,)
    last = {} if last_change is None else {one.id: last_change}
    return apply_rule(one, inputs(before, *shown, last_changes=last, now=now))


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
    outcome = applied(one, before, seen(100), None, NOW)
    assert (outcome.step.before, outcome.step.after) == (before, after)
    assert (outcome.step.code, outcome.vote) == (code, vote)


def test_the_cooldown_is_300_s_unless_stated() -> None:
    assert applied(up(), 1, seen(11), NOW - 299.9, NOW).step.code is Code.COOLDOWN
    assert applied(up(), 1, seen(11), NOW - 300.0, NOW).step.code is Code.FIRED


def test_a_rule_that_wants_more_holds_while_it_rests() -> None:
    """What is short of replicas is not scaled in by another rule meanwhile."""
    assert applied(up(), 1, seen(11), NOW, NOW).vote is Vote.HOLD
    assert applied(down(), 3, seen(0), NOW, NOW).vote is Vote.NONE


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
        outcome = applied(one, 3, seen(value, status=status), None, NOW)
        assert (outcome.step.code, outcome.vote, outcome.step.after) == (code, Vote.HOLD, 3)


def test_a_signal_that_was_not_observed_at_all_holds() -> None:
    outcome = applied(up(), 3, None, None, NOW)
    assert (outcome.step.code, outcome.vote) == (Code.SIGNAL_MISSING, Vote.HOLD)


def test_a_disabled_rule_is_skipped_even_where_its_signal_is_unknown() -> None:
    outcome = applied(up(disabled=True), 3, seen(None), None, NOW)
    assert (outcome.step.code, outcome.vote) == (Code.DISABLED, Vote.NONE)


def test_the_text_says_what_was_compared() -> None:
    assert applied(up(step=2), 1, seen(120), None, NOW).step.text == "queue = 120 > 10: +2"
    assert applied(up(), 1, seen(4), None, NOW).step.text == "not queue = 4 > 10"


def apply(kind: Kind, before: int, value: float, **fields: Any) -> RuleOutcome:
    return apply_rule(Rule("r", "queue", kind, **fields), inputs(before, seen(value)))


@pytest.mark.parametrize(("value", "after"), [(10.0, 3), (10.1, 5), (2.0, 3), (1.9, 2), (5.0, 3)])
def test_a_band_steps_outside_of_it(value: float, after: int) -> None:
    assert apply(BandRule(2.0, 10.0, step_up=2), 3, value).step.after == after


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        (1, 3, 2),  # a third each; with two a half each
        (1, 1, 1),  # the last one that can do the work stays
        (0, 1, 0),  # without work the last one goes too
    ],
)
def test_a_guarded_ratio_leaves_no_work_without_a_replica(value: float, before: int, after: int) -> None:
    rule = RatioRule(up_above=5.0, down_below=2.0, guarded=True)
    assert apply(rule, before, value).step.after == after


def test_a_guarded_ratio_takes_none_away_that_would_be_missed() -> None:
    """With 6 on 4 the rule takes one away, unless that would be more than 1.9 for each: it would come back at once."""
    assert apply(RatioRule(1.9, 1.6, guarded=True), 4, 6).step.after == 4
    assert apply(RatioRule(1.9, 1.6), 4, 6).step.after == 3


def test_a_rule_may_go_one_way_only() -> None:
    up_only = apply(ThresholdRule(50.0), 2, 0, direction=Direction.UP)
    assert (up_only.vote, up_only.step.code) == (Vote.NONE, Code.WRONG_WAY)
    down_only = apply(ThresholdRule(50.0), 2, 99, direction=Direction.DOWN)
    assert (down_only.vote, down_only.step.code) == (Vote.NONE, Code.WRONG_WAY)


OFFICE = Period(frozenset({1, 2, 3, 4, 5}), 9 * 60, 17 * 60, 4)
NIGHT = Period(frozenset({6}), 22 * 60, 2 * 60, 7)


@pytest.mark.parametrize(
    ("moment", "floor"),
    [
        ("2031-05-05T07:00", 4),  # a Monday, nine o'clock in Berlin
        ("2031-05-05T06:59", 0),
        ("2031-05-05T14:59", 4),
        ("2031-05-05T15:00", 0),
        ("2031-05-10T20:00", 7),  # Saturday, ten at night
        ("2031-05-10T23:59", 7),  # Sunday already, but the period began on Saturday
        ("2031-05-11T00:00", 0),
        ("2031-05-11T20:00", 0),
    ],
)
def test_a_schedule_keeps_so_many_at_its_times(moment: str, floor: int) -> None:
    kind = ScheduleRule((OFFICE, NIGHT), "Europe/Berlin")
    wall = datetime.fromisoformat(moment).replace(tzinfo=UTC)
    outcome = apply_rule(Rule("r", "", kind), inputs(2, wall=wall))
    assert outcome.floor == floor
    assert outcome.step.after == max(2, floor)


def test_a_forecast_looks_as_far_ahead_as_a_start_takes_and_only_raises() -> None:
    growing = series_of((NOW - 60 + 5 * n, 10.0 + 5 * n) for n in range(13))
    rule = Rule("r", "queue", ForecastRule(10.0))
    outcome = apply_rule(rule, inputs(4, seen(70.0), series={"queue": growing}, startup=60.0))
    assert outcome.vote is Vote.UP
    assert 13 <= outcome.step.after <= 14, "70 now, and one more each second"
    falling = series_of((NOW - 60 + 5 * n, 80.0 - 5 * n) for n in range(13))
    outcome = apply_rule(rule, inputs(4, seen(20.0), series={"queue": falling}, startup=60.0))
    assert (outcome.vote, outcome.step.after) == (Vote.NONE, 4)


def test_a_seasonal_forecast_is_what_was_a_season_ago() -> None:
    past = series_of([(NOW - 86_400, 5.0), (NOW - 86_370, 90.0), (NOW - 86_300, 5.0), (NOW, 5.0)])
    rule = Rule("r", "queue", ForecastRule(10.0, ForecastModel.SEASONAL_NAIVE, horizon=40.0))
    assert apply_rule(rule, inputs(2, seen(5.0), series={"queue": past})).step.after == 9


def test_a_trend_goes_on_as_it_went() -> None:
    straight = series_of((10.0 * n, 3.0 * n) for n in range(60))
    assert holt(straight, 800.0) == pytest.approx(240.0, rel=0.01)
    assert holt(series_of([(0.0, 1.0), (1.0, 2.0)]), 9.0) is None
