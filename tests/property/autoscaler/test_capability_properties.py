"""Whatever tasks, groups and sets there are: bounds hold, nothing flaps, and no task loses the last worker that can run it."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.domain.decisions import Evaluation
from gpuscale.autoscaler.domain.engine import evaluate
from gpuscale.autoscaler.domain.inputs import (
    Inputs,
    Observation,
    ObservationStatus,
    SetState,
    TaskDemand,
    TaskReport,
    WorkerGroup,
    covers,
)
from gpuscale.autoscaler.domain.rules.rule import RatioRule, Rule
from gpuscale.autoscaler.domain.spec import CapabilitySet, EndpointSpec, ReplicaTemplate, Signal, TaskSignal
from tests.support.autoscaler_values import NOW, WALL

UP, DOWN = 5.0, 0.5
amounts = st.dictionaries(st.sampled_from(["cpu", "gpu", "tpu"]), st.sampled_from([-1, 1, 2, 8]), max_size=3)
counts = st.integers(0, 6)
demands = st.lists(st.builds(TaskDemand, amounts, st.integers(0, 60)), max_size=5).map(tuple)
groups = st.lists(st.builds(WorkerGroup, amounts, st.integers(1, 4)), max_size=2).map(tuple)
reports = st.builds(TaskReport, demands, groups)


@st.composite
def specs(draw: st.DrawFn) -> EndpointSpec:
    """One to three sets, whose mins fit into what all may have."""
    made = [
        CapabilitySet(
            f"s{index}", draw(amounts), low := draw(st.integers(0, 2)), draw(st.none() | st.integers(low, 6)),
            draw(st.integers(1, 3)),
        )
        for index in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    least = sum(one.min_replicas for one in made)
    most = draw(st.integers(least, 18))
    return EndpointSpec(
        draw(st.integers(0, least)),
        most,
        ReplicaTemplate("worker"),
        (Signal("tasks", TaskSignal()),),
        (Rule("ratio", "tasks", RatioRule(UP, DOWN, guarded=True), cooldown=0.0),),
        capability_sets=tuple(made),
    )


befores = st.lists(counts, min_size=3, max_size=3)


def evaluated(
    spec: EndpointSpec, before: Mapping[str, int], report: TaskReport, unknown: int = 0
) -> Evaluation:
    seen = Observation("tasks", ObservationStatus.OK, float(report.total), 1.0, tasks=report)
    sets = {name: SetState(count) for name, count in before.items()}
    inputs = Inputs(sum(before.values()), 0, NOW, WALL, {"tasks": seen}, sets=sets)
    return evaluate(spec, inputs, unknown_replicas=unknown).evaluation


def start(spec: EndpointSpec, before: list[int]) -> dict[str, int]:
    return {one.id: count for one, count in zip(spec.capability_sets, before, strict=False)}


def workers(
    spec: EndpointSpec, counts: Mapping[str, int], report: TaskReport, needs: Mapping[str, int]
) -> int:
    own = sum(counts[one.id] * one.workers for one in spec.capability_sets if covers(one.capabilities, needs))
    return own + sum(one.workers for one in report.unmanaged_workers if covers(one.capabilities, needs))


def _sound(spec: EndpointSpec, counts: Mapping[str, int]) -> bool:
    """Whether no set has to be brought back within its bounds, for which others may have to make room."""
    return sum(counts.values()) <= spec.max_replicas and all(
        one.min_replicas
        <= counts[one.id]
        <= (spec.max_replicas if one.max_replicas is None else one.max_replicas)
        for one in spec.capability_sets
    )


@given(specs(), befores, reports, st.integers(0, 1))
def test_bounds_hold_and_each_set_moves_by_one_at_most(
    spec: EndpointSpec, before: list[int], report: TaskReport, unknown: int
) -> None:
    own = start(spec, before)
    found = evaluated(spec, own, report, unknown)
    total = sum(count.wanted for count in found.sets.values())
    assert total == found.wanted
    assert found.wanted <= spec.max_replicas
    most = {
        one.id: spec.max_replicas if one.max_replicas is None else one.max_replicas
        for one in spec.capability_sets
    }
    sound = spec.min_replicas <= sum(own.values()) and _sound(spec, own)
    for one in spec.capability_sets:
        count = found.sets[one.id]
        assert one.min_replicas <= count.wanted <= most[one.id]
        if sound:
            assert abs(count.wanted - count.before) <= 1
        if sound and unknown:
            assert count.wanted >= count.before


@given(specs(), befores, reports)
def test_no_task_loses_its_last_worker_and_nothing_that_goes_is_asked_for_again(
    spec: EndpointSpec, before: list[int], report: TaskReport
) -> None:
    own = {one: min(count, 6) for one, count in start(spec, before).items()}
    found = evaluated(spec, own, report)
    after = {one: count.wanted for one, count in found.sets.items()}
    if not _sound(spec, own):
        return  # what is beyond its bounds goes whatever it does, and makes room for what is below them
    for demand in report.demands:
        had, has = (workers(spec, counts, report, demand.capabilities) for counts in (own, after))
        if demand.tasks and has < had:
            assert has > 0
            assert demand.tasks / has <= UP


@given(specs(), reports)
def test_it_settles(spec: EndpointSpec, report: TaskReport) -> None:
    """The same tasks lead to the same groups sooner or later, and stay there."""
    counts = {one.id: one.min_replicas for one in spec.capability_sets}
    seen: list[dict[str, int]] = []
    while counts not in seen:
        seen.append(counts)
        counts = {one: count.wanted for one, count in evaluated(spec, counts, report).sets.items()}
    assert counts == seen[-1]
