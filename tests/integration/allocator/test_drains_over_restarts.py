"""Drains, and what their holders are told, where an allocator or a host starts anew in the middle of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, connect_async
from gpuscale.common.wire import to_datetime, to_duration
from tests.support.allocator import allocator, allocator_client
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message, serving

N0, N1, PARENT = "nodes/n0", "nodes/n1", "nodes/n0/gpus/gpu-parent"


async def drain(client: AsyncClient, name: str, grace: float) -> None:
    await client.nodes.DrainNode(api.DrainNodeRequest(name=name, grace=to_duration(grace)))


async def uncordon(client: AsyncClient, name: str) -> None:
    await client.nodes.UncordonNode(api.UncordonNodeRequest(name=name))


async def told(client: AsyncClient, name: str, clock: ManualClock) -> tuple[str, float | None]:
    """Why a reservation is to be taken away, and in how many seconds."""
    one = (await client.allocator.GetReservation(api.GetReservationRequest(name=name))).reservation
    if not one.HasField("revoke_time"):
        return one.end_reason, None
    return one.end_reason, (to_datetime(one.revoke_time) - clock.wall()) / timedelta(seconds=1)


def divided() -> FakeFleet:
    """A node of whose GPU only the MIG instances are named."""
    part = gpu_message("MIG-0")
    part.parent_uuid, part.mig_profile = "GPU-Parent", "1g.10gb"
    return FakeFleet(node_message("n0", part), node_message("n1", count=1))


@asynccontextmanager
async def before_any_report(
    tmp_path: Path, fleet: FakeFleet, clock: ManualClock
) -> AsyncIterator[AsyncClient]:
    """A client of the allocator after a restart, since when no node has said anything."""
    fleet.fall_silent()
    async with (
        serving(fleet) as fleet_address,
        allocator(tmp_path, fleet_address, clock=clock) as address,
        connect_async(address) as client,
    ):
        yield client


@pytest.mark.parametrize("renewed_after", [0, 70])
async def test_after_a_reboot_holders_have_all_of_the_grace_again(tmp_path: Path, renewed_after: int) -> None:
    """As the drain has: what it lists as its deadline is what they are told, however late they last renewed."""
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=1), node_message("n1", count=1))
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        there = await client.reserve(1, "me", ttl=600, nodes=[N0])
        clock.advance(30)
        await drain(client, N0, 100)
        clock.advance(renewed_after)
        if renewed_after:
            renewal = api.RenewReservationRequest(name=there.name, fence=there.fence)
            await client.allocator.RenewReservation(renewal)
    clock.reboot()
    for _ in range(2):  # and a restart of the allocator changes nothing
        async with allocator_client(tmp_path, fleet, clock=clock) as client:
            assert await told(client, there.name, clock) == (f"{N0} is drained", 100)
            [kept] = (await client.nodes.ListCordons(api.ListCordonsRequest())).cordons
            assert to_datetime(kept.drain_deadline) - clock.wall() == timedelta(seconds=100)


async def test_after_a_reboot_the_earlier_of_two_drains_is_what_counts(tmp_path: Path) -> None:
    """The one that came first had the later deadline, and after the reboot has the earlier one."""
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=1), node_message("n1", count=1))
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        there = await client.reserve(1, "me", ttl=600, nodes=[N0])
        await drain(client, f"{N0}/gpus/n0-0", 500)
        clock.advance(450)
        await drain(client, N0, 100)
        assert await told(client, there.name, clock) == (f"{N0}/gpus/n0-0 is drained", 50)
        await client.allocator.RenewReservation(
            api.RenewReservationRequest(name=there.name, fence=there.fence)
        )
    clock.reboot()
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        assert await told(client, there.name, clock) == (f"{N0} is drained", 100)


async def test_lifting_a_drain_leaves_that_of_another_node_of_the_same_reservation(tmp_path: Path) -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=1), node_message("n1", count=1))
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        there = await client.reserve(1, "me", ttl=600, member_count=2)
        await drain(client, N0, 300)
        await drain(client, N1, 200)
        await uncordon(client, N1)
        assert await told(client, there.name, clock) == (f"{N0} is drained", 300)
        await uncordon(client, N0)
        assert await told(client, there.name, clock) == ("", None)


async def test_a_drain_is_lifted_from_mig_instances_that_are_not_known_yet(tmp_path: Path) -> None:
    """Since the restart their node has said nothing, so nobody knows whose instances they are."""
    clock, fleet = ManualClock(), divided()
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        there = await client.reserve(1, "me", ttl=600, mig_profile="1g.10gb", min_memory="0")
        await drain(client, PARENT, 100)
    async with before_any_report(tmp_path, fleet, clock) as client:
        assert await told(client, there.name, clock) == (f"{PARENT} is drained", 100)
        await uncordon(client, PARENT)
        assert await told(client, there.name, clock) == ("", None)


async def test_a_drain_reaches_mig_instances_that_are_not_known_yet(tmp_path: Path) -> None:
    """Asked for after a restart, and before their node reported."""
    clock, fleet = ManualClock(), divided()
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        there = await client.reserve(1, "me", ttl=600, mig_profile="1g.10gb", min_memory="0")
    async with before_any_report(tmp_path, fleet, clock) as client:
        await drain(client, PARENT, 100)
        assert await told(client, there.name, clock) == (f"{PARENT} is drained", 100)
        [kept] = (await client.nodes.ListCordons(api.ListCordonsRequest())).cordons
        assert list(kept.reservations) == [there.name]
