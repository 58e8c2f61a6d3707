"""Jobs that are started again elsewhere, over real gRPC: their new place is kept first, and the old one goes to who waits."""

import asyncio
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuscale.allocator.usecases import rebalancing
from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, FailedPreconditionError, InvalidArgumentError
from gpuscale.common.errors import ResourceExhaustedError
from gpuscale.common.names import node_of
from gpuscale.common.wire import seconds, to_duration, to_timestamp
from tests.integration.allocator.test_rebalancing import AT_ONCE, fleet, gang, hold, in_line, stays, told
from tests.support.allocator import allocator_client, release, reread
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.waiting import eventually

WAITS = api.Reservation.STATE_WAITING
START = to_timestamp(datetime(2026, 1, 1, tzinfo=UTC))


async def job(client: AsyncClient, nodes: tuple[str, ...] = ("n0", "n1"), **fields: Any) -> api.Reservation:
    """A job on one GPU, which runs and may move within a minute."""
    movable = {"job": api.Job(command="train"), "movable": to_duration(60), **fields}
    made = await hold(client, "job", *nodes, **movable)
    await report(client, made, pid=7)
    return made


async def report(client: AsyncClient, one: api.Reservation, ended: int = 0, **known: Any) -> api.Reservation:
    member = api.JobMember(node=one.gpus[0].node_name, start_time=START, **known)
    request = api.RenewReservationRequest(name=one.name, fence=one.fence, member=member, ended_attempt=ended)
    return (await client.allocator.RenewReservation(request)).reservation


async def left(client: AsyncClient, one: api.Reservation, attempt: int = 1) -> api.Reservation:
    """Tell that its command has ended for it to be started again."""
    return await report(client, one, attempt, pid=7, end_time=START, exit_code=3, end_reason="saved")


async def begun(client: AsyncClient, one: api.Reservation) -> api.Reservation | None:
    """The reservation once it has GPUs again."""
    found = await reread(client, one.name)
    return found if found.state == api.Reservation.STATE_ACTIVE and found.job.attempt > 1 else None


def elsewhere(one: api.Reservation) -> str:
    return "n1" if node_of(one.gpus[0]) == "n0" else "n0"


async def told_to_move(client: AsyncClient) -> tuple[api.Reservation, "asyncio.Future[api.ReserveResponse]"]:
    """A job that is told to leave its node for who waits, which is returned too."""
    moving = await job(client)
    await hold(client, "stays", elsewhere(moving))
    waits = await gang(client)
    await client.capacity.ApplyRebalance(api.ApplyRebalanceRequest())
    assert await told(client, moving)
    return moving, waits


async def test_a_job_goes_on_at_the_place_that_was_kept_for_it_and_who_waits_gets_the_old_one(
    tmp_path: Path,
) -> None:
    async with allocator_client(tmp_path, fleet(), **AT_ONCE) as client:
        moving, waits = await told_to_move(client)
        [found] = (
            await client.capacity.PlanRebalance(api.PlanRebalanceRequest(ask=api.Ask(gpu_count=1)))
        ).plans
        assert not found.available, "its new place is kept, the GPU beside it is who waits's"
        with pytest.raises(ResourceExhaustedError) as refused:
            await hold(client, "urgent", elsewhere(moving), priority=1000)
        assert refused.value.metadata == {"behind_others": "true"}
        renewal = api.RenewReservationRequest(name=moving.name, fence=moving.fence)
        renewed = await client.allocator.RenewReservation(renewal)
        assert renewed.next_node == f"nodes/{elsewhere(moving)}"
        answer = await left(client, moving)
        assert (answer.state, answer.fence > moving.fence, answer.job.attempt) == (WAITS, True, 2)
        now = await eventually(partial(begun, client, moving))
        assert (node_of(now.gpus[0]), now.fence > answer.fence) == (elsewhere(moving), True)
        assert (now.end_reason, seconds(now.ttl)) == ("", seconds(moving.ttl))
        assert not now.HasField("revoke_time")
        assert not now.HasField("grant_time"), "it was first granted when it was made"
        assert {node_of(gpu) for gpu in (await waits).reservation.gpus} == {node_of(moving.gpus[0])}
        [before] = now.job.earlier
        assert (before.node, before.exit_code, before.end_reason) == (moving.gpus[0].node_name, 3, "saved")
        assert (now.job.state, list(now.job.members)) == (api.Job.STATE_STARTING, [])


async def test_a_call_that_is_repeated_changes_nothing_and_of_an_earlier_attempt_nothing_is_taken(
    tmp_path: Path,
) -> None:
    async with allocator_client(tmp_path, fleet(), **AT_ONCE) as client:
        moving, waits = await told_to_move(client)
        await left(client, moving)
        now = await eventually(partial(begun, client, moving))
        again = await left(client, moving)
        assert (again.fence, again.job.attempt, again.gpus) == (now.fence, 2, now.gpus)
        with pytest.raises(FailedPreconditionError) as late:
            await report(client, moving, pid=7)
        assert late.value.reason == "FENCE_MISMATCH"
        with pytest.raises(FailedPreconditionError) as released:
            await release(client, moving)
        assert released.value.reason == "FENCE_MISMATCH"
        asked = api.RenewReservationRequest(name=moving.name, fence=moving.fence)
        assert (await client.allocator.RenewReservation(asked)).reservation.fence == now.fence
        with pytest.raises(FailedPreconditionError):
            await client.allocator.RenewReservation(
                api.RenewReservationRequest(name=moving.name, fence=now.fence + 1)
            )
        waits.cancel()


async def test_a_job_that_saved_its_work_for_a_move_that_was_given_up_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebalancing, "LOOK", 0.02)
    async with allocator_client(tmp_path, fleet(), **AT_ONCE) as client:
        moving, waits = await told_to_move(client)
        waits.cancel()
        await eventually(partial(stays, client, moving))
        other = await hold(client, "other", elsewhere(moving))
        await hold(client, "beside", node_of(moving.gpus[0]))
        waits = asyncio.ensure_future(hold(client, "next", "n0", "n1", wait=to_duration(60)))
        await eventually(partial(in_line, client, 1))
        await left(client, moving)
        now = await eventually(partial(begun, client, moving))
        assert (now.gpus, now.fence > other.fence, waits.done()) == (moving.gpus, True, False)
        waits.cancel()
        await left(client, now, 2)
        third = await eventually(
            partial(begun, client, moving), lambda one: one if one.job.attempt == 3 else None
        )
        assert [one.exit_code for one in third.job.earlier] == [3, 3]


async def test_a_job_whose_node_is_drained_waits_for_another(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=1)), **AT_ONCE) as client:
        made = await job(client, ("n0",))
        await client.nodes.DrainNode(api.DrainNodeRequest(name="nodes/n0", grace=to_duration(300)))
        await eventually(partial(told, client, made))
        assert (await left(client, made)).state == WAITS
        found = await reread(client, made.name)
        assert (found.job.state, found.job.queue_position) == (api.Job.STATE_WAITING, 0)
        await client.nodes.UncordonNode(api.UncordonNodeRequest(name="nodes/n0"))
        now = await eventually(partial(begun, client, made))
        assert now.gpus == made.gpus


async def test_a_job_that_may_not_move_ends_as_it_did(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, fleet(), **AT_ONCE) as client:
        made = await hold(client, "job", "n0", job=api.Job(command="train"))
        ended = await left(client, made)
        assert (ended.fence, ended.job.attempt, ended.job.exit_code) == (made.fence, 1, 3)
        with pytest.raises(InvalidArgumentError, match="ended_attempt needs a member that has ended"):
            await report(client, made, 1, pid=7)


async def test_what_each_attempt_used_is_accounted_for(tmp_path: Path) -> None:
    """Of one GPU here: the second attempt has an account of its own, beside that of the first. A time limit goes on."""
    clock = ManualClock()
    clock.advance(1000)  # past midnight: accounts are kept by the day
    fleet = FakeFleet(node_message("n0", count=1))
    async with allocator_client(tmp_path, fleet, clock=clock, **AT_ONCE) as client:
        made = await job(client, ("n0",), time_limit=to_duration(600))
        clock.advance(100)
        await left(client, made)
        now = await eventually(partial(begun, client, made))
        assert now.limit_time == made.limit_time
        clock.advance(50)
        await release(client, now)
        found = await client.usage.GetReservationUsage(api.GetReservationUsageRequest(name=made.name))
        [gpu] = found.gpus
        assert (seconds(gpu.granted), found.end_cause) == (150, api.Reservation.END_CAUSE_RELEASED)
