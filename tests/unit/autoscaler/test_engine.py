"""Rules together, a person's order, and the endpoint's bounds."""

from typing import Any

import pytest

from gpuscale.autoscaler.domain.decisions import Code, Evaluation, Stage
from gpuscale.autoscaler.domain.engine import order
from gpuscale.autoscaler.domain.inputs import Observation, ObservationStatus
from gpuscale.autoscaler.domain.spec import (
    EndpointSpec,
    HostSignal,
    PrometheusSignal,
    PushedSignal,
    ReplicaSignal,
    Signal,
    Source,
    WaitingSignal,
)
from tests.support.autoscaler_values import NOW, down, evaluate, observed, seen, signal, spec, up


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


@pytest.mark.parametrize(
    "status", [ObservationStatus.MISSING, ObservationStatus.STALE, ObservationStatus.INVALID]
)
@pytest.mark.parametrize("before", [0, 1, 7])
def test_a_lost_broker_never_lowers_the_count(status: ObservationStatus, before: int) -> None:
    evaluation = run(spec(up(), down("down", "<= 0", -5)), before, seen(0.0, status=status))
    assert evaluation.wanted == before
    assert evaluation.limited_by in {Code.SIGNAL_MISSING, Code.SIGNAL_STALE, Code.SIGNAL_INVALID}


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


def test_no_scale_in_while_replicas_are_unknown() -> None:
    evaluation = run(spec(down()), 4, seen(0), unknown_replicas=1)
    assert (evaluation.wanted, evaluation.limited_by) == (4, Code.REPLICAS_UNKNOWN)
    assert evaluation.effective == frozenset()
    assert run(spec(up()), 4, seen(50), unknown_replicas=1).wanted == 5


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


@pytest.mark.parametrize("observations", [(), (seen(None),), (seen(7),)])
def test_a_count_out_of_bounds_is_brought_back_without_any_rule(
    observations: tuple[Observation, ...],
) -> None:
    assert run(spec(up(), low=2, high=5), 0, *observations).wanted == 2
    assert run(spec(up(), low=2, high=5), 9, *observations).wanted == 5
    assert run(spec(low=2, high=5, paused=True), 9).wanted == 5


def test_a_step_that_bounds_swallow_starts_no_cooldown() -> None:
    assert run(spec(up(), high=4), 4, seen(50)).effective == frozenset()
    assert run(spec(up(step=3), high=5), 4, seen(50)).effective == {"up"}, "a clamped change is a change"


def test_a_paused_endpoint_changes_nothing_and_says_so() -> None:
    evaluation = run(spec(up(), down(), paused=True), 4, seen(50))
    assert (evaluation.wanted, evaluation.limited_by) == (4, Code.PAUSED)
    assert codes(evaluation, Stage.RULE) == []
    assert [one.value for one in evaluation.observations] == [50]


def test_zero_only_where_every_queue_is_proven_empty() -> None:
    wanted = spec(down("d", "<= 0", -5), low=0)
    assert run(wanted, 3, seen(0)).wanted == 0
    ready_only = Observation("queue", ObservationStatus.OK, 0.0, 1.0, proven_empty=False)
    evaluation = run(wanted, 3, ready_only)
    assert (evaluation.wanted, evaluation.limited_by) == (1, Code.NOT_PROVEN_EMPTY)
    assert codes(evaluation, Stage.BOUNDS) == [Code.NOT_PROVEN_EMPTY, Code.WITHIN_BOUNDS]
    assert run(wanted, 1, ready_only).effective == frozenset()


def test_zero_needs_proof_from_signals_without_a_rule_too() -> None:
    wanted = spec(down("d", "<= 0", -5), signals=[signal("queue"), signal("other")])
    assert run(wanted, 3, seen(0), seen(2, "other")).wanted == 1
    assert run(wanted, 3, seen(0)).wanted == 1
    assert run(wanted, 3, seen(0), seen(0, "other")).wanted == 0


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


def test_zero_needs_a_min_of_zero() -> None:
    assert run(spec(down("d", "<= 0", -5), low=1), 3, seen(0)).wanted == 1


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
    warm = Signal("warmth", HostSignal("cpu_percent"))
    wanted = spec(down(step=-1), signals=[signal(), warm])
    assert run(wanted, 1, seen(0), seen(40.0, "warmth")).wanted == 0
    assert run(wanted, 1, seen(1), seen(40.0, "warmth")).wanted == 1
