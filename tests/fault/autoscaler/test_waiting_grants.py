"""What an earlier life of the autoscaler was granted while no adapter can use it: it waits, and nothing of it is leaked."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.wire import enum_word
from tests.support.autoscaler_app import Autoscaler, endpoint, running
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.waiting import eventually

STOPPED = api.Replica.STATE_STOPPED
WANTED = endpoint(high=2, gpus=1)


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": ["GPU-0"], "m": ["GPU-1"]})


@pytest.fixture
async def autoscaler(tmp_path: Path, allocator: FakeAllocator) -> AsyncGenerator[Autoscaler]:
    """The second life of one that ended before it heard what its Reserve was granted; its adapter is gone."""
    async with serving(allocator) as address:
        allocator.lose_answers, allocator.leaves_after_loss = 1, True
        async with running(tmp_path, address) as first, FakeAdapter("a", node="n").connected(first.address):
            await first.create(WANTED)
            await first.set_replicas(1)
            await eventually(lambda: allocator.held)
        allocator.failure = None
        async with running(tmp_path, address) as second:
            yield second


async def waits(autoscaler: Autoscaler) -> bool:
    return any(
        enum_word(step, "code") == "NO_ADAPTER" for one in await autoscaler.history() for step in one.steps
    )


async def test_an_adapter_that_never_comes_back_leaves_the_grant_to_its_ttl(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """Nobody renews it; once it has run out and another adapter comes, the replica ends and a new one runs there."""
    await eventually(lambda: waits(autoscaler))
    [granted] = allocator.reservations
    [waiting] = await autoscaler.replicas()
    assert allocator.calls["RenewReservation"] == 0
    allocator.expire(granted)
    other = FakeAdapter("b", node="m")
    async with other.connected(autoscaler.address):
        await eventually(lambda: allocator.held == ["GPU-1"])
        await eventually(lambda: len(other.alive) == 1)
        assert waiting.name not in other.starts
        [old] = [one for one in await autoscaler.replicas(ended=True) if one.name == waiting.name]
        assert (old.state, old.reason) == (STOPPED, "its reservation ended before it was used")
        assert len(allocator.reservations) == 2


async def test_the_adapter_that_comes_back_uses_the_grant(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """That no adapter has been found again yet is no reason to give GPUs back."""
    await eventually(lambda: waits(autoscaler))
    adapter = FakeAdapter("a", node="n")
    async with adapter.connected(autoscaler.address):
        await eventually(lambda: len(adapter.alive) == 1)
        assert allocator.held == ["GPU-0"]
        assert len(allocator.reservations) == 1
    assert allocator.calls["ReleaseReservation"] == 0


async def test_an_adapter_on_another_node_gives_a_grant_back_that_has_not_run_out(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """GPUs of a node that no adapter runs on any more are of no use."""
    other = FakeAdapter("b", node="m")
    async with other.connected(autoscaler.address):
        await eventually(lambda: allocator.held == ["GPU-1"])
        await eventually(lambda: len(other.alive) == 1)
        assert len(await autoscaler.replicas()) == 1
        ends = [one.end_reason for one in await autoscaler.replicas(ended=True) if one.HasField("end_time")]
        assert ends == [api.Replica.END_REASON_ADAPTER_LACKS_IT]


@pytest.mark.parametrize("deleted", [False, True], ids=["scaled in", "deleted"])
async def test_one_that_is_not_wanted_any_more_gives_its_grant_back_without_any_adapter(
    autoscaler: Autoscaler, allocator: FakeAllocator, deleted: bool
) -> None:
    await eventually(lambda: waits(autoscaler))
    assert len(allocator.held) == 1
    if deleted:
        await autoscaler.delete()
    else:
        await autoscaler.set_replicas(0)
    await eventually(lambda: not allocator.held)
    assert len(allocator.reservations) == 1, "it was not asked for anew"
    if deleted:
        await eventually(autoscaler.gone)


async def test_one_whose_template_nobody_has_does_not_hold_up_those_of_the_next(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """The spec names another template by now: what waits for the old one is of no use to anybody."""
    changed = endpoint(high=2, gpus=1)
    changed.spec.template.template = "other"
    adapter = FakeAdapter("a", node="n", templates=("other",))
    await eventually(lambda: waits(autoscaler))
    await autoscaler.update(changed, "spec.template")
    async with adapter.connected(autoscaler.address):
        await eventually(lambda: len(adapter.alive) == 1)
        await eventually(lambda: allocator.held == ["GPU-0"])
    ends = [one.end_reason for one in await autoscaler.replicas(ended=True) if one.HasField("end_time")]
    assert ends == [api.Replica.END_REASON_TEMPLATE_CHANGED]
