"""Plans of moves over real gRPC: what may move, what it costs, for whom, and why nothing can."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from gpuscale.allocator.usecases import rebalancing
from gpuscale.allocator.usecases.partitioning import Partitioning
from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import (
    AsyncClient,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    connect_async,
)
from gpuscale.common.names import node_of
from gpuscale.common.wire import to_duration
from tests.support.allocator import allocator, allocator_client, release, reread, reserve_request
from tests.support.fake_fleet import FakeFleet, GpuState, NodeState, gpu_message, node_message, serving
from tests.support.waiting import calls_of, eventually

AT_ONCE: dict[str, Any] = {"preemption_min_runtime_seconds": 0}


def fleet() -> FakeFleet:
    return FakeFleet(node_message("n0", count=2), node_message("n1", count=2))


async def plan(client: AsyncClient, ask: api.Ask | None = None) -> api.PlanRebalanceResponse:
    return await client.capacity.PlanRebalance(api.PlanRebalanceRequest(ask=ask))


async def hold(client: AsyncClient, holder: str, *nodes: str, **fields: Any) -> api.Reservation:
    """One GPU of one of the nodes."""
    request = reserve_request(nodes=[f"nodes/{node}" for node in nodes], holder=holder, **fields)
    return (await client.allocator.Reserve(request)).reservation


async def test_what_may_move_makes_room_for_an_ask(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, fleet(), **AT_ONCE) as client:
        moving = await hold(client, "batch", "n0", preemptible=True)
        await hold(client, "stays", "n1")
        answer = await plan(client, api.Ask(gpu_count=2))
        [found], [move] = answer.plans, answer.plans[0].moves
        assert (found.available, set(map(node_of, found.gpus))) == (True, {"n0"})
        assert found.message == "1 move makes room for 2 GPUs on nodes/n0"
        assert (move.reservation, move.holder, move.from_node) == (moving.name, "batch", "nodes/n0")
        assert [node_of(gpu) for gpu in move.gpus] == ["n1"]
        assert 0 <= move.cost_gpu_seconds == found.cost_gpu_seconds < 60, "the time it has run"
        assert list(answer.notes) == ["1 reservation: neither preemptible nor movable"]
        fits = await plan(client, api.Ask(gpu_count=1))
        assert (fits.plans[0].available, list(fits.plans[0].moves)) == (True, [])
        never = await plan(client, api.Ask(gpu_count=2, nodes=["nodes/n1"]))
        assert never.plans[0].message == (
            "it would fit but for what does not move: 1 reservation: neither preemptible nor movable"
        )
        huge = await plan(client, api.Ask(gpu_count=8))
        assert "8 GPUs of one node" in huge.plans[0].message
        assert "can never be granted" in huge.plans[0].message


async def test_where_only_gangs_or_bookings_are_in_the_way_the_plan_says_so(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, fleet(), **AT_ONCE) as client:
        batch = await hold(client, "batch", "n0", preemptible=True)
        spread = api.GangStrategy.GANG_STRATEGY_STRICT_SPREAD
        held = await hold(client, "gang", member_count=2, gang_strategy=spread, preemptible=True)
        wish = api.Ask(gpu_count=2)
        answer = await plan(client, wish)
        assert answer.plans[0].message == "it would fit but for what does not move: 1 reservation: a gang"
        assert list(answer.notes) == ["1 reservation: a gang"]
        for one in (batch, held):
            await release(client, one)
        booking = api.Booking(ask=api.Ask(gpu_count=2, member_count=2), duration=to_duration(3600))
        booking.start_time.FromSeconds(int(time.time()) + 60)
        await client.bookings.CreateBooking(
            api.CreateBookingRequest(booking=booking, booking_id="all", request_id=str(uuid4()))
        )
        [found] = (await plan(client, wish)).plans
        assert (
            found.message == "it would fit but for what does not move: what is booked, or promised to others"
        )


async def test_an_idle_mig_gpu_is_named_that_would_do_with_other_instances(tmp_path: Path) -> None:
    whole = gpu_message("n0-0", total=81_559, state=GpuState.GPU_STATE_DIVIDED)
    part = gpu_message("n0-0-0", total=9_000, free=9_000, utilization=None)
    part.mig_profile, part.parent_uuid = "1g.10gb", whole.uuid
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", whole, part))) as client:
        wish = api.Ask(gpu_count=1, mig_profile="3g.40gb")
        [found] = (await plan(client, wish)).plans
        [one] = found.partitions
        assert (one.gpu, one.index, one.profiles) == ("nodes/n0/gpus/n0-0", 0, ["3g.40gb", "1g.10gb"])
        assert (found.available, found.message) == (
            False,
            "it would fit if nodes/n0/gpus/n0-0, which nobody uses, had other MIG instances",
        )
        await hold(client, "other", mig_profile="1g.10gb")
        [found] = (await plan(client, wish)).plans
        assert not found.partitions


def divided(node: str, profile: str, *parts: str) -> monitor_api.Node:
    """A node whose GPU has MIG instances of a profile."""
    whole = gpu_message(f"{node}-0", total=81_559, state=GpuState.GPU_STATE_DIVIDED)
    there = [gpu_message(one, total=40_000, free=40_000, utilization=None) for one in parts]
    for one in there:
        one.mig_profile, one.parent_uuid = profile, whole.uuid
    return node_message(node, whole, *there)


async def test_a_gpu_is_cordoned_until_the_fleet_tells_of_its_new_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebalancing, "LOOK", 0.02)
    of = FakeFleet(divided("n0", "1g.10gb", "old"), divided("n1", "3g.40gb", "held-1", "held-2"))
    async with allocator_client(tmp_path, of) as client:
        for wait in (0, 0, 60):
            waits = asyncio.ensure_future(
                hold(client, "waits", mig_profile="3g.40gb", wait=to_duration(wait))
            )
            if not wait:
                await waits

        async def take(**fields: Any) -> api.TakePowerCapsResponse:
            asked = api.TakePowerCapsRequest(node="nodes/n0", partitions_gpus=True, **fields)
            return await client.power.TakePowerCaps(asked)

        async def applied() -> bool:
            await take()
            return (await client.capacity.ApplyRebalance(api.ApplyRebalanceRequest())).HasField("plan")

        async def ordered() -> api.PartitionOrder:
            [order] = (await take()).partitions
            return order

        await eventually(applied)
        order = await eventually(ordered, retry_on=(ValueError,))
        other = partial(hold, client, "other", mig_profile="2g.20gb")
        with pytest.raises(
            ResourceExhaustedError, match="; being partitioned: nodes/n0/gpus/n0-0"
        ) as refused:
            await other()
        assert refused.value.retry_after, "it may be had later, as by anybody who must wait"
        queued = asyncio.ensure_future(other(wait=to_duration(60)))
        await eventually(partial(in_line, client, 2))
        end = api.PartitionEnd(order=order.order, instances=["new"])
        looks = calls_of(monkeypatch, Partitioning, "look")
        for _ in range(5):
            assert (await take(partition_ends=[end])).partitions == [order]
            seen = len(looks)
            await eventually(lambda seen=seen: len(looks) > seen + 1)
        assert len((await client.nodes.ListCordons(api.ListCordonsRequest())).cordons) == 1
        of.put(divided("n0", "3g.40gb", "new"))
        assert (await waits).gpus[0].uuid == "new"
        await take()
        with pytest.raises(ResourceExhaustedError, match="Idle GPUs may be partitioned"):
            await other()
        assert not queued.done()
        queued.cancel()


@pytest.mark.parametrize("nodes", [("n0",), ("n0", "n1")])
async def test_what_is_movable_goes_where_it_asked_to_be(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    async with serving(fleet()) as address:
        async with allocator(tmp_path, address, **AT_ONCE) as served, connect_async(served) as client:
            reserve = partial(hold, client, "replica", *nodes, movable=to_duration(90))
            held = await eventually(reserve, retry_on=(UnavailableError,))
        for _ in range(2):  # a restart changes nothing
            async with allocator(tmp_path, address, **AT_ONCE) as served, connect_async(served) as client:
                ask = api.Ask(gpu_count=2, nodes=[held.gpus[0].node_name])
                found = (await eventually(partial(plan, client, ask), retry_on=(UnavailableError,))).plans[0]
                assert [move.cost_gpu_seconds for move in found.moves] == ([90.0] if "n1" in nodes else [])
                assert found.available is ("n1" in nodes), found.message


async def test_where_nothing_is_known_nothing_is_planned(tmp_path: Path) -> None:
    of = fleet()
    async with allocator_client(tmp_path, of, **AT_ONCE) as client:
        with pytest.raises(NotFoundError, match="n9"):
            await plan(client, api.Ask(gpu_count=1, nodes=["nodes/n9"]))
        await hold(client, "batch", "n0", preemptible=True)
        await hold(client, "stays", "n1")
        of.put(node_message("n0", count=2, state=NodeState.NODE_STATE_STALE))
        await eventually(
            lambda: plan(client, api.Ask(gpu_count=2)),
            lambda answer: (
                "1 reservation: its node does not report" in answer.notes and not answer.plans[0].available
            ),
        )


async def gang(client: AsyncClient) -> asyncio.Future[api.ReserveResponse]:
    """Two GPUs of one node, for which it waits."""
    request = reserve_request(2, holder="gang", wait=to_duration(60))
    before = len((await plan(client)).plans)
    waits = asyncio.ensure_future(client.allocator.Reserve(request, timeout=60))
    await eventually(partial(in_line, client, before + 1))
    return waits


async def in_line(client: AsyncClient, count: int) -> bool:
    return len((await plan(client)).plans) >= count


async def told(client: AsyncClient, one: api.Reservation) -> api.Reservation | None:
    """The reservation once it is told to move."""
    found = await reread(client, one.name)
    return found if found.HasField("revoke_time") else None


async def test_who_moves_goes_by_itself_and_its_gpus_are_kept_for_who_waits(tmp_path: Path) -> None:
    of = FakeFleet(node_message("n0", count=2), node_message("n1", count=2), node_message("n2", count=1))
    async with allocator_client(tmp_path, of, **AT_ONCE) as client:
        await hold(client, "far", "n2")
        first = asyncio.ensure_future(hold(client, "first", "n2", wait=to_duration(60)))
        await eventually(partial(in_line, client, 1))
        assert not (await client.capacity.ApplyRebalance(api.ApplyRebalanceRequest())).HasField("plan")
        moving = await hold(client, "replica", "n0", "n1", movable=to_duration(5))
        here = moving.gpus[0].node_name
        there = "n1" if here == "nodes/n0" else "n0"
        await hold(client, "stays", there)
        waits = await gang(client)
        begun = await client.capacity.ApplyRebalance(api.ApplyRebalanceRequest())
        assert [move.reservation for move in begun.plan.moves] == [moving.name]
        found = await reread(client, moving.name)
        assert found.end_reason == "moved for gang, which asks for 2 GPUs"
        assert found.remaining.seconds <= found.ttl.seconds, "its lease goes on"
        with pytest.raises(FailedPreconditionError) as caught:
            await client.capacity.ApplyRebalance(api.ApplyRebalanceRequest())
        assert caught.value.reason == "MOVES_UNDER_WAY"
        other = await hold(client, "replica", "n0", "n1", movable=to_duration(5))
        assert other.gpus[0].node_name == f"nodes/{there}", "the GPU beside it is kept"
        assert not waits.done()
        await release(client, moving)
        assert {gpu.node_name for gpu in (await waits).reservation.gpus} == {here}
        first.cancel()


async def test_who_moves_may_go_where_who_waits_for_that_was_to_be_served(tmp_path: Path) -> None:
    """Who waits is promised what is free first as things are: here, where who stays is not renewed for longest."""
    async with allocator_client(tmp_path, fleet(), **AT_ONCE) as client:
        moving = await hold(client, "replica", "n0", "n1", movable=to_duration(5), ttl=300)
        there = "n1" if moving.gpus[0].node_name == "nodes/n0" else "n0"
        await hold(client, "stays", there, ttl=60)
        waits = await gang(client)
        await eventually(
            lambda: plan(client, api.Ask(gpu_count=1, nodes=[f"nodes/{there}"])),
            lambda beside: not beside.plans[0].available,
        )
        [found] = (await plan(client)).plans
        assert (found.holder, found.reservation, found.available) == ("gang", "", True)
        assert [node_of(gpu) for move in found.moves for gpu in move.gpus] == [there]
        waits.cancel()


@pytest.mark.parametrize("restarts", [False, True], ids=["late", "restart"])
async def test_a_move_that_is_not_made_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """Where who waits has gone, too: that is for test_jobs_that_move.py."""
    monkeypatch.setattr(rebalancing, "LOOK", 0.02)
    async with serving(fleet()) as address:
        async with allocator(tmp_path, address, **AT_ONCE) as served, connect_async(served) as client:
            reserve = partial(hold, client, "replica", "n0", "n1", movable=to_duration(5), ttl=300)
            moving = await eventually(reserve, retry_on=(UnavailableError,))
            await hold(client, "stays", "n1" if moving.gpus[0].node_name == "nodes/n0" else "n0")
            waits = await gang(client)
            name, value = ("LOOK", 600.0) if restarts else ("LIMIT", 0.0)
            monkeypatch.setattr(rebalancing, name, value)
            await client.capacity.ApplyRebalance(api.ApplyRebalanceRequest())
            if restarts:
                assert await told(client, moving)
            else:
                await eventually(partial(stays, client, moving))
            waits.cancel()
        if restarts:
            monkeypatch.setattr(rebalancing, "LOOK", 0.02)
            async with allocator(tmp_path, address, **AT_ONCE) as served, connect_async(served) as client:
                await eventually(partial(stays, client, moving))


async def stays(client: AsyncClient, one: api.Reservation) -> bool:
    """Whether it holds its GPUs and need not leave."""
    found = await reread(client, one.name)
    return found.state == api.Reservation.STATE_ACTIVE and not found.HasField("revoke_time")


@pytest.mark.parametrize(
    ("hourly", "unknown", "begins"), [(1, False, True), (1, True, False), (0, False, False)]
)
async def test_moves_are_begun_by_themselves_where_that_is_wanted_and_all_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hourly: int, unknown: bool, begins: bool
) -> None:
    tries: list[bool] = []
    whole = rebalancing.Rebalancing.apply

    async def apply(self: rebalancing.Rebalancing, *args: Any, **options: Any) -> Any:
        found = await whole(self, *args, **options)
        tries.append(found[0] is not None)
        return found

    monkeypatch.setattr(rebalancing.Rebalancing, "apply", apply)
    monkeypatch.setattr(rebalancing, "LOOK", 0.02)
    monkeypatch.setattr(rebalancing, "AGAIN", 0.0)
    of = FakeFleet(node_message("n0", count=2), node_message("n1", count=2), node_message("n2", count=1))
    async with allocator_client(tmp_path, of, rebalance_moves_per_hour=hourly, **AT_ONCE) as client:
        await hold(client, "far", "n2")
        if unknown:
            of.put(node_message("n2", count=1, state=NodeState.NODE_STATE_STALE))
            await eventually(
                lambda: plan(client), lambda found: any("does not report" in note for note in found.notes)
            )
        moving = await hold(client, "replica", "n0", "n1", movable=to_duration(5))
        await hold(client, "stays", "n1" if moving.gpus[0].node_name == "nodes/n0" else "n0")
        waits = await gang(client)
        if hourly:
            await eventually(lambda: tries)
        assert (await told(client, moving) is not None) is begins
        assert tries[:1] == ([begins] if hourly else [])
        waits.cancel()
