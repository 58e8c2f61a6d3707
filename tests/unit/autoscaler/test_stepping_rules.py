"""Rules that step, at and around every boundary: bands, ratios, thresholds, schedules and forecasts."""

from datetime import UTC, datetime
from typing import Any

import pytest

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import series_of
from gpuscale.autoscaler.domain.rules.rule import (
    BoundMode,
    Direction,
    Kind,
    Rule,
    RuleOutcome,
    Vote,
    apply_rule,
)
from gpuscale.autoscaler.domain.rules.steps import BandRule, RatioRule, ThresholdRule
from gpuscale.autoscaler.domain.rules.timed import ForecastModel, ForecastRule, Period, ScheduleRule, holt
from tests.support.autoscaler_values import NOW, inputs, seen


def apply(kind: Kind, before: int, value: float, **fields: Any) -> RuleOutcome:
    return apply_rule(Rule("r", "queue", kind, **fields), inputs(before, seen(value)))


@pytest.mark.parametrize(("value", "after"), [(10.0, 3), (10.1, 5), (2.0, 3), (1.9, 2), (5.0, 3)])
def test_a_band_steps_outside_of_it(value: float, after: int) -> None:
    assert apply(BandRule(2.0, 10.0, step_up=2), 3, value).step.after == after


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        (0, 0, 0),
        (1, 0, 1),  # no worker and some work: one
        (10, 1, 1),  # 10.0 each holds: more than 10 is strict
        (11, 1, 2),
        (1000, 3, 4),  # one at a time, however much there is
        (5, 5, 5),  # 1.0 each holds
        (4, 5, 4),
        (0, 5, 4),
        (0, 1, 0),
    ],
)
def test_the_vanilla_ratio(value: float, before: int, after: int) -> None:
    """OpenGRIS Scaler: more than 10 tasks a worker, one more; fewer than 1, one fewer."""
    assert apply(RatioRule(), before, value).step.after == after


@pytest.mark.parametrize(("value", "before", "after"), [(9, 10, 1), (0, 10, 0), (45, 50, 5), (50, 50, 50)])
def test_a_ratio_that_goes_down_in_proportion(value: float, before: int, after: int) -> None:
    assert apply(RatioRule(proportional_down=True), before, value).step.after == after


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


@pytest.mark.parametrize(("value", "after"), [(50, 2), (51, 3), (1, 2), (0, 1)])
def test_two_depths(value: float, after: int) -> None:
    """DistributedFunSearch: more than 50 messages, one more; an empty queue, one fewer."""
    assert apply(ThresholdRule(50.0), 2, value).step.after == after


def test_a_rule_may_go_one_way_only() -> None:
    up_only = apply(ThresholdRule(50.0), 2, 0, direction=Direction.UP)
    assert (up_only.vote, up_only.step.code) == (Vote.NONE, Code.WRONG_WAY)
    down_only = apply(ThresholdRule(50.0), 2, 99, direction=Direction.DOWN)
    assert (down_only.vote, down_only.step.code) == (Vote.NONE, Code.WRONG_WAY)


def test_a_rule_may_skip_a_step_beyond_its_bound_and_says_so() -> None:
    outcome = apply(ThresholdRule(50.0, step=3), 4, 99, max_replicas=5, bound_mode=BoundMode.SKIP)
    assert (outcome.vote, outcome.step.after, outcome.step.code) == (Vote.NONE, 4, Code.SKIPPED)
    assert "max_replicas 5" in outcome.step.text


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
