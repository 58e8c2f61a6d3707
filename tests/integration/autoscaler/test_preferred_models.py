"""GPU models in order of preference: who gets which with a real allocator, and how many replicas that takes."""

from collections import Counter
from pathlib import Path
from typing import Any

from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.views.autoscaler import REPLICAS, endpoint_lines
from gpuscale.common.wire import to_duration
from tests.integration.autoscaler.real_gpus import Site, site
from tests.support.allocator import Client
from tests.support.autoscaler_app import TIMEOUT
from tests.support.fake_fleet import gpu_message, node_message
from tests.support.waiting import eventually

JOBS = "endpoints/jobs"
MODELS = [api.ModelWeight(model="H100", weight=1), api.ModelWeight(model="a100", weight=0.5)]


def node(name: str, model: str, count: int) -> monitor_api.Node:
    gpus = [gpu_message(f"{name}-{index}", index) for index in range(count)]
    for gpu in gpus:
        gpu.model = model
    return node_message(name, *gpus)


FAST, SLOW = node("fast", "NVIDIA H100 80GB HBM3", 1), node("slow", "NVIDIA A100-SXM4-80GB", 4)


async def create(one: Site, wanted: int, **fields: Any) -> None:
    one.autoscaler.watchers.queues["jobs"] = (wanted * 10, 0)
    for adapter in one.adapters.values():
        adapter.finishes = True
    await one.create("jobs", **{"high": 6, "models": MODELS, **fields})


async def on(one: Site, **models: int) -> None:
    """Wait until so many replicas are on each model."""

    async def reached() -> bool:
        return Counter(row.model.model for row in await one.running(JOBS)) == models

    await eventually(reached)


async def test_the_preferred_model_first_then_the_next_and_the_last_goes_first(tmp_path: Path) -> None:
    async with site(tmp_path, FAST, SLOW) as one:
        await create(one, 2)
        await on(one, H100=1, a100=2)
        assert "1 on a100 (0.5); no H100 (1): " in await one.said(JOBS, "SPILLED")
        shown = await one.autoscaler.get(JOBS)
        assert shown.status.granted_capacity == 2
        assert "3 granted (2 by weight), " in endpoint_lines(shown)[0]

        async def told() -> bool:
            return (await one.autoscaler.get(JOBS)).status.summary.endswith("; 2 by weight of 3")

        await eventually(told)
        column = REPLICAS.column("model")
        assert column is not None
        rows = await one.autoscaler.replicas(parent=JOBS)
        assert sorted(map(column.cell, rows)) == ["H100 (1)", "a100 (0.5)", "a100 (0.5)"]

        one.autoscaler.watchers.queues["jobs"] = (10, 0)
        await on(one, H100=1)
        assert await one.said(JOBS, "WEIGHED") == "1 by weight of 1"

        one.autoscaler.watchers.queues["jobs"] = (40, 0)
        await on(one, H100=1, a100=4)
        assert await one.said(JOBS, "NO_CAPACITY")
        assert (await one.autoscaler.get(JOBS)).status.desired_replicas == 6, "max_replicas holds"
        same = await one.autoscaler.decisions.VerifyDecision(
            api.VerifyDecisionRequest(
                name=next(d.name for d in await one.autoscaler.history(JOBS) if d.observations)
            ),
            timeout=TIMEOUT,
        )
        assert same.equal, same.differences


async def test_a_replica_stays_until_it_is_given_up_and_those_that_follow_get_the_preferred(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, FAST, SLOW) as one:
        client = Client(one.client.allocator)
        held = await client.reserve(models=["H100"])
        await create(one, 1)
        await on(one, a100=2)
        await client.release(held)
        evaluated = await one.autoscaler.decisions.Evaluate(api.EvaluateRequest(name=JOBS), timeout=TIMEOUT)
        assert (evaluated.decision.before, evaluated.decision.wanted) == (2, 2)
        one.autoscaler.watchers.queues["jobs"] = (20, 0)
        await on(one, H100=1, a100=2)
        one.autoscaler.watchers.queues["jobs"] = (10, 0)
        await on(one, H100=1)


async def test_one_that_found_no_room_takes_whichever_model_has_some_later(tmp_path: Path) -> None:
    async with site(tmp_path, FAST, SLOW) as one:
        client = Client(one.client.allocator)
        held = await client.reserve(models=["H100"])
        await create(one, 4)
        await on(one, a100=4)
        assert await one.said(JOBS, "NO_CAPACITY")
        await client.release(held)
        await on(one, H100=1, a100=4)


async def test_who_waits_in_the_queue_takes_what_becomes_free_first(tmp_path: Path) -> None:
    async with site(tmp_path, FAST, SLOW) as one:
        client = Client(one.client.allocator)
        await client.reserve(models=["H100"])
        held = await client.reserve(4, models=["A100"])
        await create(one, 1, low=1, high=1, priority=1, preempt_after=to_duration(3600))
        assert "before it in the allocator's queue" in await one.said(JOBS, "NO_CAPACITY")
        await client.release(held)
        await on(one, a100=1)
        assert await one.said(JOBS, "CLAMPED_TO_MAX") == "max_replicas is 1", "half of what is wanted"
