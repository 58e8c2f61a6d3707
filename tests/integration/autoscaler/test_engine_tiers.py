"""What GPUs there are has to say to a live endpoint; engines that give them out, alone and in tiers above a reserved pool."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.errors import UnavailableError
from gpuscale.common.wire import enum_word
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, running, scaling
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.waiting import eventually

GIVES = api.AdapterCapabilities(gives_gpus=True, picks_victims=True, drains=True)
READY = api.Replica.STATE_READY


@pytest.fixture
async def autoscaler(tmp_path: Path, allocator: FakeAllocator) -> AsyncGenerator[Autoscaler]:
    async with serving(allocator) as address, running(tmp_path, address) as one:
        one.watchers.queues["jobs"] = (50, 0)
        yield one


def engine(name: str) -> FakeAdapter:
    adapter = FakeAdapter(name, node="")
    adapter.register.kind = "ray"
    adapter.register.capabilities.CopyFrom(GIVES)
    return adapter


async def settled(autoscaler: Autoscaler, **expected: int) -> None:
    """Wait until so many replicas of each adapter are ready."""
    await eventually(
        autoscaler.replicas,
        lambda found: (
            Counter(one.adapter.removeprefix("adapters/") for one in found if one.state == READY) == expected
        ),
    )


async def connected(autoscaler: Autoscaler, stack: AsyncExitStack, *adapters: FakeAdapter) -> None:
    for one in adapters:
        await stack.enter_async_context(one.connected(autoscaler.address))
    await eventually(lambda: autoscaler.connected(len(adapters)))


async def test_replicas_of_an_engine_take_no_reservation(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """It is told how many GPUs they need, and no more; and nothing says that GPUs were reserved."""
    adapter = engine("rays")
    async with AsyncExitStack() as stack:
        await connected(autoscaler, stack, adapter)
        await autoscaler.create(endpoint(low=3, gpus=2))
        await settled(autoscaler, rays=3)
        assert {(line.gpu_count, len(line.gpu_uuids), line.fence) for line in adapter.told.values()} == {
            (2, 0, 0)
        }
        assert (await autoscaler.history())[-1].granted == 3  # the first; later ones stay
        texts = [step.text for one in await autoscaler.history() for step in one.steps]
        assert not any("reserved" in text for text in texts)
        listed = await autoscaler.adapters.ListAdapters(api.ListAdaptersRequest(), timeout=TIMEOUT)
        assert [(one.kind, one.capabilities) for one in listed.adapters] == [("ray", GIVES)]
    assert allocator.calls["Reserve"] == 0


async def test_the_gate_does_not_cap_what_an_engine_gives(autoscaler: Autoscaler) -> None:
    """How many GPUs it has nobody here knows: what it has no room for waits there, and is seen to wait."""
    wanted = scaling(high=3, gpus=1)
    wanted.spec.gpu_gate = api.GpuGate.GPU_GATE_CAP
    adapter = engine("rays")
    adapter.makes_ready = False
    async with adapter.connected(autoscaler.address):
        await autoscaler.create(wanted)
        await eventually(
            autoscaler.replicas,
            lambda found: [one.state for one in found] == [api.Replica.STATE_STARTING] * 3,
        )
        codes = {enum_word(step, "code") for one in await autoscaler.history() for step in one.steps}
        assert "CAPPED_BY_GPUS" not in codes


async def test_a_reserved_pool_first_an_engine_above_it_drained_in_reverse(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    wanted = endpoint(low=1, high=6, gpus=1)
    wanted.spec.template.tiers.add(adapter="adapters/own")
    wanted.spec.template.tiers.add(adapter="adapters/cloud", max_replicas=3)
    async with AsyncExitStack() as stack:
        await connected(autoscaler, stack, engine("cloud"), FakeAdapter("own", node="n"), engine("other"))
        await autoscaler.create(wanted)
        await settled(autoscaler, own=1)
        await autoscaler.set_replicas(4)
        await settled(autoscaler, own=2, cloud=2)
        assert len(allocator.held) == 2
        await autoscaler.set_replicas(6)
        await settled(autoscaler, own=2, cloud=3)  # the sixth has no place
        await autoscaler.set_replicas(2)
        await settled(autoscaler, own=2)
        allocator.nodes["n"].append("GPU-2")
        await autoscaler.set_replicas(3)
        await settled(autoscaler, own=3)  # what became free there is used before the cloud
        await autoscaler.set_replicas(1)
        await settled(autoscaler, own=1)
        await eventually(lambda: len(allocator.held) == 1)


async def test_without_a_tier_an_engine_takes_what_no_node_has_gpus_for(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """Reserved GPUs come first; an allocator that is away moves nothing to the engine."""
    async with AsyncExitStack() as stack:
        await connected(autoscaler, stack, engine("cloud"), FakeAdapter("own", node="n"))
        await autoscaler.create(endpoint(low=3, high=6, gpus=1))
        await settled(autoscaler, own=2, cloud=1)
        allocator.failure = UnavailableError("the allocator is away")
        await autoscaler.set_replicas(5)
        await eventually(
            autoscaler.latest,
            lambda found: "ALLOCATOR_UNAVAILABLE" in {enum_word(one, "code") for one in found.steps},
        )
        await settled(autoscaler, own=2, cloud=1)
        allocator.failure = None
        await settled(autoscaler, own=2, cloud=3)


async def ready(autoscaler: Autoscaler) -> list[str]:
    """The adapters of the replicas that work."""
    ready = api.Replica.STATE_READY
    return sorted(one.adapter for one in await autoscaler.replicas() if one.state == ready)


async def codes(autoscaler: Autoscaler) -> set[str]:
    return {enum_word(step, "code") for one in await autoscaler.history() for step in one.steps}


async def test_no_more_are_wanted_than_there_are_gpus_for(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """Work for many, GPUs for two: with the gate nothing waits in vain, and what becomes free is used once that is known."""
    wanted = scaling(high=4, gpus=1)
    wanted.spec.gpu_gate = api.GpuGate.GPU_GATE_CAP
    async with FakeAdapter().connected(autoscaler.address):
        await autoscaler.create(wanted)

        async def capped() -> bool:
            return await ready(autoscaler) == ["adapters/a"] * 2 and "CAPPED_BY_GPUS" in await codes(
                autoscaler
            )

        await eventually(capped)
        assert (await autoscaler.status()).desired_replicas == 2
        assert "NO_CAPACITY" not in await codes(autoscaler)
        allocator.nodes["n"].append("GPU-9")
        allocator.failure = UnavailableError("the allocator is away")
        await eventually(lambda: codes(autoscaler), lambda found: "GPUS_UNKNOWN" in found)
        assert (await autoscaler.status()).desired_replicas == 2
        allocator.failure = None
        await eventually(lambda: ready(autoscaler), lambda found: len(found) == 3)
