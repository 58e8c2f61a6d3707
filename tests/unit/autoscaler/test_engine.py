"""Rules together, a person's order, pace, spares, GPUs and the endpoint's bounds."""

from dataclasses import replace
from typing import Any

import pytest

from gpuscale.autoscaler.domain import engine
from gpuscale.autoscaler.domain.decisions import Code, Evaluation, Stage
from gpuscale.autoscaler.domain.engine import REGRET_SECONDS, Memory, Question, longest, order, paced, regrets
from gpuscale.autoscaler.domain.inputs import Observation, ObservationStatus
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.rules.targets import DrainRule, Period, ScheduleRule, TargetRule
from gpuscale.autoscaler.domain.spec import (
    LONGEST_LEARNT,
    UNPACED,
    Combine,
    EndpointSpec,
    GpuGate,
    HostSignal,
    Pace,
    PrometheusSignal,
    PushedSignal,
    RateLimit,
    ReplicaSignal,
    ReplicaTemplate,
    ScalingMode,
    Signal,
    Source,
    WaitingSignal,
)
from gpuscale.autoscaler.domain.whatif import answer
from tests.support.autoscaler_values import NOW, down, evaluate, inputs, observed, seen, signal, spec, up


def run(wanted: EndpointSpec, before: int, *observations: Observation, **more: Any) -> Evaluation:
    return evaluate(wanted, before, observed(*observations), more.pop("last", {}), NOW, **more)


def codes(evaluation: Evaluation, stage: Stage) -> list[Code]:
    return [step.code for step in evaluation.steps if step.stage is stage]


def test_any_rule_that_wants_more_wins_with_the_largest_count() -> None:
    wanted = spec(up("a", step=1), up("b", step=3), down("c", "< 5", -2, signal="other"))
    evaluation = run(wanted, 4, seen(50), seen(0, "other"))
    assert evaluation.wanted == 7
    assert codes(evaluation, Stage.COMBINE) == [Code.UP]
    assert evaluation.effective == {"b"}, "only the change that took effect starts a cooldown"


def test_of_rules_that_want_less_the_least_reduction_wins() -> None:
    evaluation = run(spec(down("a", step=-3), down("b", step=-1)), 6, seen(0))
    assert (evaluation.wanted, evaluation.effective) == (5, {"b"})
    assert codes(evaluation, Stage.COMBINE) == [Code.DOWN]


def test_equal_changes_take_effect_together() -> None:
    assert run(spec(up("a"), up("b")), 1, seen(50)).effective == {"a", "b"}


def test_one_unknown_signal_holds_what_another_wants_less() -> None:
    wanted = spec(down("a"), up("b", signal="other"))
    evaluation = run(wanted, 4, seen(0), seen(None, "other"))
    assert (evaluation.wanted, evaluation.limited_by) == (4, Code.SIGNAL_MISSING)
    assert codes(evaluation, Stage.COMBINE) == [Code.HELD]
    assert evaluation.effective == frozenset()


def test_one_unknown_signal_does_not_hold_what_another_wants_more() -> None:
    wanted = spec(up("a"), down("b", signal="other"))
    assert run(wanted, 4, seen(50), seen(None, "other")).wanted == 5


def test_an_up_rule_that_rests_holds_a_down_rule() -> None:
    wanted = spec(up("a"), down("b", signal="other"))
    evaluation = run(wanted, 4, seen(50), seen(0, "other"), last={"a": NOW - 1})
    assert (evaluation.wanted, evaluation.limited_by) == (4, Code.COOLDOWN)


def test_what_kept_the_count_back_is_said_also_where_nothing_holds() -> None:
    evaluation = run(spec(down()), 4, seen(0), last={"down": NOW - 1})
    assert (evaluation.wanted, evaluation.limited_by) == (4, Code.COOLDOWN)


def test_nothing_to_do() -> None:
    evaluation = run(spec(up(), down()), 4, seen(7))
    assert (evaluation.wanted, evaluation.limited_by) == (4, None)
    assert codes(evaluation, Stage.COMBINE) == [Code.NO_CHANGE]
    assert codes(evaluation, Stage.BOUNDS) == [Code.WITHIN_BOUNDS]


@pytest.mark.parametrize(
    ("before", "step", "low", "high", "wanted", "code"),
    [
        (4, 9, 1, 6, 6, Code.CLAMPED_TO_MAX),
        (6, 9, 1, 6, 6, Code.CLAMPED_TO_MAX),
        (6, -9, 2, 6, 2, Code.CLAMPED_TO_MIN),
        (2, -9, 2, 6, 2, Code.CLAMPED_TO_MIN),
        (0, 1, 3, 6, 3, Code.BELOW_MIN),
        (9, -1, 1, 6, 6, Code.ABOVE_MAX),
    ],
)
def test_a_step_across_a_bound_is_clamped_and_says_so(
    before: int, step: int, low: int, high: int, wanted: int, code: Code
) -> None:
    one = up("r", "> 10", step) if step > 0 else down("r", "> 10", step)
    evaluation = run(spec(one, low=low, high=high), before, seen(11))
    assert (evaluation.wanted, evaluation.limited_by) == (wanted, code)
    assert codes(evaluation, Stage.BOUNDS) == [code]


def test_a_step_that_bounds_swallow_starts_no_cooldown() -> None:
    assert run(spec(up(), high=4), 4, seen(50)).effective == frozenset()
    assert run(spec(up(step=3), high=5), 4, seen(50)).effective == {"up"}, "a clamped change is a change"


def test_a_paused_endpoint_changes_nothing_and_says_so() -> None:
    evaluation = run(spec(up(), down(), paused=True), 4, seen(50))
    assert (evaluation.wanted, evaluation.limited_by) == (4, Code.PAUSED)
    assert codes(evaluation, Stage.RULE) == []
    assert [one.value for one in evaluation.observations] == [50]


@pytest.mark.parametrize(
    "source",
    [PushedSignal("tasks"), ReplicaSignal("in_flight"), PrometheusSignal("main", "q"), WaitingSignal()],
)
def test_zero_needs_proof_from_whatever_the_spec_says_counts_work(source: Source) -> None:
    """A metric that is left at one task, is stale, or was never reported keeps the last replica."""
    for counts_work, wanted in ((True, 1), (False, 0)):
        tasks = Signal("tasks", source, counts_work=counts_work)
        empty = spec(down("d", "<= 1", -5, signal="tasks"), signals=[tasks])
        assert run(empty, 3, seen(1, "tasks")).wanted == wanted
        assert run(empty, 3, seen(0, "tasks")).wanted == 0
        beside = spec(down("d", "<= 1", -5), signals=[signal(), tasks])
        for status in (ObservationStatus.STALE, ObservationStatus.MISSING):
            assert run(beside, 3, seen(0), seen(name="tasks", status=status)).wanted == wanted


def test_rules_are_read_by_priority_then_id_whatever_their_order() -> None:
    rules = [up("b", priority=1), up("a", priority=1), up("z", priority=-5), down("c")]
    steps = run(spec(*rules), 3, seen(7)).steps
    assert [step.rule for step in steps if step.rule] == ["z", "c", "a", "b"]
    assert run(spec(*reversed(rules)), 3, seen(7)).steps == steps


def test_a_persons_order() -> None:
    evaluation = order(2, 5, "ada")
    assert (evaluation.before, evaluation.wanted, evaluation.effective) == (2, 5, frozenset())
    assert [(step.stage, step.code, step.text) for step in evaluation.steps] == [
        (Stage.MANUAL, Code.SET, "set to 5 by ada")
    ]


def test_what_counts_no_work_need_not_prove_that_none_is_left() -> None:
    """A temperature beside an empty queue keeps no replica."""
    wanted = spec(down(step=-1), signals=[signal(), Signal("warmth", HostSignal("cpu_percent"))])
    assert run(wanted, 1, seen(0), seen(40.0, "warmth")).wanted == 0
    assert run(wanted, 1, seen(1), seen(40.0, "warmth")).wanted == 1


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


def remembering(wanted: EndpointSpec, before: int, value: float, memory: Memory) -> engine.Result:
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
    assert (found.next_change.wait, found.next_change.wanted) == (pytest.approx(10.0), 1)


def test_a_proportional_rule_is_stabilized_down_unless_the_spec_says_otherwise() -> None:
    target = Rule("t", "queue", TargetRule(10.0))
    busy = Memory(0.0, asked=((NOW - 30.0, 9),))
    assert remembering(spec(target), 9, 20.0, busy).evaluation.wanted == 9
    assert remembering(spec(target, down=Pace(stabilization=0.0)), 9, 20.0, busy).evaluation.wanted == 2
    assert remembering(spec(down(step=-3)), 9, 1.0, busy).evaluation.wanted == 6, "steps have their cooldown"


def test_a_window_keeps_what_is_needed_while_nothing_waits_and_no_more() -> None:
    drain = Rule("d", "queue", DrainRule(30.0, service_time=4.0, utilization=1.0, catch_up_held=60.0))
    went = Question(spec(drain), inputs(4, seen(34.0), ready=4), Memory(0.0))
    found = engine.asked(went)
    assert (found.evaluation.wanted, found.memory.asked) == (8, ((NOW, 4),)), "30 wait: 4 for 30 s"
    upwards = spec(drain, up=Pace(stabilization=60.0))
    assert engine.asked(replace(went, spec=upwards)).memory.asked == ((NOW, 8),)
    other = spec(drain, up("s", "> 20", 5))
    assert engine.asked(replace(went, spec=other)).memory.asked == ((NOW, 9),), "the other rule's 9 last"


def test_what_was_asked_and_changed_is_remembered_for_as_long_as_it_is_needed() -> None:
    target = Rule("t", "queue", TargetRule(10.0))
    old = Memory(0.0, asked=((NOW - 70.0, 3), (NOW - 50.0, 4)), changes=((NOW - 61.0, 1),))
    memory = remembering(spec(target), 4, 90.0, old).memory
    assert memory.asked == ((NOW - 50.0, 4), (NOW, 9))
    assert memory.changes == ((NOW, 5),)


def test_a_shadow_says_what_it_would_do_and_leaves_the_count() -> None:
    evaluation = evaluate(spec(up(), mode=ScalingMode.SHADOW), 3, observed(seen(50)), {}, NOW)
    assert (evaluation.wanted, evaluation.limited_by, evaluation.effective) == (3, Code.SHADOWED, frozenset())
    assert "4 would be wanted" in evaluation.steps[-1].text
    assert evaluate(spec(low=2, mode=ScalingMode.SHADOW), 0, {}, {}, NOW).wanted == 2, (
        "bounds are kept even so"
    )


def test_from_zero_nothing_moves_before_a_signal_is_above_its_activation() -> None:
    wanted = spec(Rule("t", "queue", TargetRule(1.0)), signals=[signal(activation_threshold=5.0)])
    asleep = evaluate(wanted, 0, observed(seen(5.0)), {}, NOW)
    assert (asleep.wanted, asleep.limited_by) == (0, Code.INACTIVE)
    assert next(step.stage for step in asleep.steps) is Stage.ACTIVATE
    assert evaluate(wanted, 0, observed(seen(6.0)), {}, NOW).wanted == 6
    assert evaluate(wanted, 1, observed(seen(5.0)), {}, NOW).wanted == 5


LATER = 10_000.0


def changed(*changes: tuple[float, int]) -> Memory:
    return Memory(0.0, (), tuple((LATER - ago, change) for ago, change in changes))


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ((), 0),
        (((500, -2), (400, 1)), 1),
        (((500, 2), (400, -1)), 0),
        (((1700, -2), (1600, 1), (900, -1), (300, 1)), 2),
        (((1700, -2), (1700 - LONGEST_LEARNT - 1, 1)), 0),
        (((REGRET_SECONDS, -2), (REGRET_SECONDS - 10, 1)), 0),
    ],
)
def test_what_was_given_up_and_needed_soon_after_is_regretted(
    changes: tuple[tuple[float, int], ...], count: int
) -> None:
    assert regrets(changed(*changes), LATER) == count


@pytest.mark.parametrize(
    ("startup", "count", "window"),
    [
        (30.0, 0, 100.0), (60.0, 1, 400.0), (30.0, 5, 300.0), (None, 5, 100.0), (5.0, 5, 100.0),
        (900.0, 9, 600.0),
    ],
)  # fmt: skip
def test_the_window_grows_fourfold_up_to_ten_start_ups_and_ten_minutes(
    startup: float | None, count: int, window: float
) -> None:
    assert Pace(100.0, startups=10.0).window(startup, count) == window
    assert Pace(100.0).window(startup, count) == 100.0


def test_a_count_that_is_regretted_is_given_up_later() -> None:
    down = Pace(100.0, startups=10.0)
    past = Memory(0.0, ((LATER - 150, 5), (LATER - 50, 3)), ((LATER - 700, -2), (LATER - 600, 2)))
    assert paced(UNPACED, down, 5, 3, past, LATER, 30.0).count == 5
    assert paced(UNPACED, down, 5, 3, past, LATER, None).count == 3
    assert longest(UNPACED, down) == REGRET_SECONDS, (
        "changes are remembered for as long as they are regretted"
    )


GPU = ReplicaTemplate("worker", gpu_count=1)


def count_of(policy: EndpointSpec, before: int, value: float | None, **more: int | None) -> int:
    return evaluate(policy, before, observed(seen(value)), {}, NOW, **more).wanted


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [(2, 40.0, 6), (6, 40.0, 6), (6, 0.0, 2), (6, None, 6), (0, None, 2), (1, 40.0, 6)],
)
def test_spares_come_on_top_of_what_a_target_asks_for(before: int, value: float | None, after: int) -> None:
    """Four replicas of work, and two spares: also where nothing is to be done, or known."""
    rule = Rule("target", "queue", TargetRule(10.0), cooldown=0.0)
    assert count_of(spec(rule, high=20, warm_spares=2), before, value) == after


def test_rules_go_by_the_replicas_without_the_spares() -> None:
    """A step from three working replicas leads to four, and the two spares stay."""
    assert count_of(spec(up(), warm_spares=2), 5, 50.0) == 6
    assert count_of(spec(down(), warm_spares=2), 5, 0.0) == 4
    assert count_of(spec(down(), warm_spares=2), 2, 0.0) == 2


def test_spares_stay_within_the_bounds_and_are_said() -> None:
    found = evaluate(spec(up(), high=5, warm_spares=3), 5, observed(seen(50.0)), {}, NOW)
    assert (found.wanted, found.limited_by) == (5, Code.CLAMPED_TO_MAX)
    [step] = [one for one in found.steps if one.stage is Stage.SPARES]
    assert (step.before, step.after) == (3, 6)


def test_a_paused_endpoint_gets_no_spares() -> None:
    assert count_of(spec(up(), warm_spares=3, paused=True), 1, 50.0) == 1


@pytest.mark.parametrize(
    ("gate", "limit", "after", "code"),
    [
        (GpuGate.RESERVE, 3, 6, None), (GpuGate.OFF, 3, 6, None), (GpuGate.ADVISE, 3, 6, Code.GPUS_SHORT),
        (GpuGate.ADVISE, None, 6, Code.GPUS_UNKNOWN), (GpuGate.ADVISE, 6, 6, None),
        (GpuGate.CAP, 3, 3, Code.CAPPED_BY_GPUS), (GpuGate.CAP, 1, 2, Code.CAPPED_BY_GPUS),
        (GpuGate.CAP, None, 2, Code.GPUS_UNKNOWN), (GpuGate.CAP, 6, 6, None),
    ],
)  # fmt: skip
def test_the_gate_holds_back_more_than_there_are_gpus_for(
    gate: GpuGate, limit: int | None, after: int, code: Code | None
) -> None:
    """And never takes away one that is there: two replicas stay two where GPUs are known for one only."""
    policy = spec(up(step=4), gpu_gate=gate, template=GPU)
    found = evaluate(policy, 2, observed(seen(50.0)), {}, NOW, gpu_limit=limit)
    assert found.wanted == after
    assert [one.code for one in found.steps if one.stage is Stage.GPU] == ([code] if code else [])
    assert found.limited_by == (code if after < 6 else None)


def test_the_gate_says_nothing_to_a_reduction_or_to_a_repair() -> None:
    fewer = evaluate(spec(down(), gpu_gate=GpuGate.CAP, template=GPU), 3, observed(seen(0.0)), {}, NOW)
    assert fewer.wanted == 2
    assert evaluate(spec(low=4, gpu_gate=GpuGate.CAP, template=GPU), 1, {}, {}, NOW).wanted == 4


def test_without_the_gate_replicas_are_given_no_gpus() -> None:
    assert spec(gpu_gate=GpuGate.OFF, template=GPU).started_from.gpu_count == 0
    assert spec(template=GPU).started_from.gpu_count == 1
