"""Check, wait, explain, estimate and rank over real gRPC, with a real store and a fake fleet."""

import asyncio
import re
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.client import AsyncClient, InvalidArgumentError, NotFoundError, UnavailableError, connect_async
from gpuscale.common.wire import enum_word, seconds, to_duration
from tests.support.allocator import MIB, allocator, allocator_client, release, reserve_request
from tests.support.fake_fleet import FakeFleet, NodeState, gpu_message, node_message, serving


def fleet() -> FakeFleet:
    return FakeFleet(node_message("n0", count=2), node_message("n1", count=1))


async def check(client: AsyncClient, ask: api.Ask) -> api.CheckAvailabilityResponse:
    return await client.capacity.CheckAvailability(api.CheckAvailabilityRequest(ask=ask))


async def wait(client: AsyncClient, ask: api.Ask, timeout: float) -> api.WaitForAvailabilityResponse:
    request = api.WaitForAvailabilityRequest(ask=ask, timeout=to_duration(timeout))
    return await client.capacity.WaitForAvailability(request, timeout=timeout + 20)


async def explain(client: AsyncClient, ask: api.Ask) -> api.ExplainPlacementResponse:
    return await client.capacity.ExplainPlacement(api.ExplainPlacementRequest(ask=ask))


async def test_a_check_says_what_reserve_would_do_and_no_room_is_an_answer(tmp_path: Path) -> None:
    """The seed answered True with a warning where memory was short, and True where nothing could be read at all."""
    async with allocator_client(tmp_path, fleet()) as client:
        found = await check(client, api.Ask(gpu_count=2))
        assert (found.available, enum_word(found, "reason")) == (True, "")
        assert "n0-0" in found.message
        assert await check(client, api.Ask(gpu_count=2)) == found, "a check holds nothing"
        assert list(found.gpus) == list((await client.reserve(2, "me")).gpus)
        taken = await check(client, api.Ask(gpu_count=2))
        assert (taken.available, enum_word(taken, "reason"), list(taken.gpus)) == (False, "NO_CAPACITY", [])
        for never in (api.Ask(gpu_count=3), api.Ask(gpu_count=1, min_memory_bytes=90_000 * MIB)):
            answer = await check(client, never)
            assert (answer.available, enum_word(answer, "reason")) == (False, "UNSATISFIABLE")


async def test_who_holds_a_gpu_is_named_oldest_first_however_often_it_is_asked(tmp_path: Path) -> None:
    """To say what would help, leases are thought away: that must not show."""
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=1))) as client:
        held = [await client.reserve(1, "me", gpu_milli=300, ttl=ttl) for ttl in (60, 600)]
        for _ in range(3):
            [node] = (await explain(client, api.Ask(gpu_count=1))).nodes
            assert list(node.gpus[0].reservations) == [one.name for one in held]


async def test_an_unknown_node_is_an_error(tmp_path: Path) -> None:
    ask = api.Ask(gpu_count=1, nodes=["nodes/n9"])
    async with allocator_client(tmp_path, fleet()) as client:
        for asking in (check(client, ask), wait(client, ask, 5), explain(client, ask)):
            with pytest.raises(NotFoundError, match="n9"):
                await asking


async def test_without_telemetry_nothing_is_claimed(tmp_path: Path) -> None:
    ask = api.Ask(gpu_count=1)
    async with (
        serving(FakeFleet(node_message("n0", count=1), silent=True)) as fleet_address,
        allocator(tmp_path, fleet_address) as address,
        connect_async(address) as client,
    ):
        asked = (
            check(client, ask),
            wait(client, ask, 5),
            explain(client, ask),
            client.allocator.Reserve(reserve_request(), timeout=60),
            client.capacity.RankNodes(api.RankNodesRequest()),
            client.capacity.PlanRebalance(api.PlanRebalanceRequest()),
            client.capacity.PlanRebalance(api.PlanRebalanceRequest(ask=ask)),
        )
        for asking in asked:
            with pytest.raises(UnavailableError) as caught:
                await asking
            assert (caught.value.reason, caught.value.retry_after) == ("NO_TELEMETRY", 1)


@pytest.mark.parametrize("event", ["release", "uncordon", "telemetry"])
async def test_whoever_waits_is_told_at_once(tmp_path: Path, event: str) -> None:
    """Nothing is polled: a release, a cordon that is lifted, and a node that comes back wake who waits."""
    running = fleet()
    async with allocator_client(tmp_path, running) as client:
        ask = api.Ask(gpu_count=2, nodes=["nodes/n0"])
        held = None
        if event == "release":
            held = await client.reserve(2, "me", nodes=["nodes/n0"])
        elif event == "uncordon":
            await client.nodes.CordonNode(api.CordonNodeRequest(name="nodes/n0"))
        else:
            running.put(node_message("n0", count=2, state=NodeState.NODE_STATE_OFFLINE))
            while (await check(client, ask)).available:
                await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(wait(client, ask, 3600))
        await asyncio.sleep(0)  # it is on its way now, before the next calls, which go the same way
        for _ in range(3):
            assert not (await check(client, ask)).available
        assert not waiting.done()
        if held is not None:
            await release(client, held)
        elif event == "uncordon":
            await client.nodes.UncordonNode(api.UncordonNodeRequest(name="nodes/n0"))
        else:
            running.put(node_message("n0", count=2))
        found = await asyncio.wait_for(waiting, 60)
        assert (found.available, enum_word(found, "reason")) == (True, "")
        assert 0 < seconds(found.waited) < 30


async def test_an_explanation_names_what_stands_in_the_way_and_what_helps(tmp_path: Path) -> None:
    full = gpu_message("n2-0", free=1_000)
    full.reading.processes.append(
        types_api.GpuProcess(pid=123, memory_used_bytes=79_000 * MIB, command="python")
    )
    running = FakeFleet(node_message("n0", count=2), node_message("n1", count=2), node_message("n2", full))
    async with allocator_client(tmp_path, running) as client:
        first = await client.reserve(1, "alice", ttl=300, nodes=["nodes/n0"])
        await client.nodes.CordonNode(api.CordonNodeRequest(name="nodes/n1", reason="fan"))
        found = await explain(client, api.Ask(gpu_count=2))
        assert (found.available, enum_word(found, "reason"), found.node_count) == (False, "NO_CAPACITY", 3)
        effects = {enum_word(one, "constraint"): one for one in found.constraints}
        assert effects["HELD"].removed_in_order_count == 1
        assert effects["CORDONED"].removed_alone_count == 2
        assert effects["MEMORY_BELOW_MIN"].removed_in_order_count == 1
        assert found.nodes[0].name == "nodes/n0"
        assert found.nodes[0].fitting_count == 1
        held = next(gpu for gpu in found.nodes[0].gpus if gpu.obstacle)
        assert (enum_word(held, "obstacle"), list(held.reservations)) == ("HELD", [first.name])
        assert held.uuid == first.gpus[0].uuid  # as the driver writes it
        free = next(gpu for gpu in found.nodes[0].gpus if not gpu.obstacle)
        assert free.score.total > 0
        helps = "\n".join(found.remedies)
        assert f"eservation {first.name.partition('/')[2]} of alice ends in" in helps
        assert "nodes/n1 is cordoned by local (fan): gpuscalectl uncordon nodes/n1" in helps
        for ask in (api.Ask(gpu_count=9), api.Ask(gpu_count=1, member_count=9)):
            never = await explain(client, ask)
            assert enum_word(never, "reason") == "UNSATISFIABLE"
            assert not re.search("cordon|reservation", "".join(never.remedies)), "that would not help"
        stranger = await explain(client, api.Ask(gpu_count=1, nodes=["nodes/n2"]))
        assert "79000 MiB of n2-0: python (123)" in "\n".join(stranger.remedies)


async def test_an_estimate_is_an_ask_for_reserve(tmp_path: Path) -> None:
    by_name = api.EstimateRequirementsRequest(model="llama-3-70b")
    by_name.parameters.update({"tp-size": [1, 2], "pp_size": {"values": [1]}, "enable-x": True})
    sized = api.EstimateRequirementsRequest(model="qwen3-8b", context_tokens=4096, batch_size=2)
    async with allocator_client(tmp_path, fleet()) as client:
        estimate = client.capacity.EstimateRequirements
        found = await estimate(by_name)
        assert (found.gpu_count, found.memory_bytes, found.parameter_count) == (2, 20_000 * MIB, 70e9)
        assert list(found.ignored_parameters) == ["enable-x"]
        assert (await check(client, found.ask)).available
        found = await estimate(sized)
        assert (
            found.least_memory_bytes == found.weights_bytes + found.kv_cache_bytes < found.most_memory_bytes
        )
        assert (found.gpu_count, found.fits[0].fleet_count > 0) == (found.fits[0].gpu_count or 1, True)
        assert (await check(client, found.ask)).available == bool(found.fits[0].gpu_count)
        sized.config.update({"hidden_size": 0})
        with pytest.raises(InvalidArgumentError):
            await estimate(sized)


async def test_nodes_are_ranked_by_what_is_idle_and_free(tmp_path: Path) -> None:
    unmeasured = node_message("n2", *(gpu_message(f"n2-{i}", i, utilization=None) for i in range(4)))
    running = FakeFleet(node_message("n0", count=2), node_message("n1", count=2), unmeasured)
    async with allocator_client(tmp_path, running) as client:
        await client.reserve(1, "me", nodes=["nodes/n0"])
        found = await client.capacity.RankNodes(api.RankNodesRequest(gpu_count=2))
        assert [(one.name, one.idle_gpu_count, one.sufficient, one.fallback) for one in found.nodes] == [
            ("nodes/n1", 2, True, False),
            ("nodes/n0", 1, False, False),
            ("nodes/n2", 0, False, True),
        ]
        assert not found.fallback
        assert not found.nodes[2].HasField("mean_utilization_percent")
        await client.nodes.CordonNode(api.CordonNodeRequest(name="nodes/n1"))
        strict = await client.capacity.RankNodes(api.RankNodesRequest(gpu_count=2, max_utilization_percent=0))
        assert (strict.fallback, [one.idle_gpu_count for one in strict.nodes]) == (True, [0, 0, 0])
