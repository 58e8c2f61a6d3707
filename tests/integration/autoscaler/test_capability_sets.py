"""One endpoint with several capability sets, live: reported tasks in, groups of each set at adapters out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.manifests import parse
from gpuscale.cli.views import autoscaler as autoscaler_view
from gpuscale.common.wire import enum_word, to_duration
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, reason, running
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.waiting import eventually

EXAMPLE = Path(__file__).parents[3] / "examples" / "capabilities.yaml"
Tasks = Mapping[str, tuple[Mapping[str, int], int]]


@pytest.fixture
async def adapter(autoscaler: Autoscaler) -> AsyncGenerator[FakeAdapter]:
    one = FakeAdapter(templates=("worker", "gpu-worker"))
    async with one.connected(autoscaler.address):
        yield one


def two_sets(**fields: Any) -> api.Endpoint:
    """Sets `cpu`, and `gpu` of one GPU each from a template of its own."""
    made = endpoint(high=10)
    gpus = api.ReplicaTemplate(template="gpu-worker", gpu_count=1, lease_ttl=to_duration(5))
    made.spec.signals.add(id="tasks", tasks=api.TaskSignal(), max_age=to_duration(60))
    ratio = api.RatioRule(up_above=5, down_below=0.5)
    made.spec.rules.add(id="ratio", signal="tasks", ratio=ratio, cooldown=to_duration(0))
    made.spec.capability_sets.add(id="cpu", capabilities={"cpu": 1})
    made.spec.capability_sets.add(id="gpu", capabilities={"gpu": 1}, template=gpus, **fields)
    return made


async def report(one: Autoscaler, *tasks: tuple[Mapping[str, int], int]) -> None:
    """Tasks by what they need."""
    found = api.TaskReport(
        demands=[api.TaskDemand(capabilities=needs, tasks=count) for needs, count in tasks]
    )
    await one.metrics.ReportMetrics(
        api.ReportMetricsRequest(name="endpoints/e", tasks=found), timeout=TIMEOUT
    )


async def settled(one: Autoscaler, **ready: int) -> None:
    """Wait until so many groups of each set are aimed at and work."""
    await eventually(
        one.status,
        lambda found: (
            {each.id: (each.desired_replicas, each.ready_replicas) for each in found.capability_sets}
            == {name: (count, count) for name, count in ready.items()}
        ),
    )


def gpu(count: int) -> tuple[Mapping[str, int], int]:
    return {"gpu": 1}, count


def cpu(count: int) -> tuple[Mapping[str, int], int]:
    return {"cpu": 1}, count


async def test_each_set_follows_its_own_tasks_and_adapters_hear_counts_and_capabilities(
    autoscaler: Autoscaler, adapter: FakeAdapter
) -> None:
    await autoscaler.create(two_sets())
    await report(autoscaler, cpu(15), gpu(6))
    await settled(autoscaler, cpu=3, gpu=2)
    told = {key: (dict(one.capabilities), one.replicas) for key, one in adapter.sets.items()}
    assert told == {("endpoints/e", "cpu"): ({"cpu": 1}, 3), ("endpoints/e", "gpu"): ({"gpu": 1}, 2)}
    lines = [(one.capability_set, dict(one.capabilities), one.template) for one in adapter.told.values()]
    assert (
        sorted(lines, key=str)
        == [("cpu", {"cpu": 1}, "worker")] * 3 + [("gpu", {"gpu": 1}, "gpu-worker")] * 2
    )
    held = {one.capability_set: len(one.gpu_uuids) for one in await autoscaler.replicas()}
    assert held == {"cpu": 0, "gpu": 1}
    await report(autoscaler, cpu(15))
    await settled(autoscaler, cpu=3, gpu=0)
    await report(autoscaler)
    await settled(autoscaler, cpu=0, gpu=0)


async def test_the_example_runs_and_workers_with_a_gpu_take_over_what_needs_a_cpu(
    autoscaler: Autoscaler,
) -> None:
    adapter = FakeAdapter(templates=("task-worker", "gpu-worker"))
    adapter.workers["gpu-worker"] = api.WorkerGroup(capabilities={"cpu": 1, "gpu": 1}, workers=2)
    [made] = parse(EXAMPLE.read_text(), EXAMPLE.name)
    assert isinstance(made, api.Endpoint)
    made.name, made.spec.tick.nanos, made.spec.tick.seconds = "endpoints/e", 100_000_000, 0
    async with adapter.connected(autoscaler.address):
        await autoscaler.create(made)
        await report(autoscaler, cpu(5), gpu(20))
        await settled(autoscaler, cpu=1, gpu=2)
        lines = [(one.template, dict(one.capabilities)) for one in adapter.told.values()]
        of_gpus = ("gpu-worker", {"cpu": 1, "gpu": 1})
        assert sorted(lines, key=str) == [of_gpus, of_gpus, ("task-worker", {"cpu": 1})]
        await report(autoscaler, cpu(5))
        for _ in range(3):
            await _ticked(autoscaler)
        await settled(autoscaler, cpu=1, gpu=2)
        await report(autoscaler)
        await settled(autoscaler, cpu=1, gpu=0)


async def test_a_set_that_waits_for_gpus_holds_up_no_other(
    autoscaler: Autoscaler, adapter: FakeAdapter
) -> None:
    await autoscaler.create(two_sets())
    await report(autoscaler, gpu(20))

    async def short() -> bool:
        [_, found] = (await autoscaler.status()).capability_sets
        return (found.desired_replicas, found.granted_replicas) == (4, 2)

    await eventually(short)
    await report(autoscaler, gpu(20), cpu(10))

    async def started() -> bool:
        found, _ = (await autoscaler.status()).capability_sets
        return found.ready_replicas == 2

    await eventually(started)


async def test_workers_that_cannot_do_what_was_asked_for_are_not_asked_for_again_and_again(
    autoscaler: Autoscaler, adapter: FakeAdapter
) -> None:
    """The native adapter of OpenGRIS starts what it has, whatever is asked: each heartbeat asked for one more."""
    adapter.workers["gpu-worker"] = api.WorkerGroup(capabilities={"cpu": 1})
    await autoscaler.create(two_sets())
    await report(autoscaler, gpu(5))
    latest = await _decided(autoscaler, "NO_CAPABLE_SET")
    assert "gpu reports cpu:1" in next(
        one.text for one in latest.steps if enum_word(one, "code") == "NO_CAPABLE_SET"
    )
    await settled(autoscaler, cpu=0, gpu=0)  # it is of no use, and goes
    for _ in range(5):
        await _ticked(autoscaler)
    assert len(adapter.starts) == 1


async def test_an_adapter_that_says_what_its_workers_can_do_gets_only_what_fits(
    autoscaler: Autoscaler,
) -> None:
    first = FakeAdapter("a", templates=("worker", "gpu-worker"))
    first.register.workers["gpu-worker"].capabilities["gpu"] = 0
    second = FakeAdapter("b", templates=("gpu-worker",))
    second.register.workers["gpu-worker"].capabilities["gpu"] = 8
    async with first.connected(autoscaler.address):
        await autoscaler.create(two_sets())
        await report(autoscaler, gpu(1))
        assert "offers gpu:1" in (await _decided(autoscaler, "NO_ADAPTER")).summary
        async with second.connected(autoscaler.address):
            await settled(autoscaler, cpu=0, gpu=1)
    assert (len(first.starts), len(second.starts)) == (0, 1)


async def test_a_person_sets_one_set(autoscaler: Autoscaler, adapter: FakeAdapter) -> None:
    made = two_sets(max_replicas=3)
    del made.spec.rules[:]
    await autoscaler.create(made)
    request = api.SetReplicasRequest(name="endpoints/e", replicas=2, capability_set="gpu", current_replicas=0)
    await autoscaler.endpoints.SetReplicas(request, timeout=TIMEOUT)
    await settled(autoscaler, cpu=0, gpu=2)
    for replicas, named, expected in (
        (4, "gpu", "OUT_OF_RANGE"),
        (1, "", "INVALID_ARGUMENT"),
        (1, "tpu", "INVALID_ARGUMENT"),
    ):
        request = api.SetReplicasRequest(name="endpoints/e", replicas=replicas, capability_set=named)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await autoscaler.endpoints.SetReplicas(request, timeout=TIMEOUT)
        assert reason(refused.value)[0] == expected


async def test_sets_and_what_was_reported_outlive_a_restart_and_a_set_that_is_gone_is_drained(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    adapter = FakeAdapter(templates=("worker", "gpu-worker"))
    adapter.workers["gpu-worker"] = api.WorkerGroup(capabilities={"gpu": 1}, workers=4)
    async with serving(allocator) as address:
        async with running(tmp_path, address) as one, adapter.connected(one.address):
            await one.create(two_sets())
            await report(one, cpu(10), gpu(40))
            await settled(one, cpu=2, gpu=2)
            shown, rows = await one.get(), await one.replicas()
            assert autoscaler_view.endpoint_lines(shown)[2] == (
                "  gpu: 2 desired, 2 granted, 2 ready with 8 workers; each gpu=1"
            )
            sets, able = autoscaler_view.ENDPOINTS.column("sets"), autoscaler_view.REPLICAS.column("can")
            assert sets is not None
            assert able is not None
            assert sets.cell(shown) == "cpu 2/2, gpu 2/2"
            assert sorted(map(able.cell, rows)) == ["1 x cpu=1"] * 2 + ["4 x gpu=1"] * 2
            why = [line for taken in await one.history() for line in autoscaler_view.step_lines(taken)]
            assert any("40 that need gpu=1" in line for line in why)
            before = sorted((each.name, str(each.workers)) for each in rows)
        async with running(tmp_path, address) as one:
            found = [(each.id, each.desired_replicas) for each in (await one.status()).capability_sets]
            assert found == [("cpu", 2), ("gpu", 2)]
            assert sorted((each.name, str(each.workers)) for each in await one.replicas()) == before
            async with adapter.connected(one.address):
                await settled(one, cpu=2, gpu=2)  # nobody has reported tasks again: everything holds
                changed = await one.get()
                del changed.spec.capability_sets[1]
                await one.update(changed, "spec.capability_sets")
                await settled(one, cpu=2)
                await eventually(
                    one.replicas, lambda found: {each.capability_set for each in found} == {"cpu"}
                )
    assert len(adapter.starts) == 4


async def _decided(autoscaler: Autoscaler, code: str) -> api.Decision:
    """The newest decision, once it has a step of this code."""
    found = await eventually(
        autoscaler.history,
        lambda found: next(
            (one for one in found[:1] if any(enum_word(step, "code") == code for step in one.steps)), None
        ),
    )
    assert found is not None
    return found


async def _ticked(autoscaler: Autoscaler) -> None:
    """Wait for one more evaluation."""
    request = api.QuerySignalsRequest(name="endpoints/e")

    async def last() -> int:
        [one] = (await autoscaler.decisions.QuerySignals(request, timeout=TIMEOUT)).signals
        return one.samples[-1].end_time.ToNanoseconds()

    before = await last()
    await eventually(last, lambda found: found > before)
