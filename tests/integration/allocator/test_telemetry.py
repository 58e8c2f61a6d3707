"""Following the fleet: broken streams, restarts, ageing readings, and the order in which nodes were first seen."""

import asyncio
from pathlib import Path

import pytest

from gpuscale.api.allocator.v1 import Job
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, ResourceExhaustedError
from gpuscale.common.wire import to_duration
from tests.support.allocator import Client, running
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, NodeState, connected_node, node_message
from tests.support.waiting import eventually


async def nodes_of(client: Client, count: int = 1) -> list[str]:
    """Where a grant goes; given back at once."""
    granted = await client.reserve(count)
    await client.release(granted)
    return [gpu.node for gpu in granted.gpus]


async def test_readings_age_while_nobody_reports_and_the_reason_is_said(tmp_path: Path) -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=1, period=2.0, age=1.0))
    async with running(tmp_path, fleet, clock=clock) as client:
        fleet.fall_silent()
        fleet.break_streams()
        clock.advance(5.0)
        assert await nodes_of(client) == ["n0"]
        clock.advance(0.1)
        assert await _refused_for(client, "stale")
        await eventually(lambda: _says(client, "cannot be followed at the moment: the test broke the stream"))
        with pytest.raises(FailedPreconditionError) as chosen:
            await client.reserve(nodes=["nodes/n0"])
        assert chosen.value.reason == "NODE_NOT_ONLINE"
        assert "no current report has come from n0" in chosen.value.message
        job = Job(command="train")
        waits = await client.reserve(nodes=["nodes/n0"], wait=to_duration(60), keep_place=True, job=job)
        assert waits.state == waits.STATE_WAITING
        fleet.speak()
        await eventually(lambda: client.get(waits.name), lambda one: one.state == one.STATE_ACTIVE)
        await client.release(await client.get(waits.name))
        await eventually(lambda: nodes_of(client), retry_on=(ResourceExhaustedError,))


async def test_what_a_fleet_says_is_unchanged_counts_for_longer(tmp_path: Path) -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=1, period=2.0))
    async with running(tmp_path, fleet, clock=clock) as client:
        clock.advance(5.0)
        fleet.confirm("n0", "unknown")
        fleet.put(node_message("n1", count=2, period=0.1))  # once it is known, what came before is
        await eventually(lambda: _can_have(client, 2))
        clock.advance(5.9)
        assert await nodes_of(client) == ["n0"]
        clock.advance(0.2)
        with pytest.raises(ResourceExhaustedError):
            await client.reserve()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(client.reserve(wait=to_duration(30.0)))
            await asyncio.sleep(0)
            fleet.confirm("n0")
        assert waiting.result().gpus[0].node == "n0"


async def test_what_a_node_that_is_away_has_is_nobodys_until_it_is_back(tmp_path: Path) -> None:
    """Though the lease of it has ended; also for an allocator that starts meanwhile."""
    clock, fleet = ManualClock(), FakeFleet(node_message("n0", count=1))
    async with running(tmp_path, fleet, clock=clock) as client:
        lease = await client.reserve(ttl=12)
    fleet.put(node_message("n0", count=1, state=NodeState.NODE_STATE_OFFLINE))
    async with running(tmp_path, fleet, clock=clock) as client:

        async def expired() -> bool:
            clock.advance(1.0)
            return (await client.get(lease.name)).state == lease.STATE_EXPIRED

        await eventually(expired)
        with pytest.raises(GpuscaleError):
            await client.reserve()
        fleet.put(node_message("n0", count=1))
        granted = await eventually(client.reserve, retry_on=(GpuscaleError,))
        assert (granted.gpus[0].uuid, granted.fence > lease.fence) == (lease.gpus[0].uuid, True)


async def test_what_a_restarted_fleet_does_not_know_yet_is_offline_or_stale_not_gone(tmp_path: Path) -> None:
    """The stream that broke is taken up again: a node is not named at first, then there, and later without a report."""
    fleet = FakeFleet(node_message("n0", count=4), node_message("n1", count=1))
    async with running(tmp_path, fleet) as client:
        fleet.forget("n0")
        fleet.break_streams()
        await eventually(lambda: _refused_for(client, "node_not_online", 4))
        fleet.put(node_message("n0", count=4))
        await eventually(lambda: _can_have(client, 4))
        assert fleet.watchers == 1
        fleet.put(connected_node("n0"))
        await eventually(lambda: _refused_for(client, "stale", 4))


async def test_ties_go_to_the_node_seen_first_for_ever(tmp_path: Path) -> None:
    """Also after a restart, when the fleet names the nodes in another order."""
    fleet = FakeFleet(node_message("old", count=1))
    async with running(tmp_path, fleet) as client:
        fleet.put(node_message("new", count=1))
        await eventually(lambda: _can_have_both(client))
        assert await nodes_of(client) == ["old"]
    fleet = FakeFleet(node_message("new", count=1), node_message("old", count=1))
    async with running(tmp_path, fleet) as client:
        assert await nodes_of(client) == ["old"]


async def test_a_node_that_has_not_reported_since_the_start_is_not_unknown(tmp_path: Path) -> None:
    """Be it before its first report ever, connected again without one, or only remembered."""
    async with running(tmp_path, FakeFleet(connected_node("n0")), ready=False) as client:
        await eventually(
            lambda: _refused_as(client, "NO_TELEMETRY", "no agent has reported to the fleet yet")
        )
    for again in ([connected_node("n0")], []):
        async with running(tmp_path, FakeFleet(*again, node_message("n1", count=1))) as client:
            heard = "not heard of since the allocator started: n0"
            assert await _refused_as(client, "NO_CAPACITY", heard, 4)
            with pytest.raises(FailedPreconditionError) as not_online:
                await client.reserve(nodes=["nodes/n0"])
            assert not_online.value.reason == "NODE_NOT_ONLINE"


async def test_an_ask_may_wait_for_a_node_whose_driver_is_broken(tmp_path: Path) -> None:
    problem = "NVML: Driver Not Loaded"
    fleet = FakeFleet(node_message("n0", gpu_problem=problem))
    async with running(tmp_path, fleet) as client:
        for count in (1, 4):
            assert await _refused_as(client, "NO_CAPACITY", f"n0 ({problem})", count)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(client.reserve(4, wait=to_duration(30.0)))
            await asyncio.sleep(0)
            fleet.put(node_message("n0", count=4))
        assert len(waiting.result().gpus) == 4


async def _refused_as(client: Client, reason: str, words: str, count: int = 1) -> bool:
    try:
        await client.reserve(count)
    except GpuscaleError as error:
        return error.reason == reason and words in error.message
    return False


async def _can_have(client: Client, count: int) -> bool:
    try:
        await nodes_of(client, count)
    except (FailedPreconditionError, ResourceExhaustedError):
        return False
    return True


async def _can_have_both(client: Client) -> bool:
    """Whether two single GPUs can be had: one on each node."""
    first = await client.reserve()
    try:
        return await _can_have(client, 1)
    finally:
        await client.release(first)


async def _refused_for(client: Client, reason: str, count: int = 1) -> bool:
    try:
        await nodes_of(client, count)
    except ResourceExhaustedError as error:
        return error.metadata.get(reason) == str(count)
    return False


async def _says(client: Client, text: str) -> bool:
    with pytest.raises(ResourceExhaustedError) as caught:
        await client.reserve()
    return text in caught.value.message
