"""Rules at the ends of what numbers, clocks and names can be."""

import math
from datetime import datetime

import pytest

from gpuscale.autoscaler.domain import signals
from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.engine import Memory, evaluate
from gpuscale.autoscaler.domain.inputs import LARGEST, Burst, InputSeries, ObservationStatus, series_of
from gpuscale.autoscaler.domain.rules import targets
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import (
    LARGEST_COUNT,
    BandRule,
    Rule,
    ThresholdRule,
    Vote,
    apply_rule,
)
from gpuscale.autoscaler.domain.spec import Combine, Pace, PushedSignal, RateLimit, Signal
from gpuscale.autoscaler.domain.validate import violations
from gpuscale.autoscaler.domain.whatif import Stated, StatedSignal, hypothetical, question
from tests.support.autoscaler_values import AT, NOW, inputs, seen, signal, spec

LOADED = Signal("load", PushedSignal("load"))


def test_steps_that_are_added_up_have_room_in_a_decision() -> None:
    rules = [Rule(name, "queue", targets.TargetRule(1e-9)) for name in ("a", "b", "c")]
    found = evaluate(spec(*rules, combine=Combine.SUM_STEPS), inputs(1, seen(1e9)))
    assert max(step.after for step in found.evaluation.steps) == LARGEST_COUNT


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1e19, "1e+19 is not a 64-bit number"),
        (-1e19, "-1e+19 is not a 64-bit number"),
        (math.inf, "inf is not a number"),
        (math.nan, "nan is not a number"),
    ],
)
def test_what_64_bits_do_not_hold_is_invalid_and_remembered_nowhere(value: float, said: str) -> None:
    for values in ((value,), (1.0, value), (value, value)):
        found = signals.observe(LOADED, signals.Sample(values, NOW), NOW)
        assert (found.status, found.detail) == (ObservationStatus.INVALID, said)
        past = signals.EndpointPast().with_samples(
            spec(signals=[LOADED]), {"load": signals.Sample(values, NOW)}
        )
        assert past.series["load"] == InputSeries()
    assert signals.observe(LOADED, signals.Sample((LARGEST,), NOW), NOW).status is ObservationStatus.OK


def test_more_messages_than_64_bits_count_cannot_be_told() -> None:
    half = signals.QueueReading(signals.QueueState.OK, signals.LARGEST_COUNT // 2 + 1, 0, 1, NOW)
    found = signals.combined([half, half])
    assert (found.ready, found.unacked, found.total) == (None, 0, None)


def test_no_rule_keeps_what_is_not_there() -> None:
    """A step below none ends at none: the rule's own doing, not a floor that some schedule keeps."""
    rule = Rule("idle", "queue", ThresholdRule(5.0, step=3), cooldown=0.0)
    for before in (0, 1, 2):
        found = evaluate(spec(rule), inputs(before, seen(0.0)))
        assert found.evaluation.wanted == 0
        assert found.evaluation.limited_by is None


def test_spares_stay_where_a_rule_steps_below_none() -> None:
    rule = Rule("idle", "queue", BandRule(low=1.0, step_down=3), cooldown=0.0)
    assert evaluate(spec(rule, warm_spares=2), inputs(3, seen(0.0))).evaluation.wanted == 2


@pytest.mark.parametrize("percent", [1.0, 100.0])
def test_a_limit_in_percent_lets_the_first_replica_through(percent: float) -> None:
    up = Pace(0.0, (RateLimit(60.0, percent=percent),))
    rule = Rule("r", "queue", targets.TargetRule(1.0))
    assert evaluate(spec(rule, up=up), inputs(0, seen(50.0)), Memory(0.0)).evaluation.wanted == 1


def test_a_burst_asks_for_no_more_than_the_rate_allows_and_no_less_than_the_long_window() -> None:
    """Knative: the panicking count is bounded by max_scale_up_rate, and stable wins where it is larger."""
    rule = Rule("r", "queue", targets.PanicRule(10.0, 1.0, max_up_rate=3.0))
    short = series_of([(NOW - 2, 1000.0), (NOW, 1000.0)])
    first = apply_rule(rule, inputs(2, seen(1000.0), series={"queue": short}))
    assert (first.step.after, first.burst) == (6, Burst(NOW, 6))
    fallen = series_of([*((NOW - 59 + n, 500.0) for n in range(50)), (NOW - 3, 10.0), (NOW, 10.0)])
    known = {"r": Burst(NOW - 5, 20)}
    during = apply_rule(rule, inputs(20, seen(10.0), series={"queue": fallen}, bursts=known))
    assert during.step.after == 49


def test_a_burst_is_over_when_exactly_a_stable_window_has_passed() -> None:
    rule = Rule("r", "queue", targets.PanicRule(10.0, 1.0))
    calm = series_of((NOW - 60 + n, 10.0) for n in range(61))
    for since, lasts in ((59.9, True), (60.0, False)):
        known = {"r": Burst(NOW - since, 8)}
        found = apply_rule(rule, inputs(8, seen(10.0), series={"queue": calm}, bursts=known))
        assert (found.step.after == 8) is lasts


def test_a_signal_that_is_called_as_what_stands_for_no_signal_hides_it() -> None:
    """Else a formula over a signal `ready` would go by the ready replicas while the broker is away."""
    rule = Rule("f", "", FormulaRule("ready / 5"))
    assert apply_rule(rule, inputs(1, seen(50.0, "ready"))).step.after == 10
    lost = apply_rule(rule, inputs(20, seen(None, "ready")))
    assert (lost.vote, lost.step.code) == (Vote.HOLD, Code.SIGNAL_MISSING)


def test_a_formula_must_say_which_of_several_signals_it_means() -> None:
    both = [signal("jobs-a"), signal("jobs.a"), signal("other")]
    [found] = violations(spec(Rule("f", "", FormulaRule("jobs_a + other")), signals=both))
    assert found.field == "endpoint.spec.rules[0].formula.expression"
    assert "jobs_a, which may be one of several signals" in found.description
    assert not violations(spec(Rule("f", "", FormulaRule("other")), signals=both))


@pytest.mark.parametrize(
    ("moment", "holds"),
    [
        ("2031-03-30T00:29:59Z", False),  # 01:29:59 in Berlin
        ("2031-03-30T00:30:00Z", True),
        ("2031-03-30T00:59:59Z", True),  # the last second before clocks jump from 02:00 to 03:00
        ("2031-03-30T01:00:00Z", True),
        ("2031-03-30T01:29:59Z", True),
        ("2031-03-30T01:30:00Z", False),  # 03:30
        ("2031-10-25T23:30:00Z", True),  # 01:30, on the day on which the hour from 02:00 comes twice
        ("2031-10-26T00:30:00Z", True),
        ("2031-10-26T01:30:00Z", True),
        ("2031-10-26T02:29:59Z", True),
        ("2031-10-26T02:30:00Z", False),
    ],
)
def test_a_schedule_goes_by_the_clocks_on_the_wall(moment: str, holds: bool) -> None:
    kind = targets.ScheduleRule((targets.Period(frozenset({7}), 90, 210, 4),), "Europe/Berlin")
    wall = datetime.fromisoformat(moment)
    assert apply_rule(Rule("s", "", kind), inputs(1, wall=wall)).floor == (4 if holds else 0)


def test_a_signal_that_is_read_often_reaches_back_a_whole_season(monkeypatch: pytest.MonkeyPatch) -> None:
    most, season = 100, 300.0
    monkeypatch.setattr("gpuscale.autoscaler.domain.inputs.LONGEST", most)
    series = InputSeries()
    for second in range(1000):
        series = series.added(float(second), float(second), season)
    assert len(series.times) <= most
    assert series.covers(999 - season)
    gaps = [later - earlier for earlier, later in zip(series.times, series.times[1:], strict=False)]
    assert max(gaps) <= 2 * (2 * season / most)
    assert max(gaps[-most // 3 :]) == 1.0
    kind = targets.ForecastRule(1.0, targets.ForecastModel.SEASONAL_NAIVE, horizon=1.0, season=season)
    found = apply_rule(Rule("f", "queue", kind), inputs(1, seen(5.0), now=999.0, series={"queue": series}))
    assert abs(found.step.after - 700) <= 12


def test_points_that_are_stated_of_one_moment_are_one() -> None:
    points = ((30.0, 1.0), (20.0, 2.0), (20.0, 3.0), (10.0, math.inf), (5.0, 4.0))
    stated = Stated({"queue": StatedSignal(5.0, 0.0, points=points)})
    rule = Rule("f", "queue", targets.ForecastRule(1.0, horizon=10.0))
    asked = question(hypothetical(spec(rule), AT), spec(rule), stated)
    series = asked.inputs.series["queue"]
    assert series == series_of([(NOW - 30, 1.0), (NOW - 20, 3.0), (NOW - 5, 4.0), (NOW, 5.0)])
    assert apply_rule(rule, asked.inputs).step.code is Code.FIRED
