"""An adapter that never comes back: an operator gives it up, and nothing stays held for it."""

from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.loop import hub
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, reason, running
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.waiting import eventually

WAIT = 30.0
State = api.Replica.State


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": ["GPU-0", "GPU-1"], "m": ["GPU-2", "GPU-3"]})


@pytest.fixture
async def autoscaler(tmp_path: Path, allocator: FakeAllocator) -> AsyncGenerator[Autoscaler]:
    async with serving(allocator) as address, running(tmp_path, address) as one:
        yield one


async def forget(autoscaler: Autoscaler, name: str = "adapters/a") -> list[str]:
    answer = await autoscaler.adapters.ForgetAdapter(api.ForgetAdapterRequest(name=name), timeout=TIMEOUT)
    return list(answer.replicas)


async def listed(autoscaler: Autoscaler) -> list[api.Adapter]:
    return list((await autoscaler.adapters.ListAdapters(api.ListAdaptersRequest(), timeout=TIMEOUT)).adapters)


async def disconnected(autoscaler: Autoscaler) -> bool:
    return [one.state for one in await listed(autoscaler)] == [api.Adapter.STATE_DISCONNECTED]


async def test_what_a_forgotten_adapter_had_ends_as_failed_and_another_takes_over(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    lost, other = FakeAdapter("a", node="n"), FakeAdapter("b", node="m")
    async with lost.connected(autoscaler.address):
        await autoscaler.create(endpoint(low=2, high=2, gpus=1))
        await eventually(lambda: len(lost.alive) == 2, timeout=WAIT)
        names = set(lost.alive)
    await eventually(lambda: disconnected(autoscaler), timeout=WAIT)
    async with other.connected(autoscaler.address):

        async def both_known() -> bool:
            return len(await listed(autoscaler)) == 2

        await eventually(both_known, timeout=WAIT)
        assert not other.alive, "while the first may come back, nothing takes the place of its replicas"
        assert set(await forget(autoscaler)) == names
        await eventually(lambda: len(other.alive) == 2, timeout=WAIT)
        await eventually(lambda: sorted(allocator.held) == ["GPU-2", "GPU-3"], timeout=WAIT)
        gone = [one for one in await autoscaler.replicas(ended=True) if one.name in names]
        assert {one.state for one in gone} == {State.STATE_FAILED}
        assert {one.reason for one in gone} == {
            "adapter a was given up by an operator; whether it runs on is unknown"
        }
        assert [one.name for one in await listed(autoscaler)] == ["adapters/b"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await forget(autoscaler)
        assert reason(caught.value) == ("NOT_FOUND", "NOT_FOUND")


async def test_an_adapter_that_is_connected_is_not_forgotten(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    adapter = FakeAdapter()
    async with adapter.connected(autoscaler.address):
        await autoscaler.create(endpoint(low=1, high=1, gpus=1))
        await eventually(lambda: adapter.alive, timeout=WAIT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await forget(autoscaler)
        assert reason(caught.value) == ("FAILED_PRECONDITION", "ADAPTER_CONNECTED")
        assert adapter.alive
        assert len(allocator.held) == 1


async def test_one_that_comes_back_after_all_stops_what_it_still_runs(
    autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it runs is nobody's by then, and shares its GPUs with what took its place."""
    monkeypatch.setattr(hub, "STRAY", 0.2)
    adapter = FakeAdapter()
    async with adapter.connected(autoscaler.address):
        await autoscaler.create(endpoint(low=1, high=1))
        await eventually(lambda: adapter.alive, timeout=WAIT)
        [old] = adapter.alive
    await eventually(lambda: disconnected(autoscaler), timeout=WAIT)
    await forget(autoscaler)
    async with adapter.connected(autoscaler.address):
        await eventually(lambda: old in adapter.forgotten, timeout=WAIT)
        await eventually(lambda: len(adapter.alive) == 1, timeout=WAIT)
    assert old not in adapter.alive


async def test_an_adapter_that_an_earlier_life_knew_can_be_forgotten(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """It has never been heard of in this one; only its replicas tell of it."""
    adapter = FakeAdapter()
    async with serving(allocator) as address:
        async with running(tmp_path, address) as first, adapter.connected(first.address):
            await first.create(endpoint(low=1, high=1, gpus=1))
            await eventually(lambda: adapter.alive, timeout=WAIT)
        async with running(tmp_path, address) as second:
            assert len(await forget(second)) == 1
            await eventually(lambda: not allocator.held, timeout=WAIT)
