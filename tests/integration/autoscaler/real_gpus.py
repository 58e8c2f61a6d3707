"""A real allocator over nodes that a test states, adapters that say when work is finished, and the autoscaler."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscale.api.autoscaler import v1 as api
from gpuscale.client import AsyncClient, connect_async
from gpuscale.common.wire import enum_word, to_duration
from tests.support.allocator import allocator as real_allocator
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, running
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_fleet import FakeFleet, serving
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

        async def reached() -> bool:
            return len(await self.running(name)) == count

        await eventually(reached)

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
