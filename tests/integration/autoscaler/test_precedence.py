"""Who gives way where GPUs are short: a real allocator, whose queue keeps the place, and adapters that say when work is finished."""

import asyncio
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain import precedence
from gpuscale.common.wire import to_duration
from tests.integration.autoscaler.real_gpus import REPLICA, site
from tests.support.allocator import Client
from tests.support.autoscaler_app import TIMEOUT
from tests.support.fake_fleet import gpu_message, node_message
from tests.support.waiting import eventually

BATCH, CHAT = "endpoints/batch", "endpoints/chat"


async def test_a_lower_endpoint_gives_way_down_to_its_min_and_nobody_else_gets_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precedence, "HOLD", 5.0)
    async with site(tmp_path, node_message("n", count=4)) as one:
        one.autoscaler.watchers.queues["jobs"] = (40, 0)
        await one.create("batch", low=1)
        await one.count(BATCH, 4)

        somebody = asyncio.create_task(Client(one.client.allocator).reserve(wait=to_duration(60)))
        await one.create("chat", low=2, high=2, priority=10)
        await one.count(BATCH, 2)
        assert "endpoints/batch gives way, and keeps 2" in await one.said(CHAT, "PREEMPTS")
        assert "gives way to endpoints/chat (priority 10): 2 at most" in await one.said(BATCH, "GIVES_WAY")
        assert "endpoints/batch gives way" in (await one.autoscaler.get(CHAT)).status.summary
        assert not await one.running(CHAT), "the others finish their work first"
        assert not somebody.done()

        one.adapters["n"].finish()
        await one.count(CHAT, 2)
        assert not somebody.done(), "what was freed was kept for those that it was freed for"
        ended = [row for row in await one.autoscaler.replicas(ended=True, parent=BATCH) if row.end_reason]
        assert {(row.end_reason, row.reason) for row in ended} == {
            (REPLICA.END_REASON_PREEMPTED, "gives way to endpoints/chat (priority 10)")
        }
        await one.said(
            BATCH, "NO_CAPACITY"
        )  # after its hold it wants more again, and takes nothing from the higher one
        assert len(await one.running(CHAT)) == 2

        await one.autoscaler.delete(CHAT)
        await asyncio.wait_for(somebody, 60)  # it was there before those that batch wants again
        await one.count(BATCH, 3)


async def test_only_gpus_that_help_are_freed_all_of_one_node(tmp_path: Path) -> None:
    """Two GPUs of one node are asked for, of a model that one node has; what runs elsewhere is let be."""
    other = [gpu_message(f"a-{index}", index) for index in range(2)]
    for gpu in other:
        gpu.model = "NVIDIA A100-SXM4-80GB"
    async with site(
        tmp_path, node_message("b", count=2), node_message("a", *other), node_message("c", count=2)
    ) as one:
        one.autoscaler.watchers.queues["jobs"] = (60, 0)
        await one.create("batch", low=0, high=6)
        await one.count(BATCH, 6)
        ask = allocator_api.Ask(gpu_count=2, models=["A100"])
        await one.create("chat", low=2, high=2, gpus=0, ask=ask, priority=1)
        await one.count(BATCH, 4)
        assert {row.node for row in await one.running(BATCH)} == {"nodes/b", "nodes/c"}
        one.adapters["a"].finish()
        await one.count(CHAT, 1)


async def test_others_give_way_only_after_the_time_that_is_stated(tmp_path: Path) -> None:
    async with site(tmp_path, node_message("n", count=1)) as one:
        one.autoscaler.watchers.queues["jobs"] = (10, 0)
        await one.create("batch", low=0, high=1)
        await one.count(BATCH, 1)
        await one.create("chat", low=1, high=1, priority=10, preempt_after=to_duration(3600))
        await one.said(CHAT, "NO_CAPACITY")
        chat = await one.autoscaler.get(CHAT)
        assert len(await one.running(BATCH)) == 1
        assert "gives way" not in chat.status.summary
        chat.spec.ClearField("preempt_after")
        await one.autoscaler.update(chat, "spec.preempt_after")
        await one.count(BATCH, 0)


async def test_a_place_in_the_queue_is_left_with_the_replica(tmp_path: Path) -> None:
    """One that is not wanted any more holds nothing, and the next in the line is served."""
    async with site(tmp_path, node_message("n", count=1)) as one:
        held = await Client(one.client.allocator).reserve()
        await one.create("chat", low=1, high=1, priority=10)
        assert "0 before it in the allocator's queue" in await one.said(CHAT, "NO_CAPACITY")
        quotas = await one.client.quotas.ListQuotas(allocator_api.ListQuotasRequest())
        assert sum(quota.waiting_count for quota in quotas.quotas) == 1
        await one.autoscaler.delete(CHAT)

        async def gone() -> bool:
            listed = await one.autoscaler.endpoints.ListEndpoints(api.ListEndpointsRequest(), timeout=TIMEOUT)
            return not listed.endpoints

        await eventually(gone)
        waiting = asyncio.create_task(Client(one.client.allocator).reserve(wait=to_duration(30)))
        await Client(one.client.allocator).release(held)
        await asyncio.wait_for(waiting, 60)
