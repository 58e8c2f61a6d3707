"""GPU models with weights: what replicas count for, how many so much takes, who goes first, and what specs may say."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpuscale.api.allocator.v1 import Ask
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain import engine
from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import ReplicaWeights
from gpuscale.autoscaler.domain.planning import capacity_of, plan
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.rules.targets import TargetRule, TargetType
from gpuscale.autoscaler.domain.spec import (
    CapabilitySet,
    GpuGate,
    ModelWeight,
    Pace,
    RateLimit,
    ReplicaTemplate,
)
from gpuscale.autoscaler.domain.validate import violations
from gpuscale.autoscaler.wire.specs import ask_to_wire, spec_violations, template_from_wire, template_to_wire
from tests.support.autoscaler_values import (
    AT,
    down,
    evaluate,
    inputs,
    leaving,
    observed,
    replica,
    seen,
    spec,
    up,
)

S = ReplicaState
H100, A100 = ModelWeight("H100", 1.0), ModelWeight("A100", 0.5)
TEMPLATE = ReplicaTemplate("worker", gpu_count=1, models=(H100, A100))
PER_TEN = Rule("t", "queue", TargetRule(10.0, tolerance_up=0.0, tolerance_down=0.0))
NO_WAIT = Pace(stabilization=0.0)


def on(model: ModelWeight, number: int = 0, state: S = S.READY) -> Replica:
    return replica(number, state, template=replace(TEMPLATE, models=(model,)))


def wanted(
    work: float | None, capacity: ReplicaWeights, *rules: Rule, ready: int | None = None, **fields: Any
) -> tuple[int, Sequence[Code]]:
    """How many replicas so much work leads to, where each of weight 1 does ten of it, and the codes of that."""
    made = spec(*(rules or (PER_TEN,)), template=TEMPLATE, **{"down": NO_WAIT, **fields})
    before = len(capacity.weights)
    ready = before if ready is None else ready
    found = evaluate(made, before, observed(seen(work)), {}, AT.now, capacity=capacity, ready=ready)
    assert found.limited_by is not Code.WEIGHED, "it says what the count is, and holds nothing back"
    return found.wanted, [step.code for step in found.steps]


@pytest.mark.parametrize(
    ("weights", "units", "count"),
    [
        ((), 3, 3),
        ((0.5, 1.0), 2, 3),  # 1.5 are there
        ((0.5, 1.0), 3, 4),
        ((0.5, 1.0), 1, 1),  # the slow one goes
        ((0.5, 0.5, 1.0), 2, 3),
        ((1.0, 0.5, 0.5), 1, 2),  # the fast one stops first, and the slow ones do it together
        ((0.5, 1.0), 0, 0),
        ((0.1,) * 10, 1, 10),  # not 9 or 11, whatever floating point makes of it
        ((2.0,), 1, 1),
    ],
)
def test_replicas_that_count_for_so_much(weights: tuple[float, ...], units: int, count: int) -> None:
    assert ReplicaWeights(weights, 1.0, 1.0).replicas(units) == count


def test_bounds_are_of_replicas() -> None:
    count, codes = wanted(90, ReplicaWeights((0.5, 0.5), 0.5, 0.5), high=6)
    assert (count, codes[-1]) == (6, Code.CLAMPED_TO_MAX)
    assert wanted(0, ReplicaWeights((0.5,), 0.5, 0.5), low=1)[0] == 1


def test_what_nobody_knows_holds_and_steps_are_of_capacity() -> None:
    half = ReplicaWeights((0.5, 1.0), 1.0, 0.75)
    assert wanted(None, half)[0] == 2
    assert wanted(7, half, up(), down())[0] == 2
    assert wanted(20, half, up())[0] == 3
    assert wanted(0, half, down())[0] == 1
    assert wanted(20, ReplicaWeights((0.5, 1.0), 0.5, 0.75), up(step=2))[0] == 5
    assert wanted(20, half, up(), paused=True)[0] == 2


def test_a_level_is_one_of_what_those_that_work_count_for() -> None:
    level = Rule("t", "queue", TargetRule(50.0, TargetType.VALUE, 0.0, 0.0))
    assert wanted(100, ReplicaWeights((0.5,) * 4, 0.5, 0.5), level)[0] == 8
    assert wanted(100, ReplicaWeights((0.5,) * 4, 0.5, 0.5), level, ready=2)[0] == 4


def test_spares_and_rate_limits_are_of_capacity() -> None:
    half = ReplicaWeights((0.5,) * 4, 0.5, 0.5)
    assert wanted(20, half, warm_spares=1)[0] == 6
    assert wanted(90, half, up=Pace(limits=(RateLimit(60.0, replicas=1),)))[0] == 6


@pytest.mark.parametrize(("most", "changes"), [(1, ()), (2, ((AT.now, 1),))])
def test_a_change_of_replicas_is_remembered_as_one_though_it_is_less(
    most: int, changes: tuple[tuple[float, int], ...]
) -> None:
    made = spec(PER_TEN, high=most, template=TEMPLATE, up=Pace(cooldown=60.0))
    result = engine.evaluate(made, inputs(1, seen(10.0), capacity=ReplicaWeights((0.5,), 0.1, 0.5)))
    assert (result.evaluation.wanted, result.memory.changes) == (most, changes)


def test_only_models_with_weights_are_weighed() -> None:
    assert capacity_of(spec(PER_TEN), [replica(0, S.READY)], {}) is None
    found = evaluate(spec(PER_TEN), 1, observed(seen(30.0)), {}, AT.now)
    assert Code.WEIGHED not in {step.code for step in found.steps}


def test_the_least_preferred_stops_first_and_then_as_ever() -> None:
    rows = [on(A100, 0), on(H100, 1), on(H100, 2, S.STARTING), on(A100, 3), replica(4, S.READY), replica(5)]
    order = ["r005", "r004", "r003", "r000", "r002", "r001"]
    made = spec(PER_TEN, template=TEMPLATE)
    for left in range(6):
        assert [one.id for one in plan(left, rows, (), made, {}, AT.now).stop] == order[: 6 - left]
    assert capacity_of(made, rows, {}) == ReplicaWeights((1.0, 0.5, 0.5, 0.5, 1.0, 1.0), 1.0, 0.625)


def test_another_gets_what_the_newest_got_while_that_starts() -> None:
    made, waits = spec(PER_TEN, template=TEMPLATE), replica(9, template=TEMPLATE)
    for state, following in ((S.STARTING, 0.5), (S.READY, 1.0)):
        found = capacity_of(made, [on(H100, 1, S.STARTING), on(A100, 2, state), waits], {})
        assert (found.next, found.weights[0]) == (following, following)
    gone = [asked_to_stop(on(A100, 1), "", AT), leaving(on(A100, 2)), on(A100, 3, S.FAILED)]
    found = capacity_of(made, gone, {})
    assert (found.weights, found.next) == ((), 1.0)


def test_a_template_of_one_model_is_of_the_whole_and_tells_what_it_got() -> None:
    fast, slow = TEMPLATE.of_each_model()
    assert [fast.models, slow.models] == [(H100,), (A100,)]
    assert slow.is_of(TEMPLATE)
    assert not slow.is_of(replace(TEMPLATE, models=(H100,)))
    assert not replace(slow, gpu_count=2).is_of(TEMPLATE)
    assert TEMPLATE.on(["NVIDIA a100-SXM4-80GB"]) == slow
    assert TEMPLATE.on(["NVIDIA H100", "NVIDIA A100"]) == slow, "as slow as the slowest of its GPUs"
    assert TEMPLATE.on(["NVIDIA L4"]) == TEMPLATE
    large = replace(TEMPLATE, models=(ModelWeight("A100-80GB", 0.7), A100))
    assert large.on(["NVIDIA A100-80GB"]).models == large.models[:1]
    weights = [TEMPLATE.weight(one) for one in (fast, slow, TEMPLATE, ReplicaTemplate("worker"))]
    assert weights == [1, 0.5, 0.5, 0.5]
    assert ReplicaTemplate("worker").of_each_model() == [ReplicaTemplate("worker")]


def test_models_are_asked_for_and_stored_with_an_ask_or_without() -> None:
    for wire in (
        api.ReplicaTemplate(template="worker", gpu_count=1, models=[api.ModelWeight(model="H100", weight=1)]),
        api.ReplicaTemplate(
            template="worker", models=[api.ModelWeight(model="H100", weight=1)], ask=Ask(gpu_count=2)
        ),
    ):
        template = template_from_wire(wire)
        assert list(ask_to_wire(template).models) == ["H100"]
        assert template_to_wire(template) == wire
    wire.ask.models.append("A100")
    found = spec_violations(spec(template=template_from_wire(wire)))
    assert [one.field for one in found] == ["endpoint.spec.template.ask.models"]


def test_what_specs_may_say_of_models() -> None:
    twice = replace(TEMPLATE, models=(H100, ModelWeight("h100", 0.5)))
    for made, field in (
        (spec(template=TEMPLATE), ""),
        (spec(template=twice), "template.models[1].model"),
        (spec(template=TEMPLATE, gpu_gate=GpuGate.OFF), "template.models"),
        (spec(template=replace(TEMPLATE, gpu_count=0)), "template.models"),
        (spec(template=TEMPLATE, capability_sets=(CapabilitySet("s", {}),)), "template.models"),
        (
            spec(capability_sets=(CapabilitySet("s", {}, template=TEMPLATE),)),
            "capability_sets[0].template.models",
        ),
    ):
        assert [one.field for one in violations(made)] == ([f"endpoint.spec.{field}"] if field else [])
