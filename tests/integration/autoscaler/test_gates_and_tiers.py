"""What GPUs there are has to say to a live endpoint, warm spares, and adapters in tiers."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.errors import UnavailableError
from tests.support.autoscaler_app import Autoscaler, endpoint, running, scaling
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.waiting import eventually

GATE = api.GpuGate


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": ["GPU-0", "GPU-1"], "m": ["GPU-2", "GPU-3", "GPU-4"]})


@pytest.fixture
async def autoscaler(tmp_path: Path, allocator: FakeAllocator) -> AsyncGenerator[Autoscaler]:
    async with serving(allocator) as address, running(tmp_path, address) as one:
        one.watchers.queues["jobs"] = (50, 0)
        yield one


async def ready(autoscaler: Autoscaler) -> list[str]:
    """The adapters of the replicas that work."""
    ready = api.Replica.STATE_READY
    return sorted(one.adapter for one in await autoscaler.replicas() if one.state == ready)


async def codes(autoscaler: Autoscaler) -> set[str]:
    return {step.code for one in await autoscaler.history() for step in one.steps}


async def test_no_more_are_wanted_than_there_are_gpus_for(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """Work for many, GPUs for two: with the gate nothing waits in vain, and what becomes free is used."""
    wanted = scaling(high=4, gpus=1)
    wanted.spec.gpu_gate = GATE.GPU_GATE_CAP
    async with FakeAdapter().connected(autoscaler.address):
        await autoscaler.create(wanted)

        async def capped() -> bool:
            return await ready(autoscaler) == ["adapters/a"] * 2 and "CAPPED_BY_GPUS" in await codes(
                autoscaler
            )

        await eventually(capped, timeout=30)
        assert (await autoscaler.status()).desired_replicas == 2
        assert "NO_CAPACITY" not in await codes(autoscaler)
        allocator.nodes["n"].append("GPU-9")

        async def used() -> bool:
            return len(await ready(autoscaler)) == 3

        await eventually(used, timeout=30)


async def test_while_nobody_knows_how_many_gpus_are_free_none_more_are_wanted(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    allocator.failure = UnavailableError("the allocator is away")
    wanted = scaling(high=4, gpus=1)
    wanted.spec.gpu_gate = GATE.GPU_GATE_CAP
    async with FakeAdapter().connected(autoscaler.address):
        await autoscaler.create(wanted)

        async def held() -> bool:
            return "GPUS_UNKNOWN" in await codes(autoscaler)

        await eventually(held, timeout=30)
        assert (await autoscaler.status()).desired_replicas == 0


async def test_without_the_gate_replicas_start_without_reservations(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    wanted = endpoint(low=3, gpus=1)
    wanted.spec.gpu_gate = GATE.GPU_GATE_OFF
    async with FakeAdapter(node="").connected(autoscaler.address):
        await autoscaler.create(wanted)

        async def started() -> bool:
            return len(await ready(autoscaler)) == 3

        await eventually(started, timeout=30)
    assert not allocator.reservations
    assert all(not one.gpu_uuids for one in await autoscaler.replicas())


async def test_tiers_are_filled_in_turn_and_drained_in_reverse(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """Two on the primary node, for it has no more GPUs; what is above them goes elsewhere, and goes first."""
    wanted = endpoint(low=4, high=4, gpus=1)
    wanted.spec.template.tiers.add(adapter="adapters/primary")
    wanted.spec.template.tiers.add(adapter="adapters/elastic", max_replicas=2)
    async with AsyncExitStack() as stack:
        for name, node in (("elastic", "m"), ("primary", "n"), ("stranger", "m")):
            await stack.enter_async_context(FakeAdapter(name, node=node).connected(autoscaler.address))

        async def all_connected() -> bool:
            listed = await autoscaler.adapters.ListAdapters(api.ListAdaptersRequest(), timeout=10)
            return len(listed.adapters) == 3

        await eventually(all_connected)
        await autoscaler.create(wanted)
        await settled(autoscaler, ["elastic", "elastic", "primary", "primary"])
        now = await autoscaler.get()
        now.spec.min_replicas, now.spec.max_replicas = 1, 5
        await autoscaler.update(now)
        await autoscaler.set_replicas(5)

        async def full() -> bool:
            return bool({"NO_CAPACITY", "NO_ADAPTER"} & await codes(autoscaler))

        await eventually(full, timeout=30)
        await settled(autoscaler, ["elastic", "elastic", "primary", "primary"])
        await autoscaler.set_replicas(3)
        await settled(autoscaler, ["elastic", "primary", "primary"])
        await autoscaler.set_replicas(1)
        await settled(autoscaler, ["primary"])


async def settled(autoscaler: Autoscaler, adapters: Sequence[str]) -> None:
    async def so() -> bool:
        return await ready(autoscaler) == [f"adapters/{one}" for one in adapters]

    await eventually(so, timeout=30)
