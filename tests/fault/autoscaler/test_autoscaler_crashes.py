"""P16: the autoscaler is killed (kill -9) at every step; afterwards nothing is leaked, and nothing was started twice.

Deaths at any moment, of the same parts on virtual time, are in tests/property/autoscaler/test_scaling_world.py.
"""

import signal
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.program import AutoscalerProcess
from tests.support.waiting import eventually

WANTED = endpoint(low=2, high=4, gpus=1)


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": [f"GPU-{index}" for index in range(4)]})


@pytest.fixture
async def process(tmp_path: Path, allocator: FakeAllocator) -> AsyncGenerator[AutoscalerProcess]:
    async with serving(allocator) as address, AutoscalerProcess(tmp_path, address) as one:
        yield one


async def settled(autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter, count: int) -> None:
    """Wait until rows, processes and reservations are the same `count` things."""

    async def checked() -> bool:
        rows = {one.name: one for one in await autoscaler.replicas()}
        assert len(rows) == count
        assert all(one.state == api.Replica.STATE_READY for one in rows.values())
        assert set(adapter.alive) == set(rows)
        held = {one.name for one in allocator.reservations.values() if one.state == 2}
        assert held == {one.reservation for one in rows.values()}
        assert len(set(allocator.held)) == len(allocator.held) == count
        return True

    await eventually(checked)


async def test_killed_at_each_step_of_a_start_life_after_life(
    process: AutoscalerProcess, allocator: FakeAllocator
) -> None:
    adapter, request_id = FakeAdapter(), str(uuid.uuid4())
    await process.start("autoscaler.replica.after_intent=kill")
    async with process.called() as autoscaler:
        await autoscaler.create(WANTED, request_id)
    async with adapter.connected(process.address):
        assert await process.ended() == -signal.SIGKILL
        for point in ("replica.after_reserve", "replica.after_record", "adapter.before_send"):
            await process.start(f"autoscaler.{point}=kill")
            assert await process.ended() == -signal.SIGKILL
        await process.start()
        async with process.called() as autoscaler:
            await autoscaler.create(WANTED, request_id)
            await settled(autoscaler, allocator, adapter, 2)
            assert len(allocator.reservations) == 2, "each life asks for what the first was granted"
            assert set(adapter.starts.values()) == {1}


async def test_killed_between_the_models_that_it_would_like(
    process: AutoscalerProcess, allocator: FakeAllocator
) -> None:
    """The next life asks for the model that the last asked for, is told the same GPUs, and knows what they count for."""
    allocator.models = dict.fromkeys(allocator.nodes["n"], "NVIDIA A100")
    models, adapter = [api.ModelWeight(model=one, weight=1) for one in ("H100", "A100")], FakeAdapter()
    await process.start("autoscaler.replica.after_reserve=kill")
    async with process.called() as autoscaler:
        await autoscaler.create(endpoint(low=2, high=4, gpus=1, models=models))
    async with adapter.connected(process.address):
        assert await process.ended() == -signal.SIGKILL
        await process.start("autoscaler.replica.after_intent=kill")
        assert await process.ended() == -signal.SIGKILL
        await process.start()
        async with process.called() as autoscaler:
            await settled(autoscaler, allocator, adapter, 2)
            assert {one.model.model for one in await autoscaler.replicas()} == {"A100"}
    assert len(allocator.reservations) == 2, "what was granted to the last life is not asked for anew"


async def test_killed_while_gpus_are_given_back(process: AutoscalerProcess, allocator: FakeAllocator) -> None:
    adapter = FakeAdapter()
    await process.start("autoscaler.replica.before_release=kill")
    async with adapter.connected(process.address):
        async with process.called() as autoscaler:
            await autoscaler.create(WANTED)
            await settled(autoscaler, allocator, adapter, 2)
            await autoscaler.delete()
        assert await process.ended() == -signal.SIGKILL
        await process.start("autoscaler.replica.after_release=kill")
        assert await process.ended() == -signal.SIGKILL
        await process.start()
        async with process.called() as autoscaler:
            await eventually(lambda: not allocator.held)

            async def gone() -> bool:
                answer = await autoscaler.endpoints.ListEndpoints(api.ListEndpointsRequest(), timeout=TIMEOUT)
                return not answer.endpoints

            await eventually(gone)
    assert not adapter.alive


async def test_no_second_one_starts_on_its_state_and_it_ends_when_asked_to(
    tmp_path: Path, process: AutoscalerProcess
) -> None:
    await process.start()
    adapter = FakeAdapter()
    async with adapter.connected(process.address), process.called() as autoscaler:
        async with AutoscalerProcess(tmp_path, "127.0.0.1:1") as second:
            await second.start()
            assert await second.ended() == 1
        await autoscaler.create(endpoint(low=1, high=1))
        await eventually(lambda: adapter.alive)
        process.terminate()
        assert await process.ended() == 0
    assert adapter.alive, "the replicas are its adapter's"
