"""How outcomes become one, and how fast the count may follow."""

import pytest

from gpuscale.autoscaler.domain import engine
from gpuscale.autoscaler.domain.decisions import Code, Stage
from gpuscale.autoscaler.domain.engine import Memory, Question, paced
from gpuscale.autoscaler.domain.rules.rule import BoundMode, Rule
from gpuscale.autoscaler.domain.rules.targets import TargetRule
from gpuscale.autoscaler.domain.rules.timed import Period, ScheduleRule
from gpuscale.autoscaler.domain.spec import UNPACED, Combine, EndpointSpec, Pace, RateLimit, ScalingMode
from gpuscale.autoscaler.domain.whatif import answer
from tests.support.autoscaler_values import NOW, down, evaluate, inputs, observed, seen, signal, spec, up


@pytest.mark.parametrize(
    ("how", "wanted"),
    [(Combine.SAFEST, 8), (Combine.FIRST_MATCH, 3), (Combine.PRIORITY, 3), (Combine.SUM_STEPS, 6)],
)
def test_rules_that_disagree(how: Combine, wanted: int) -> None:
    rules = (down("a", "< 5", -2), up("b", step=3, signal="other"))
    evaluation = evaluate(spec(*rules, combine=how), 5, observed(seen(1), seen(50, "other")), {}, NOW)
    assert evaluation.wanted == wanted


def test_by_priority_the_first_that_says_anything_decides() -> None:
    """A hold is something; under FIRST_MATCH, as in Backend.AI, a rule that cannot be read is passed over."""
    rules = (up("a", signal="gone", priority=1), down("b", priority=2))
    shown = observed(seen(0), seen(None, "gone"))
    assert evaluate(spec(*rules, combine=Combine.PRIORITY), 5, shown, {}, NOW).wanted == 5
    assert evaluate(spec(*rules, combine=Combine.FIRST_MATCH), 5, shown, {}, NOW).wanted == 4


def test_steps_that_add_up_to_nothing_start_no_cooldown() -> None:
    rules = (up("a", step=2), down("b", "> 1", -2))
    evaluation = evaluate(spec(*rules, combine=Combine.SUM_STEPS), 5, observed(seen(50)), {}, NOW)
    assert (evaluation.wanted, evaluation.effective) == (5, frozenset())


def test_a_schedule_keeps_what_others_would_take_away() -> None:
    always = Rule("keep", "", ScheduleRule((Period(frozenset(), 0, 1440, 4),)))
    wanted = spec(down(step=-5), always, signals=[signal()])
    evaluation = evaluate(wanted, 6, observed(seen(1)), {}, NOW)
    assert (evaluation.wanted, evaluation.limited_by) == (4, Code.FLOOR)


def test_up_follows_the_least_and_down_the_most_of_the_window() -> None:
    memory = Memory(0.0, asked=((NOW - 90, 9), (NOW - 50, 4), (NOW - 10, 6)))
    window = Pace(stabilization=60.0)
    assert paced(window, window, 5, 8, memory, NOW).count == 5, "50 s ago 4 were enough"
    assert paced(window, window, 5, 3, memory, NOW).count == 5, "10 s ago 6 were asked for"
    assert paced(window, window, 7, 3, memory, NOW).count == 6
    assert paced(UNPACED, UNPACED, 5, 8, memory, NOW).count == 8


def test_after_a_restart_nothing_is_taken_away_before_the_window_is_full() -> None:
    pace = Pace(stabilization=60.0)
    held = paced(UNPACED, pace, 5, 1, Memory(NOW - 59.0), NOW)
    assert (held.count, held.limited_by) == (5, Code.STABILIZED_DOWN)
    assert paced(UNPACED, pace, 5, 1, Memory(NOW - 60.0), NOW).count == 1


@pytest.mark.parametrize(
    ("limits", "strictest", "asked", "count"),
    [
        ((RateLimit(15.0, replicas=4), RateLimit(15.0, percent=100.0)), False, 50, 20),
        ((RateLimit(15.0, replicas=4), RateLimit(15.0, percent=100.0)), True, 50, 14),
        ((RateLimit(15.0, percent=10.0),), False, 50, 11),
        ((RateLimit(15.0, percent=50.0),), False, 1, 5),
        ((RateLimit(15.0, replicas=3),), False, 9, 9),
        ((RateLimit(15.0, replicas=3),), False, 1, 7),
    ],
)
def test_rate_limits_are_the_hpas(
    limits: tuple[RateLimit, ...], strictest: bool, asked: int, count: int
) -> None:
    pace = Pace(limits=limits, strictest=strictest)
    assert paced(pace, pace, 10, asked, Memory(0.0), NOW).count == count


def test_a_limit_counts_what_changed_within_its_period() -> None:
    pace = Pace(limits=(RateLimit(15.0, replicas=4),))
    recent = Memory(0.0, changes=((NOW - 10, 3),))
    assert paced(pace, pace, 8, 50, recent, NOW).count == 9, "it began at 5 and may reach 9"
    assert paced(pace, pace, 8, 50, Memory(0.0, changes=((NOW - 15, 3),)), NOW).count == 12


def test_a_direction_may_be_off_or_rest() -> None:
    off = paced(UNPACED, Pace(disabled=True), 5, 1, Memory(0.0), NOW)
    assert (off.count, off.limited_by) == (5, Code.DIRECTION_DISABLED)
    rest = Pace(cooldown=300.0)
    changed = Memory(0.0, changes=((NOW - 299.0, -1),))
    assert paced(UNPACED, rest, 5, 1, changed, NOW).limited_by is Code.ENDPOINT_COOLDOWN
    assert paced(UNPACED, rest, 5, 1, Memory(0.0, changes=((NOW - 300.0, -1),)), NOW).count == 1


def run(wanted: EndpointSpec, before: int, value: float, memory: Memory) -> engine.Result:
    return engine.evaluate(wanted, inputs(before, seen(value)), memory)


def test_after_a_restart_an_endpoint_rests_before_it_takes_any_away() -> None:
    """When it last took some away nobody knows; and it wakes up at once."""
    pace = Pace(0.0, cooldown=100.0)
    wanted = spec(up("up", cooldown=0.0), down("down", cooldown=0.0), up=pace, down=pace)
    for since, value, after in ((0.0, 0.0, 2), (99.9, 0.0, 2), (100.0, 0.0, 1), (0.0, 20.0, 3)):
        result = engine.evaluate(wanted, inputs(2, seen(value)), Memory(NOW - since))
        assert result.evaluation.wanted == after
        held = result.evaluation.limited_by is Code.ENDPOINT_COOLDOWN
        assert held is (after == 2)
    found = answer(Question(wanted, inputs(2, seen(0.0)), Memory(NOW - 90.0)))
    assert found.next_change is not None
    assert (found.next_change.wait, found.next_change.wanted) == (pytest.approx(10.0), 1)


def test_a_proportional_rule_is_stabilized_down_unless_the_spec_says_otherwise() -> None:
    target = Rule("t", "queue", TargetRule(10.0))
    busy = Memory(0.0, asked=((NOW - 30.0, 9),))
    assert run(spec(target), 9, 20.0, busy).evaluation.wanted == 9
    assert run(spec(target, down=Pace(stabilization=0.0)), 9, 20.0, busy).evaluation.wanted == 2
    assert run(spec(down(step=-3)), 9, 1.0, busy).evaluation.wanted == 6, "steps have their cooldown"


def test_what_was_asked_and_changed_is_remembered_for_as_long_as_it_is_needed() -> None:
    target = Rule("t", "queue", TargetRule(10.0))
    old = Memory(0.0, asked=((NOW - 70.0, 3), (NOW - 50.0, 4)), changes=((NOW - 61.0, 1),))
    memory = run(spec(target), 4, 90.0, old).memory
    assert memory.asked == ((NOW - 50.0, 4), (NOW, 9))
    assert memory.changes == ((NOW, 5),)


def test_a_shadow_says_what_it_would_do_and_leaves_the_count() -> None:
    evaluation = evaluate(spec(up(), mode=ScalingMode.SHADOW), 3, observed(seen(50)), {}, NOW)
    assert (evaluation.wanted, evaluation.limited_by, evaluation.effective) == (3, Code.SHADOWED, frozenset())
    assert "4 would be wanted" in evaluation.steps[-1].text
    assert evaluate(spec(low=2, mode=ScalingMode.SHADOW), 0, {}, {}, NOW).wanted == 2, (
        "bounds are kept even so"
    )


def test_bounds_may_skip_and_say_so() -> None:
    """Backend.AI: a step that would pass a bound is not taken; a count that is out of bounds is repaired all the same."""
    skip = spec(up(step=3), high=5, bound_mode=BoundMode.SKIP)
    evaluation = evaluate(skip, 4, observed(seen(50)), {}, NOW)
    assert (evaluation.wanted, evaluation.limited_by) == (4, Code.SKIPPED_AT_MAX)
    assert evaluate(spec(low=3, bound_mode=BoundMode.SKIP), 1, {}, {}, NOW).wanted == 3


def test_from_zero_nothing_moves_before_a_signal_is_above_its_activation() -> None:
    shy = signal(activation_threshold=5.0)
    wanted = spec(Rule("t", "queue", TargetRule(1.0)), signals=[shy])
    asleep = evaluate(wanted, 0, observed(seen(5.0)), {}, NOW)
    assert (asleep.wanted, asleep.limited_by) == (0, Code.INACTIVE)
    assert next(step.stage for step in asleep.steps) is Stage.ACTIVATE
    assert evaluate(wanted, 0, observed(seen(6.0)), {}, NOW).wanted == 6
    assert evaluate(wanted, 1, observed(seen(5.0)), {}, NOW).wanted == 5
