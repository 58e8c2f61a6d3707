"""OpenGRIS Scaler's capability scaling of one endpoint with several sets: tasks, workers, and what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.rpc.status import from_rpc_error
from gpuscale.common.wire import enum_word, to_duration
from tests.support.asking_autoscaler import Asking
from tests.support.autoscaler_app import TIMEOUT

pytestmark = pytest.mark.asyncio(loop_scope="module")

Needs = Mapping[str, int]
CPU: Needs = {}
GPU: Needs = {"gpu": 1}
BIG: Needs = {"gpu": 2}
BOTH: Needs = {"gpu": 1, "high_memory": -1}


@dataclass(frozen=True)
class Case:
    """So many groups of each set, tasks that need this, workers that nobody here started: so many groups then."""

    before: Mapping[str, int]
    tasks: Sequence[tuple[Needs, int]]
    wanted: Mapping[str, int]
    limit: str | None = None
    unmanaged: Sequence[tuple[Needs, int]] = ()
    groups: Mapping[str, Sequence[tuple[Needs, int]]] = field(default_factory=dict)
    unknown: int = 0


def a_set(name: str, capabilities: Needs, **fields: Any) -> api.CapabilitySet:
    return api.CapabilitySet(id=name, capabilities=capabilities, **fields)


def group(offers: Needs, workers: int) -> api.WorkerGroup:
    return api.WorkerGroup(capabilities=offers, workers=workers)


def uneven(*workers: int) -> Mapping[str, Sequence[tuple[Needs, int]]]:
    return {"gpu": [(GPU, count) for count in workers]}


def report(tasks: Iterable[tuple[Needs, int]], unmanaged: Iterable[tuple[Needs, int]] = ()) -> api.TaskReport:
    return api.TaskReport(
        demands=[api.TaskDemand(capabilities=needs, tasks=count) for needs, count in tasks],
        unmanaged_workers=[group(*one) for one in unmanaged],
    )


async def made(asked: Asking, *sets: api.CapabilitySet, **wish: Any) -> api.EndpointSpec:
    fields = {"watcher": "", "min_replicas": 0, "max_replicas": 20, "capability_sets": sets} | wish
    return await asked.render("allocate=capability; scaling=capability", **fields)


async def came(
    asked: Asking, spec: api.EndpointSpec, case: Case, **more: Any
) -> tuple[dict[str, int], api.Decision]:
    """Groups of each set after an evaluation, and the decision."""
    request = api.EvaluateRequest(
        spec=spec,
        unknown_replicas=case.unknown,
        signals=[api.StatedSignal(signal="tasks", tasks=report(case.tasks, case.unmanaged), **more)],
        capability_sets=[
            api.StatedCapabilitySet(
                id=name, before=count, groups=[group(*one) for one in case.groups.get(name, ())]
            )
            for name, count in case.before.items()
        ],
    )
    decision = (await asked.evaluate(request)).decision
    assert {one.id: one.before for one in decision.capability_sets} == case.before
    return {one.id: one.wanted for one in decision.capability_sets}, decision


async def differing(asked: Asking, spec: api.EndpointSpec, cases: Iterable[Case]) -> list[str]:
    async def differs(case: Case) -> str:
        counts, decision = await came(asked, spec, case)
        found = (counts, decision.wanted, enum_word(decision, "limited_by"))
        limit = enum_word(decision, "limited_by") if case.limit is None else case.limit
        right = (dict(case.wanted), sum(case.wanted.values()), limit)
        return "" if found == right else f"{case}: {found} ({decision.summary})"

    return [one for one in await asyncio.gather(*(differs(case) for case in cases)) if one]


TWO = (a_set("cpu", CPU), a_set("gpu", GPU))
SAME: Mapping[str, tuple[Sequence[api.CapabilitySet], Sequence[Case]]] = {
    "the example of the seed: 100 tasks without needs and 50 for a gpu, and nobody there": (
        TWO,
        [
            Case({"cpu": 0, "gpu": 0}, [(CPU, 100), (GPU, 50)], {"cpu": 1, "gpu": 1}),
            Case({"cpu": 0, "gpu": 0}, [(CPU, 1), (GPU, 1)], {"cpu": 1, "gpu": 1}),
            Case({"cpu": 3, "gpu": 0}, [(CPU, 10), (GPU, 1)], {"cpu": 3, "gpu": 1}),
            Case({"cpu": 0, "gpu": 0}, [], {"cpu": 0, "gpu": 0}),
        ],
    ),
    "more than 5 tasks for each worker that can run them; exactly 5 hold": (
        TWO,
        [
            Case({"cpu": 0, "gpu": 4}, [(GPU, 20)], {"cpu": 0, "gpu": 4}),
            Case({"cpu": 0, "gpu": 4}, [(GPU, 21)], {"cpu": 0, "gpu": 5}),
            Case({"cpu": 0, "gpu": 4}, [(GPU, 500)], {"cpu": 0, "gpu": 5}),
        ],
    ),
    "workers with more capabilities can run tasks that need fewer": (
        TWO,
        [
            Case({"cpu": 0, "gpu": 1}, [(CPU, 5)], {"cpu": 0, "gpu": 1}),
            Case({"cpu": 1, "gpu": 1}, [(CPU, 10)], {"cpu": 1, "gpu": 1}),
            Case({"cpu": 1, "gpu": 1}, [(CPU, 11)], {"cpu": 2, "gpu": 1}),
            Case({"cpu": 9, "gpu": 0}, [(GPU, 1), (CPU, 9)], {"cpu": 9, "gpu": 1}),
        ],
    ),
    "fewer than 0.5 tasks for each worker; exactly 0.5 hold": (
        TWO,
        [
            Case({"cpu": 0, "gpu": 4}, [(GPU, 2)], {"cpu": 0, "gpu": 4}),
            Case({"cpu": 0, "gpu": 4}, [(GPU, 1)], {"cpu": 0, "gpu": 3}),
            Case({"cpu": 0, "gpu": 4}, [], {"cpu": 0, "gpu": 3}),
            Case({"cpu": 2, "gpu": 1}, [], {"cpu": 1, "gpu": 0}),
        ],
    ),
    "idle workers with a gpu go without touching the others": (
        (a_set("cpu", {"cpu": 1}), a_set("gpu", GPU)),
        [Case({"cpu": 2, "gpu": 3}, [({"cpu": 1}, 8)], {"cpu": 2, "gpu": 2})],
    ),
    "nothing is taken away in a round that adds something": (
        (a_set("cpu", {"cpu": 1}), a_set("gpu", GPU)),
        [Case({"cpu": 4, "gpu": 0}, [(GPU, 1)], {"cpu": 4, "gpu": 1})],
    ),
    "the last group that can run waiting tasks stays; without tasks it goes": (
        TWO,
        [
            Case({"cpu": 9, "gpu": 1}, [(GPU, 1), (CPU, 0)], {"cpu": 8, "gpu": 1}),
            Case({"cpu": 0, "gpu": 1}, [(GPU, 0)], {"cpu": 0, "gpu": 0}),
        ],
    ),
    "amounts count: a worker with one gpu cannot run a task that needs two": (
        (a_set("one", GPU), a_set("two", BIG)),
        [
            Case({"one": 4, "two": 0}, [(BIG, 1)], {"one": 4, "two": 1}),
            Case({"one": 0, "two": 1}, [(GPU, 5)], {"one": 0, "two": 1}),
            Case({"one": 0, "two": 1}, [(GPU, 6)], {"one": 1, "two": 1}),
            Case({"one": 2, "two": 0}, [({"gpu": -1}, 10)], {"one": 2, "two": 0}),
            # Tasks of one kind are counted together where they can go to the same workers only.
            Case({"one": 0, "two": 1}, [(GPU, 3), (BIG, 3)], {"one": 1, "two": 1}),
        ],
    ),
    "the set with the least to spare is taken": (
        (a_set("all", {"gpu": 8, "high_memory": -1}), a_set("gpu", GPU), a_set("cpu", CPU)),
        [
            Case({"all": 0, "gpu": 0, "cpu": 0}, [(CPU, 1)], {"all": 0, "gpu": 0, "cpu": 1}),
            Case({"all": 0, "gpu": 0, "cpu": 0}, [(GPU, 1)], {"all": 0, "gpu": 1, "cpu": 0}),
            Case({"all": 0, "gpu": 0, "cpu": 0}, [(BIG, 1)], {"all": 1, "gpu": 0, "cpu": 0}),
            Case({"all": 0, "gpu": 0, "cpu": 0}, [(BOTH, 1)], {"all": 1, "gpu": 0, "cpu": 0}),
        ],
    ),
    "groups of several workers": (
        (a_set("cpu", CPU, workers=1), a_set("gpu", GPU, workers=4)),
        [
            Case({"cpu": 0, "gpu": 2}, [(GPU, 40)], {"cpu": 0, "gpu": 2}),
            Case({"cpu": 0, "gpu": 2}, [(GPU, 41)], {"cpu": 0, "gpu": 3}),
            Case({"cpu": 0, "gpu": 2}, [(GPU, 4)], {"cpu": 0, "gpu": 2}),
            Case({"cpu": 0, "gpu": 2}, [(GPU, 3)], {"cpu": 0, "gpu": 1}),
        ],
    ),
    "unequal groups of a set, by what they report": (
        TWO,
        [
            Case({"cpu": 0, "gpu": 2}, [(GPU, 41)], {"cpu": 0, "gpu": 3}, groups=uneven(1, 7)),
            Case({"cpu": 0, "gpu": 2}, [(GPU, 40)], {"cpu": 0, "gpu": 2}, groups=uneven(1, 7)),
            # The group that would go is the large one, without which there would be more than 5 for each.
            Case({"cpu": 0, "gpu": 2}, [(GPU, 7)], {"cpu": 0, "gpu": 2}, groups=uneven(15, 1)),
            Case({"cpu": 0, "gpu": 2}, [(GPU, 7)], {"cpu": 0, "gpu": 1}, groups=uneven(1, 15)),
        ],
    ),
    "what groups can do counts, not what was asked for": (
        (a_set("gpu", GPU), a_set("both", BOTH)),
        [
            Case({"gpu": 1, "both": 0}, [(BOTH, 5)], {"gpu": 1, "both": 0}, groups={"gpu": [(BOTH, 1)]}),
            Case({"gpu": 1, "both": 0}, [(GPU, 5)], {"gpu": 2, "both": 0}, groups={"gpu": [(CPU, 1)]}),
        ],
    ),
    "workers that somebody else started are capacity": (
        TWO,
        [
            Case({"cpu": 0, "gpu": 0}, [(GPU, 20)], {"cpu": 0, "gpu": 0}, unmanaged=[(GPU, 4)]),
            Case({"cpu": 0, "gpu": 0}, [(GPU, 21)], {"cpu": 0, "gpu": 1}, unmanaged=[(GPU, 4)]),
            Case({"cpu": 0, "gpu": 1}, [(GPU, 2)], {"cpu": 0, "gpu": 0}, unmanaged=[(GPU, 4)]),
            Case({"cpu": 0, "gpu": 0}, [(BIG, 1), (CPU, 5)], {"cpu": 0, "gpu": 0}, unmanaged=[(BIG, 1)]),
            Case({"cpu": 0, "gpu": 0}, [], {"cpu": 0, "gpu": 0}, unmanaged=[(GPU, 4)]),
        ],
    ),
}


@pytest.mark.parametrize("table", SAME)
async def test_same_as_the_seed(asked: Asking, table: str) -> None:
    sets, cases = SAME[table]
    assert await differing(asked, await made(asked, *sets), cases) == []


BOUNDED = (a_set("cpu", {"cpu": 1}, min_replicas=1, max_replicas=3), a_set("gpu", GPU, max_replicas=2))
BETTER: Mapping[str, tuple[Sequence[api.CapabilitySet], Mapping[str, Any], Sequence[Case]]] = {
    "every set has bounds of its own": (
        BOUNDED,
        {},
        [
            Case({"cpu": 3, "gpu": 2}, [(GPU, 99)], {"cpu": 2, "gpu": 2}, "CLAMPED_TO_MAX"),
            Case({"cpu": 1, "gpu": 0}, [], {"cpu": 1, "gpu": 0}, "CLAMPED_TO_MIN"),
            Case({"cpu": 0, "gpu": 5}, [(GPU, 9)], {"cpu": 1, "gpu": 2}),
        ],
    ),
    "all sets together have the bounds of the endpoint, and idle groups make room": (
        (a_set("cpu", {"cpu": 1}), a_set("gpu", GPU)),
        {"max_replicas": 4, "min_replicas": 1},
        [
            Case({"cpu": 3, "gpu": 1}, [(GPU, 6), ({"cpu": 1}, 15)], {"cpu": 3, "gpu": 1}, "CLAMPED_TO_MAX"),
            Case({"cpu": 4, "gpu": 0}, [(GPU, 1)], {"cpu": 3, "gpu": 1}),
            Case({"cpu": 1, "gpu": 0}, [], {"cpu": 1, "gpu": 0}, "CLAMPED_TO_MIN"),
        ],
    ),
    "what no set offers is said, and holds up nothing else": (
        TWO,
        {},
        [
            Case({"cpu": 1, "gpu": 1}, [({"tpu": 1}, 3), (CPU, 5)], {"cpu": 1, "gpu": 1}, "NO_CAPABLE_SET"),
            Case({"cpu": 1, "gpu": 1}, [(BIG, 3), (CPU, 11)], {"cpu": 2, "gpu": 1}, "NO_CAPABLE_SET"),
        ],
    ),
    "no group goes that holds the last worker for tasks of a smaller set": (
        (a_set("wide", {"gpu": 1, "tpu": 1}), a_set("gpu", GPU)),
        {},
        # The seed reckons the wide set's tasks and workers alone, and would stop what runs the one task for a tpu.
        [Case({"wide": 1, "gpu": 9}, [({"tpu": 1}, 1), (GPU, 0)], {"wide": 1, "gpu": 8})],
    ),
    "no group goes while one may live that is not heard of": (
        TWO,
        {},
        [Case({"cpu": 4, "gpu": 0}, [], {"cpu": 4, "gpu": 0}, "REPLICAS_UNKNOWN", unknown=1)],
    ),
}


@pytest.mark.parametrize("table", BETTER)
async def test_deliberately_better(asked: Asking, table: str) -> None:
    sets, wish, cases = BETTER[table]
    assert await differing(asked, await made(asked, *sets, **wish), cases) == []


async def test_tasks_that_nobody_counts_or_counted_too_long_ago_are_not_none(asked: Asking) -> None:
    spec = await made(asked, *TWO)
    case = Case({"cpu": 2, "gpu": 2}, [], {"cpu": 2, "gpu": 2})
    for more, limit in (
        ({"age": to_duration(60)}, "SIGNAL_STALE"),
        ({"status": api.Observation.STATUS_MISSING}, "SIGNAL_MISSING"),
    ):
        counts, decision = await came(asked, spec, case, **more)
        assert (counts, decision.wanted, enum_word(decision, "limited_by")) == (case.wanted, 4, limit)


async def test_a_rule_may_be_tuned_paused_and_rest(asked: Asking) -> None:
    spec = await made(asked, *TWO, parameters={"upper_task_ratio": 2, "lower_task_ratio": 1})
    case = Case({"cpu": 0, "gpu": 2}, [(GPU, 5)], {"cpu": 0, "gpu": 3})
    assert await differing(asked, spec, [case]) == []
    spec.paused = True
    assert (await came(asked, spec, case))[1].limited_by == api.DecisionCode.DECISION_CODE_PAUSED
    spec.paused = False
    spec.mode = api.ScalingMode.SCALING_MODE_SHADOW
    decision = (await came(asked, spec, case))[1]
    assert (decision.wanted, enum_word(decision, "limited_by")) == (2, "SHADOWED")


async def test_an_activation_threshold_holds_for_sets_too(asked: Asking) -> None:
    """Fewer tasks start nothing; where there is a worker the rule is read whatever they are."""
    spec = await made(asked, *TWO)
    spec.signals[0].activation_threshold = 10
    for before, tasks, wanted, limit in ((0, 10, 0, "INACTIVE"), (0, 11, 1, ""), (1, 10, 2, "")):
        case = Case({"cpu": 0, "gpu": before}, [(GPU, tasks)], {"cpu": 0, "gpu": wanted})
        counts, decision = await came(asked, spec, case)
        assert (counts, enum_word(decision, "limited_by")) == (case.wanted, limit)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda spec: spec.capability_sets.add(id="cpu"), "spec.capability_sets[2].id"),
        (lambda spec: setattr(spec, "warm_spares", 1), "spec.warm_spares"),
        (lambda spec: setattr(spec.up, "disabled", True), "spec.up"),
        (lambda spec: spec.down.cooldown.FromSeconds(60), "spec.down"),
        (lambda spec: setattr(spec, "gpu_gate", api.GpuGate.GPU_GATE_CAP), "spec.gpu_gate"),
        (lambda spec: setattr(spec, "gpu_gate", api.GpuGate.GPU_GATE_ADVISE), "spec.gpu_gate"),
        (lambda spec: setattr(spec, "bound_mode", api.BoundMode.BOUND_MODE_SKIP), "spec.bound_mode"),
        (
            lambda spec: spec.capability_sets[0].capabilities.update(gpu=-2),
            "spec.capability_sets[0].capabilities[gpu]",
        ),
        (
            lambda spec: spec.capability_sets[0].capabilities.update({"gpu=8,tpu": 1}),
            "spec.capability_sets[0].capabilities",
        ),
        (lambda spec: setattr(spec.rules[0].ratio, "proportional_down", True), "spec.rules[0].ratio"),
        (lambda spec: setattr(spec.capability_sets[0], "min_replicas", 30), "spec.max_replicas"),
    ],
)
async def test_what_contradicts_itself_is_refused_with_its_field(
    asked: Asking, change: Any, field: str
) -> None:
    spec = await made(asked, *TWO)
    change(spec)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asked.evaluate(api.EvaluateRequest(spec=spec))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in [one.field for one in from_rpc_error(refused.value).violations]


async def test_only_the_preset_of_capabilities_takes_sets(asked: Asking) -> None:
    for preset, wish in (("keda", {"watcher": ""}), ("opengris_capability", {})):
        fields = {"preset": preset, "watcher": "watchers/jobs", "capability_sets": TWO} | wish
        request = api.RenderPresetRequest(wish=api.PresetWish(**fields))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asked.presets.RenderPreset(request, timeout=TIMEOUT)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_answer_says_what_would_change_the_count_and_when_it_may(asked: Asking) -> None:
    """More is asked for at the next tick; a bound of one set is lifted to see what it holds back."""
    spec = await made(asked, a_set("cpu", {"cpu": 1}), a_set("gpu", GPU, max_replicas=2))
    tasks = report([(GPU, 99), ({"tpu": 1}, 1)])

    async def answer(before: int) -> api.EvaluateResponse:
        request = api.EvaluateRequest(
            spec=spec,
            signals=[api.StatedSignal(signal="tasks", tasks=tasks)],
            capability_sets=[api.StatedCapabilitySet(id="gpu", before=before)],
        )
        return await asked.evaluate(request)

    first = await answer(0)
    assert (first.decision.wanted, first.next_change.wanted) == (1, 2)
    assert first.decision.summary.startswith(
        "gpu from 0 to 1 (99 tasks that need gpu:1 and no worker: +1 gpu)"
    )
    assert "tpu:1" in first.decision.summary
    assert ("CLAMPED_TO_MAX", 3) in [
        (enum_word(one, "code"), one.wanted) for one in (await answer(2)).alternatives
    ]


@pytest.mark.parametrize("kind", ["spec", "preset"])
async def test_capability_sets_cannot_be_backtested(asked: Asking, kind: str) -> None:
    policy = api.BacktestPolicy(name="sets")
    if kind == "spec":
        policy.spec.CopyFrom(await made(asked, *TWO))
    else:
        policy.preset.CopyFrom(api.PresetWish(preset="opengris_capability", capability_sets=TWO))
    request = api.BacktestRequest(policies=[policy], arrivals=[0.0], service_seconds=[1.0])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asked.backtests.Backtest(request, timeout=TIMEOUT)
    [one] = from_rpc_error(refused.value).violations
    assert one.field == f"policies[0].{kind}.capability_sets"
