"""Who gives way where GPUs are short, and who gets which model: a real allocator over nodes that a test states, and adapters that say when work is finished."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.autoscaler.domain import precedence
from gpuscale.cli.views.autoscaler import REPLICAS, endpoint_lines
from gpuscale.client import AsyncClient, connect_async
from gpuscale.common.wire import enum_word, to_duration
from tests.support.allocator import Client
from tests.support.allocator import allocator as real_allocator
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, running
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message, serving
from tests.support.waiting import eventually

REPLICA = api.Replica


@dataclass
class Site:
    """An allocator over some nodes, an adapter on each, and the autoscaler."""

    autoscaler: Autoscaler
    client: AsyncClient
    adapters: dict[str, FakeAdapter]

    async def running(self, name: str) -> list[api.Replica]:
        """The replicas of an endpoint that have GPUs and are not asked to stop."""
        found = await self.autoscaler.replicas(parent=name)
        return [one for one in found if one.gpu_uuids and one.state != REPLICA.STATE_DRAINING]

    async def count(self, name: str, count: int) -> None:
        """Wait until so many of an endpoint run."""
        await eventually(lambda: self.running(name), lambda found: len(found) == count)

    async def said(self, name: str, code: str) -> str:
        """The text of the newest step with a code in a decision of an endpoint."""
        request = api.ListDecisionsRequest(parent=name, page_size=1000)

        async def found() -> str:
            listed = (await self.autoscaler.decisions.ListDecisions(request, timeout=TIMEOUT)).decisions
            steps = (step for one in listed for step in one.steps if enum_word(step, "code") == code)
            return next((step.text for step in steps), "")

        return await eventually(found)

    async def create(self, name: str, **fields: Any) -> None:
        """An endpoint that wants a replica for each ten messages of `jobs`, of one GPU each unless it is said otherwise."""
        spec = {one: fields.pop(one) for one in ("priority", "preempt_after") if one in fields}
        per_ten = api.Rule(id="t", signal="depth", target=api.TargetRule(value=10))
        made = endpoint(per_ten, name=name, **{"gpus": 1, "lease_ttl": to_duration(30), **fields})
        made.spec.MergeFrom(api.EndpointSpec(down=api.Pace(stabilization=to_duration(0)), **spec))
        await self.autoscaler.create(made)


@asynccontextmanager
async def site(folder: Path, *nodes: Any) -> AsyncGenerator[Site]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(serving(FakeFleet(*nodes)))
        address = await stack.enter_async_context(real_allocator(folder / "allocator", fleet))
        autoscaler = await stack.enter_async_context(running(folder / "autoscaler", address))
        client = await stack.enter_async_context(connect_async(address))
        names = [one.name.removeprefix("nodes/") for one in nodes]
        adapters = {name: FakeAdapter(name, node=name) for name in names}
        for adapter in adapters.values():
            adapter.finishes = False
            await stack.enter_async_context(adapter.connected(autoscaler.address))
        await eventually(lambda: all(one.revisions for one in adapters.values()))
        yield Site(autoscaler, client, adapters)


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
        # After its hold it wants more again, and takes nothing from the higher one.
        await one.said(BATCH, "NO_CAPACITY")
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
        assert "next in the allocator's queue" in await one.said(CHAT, "NO_CAPACITY")
        quotas = await one.client.quotas.ListQuotas(allocator_api.ListQuotasRequest())
        assert sum(quota.waiting_count for quota in quotas.quotas) == 1
        await one.autoscaler.delete(CHAT)
        await eventually(one.autoscaler.gone)
        waiting = asyncio.create_task(Client(one.client.allocator).reserve(wait=to_duration(30)))
        await Client(one.client.allocator).release(held)
        await asyncio.wait_for(waiting, 60)


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
    await eventually(
        lambda: one.running(JOBS), lambda found: Counter(row.model.model for row in found) == models
    )


async def evaluations(one: Site, but: int = 0) -> int:
    """How many decisions there were, each as often as it was taken."""
    return sum(decision.count for decision in await one.autoscaler.history(JOBS)) - but


async def test_the_preferred_model_first_then_the_next_and_the_last_goes_first(tmp_path: Path) -> None:
    async with site(tmp_path, FAST, SLOW) as one:
        await create(one, 2)
        await on(one, H100=1, a100=2)
        assert "1 on a100 (0.5); no H100 (1): " in await one.said(JOBS, "SPILLED")
        shown = await one.autoscaler.get(JOBS)
        assert shown.status.granted_capacity == 2
        assert "3 granted (2 by weight), " in endpoint_lines(shown)[0]
        await eventually(
            lambda: one.autoscaler.get(JOBS),
            lambda found: found.status.summary.endswith("; 2 by weight of 3"),
        )
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
        await eventually(lambda: one.autoscaler.wants(6, JOBS))
        before = await evaluations(one)
        await eventually(lambda: evaluations(one, before))
        assert await one.autoscaler.wants(6, JOBS), "and no more: max_replicas holds"
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
        assert "next in the allocator's queue" in await one.said(JOBS, "NO_CAPACITY")
        await client.release(held)
        await on(one, a100=1)
        assert await one.said(JOBS, "CLAMPED_TO_MAX") == "max_replicas is 1", "half of what is wanted"
