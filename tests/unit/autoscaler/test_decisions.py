"""Decisions: their summaries, and what makes two the same."""

from typing import Any

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
from gpuscale.autoscaler.domain.spec import Combine
from tests.support.autoscaler_values import NOW, down, endpoint, evaluate, observed, seen, spec, up

WANTED = spec(up(step=2), down())


def decide(before: int, value: float | None, outcome: DecisionOutcome) -> Decision:
    evaluation = evaluate(WANTED, before, observed(seen(value)), {}, NOW)
    return compose(endpoint(WANTED), evaluation, outcome)


def test_a_change_tells_the_rule_that_made_it() -> None:
    decision = decide(2, 120, DecisionOutcome(4))
    assert (decision.before, decision.wanted, decision.granted, decision.limited_by) == (2, 4, 4, None)
    assert decision.summary == "from 2 to 4: queue = 120 > 10: +2"


@pytest.mark.parametrize(
    ("fields", "summary"),
    [
        ({}, "from 3 to 6: queue = 120 > 10: +3"),
        ({"combine": Combine.SUM_STEPS}, "from 3 to 7: a -1, b +2, c +3 together"),
        ({"high": 3, "combine": Combine.FIRST_MATCH}, "from 3 to 2: queue = 120 >= 99: -1"),
    ],
)
def test_a_change_of_several_rules_tells_those_that_won(fields: dict[str, Any], summary: str) -> None:
    both = spec(down("a", ">= 99"), up("b", step=2), up("c", step=3), **fields)
    evaluation = evaluate(both, 3, observed(seen(120)), {}, NOW)
    assert compose(endpoint(both), evaluation, DecisionOutcome(6)).summary == summary


def test_spares_are_told_where_no_rule_wants_a_change() -> None:
    spared = spec(up(), warm_spares=2)
    evaluation = evaluate(spared, 1, observed(seen(7)), {}, NOW)
    assert (
        compose(endpoint(spared), evaluation, DecisionOutcome(2)).summary
        == "from 1 to 2: 2 warm spares on top"
    )


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
