"""Warm spares on top of what rules want, and what GPUs there are has to say."""

import pytest

from gpuscale.autoscaler.domain.decisions import Code, Stage
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.rules.targets import TargetRule
from gpuscale.autoscaler.domain.spec import EndpointSpec, GpuGate, ReplicaTemplate
from tests.support.autoscaler_values import NOW, down, evaluate, observed, seen, spec, up

GPU = ReplicaTemplate("worker", gpu_count=1)


def wanted(policy: EndpointSpec, before: int, value: float | None, **more: int | None) -> int:
    return evaluate(policy, before, observed(seen(value)), {}, NOW, **more).wanted


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [(2, 40.0, 6), (6, 40.0, 6), (6, 0.0, 2), (6, None, 6), (0, None, 2), (1, 40.0, 6)],
)
def test_spares_come_on_top_of_what_a_target_asks_for(before: int, value: float | None, after: int) -> None:
    """Four replicas of work, and two spares: also where nothing is to be done, or known."""
    rule = Rule("target", "queue", TargetRule(10.0), cooldown=0.0)
    assert wanted(spec(rule, high=20, warm_spares=2), before, value) == after


def test_rules_go_by_the_replicas_without_the_spares() -> None:
    """A step from three working replicas leads to four, and the two spares stay."""
    assert wanted(spec(up(), warm_spares=2), 5, 50.0) == 6
    assert wanted(spec(down(), warm_spares=2), 5, 0.0) == 4
    assert wanted(spec(down(), warm_spares=2), 2, 0.0) == 2


def test_spares_stay_within_the_bounds_and_are_said() -> None:
    found = evaluate(spec(up(), high=5, warm_spares=3), 5, observed(seen(50.0)), {}, NOW)
    assert (found.wanted, found.limited_by) == (5, Code.CLAMPED_TO_MAX)
    [step] = [one for one in found.steps if one.stage is Stage.SPARES]
    assert (step.before, step.after) == (3, 6)


def test_a_paused_endpoint_gets_no_spares() -> None:
    assert wanted(spec(up(), warm_spares=3, paused=True), 1, 50.0) == 1


@pytest.mark.parametrize(
    ("gate", "limit", "after", "code"),
    [
        (GpuGate.RESERVE, 3, 6, None),
        (GpuGate.OFF, 3, 6, None),
        (GpuGate.ADVISE, 3, 6, Code.GPUS_SHORT),
        (GpuGate.ADVISE, None, 6, Code.GPUS_UNKNOWN),
        (GpuGate.ADVISE, 6, 6, None),
        (GpuGate.CAP, 3, 3, Code.CAPPED_BY_GPUS),
        (GpuGate.CAP, 1, 2, Code.CAPPED_BY_GPUS),
        (GpuGate.CAP, None, 2, Code.GPUS_UNKNOWN),
        (GpuGate.CAP, 6, 6, None),
    ],
)
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
    repaired = evaluate(spec(low=4, gpu_gate=GpuGate.CAP, template=GPU), 1, {}, {}, NOW)
    assert repaired.wanted == 4


def test_without_the_gate_replicas_are_given_no_gpus() -> None:
    assert spec(gpu_gate=GpuGate.OFF, template=GPU).started_from.gpu_count == 0
    assert spec(template=GPU).started_from.gpu_count == 1
