"""Replicas move to make room for who waits: the next one is ready before the old one goes, or nothing changes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from gpuscale.allocator.usecases import rebalancing
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client import AsyncClient, connect_async
from gpuscale.common.wire import to_duration
from tests.support.allocator import allocator as real_allocator
from tests.support.autoscaler_app import Autoscaler, endpoint, running
from tests.support.fake_adapter import READY, FakeAdapter
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.fake_fleet import serving as serving_fleet
from tests.support.waiting import eventually


@dataclass
class Site:
    """Two hosts with two GPUs each: on one a replica, on the other somebody who stays; and a gang that waits for two."""

    autoscaler: Autoscaler
    client: AsyncClient
    here: FakeAdapter
    there: FakeAdapter
    node: str
    gang: asyncio.Future[allocator_api.ReserveResponse]

    async def ready(self) -> int:
        """How many replicas work."""
        return (await self.autoscaler.status()).ready_replicas


async def _reserve(
    client: AsyncClient, count: int, nodes: list[str], wait: float
) -> allocator_api.ReserveResponse:
    request = allocator_api.ReserveRequest(
        request_id=str(uuid4()),
        holder="somebody",
        ask=allocator_api.Ask(gpu_count=count, nodes=nodes),
        wait=to_duration(wait),
    )
    return await client.allocator.Reserve(request, timeout=wait + 10)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    async with AsyncExitStack() as stack:
        fleet = FakeFleet(node_message("b", count=2), node_message("c", count=2))
        fleet_address = await stack.enter_async_context(serving_fleet(fleet))
        address = await stack.enter_async_context(
            real_allocator(tmp_path / "allocator", fleet_address, preemption_min_runtime_seconds=0)
        )
        autoscaler = await stack.enter_async_context(running(tmp_path / "autoscaler", address))
        client = await stack.enter_async_context(connect_async(address))
        adapters = {one: FakeAdapter(f"of-{one}", node=one) for one in ("b", "c")}
        for one in adapters.values():
            await stack.enter_async_context(one.connected(autoscaler.address))
            await eventually(lambda one=one: one.revisions)
        await autoscaler.create(endpoint(low=1, high=1, gpus=1, movable=to_duration(5)))
        await eventually(lambda: any(one.alive for one in adapters.values()))
        [here] = [name for name, one in adapters.items() if one.alive]
        [there] = adapters.keys() - {here}
        adapters[there].makes_ready = False
        await _reserve(client, 1, [f"nodes/{there}"], 0)
        gang = asyncio.ensure_future(_reserve(client, 2, [], 60))
        found = Site(autoscaler, client, adapters[here], adapters[there], f"nodes/{here}", gang)
        await eventually(lambda: _waits(client))
        yield found
        gang.cancel()


async def _waits(client: AsyncClient) -> bool:
    found = await client.capacity.PlanRebalance(allocator_api.PlanRebalanceRequest())
    return any(one.moves for one in found.plans)


async def test_the_next_one_is_ready_before_the_old_one_goes_and_who_waited_is_served(site: Site) -> None:
    await site.client.capacity.ApplyRebalance(allocator_api.ApplyRebalanceRequest())
    await eventually(lambda: site.there.alive)
    assert (await site.ready(), list(site.here.states.values()), site.gang.done()) == (1, [READY], False)
    [new] = site.there.alive
    site.there.set(new, READY)
    granted = (await site.gang).reservation
    assert {gpu.node_name for gpu in granted.gpus} == {site.node}
    assert not site.here.alive
    assert (await site.ready(), len(site.here.starts), len(site.there.starts)) == (1, 1, 1)
    [gone] = [one for one in await site.autoscaler.replicas(ended=True) if one.node == site.node]
    assert gone.reason == "moved for somebody, which asks for 2 GPUs"


async def test_a_replica_whose_next_one_does_not_get_ready_stays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebalancing, "LIMIT", 5.0)
    await site.client.capacity.ApplyRebalance(allocator_api.ApplyRebalanceRequest())
    await eventually(lambda: site.there.alive)
    await eventually(lambda: not site.there.alive)
    assert (await site.ready(), list(site.here.states.values()), site.gang.done()) == (1, [READY], False)
    assert not any(one.HasField("revoke_time") for one in await site.autoscaler.replicas())
