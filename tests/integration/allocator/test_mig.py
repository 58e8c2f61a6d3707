"""A GPU that its admin makes whole again under the leases of its MIG instances, over real gRPC and a restart."""

from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, ResourceExhaustedError
from gpuscale.common.wire import enum_word
from tests.support.allocator import allocator_client
from tests.support.fake_fleet import FakeFleet, GpuState, gpu_message, node_message

KEPT = 3600.0
"""Longer than any test: the vanished instance is not lost before."""


def divided() -> FakeFleet:
    parts = [gpu_message(f"MIG-{index}", index) for index in (1, 2)]
    for part in parts:
        part.parent_uuid, part.mig_profile = "n0-0", "1g.10gb"
    whole = gpu_message("n0-0", state=GpuState.GPU_STATE_DIVIDED)
    return FakeFleet(node_message("n0", whole, *parts))


async def idle(client: AsyncClient) -> int:
    [ranked] = (await client.capacity.RankNodes(api.RankNodesRequest())).nodes
    return ranked.idle_gpu_count


async def test_a_gpu_is_held_while_a_lease_of_an_instance_of_it_lives(tmp_path: Path) -> None:
    """The node names the instance no more, and only the state on disk knows whose it was."""
    async with allocator_client(tmp_path, divided(), lost_after_seconds=KEPT) as client:
        held = await client.reserve(1, "me", ttl=3600, mig_profile="1g.10gb", min_memory="0")
    whole = FakeFleet(node_message("n0", count=1))
    async with allocator_client(tmp_path, whole, lost_after_seconds=KEPT) as client:
        with pytest.raises(ResourceExhaustedError) as refused:
            await client.reserve(1, "you")
        assert refused.value.metadata["held"] == "1"
        ask = api.ExplainPlacementRequest(ask=api.Ask(gpu_count=1))
        [node] = (await client.capacity.ExplainPlacement(ask)).nodes
        assert [(enum_word(one, "obstacle"), list(one.reservations)) for one in node.gpus] == [
            ("HELD", [held.name])
        ]
        assert await idle(client) == 0
        await client.allocator.ReleaseReservation(
            api.ReleaseReservationRequest(name=held.name, fence=held.fence)
        )
        assert await idle(client) == 1
        assert [one.uuid for one in (await client.reserve(1, "you")).gpus] == ["n0-0"]
