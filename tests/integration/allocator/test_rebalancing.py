"""Plans of moves over real gRPC: what may move, what it costs, for whom, and why nothing can."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, NotFoundError, UnavailableError, connect_async
from gpuscale.common.names import node_of
from gpuscale.common.wire import to_duration
from tests.support.allocator import allocator, allocator_client
from tests.support.fake_fleet import FakeFleet, NodeState, node_message, serving
from tests.support.waiting import eventually


def fleet() -> FakeFleet:
    return FakeFleet(node_message("n0", count=2), node_message("n1", count=2))


async def plan(client: AsyncClient, ask: api.Ask | None = None) -> api.PlanRebalanceResponse:
    return await client.capacity.PlanRebalance(api.PlanRebalanceRequest(ask=ask))


async def hold(client: AsyncClient, holder: str, *nodes: str, **fields: Any) -> api.Reservation:
    """One GPU of one of the nodes."""
    ask = api.Ask(gpu_count=1, nodes=[f"nodes/{node}" for node in nodes])
    request = api.ReserveRequest(request_id=str(uuid4()), holder=holder, ask=ask, **fields)
    return (await client.allocator.Reserve(request)).reservation


async def test_what_may_move_makes_room_for_an_ask(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, fleet()) as client:
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
        assert never.plans[0].message == "on no node that could serve it may enough move"


async def test_who_waits_is_planned_for(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, fleet()) as client:
        assert not (await plan(client)).plans
        await hold(client, "batch", "n0", preemptible=True)
        await hold(client, "stays", "n1")
        request = api.ReserveRequest(
            request_id=str(uuid4()), holder="gang", ask=api.Ask(gpu_count=2), wait=to_duration(60)
        )
        waits = asyncio.ensure_future(client.allocator.Reserve(request, timeout=60))

        async def planned() -> api.RebalancePlan:
            [found] = (await plan(client)).plans
            return found

        found = await eventually(planned, retry_on=(ValueError,))
        assert (found.holder, found.reservation, found.available) == ("gang", "", True)
        assert [move.holder for move in found.moves] == ["batch"]
        waits.cancel()


@pytest.mark.parametrize("nodes", [("n0",), ("n0", "n1")])
async def test_what_is_movable_goes_where_it_asked_to_be(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    async with serving(fleet()) as address:
        async with allocator(tmp_path, address) as served, connect_async(served) as client:
            reserve = partial(hold, client, "replica", *nodes, movable=to_duration(90))
            held = await eventually(reserve, retry_on=(UnavailableError,))
        for _ in range(2):  # a restart changes nothing
            async with allocator(tmp_path, address) as served, connect_async(served) as client:
                ask = api.Ask(gpu_count=2, nodes=[held.gpus[0].node_name])
                found = (await eventually(partial(plan, client, ask), retry_on=(UnavailableError,))).plans[0]
                assert [move.cost_gpu_seconds for move in found.moves] == ([90.0] if "n1" in nodes else [])
                assert found.available is ("n1" in nodes), found.message


async def test_where_nothing_is_known_nothing_is_planned(tmp_path: Path) -> None:
    of = fleet()
    async with allocator_client(tmp_path, of) as client:
        with pytest.raises(NotFoundError, match="n9"):
            await plan(client, api.Ask(gpu_count=1, nodes=["nodes/n9"]))
        await hold(client, "batch", "n0", preemptible=True)
        await hold(client, "stays", "n1")
        of.put(node_message("n0", count=2, state=NodeState.NODE_STATE_STALE))

        async def noted() -> bool:
            answer = await plan(client, api.Ask(gpu_count=2))
            return "1 reservation: its node does not report" in answer.notes and not answer.plans[0].available

        await eventually(noted)
