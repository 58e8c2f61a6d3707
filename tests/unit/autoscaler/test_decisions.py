"""Decisions: their summaries, and what makes two the same."""

import pytest

from gpuscale.autoscaler.domain.decisions import (
    Code,
    Decision,
    DecisionOutcome,
    Stage,
    Step,
    afterwards,
    compose,
    sameness,
)
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale.autoscaler.domain.spec import Combine, EndpointSpec
from gpuscale.autoscaler.wire.decisions import EndpointView, endpoint_to_wire
from tests.support.autoscaler_values import NOW, down, endpoint, evaluate, observed, replica, seen, spec, up

WANTED = spec(up(step=2), down())


def decide(before: int, value: float | None, outcome: DecisionOutcome) -> Decision:
    return compose(endpoint(WANTED), evaluate(WANTED, before, observed(seen(value)), {}, NOW), outcome)


THREE = down("a", ">= 99"), up("b", step=2), up("c", step=3)


@pytest.mark.parametrize(
    ("before", "of", "summary"),
    [
        (3, spec(*THREE), "from 3 to 6: queue = 120 > 10: +3"),
        (3, spec(*THREE, combine=Combine.SUM_STEPS), "from 3 to 7: a -1, b +2, c +3 together"),
        (1, spec(down(), warm_spares=2), "from 1 to 2: 2 warm spares on top"),
    ],
)
def test_a_change_tells_what_made_it(before: int, of: EndpointSpec, summary: str) -> None:
    evaluation = evaluate(of, before, observed(seen(120)), {}, NOW)
    assert compose(endpoint(of), evaluation, DecisionOutcome(7)).summary == summary


def test_of_two_rules_with_one_limit_that_which_bound_is_told() -> None:
    of = spec(up("a", step=9, max_replicas=6), up("b", step=9, max_replicas=5))
    decision = compose(endpoint(of), evaluate(of, 3, observed(seen(120)), {}, NOW), DecisionOutcome(6))
    assert decision.limited_by is Code.CLAMPED_TO_RULE_MAX
    assert decision.summary == "from 3 to 6: queue = 120 > 10: +9, bounded by the rule's max_replicas 6"


def test_a_hold_tells_what_is_unknown() -> None:
    decision = decide(2, None, DecisionOutcome(2))
    assert decision.limited_by is Code.SIGNAL_MISSING
    assert decision.summary == "stays at 2: queue: queue unreachable"


def test_no_capacity_tells_the_allocators_text() -> None:
    full = Step(Stage.GPU, Code.NO_CAPACITY, 4, 3, "3 of 4 GPUs are taken")
    decision = decide(2, 120, DecisionOutcome(3, (full,)))
    assert (decision.limited_by, decision.steps[-1]) == (Code.NO_CAPACITY, full)
    assert decision.summary == "from 2 to 4, 3 granted: 3 of 4 GPUs are taken"


def test_nothing_to_do_says_so() -> None:
    assert decide(2, 7, DecisionOutcome(2)).summary == "stays at 2: no rule wants a change"


def test_between_evaluations_only_the_outcome_is_told() -> None:
    granted = Step(Stage.GPU, Code.GRANTED, 1, 2, "GPUs for one more replica")
    decision = afterwards(endpoint(desired=2), DecisionOutcome(2, (granted,)))
    assert (decision.before, decision.wanted, decision.granted) == (2, 2, 2)
    assert decision.summary == "stays at 2: GPUs for one more replica"


def test_same_codes_are_the_same_decision_whatever_the_values() -> None:
    assert sameness(decide(2, 6, DecisionOutcome(2))) == sameness(decide(2, 7, DecisionOutcome(2)))
    assert sameness(decide(2, 6, DecisionOutcome(2))) != sameness(decide(2, None, DecisionOutcome(2)))
    assert sameness(decide(2, 6, DecisionOutcome(2))) != sameness(decide(2, 6, DecisionOutcome(1)))


def test_an_endpoint_tells_why_replicas_of_it_still_start() -> None:
    """One whose probe goes on failing read that no rule wants a change, and nothing else."""
    starts = [replica(number, ReplicaState.STARTING, reason="its probe fails") for number in (1, 2)]
    others = [replica(3, ReplicaState.READY), replica(4, ReplicaState.STARTING), replica(5, reason="no room")]
    for those, more in ((others, ""), (starts + others, " (2 replicas start: its probe fails)")):
        view = EndpointView(endpoint(), those, summary="it is fine")
        assert endpoint_to_wire(view).status.summary == f"it is fine{more}"
