"""P16: the autoscaler is killed (kill -9) at every step; afterwards nothing is leaked, and nothing was started twice."""

import random
import signal
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.wire import enum_word
from tests.support.autoscaler_app import Autoscaler, endpoint
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.program import AutoscalerProcess
from tests.support.waiting import eventually

WAIT = 30.0
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

    async def check() -> None:
        rows = {one.name: one for one in await autoscaler.replicas()}
        assert len(rows) == count
        assert all(one.state == api.Replica.STATE_READY for one in rows.values())
        assert set(adapter.alive) == set(rows)
        held = {one.name for one in allocator.reservations.values() if one.state == 2}
        assert held == {one.reservation for one in rows.values()}
        assert len(set(allocator.held)) == len(allocator.held) == count

    async def checked() -> bool:
        await check()
        return True

    await eventually(checked, timeout=WAIT)


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


async def test_what_was_granted_waits_for_adapters_that_come_back_later(
    process: AutoscalerProcess, allocator: FakeAllocator
) -> None:
    """The second life looks before any adapter has found it again: that is no reason to give GPUs back."""
    adapter = FakeAdapter()
    await process.start("autoscaler.replica.after_reserve=kill")
    async with process.called() as autoscaler:
        await autoscaler.create(WANTED)
        async with adapter.connected(process.address):
            assert await process.ended() == -signal.SIGKILL
    await process.start()
    async with process.called() as autoscaler:

        async def waits() -> bool:
            return any(
                enum_word(step, "code") == "NO_ADAPTER"
                for one in await autoscaler.history()
                for step in one.steps
            )

        await eventually(waits, timeout=WAIT)
        async with adapter.connected(process.address):
            await settled(autoscaler, allocator, adapter, 2)
    assert len(allocator.reservations) == 2
    assert allocator.calls["ReleaseReservation"] == 0


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
            await eventually(lambda: not allocator.held, timeout=WAIT)

            async def gone() -> bool:
                answer = await autoscaler.endpoints.ListEndpoints(api.ListEndpointsRequest(), timeout=5)
                return not answer.endpoints

            await eventually(gone, timeout=WAIT)
    assert not adapter.alive


async def test_killed_at_any_moment_again_and_again(
    process: AutoscalerProcess, allocator: FakeAllocator
) -> None:
    """Orders up and down, and a kill every moment; the end is what the last order said."""
    source, adapter = random.Random(7), FakeAdapter()
    await process.start()
    async with adapter.connected(process.address):
        async with process.called() as autoscaler:
            await autoscaler.create(endpoint(high=4, gpus=1))
        for _ in range(4):
            async with process.called() as autoscaler:
                for _ in range(source.randint(1, 3)):
                    await autoscaler.set_replicas(source.randint(0, 4))
                await process.kill()
            await process.start()
        async with process.called() as autoscaler:
            await autoscaler.set_replicas(3)
            await settled(autoscaler, allocator, adapter, 3)
    assert set(adapter.starts.values()) == {1}


async def test_a_living_replica_survives_its_autoscaler(
    process: AutoscalerProcess, allocator: FakeAllocator
) -> None:
    """Until its adapter is heard of again it is UNKNOWN; it is neither replaced nor released, and its lease is renewed."""
    adapter = FakeAdapter()
    await process.start()
    async with adapter.connected(process.address), process.called() as autoscaler:
        await autoscaler.create(WANTED)
        await settled(autoscaler, allocator, adapter, 2)
    await process.kill()
    before = allocator.calls["RenewReservation"]
    await process.start()
    async with process.called() as autoscaler:
        rows = await autoscaler.replicas()
        assert [one.state for one in rows] == [api.Replica.STATE_UNKNOWN] * 2
        await eventually(lambda: allocator.calls["RenewReservation"] >= before + 2)
        async with adapter.connected(process.address):
            await settled(autoscaler, allocator, adapter, 2)
    assert set(adapter.starts.values()) == {1}
    assert allocator.calls["ReleaseReservation"] == 0


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
        assert await process.ended(10.0) == 0
    assert adapter.alive, "the replicas are its adapter's"
