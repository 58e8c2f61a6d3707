"""P16: the autoscaler is killed (kill -9); afterwards nothing is leaked, and nothing was started twice.

Deaths at each step of a start and of an end are those of test_killed_while_moving.py, at any moment, of the same parts on virtual
time, those of tests/property/autoscaler/test_scaling_world.py.
"""

import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from tests.support.autoscaler_app import Autoscaler, endpoint
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.program import AutoscalerProcess
from tests.support.waiting import eventually


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": [f"GPU-{index}" for index in range(4)]})


@pytest.fixture
async def process(tmp_path: Path, allocator: FakeAllocator) -> AsyncGenerator[AutoscalerProcess]:
    async with serving(allocator) as address, AutoscalerProcess(tmp_path, address) as one:
        yield one


async def settled(autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter) -> bool:
    """Whether rows, processes and reservations are the same two things."""
    rows = {one.name: one for one in await autoscaler.replicas()}
    assert len(rows) == 2
    assert all(one.state == api.Replica.STATE_READY for one in rows.values())
    assert set(adapter.alive) == set(rows)
    held = {one.name for one in allocator.reservations.values() if one.state == 2}
    assert held == {one.reservation for one in rows.values()}
    return len(set(allocator.held)) == len(allocator.held) == 2


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
            await eventually(lambda: settled(autoscaler, allocator, adapter))
            assert {one.model.model for one in await autoscaler.replicas()} == {"A100"}
    assert len(allocator.reservations) == 2, "what was granted to the last life is not asked for anew"


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
