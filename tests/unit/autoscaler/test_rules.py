"""Rules that step, go by the clock or are proportional, at and around every boundary, and while sources are silent."""

import ast
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import (
    Aggregation,
    Burst,
    InputSeries,
    Observation,
    ObservationStatus,
    series_of,
)
from gpuscale.autoscaler.domain.rules.formula import FormulaRule, problem
from gpuscale.autoscaler.domain.rules.rule import (
    BandRule,
    Comparator,
    Direction,
    Kind,
    RatioRule,
    Rule,
    RuleOutcome,
    StepRule,
    ThresholdRule,
    Vote,
    apply_rule,
)
from gpuscale.autoscaler.domain.rules.targets import (
    DrainRule,
    ForecastModel,
    ForecastRule,
    PanicRule,
    Period,
    ScheduleRule,
    TargetRule,
    TargetType,
    holt,
)
from gpuscale.autoscaler.domain.signals import Sample, observe
from gpuscale.autoscaler.domain.spec import OnMissing, ReplicaSignal, Signal
from tests.support.autoscaler_values import NOW, down, inputs, seen, up


def steady(value: float) -> InputSeries:
    """A signal that showed one value for two minutes, up to NOW."""
    return series_of((NOW - ago, value) for ago in range(120, -1, -2))


def apply(kind: Kind, before: int, value: float, **fields: Any) -> RuleOutcome:
    """The outcome where `queue` shows `value`, and showed it all along unless `series` says otherwise."""
    fields.setdefault("series", {"queue": steady(value)})
    return apply_rule(Rule("r", "queue", kind), inputs(before, seen(value), **fields))


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        (100, 5, 5),  # 20 each, at the target
        (110, 5, 5),  # a tenth above: within the tolerance, which is inclusive
        (111, 5, 6),
        (90, 5, 5),
        (89, 5, 5),  # outside of the tolerance, and rounded up to what there is
        (79, 5, 4),
        (0, 5, 0),
        (1, 0, 1),
        (41, 0, 3),
    ],
)
def test_a_target_asks_for_the_work_divided_by_it(value: float, before: int, after: int) -> None:
    """KEDA and the HPA's AverageValue: ceil(value / target), within a tolerance of 0.1."""
    outcome = apply(TargetRule(20.0), before, value)
    assert outcome.step.after == after
    assert outcome.vote is (Vote.UP if after > before else Vote.DOWN if after < before else Vote.NONE)


@pytest.mark.parametrize(("value", "after"), [(130, 5), (131, 7), (96, 5), (94, 5), (79, 4)])
def test_a_target_may_tolerate_more_above_than_below(value: float, after: int) -> None:
    assert apply(TargetRule(20.0, tolerance_up=0.3, tolerance_down=0.05), 5, value).step.after == after


@pytest.mark.parametrize(("value", "fired"), [(95, False), (94, True), (130, False), (131, True)])
def test_both_tolerances_of_a_level_are_its_own(value: float, fired: bool) -> None:
    rule = TargetRule(100.0, TargetType.VALUE, tolerance_up=0.3, tolerance_down=0.05)
    assert (apply(rule, 50, value).vote is not Vote.NONE) is fired


def test_a_quotient_that_is_whole_but_for_floating_point_is_whole() -> None:
    assert apply(TargetRule(0.1), 2, 0.3).step.after == 3


@pytest.mark.parametrize(
    ("value", "ready", "before", "after"),
    [
        (90.0, 4, 4, 6),  # ceil(4 x 90 / 60)
        (65.0, 4, 4, 4),
        (30.0, 4, 4, 2),
        (90.0, 4, 6, 6),  # two are on their way already
        (90.0, 2, 6, 6),  # what is ready asks for three, and six are on their way: nothing is taken away
        (90.0, 0, 0, 2),
    ],
)
def test_a_level_is_taken_from_the_replicas_that_work(
    value: float, ready: int, before: int, after: int
) -> None:
    rule = TargetRule(60.0, TargetType.VALUE)
    assert apply(rule, before, value, ready=ready).step.after == after


def test_a_burst_is_met_at_once_and_never_shrinks_while_it_lasts() -> None:
    """Knative: twice what is ready in the short window starts a panic; in it the count only grows."""
    rule = PanicRule(capacity=10.0, utilization=1.0, panic_window=6.0)
    calm = [(NOW - 60 + 2 * n, 20.0) for n in range(27)]
    burst = series_of([*calm, (NOW - 4, 100.0), (NOW - 2, 100.0), (NOW, 100.0)])
    first = apply(rule, 2, 100.0, ready=2, series={"queue": burst})
    assert (first.vote, first.step.after) == (Vote.UP, 10)
    assert first.burst == Burst(NOW, 10)

    later = series_of([*calm, (NOW - 4, 5.0), (NOW - 2, 5.0), (NOW, 5.0)])
    during = apply(rule, 10, 5.0, ready=10, series={"queue": later}, bursts={"r": Burst(NOW - 30.0, 10)})
    assert during.step.after == 10
    assert during.burst is not None

    over = apply(rule, 10, 5.0, ready=10, series={"queue": steady(5.0)}, bursts={"r": Burst(NOW - 60.0, 10)})
    assert over.step.after == 5, "a stable window after the burst it shrinks, at most by half"
    assert over.burst is None


def test_a_window_that_is_not_full_allows_no_reduction() -> None:
    young = series_of([(NOW - 10, 1.0), (NOW, 1.0)])
    for kind in (PanicRule(10.0), DrainRule(30.0, service_time=1.0)):
        outcome = apply(kind, 8, 1.0, series={"queue": young})
        assert (outcome.vote, outcome.step.code) == (Vote.HOLD, Code.WINDOW_NOT_FULL), kind


PATIENT = DrainRule(deadline=1e9, service_time=4.0, utilization=1.0, busy_signal="busy")


def drained(
    kind: DrainRule, *, before: int = 3, fields: Mapping[str, Any] | None = None, **shown: float | InputSeries
) -> RuleOutcome:
    """The outcome where signals show these values, and showed them all along, or the newest of these series."""
    series = {name: one if isinstance(one, InputSeries) else steady(one) for name, one in shown.items()}
    seen_now = [seen(one.values[-1], name) for name, one in series.items()]
    return apply_rule(Rule("r", "queue", kind), inputs(before, *seen_now, series=series, **fields or {}))


def growing(first: float, step: float) -> InputSeries:
    """One more `step` every two seconds of a minute, up to NOW."""
    return series_of((NOW - 60 + 2 * n, first + step * n) for n in range(31))


@pytest.mark.parametrize(("waiting", "after"), [(0.0, 5), (15.0, 5), (16.0, 6), (60.0, 8)])
def test_a_drain_works_off_what_waits_with_the_room_that_it_has_and_then_with_more(
    waiting: float, after: int
) -> None:
    """2/s of 4 s are 4 replicas of 2 slots, and 5 at 0.8; 15 that wait need one for 30 s."""
    kind = replace(PATIENT, deadline=30.0, slots=2.0, utilization=0.8, rate_signal="rate")
    step = drained(kind, queue=waiting, busy=8.0, rate=2.0).step
    assert step.after == after
    assert f"need 5.00 with 1.00 to spare, and {waiting:g} waiting within 30 s" in step.text


@pytest.mark.parametrize(
    ("busy", "waiting", "after", "said"),
    [
        (4.0, 0.0, 5, "need 5.00 with 1.00"),
        (36.0, 0.0, 42, "need 42.00 with 6.00"),
        (36.0, 45.0, 42, "need 42.00 with 6.00"),
        (36.0, 60.0, 44, "need 42.00 with 6.00"),
    ],
)
def test_a_drain_leaves_no_more_room_than_chance_takes(
    busy: float, waiting: float, after: int, said: str
) -> None:
    """A fifth of the room to spare, or the square root of what is in hand; 45 that wait need six for 30 s."""
    kind = DrainRule(30.0, service_time=4.0, tolerance=0.0, headroom=1.0, busy_signal="busy")
    step = drained(kind, queue=waiting, busy=busy).step
    assert (step.after, said in step.text) == (after, True), step.text


def test_a_drain_reckons_arrivals_from_what_is_in_hand_and_what_grows() -> None:
    """Eight in hand of 4 s each leave at 2/s; the queue grows by 1/s: 3/s arrive."""
    outcome = drained(PATIENT, queue=growing(10.0, 2.0), busy=8.0)
    assert outcome.step.after == 3 * 4 + 1  # and a breath for what waits


@pytest.mark.parametrize(
    ("startup", "after", "said"),
    [
        (None, 30 + 120, "need 150.00 with"),
        (90.0, 30 + 120, "need 150.00 with"),
        (30.0, 30 + 60, "need 90.00 in 60 s with"),
        (0.0, 30 + 30, "need 60.00 in 30 s with"),
    ],
)
def test_a_drain_needs_room_for_what_will_be_in_hand_once_a_replica_is_ready(
    startup: float | None, after: int, said: str
) -> None:
    """Thirty in hand, one more a second, of 120 s each: 150 in the end, and fewer when a start is done."""
    kind = replace(PATIENT, service_time=120.0, tolerance=0.0)
    step = drained(kind, queue=0.0, busy=growing(0.0, 2.0), fields={"startup": startup}).step
    assert (step.after, said in step.text) == (after, True), step.text


def test_a_drain_counts_the_growth_of_what_is_in_hand_too() -> None:
    """Six in hand on average of 4 s each leave at 1.5/s; there is one more in hand every 10 s: 1.6/s arrive."""
    kind = replace(PATIENT, utilization=0.1, tolerance=0.0)
    outcome = drained(kind, queue=0.0, busy=growing(3.0, 0.2))
    assert outcome.step.after == 64  # 1.6/s of 4 s, at a tenth of what a replica can


def test_a_drain_that_reads_everything_takes_what_replicas_have_room_for_as_in_hand() -> None:
    outcome = apply(DrainRule(deadline=10.0, service_time=2.0, utilization=1.0), 4, 24.0, ready=4)
    # 4 in hand of 2 s leave at 2/s, 20 wait: 2 x 2 + 20 x 2 / 10
    assert outcome.step.after == 8


def test_a_drain_learns_how_long_work_takes() -> None:
    """Little's law: 10 in hand and 2/s that leave are 5 s each."""
    kind = replace(PATIENT, service_time=None, rate_signal="rate")
    assert drained(kind, queue=0.0, busy=10.0, rate=2.0).step.after == 10


HOLDING = replace(PATIENT, deadline=30.0, catch_up_held=60.0)


def test_what_a_drain_asks_for_beyond_what_waits_is_told_apart() -> None:
    outcome = drained(HOLDING, queue=60.0, busy=8.0)
    assert (outcome.step.after, outcome.lasting) == (8 + 60 * 4 // 30, 8)


@pytest.mark.parametrize(("ago", "after"), [(59.0, 9), (60.0, 2)])
def test_a_drain_gives_nothing_up_right_after_a_change(ago: float, after: int) -> None:
    changed = {"last_changes": {"r": NOW - ago}}
    assert drained(HOLDING, before=9, fields=changed, queue=0.0, busy=2.0).step.after == after


def test_a_drain_without_its_further_signals_holds() -> None:
    outcome = drained(DrainRule(deadline=30.0, service_time=1.0, busy_signal="busy"), queue=0.0)
    assert (outcome.vote, outcome.step.code) == (Vote.HOLD, Code.SIGNAL_MISSING)


@pytest.mark.parametrize(
    ("expression", "after"),
    [
        ("queue / 20", 5),
        ("ceil(queue / 30)", 4),
        ("max(queue / 50, 3)", 3),
        ("replicas + 1 if queue > 50 else replicas", 3),
        ("ready * 2", 4),
        ("-1", -1),
    ],
)
def test_a_formula_says_how_many(expression: str, after: int) -> None:
    assert apply(FormulaRule(expression), 2, 100.0).step.after == after


@pytest.mark.parametrize(
    "expression", ["queue / 0", "10 ** 90 ** 2", "queue ** 1000", "queue * 1e308 * 10", "0 ** -1"]
)
def test_a_formula_without_a_finite_result_holds(expression: str) -> None:
    outcome = apply(FormulaRule(expression), 2, 100.0)
    assert (outcome.vote, outcome.step.code) == (Vote.HOLD, Code.SIGNAL_INVALID)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "().__class__", "'a' * 3", "[1 for x in queue]", "open('x')",
        "lambda: 1", "max(queue, key=abs)", "queue.real", "True", "1 +",
        "(" * 60 + "1" + ")" * 60 + "+" * 1, "+".join(["1"] * 30),
    ],
)  # fmt: skip
def test_a_formula_may_hold_numbers_signals_and_little_else(expression: str) -> None:
    assert problem(expression)


def test_the_allowed_formulas_are_allowed() -> None:
    assert not problem(
        "min(max(ceil(queue / 20), 1), floor(9.5)) + abs(-1) if queue >= 3 and ready < 4 else 0"
    )


def test_a_formula_is_read_although_python_lost_count_of_its_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 3.11 does where the garbage collector runs a finalizer meanwhile that parses, too."""
    parse, errors = ast.parse, iter([SystemError("AST constructor recursion depth mismatch")])

    def disturbed(text: str, mode: str) -> ast.AST:
        for error in errors:
            raise error
        return parse(text, mode=mode)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert apply(FormulaRule("queue / 8 + 0"), 1, 16.0).step.after == 2
    assert list(errors) == []


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
    history = InputSeries((NOW - 100.0, NOW - 50.0, NOW), (value,) * 3)
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
    assert found.step.after >= min(outcome(kind, value, told + silent, 0).step.after, told + silent)


def test_a_signal_that_leaves_out_what_is_missing_leaves_out_silent_replicas_too() -> None:
    """Backend.AI averages over the kernels that report."""
    sample = Sample((10.0,), NOW, silent_count=3)
    for on_missing, minded in (
        (OnMissing.HOLD, 3), (OnMissing.LAST, 3), (OnMissing.IGNORE, 0), (OnMissing.ZERO, 0),
    ):  # fmt: skip
        seen = observe(Signal("s", ReplicaSignal("m"), on_missing=on_missing), sample, NOW)
        assert (seen.silent_count, seen.detail) == (minded, "3 of 4 said nothing")


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


def stepped(kind: Kind, before: int, value: float, **fields: Any) -> RuleOutcome:
    return apply_rule(Rule("r", "queue", kind, **fields), inputs(before, seen(value)))


@pytest.mark.parametrize(("value", "after"), [(10.0, 3), (10.1, 5), (2.0, 3), (1.9, 2), (5.0, 3)])
def test_a_band_steps_outside_of_it(value: float, after: int) -> None:
    assert stepped(BandRule(2.0, 10.0, step_up=2), 3, value).step.after == after


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
    assert stepped(rule, before, value).step.after == after


def test_a_guarded_ratio_takes_none_away_that_would_be_missed() -> None:
    """With 6 on 4 the rule takes one away, unless that would be more than 1.9 for each: it would come back at once."""
    assert stepped(RatioRule(1.9, 1.6, guarded=True), 4, 6).step.after == 4
    assert stepped(RatioRule(1.9, 1.6), 4, 6).step.after == 3


def test_a_rule_may_go_one_way_only() -> None:
    up_only = stepped(ThresholdRule(50.0), 2, 0, direction=Direction.UP)
    assert (up_only.vote, up_only.step.code) == (Vote.NONE, Code.WRONG_WAY)
    down_only = stepped(ThresholdRule(50.0), 2, 99, direction=Direction.DOWN)
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
