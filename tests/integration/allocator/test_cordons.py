"""Cordons and drains over real gRPC, with a real store and a fake fleet, also where an allocator or a host starts anew."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.cordons import Cordon, Spot
from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.state import store
from gpuscale.allocator.state.operators import CordonStore
from gpuscale.allocator.state.store import open_store
from gpuscale.api.allocator import v1 as api
from gpuscale.client import (
    AsyncClient,
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    connect_async,
)
from gpuscale.common.runtime import tasks
from gpuscale.common.wire import to_datetime, to_duration
from tests.support.allocator import allocator, allocator_client, callers, calling, reread
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message, serving
from tests.support.waiting import eventually

N0, N1, GPU = "nodes/n0", "nodes/n1", "nodes/n0/gpus/n0-0"
PARENT = "nodes/n0/gpus/gpu-parent"
CANCELLED = api.Reservation.STATE_CANCELLED


def fleet() -> FakeFleet:
    return FakeFleet(node_message("n0", count=2), node_message("n1", count=1))


async def cordon(client: AsyncClient, name: str, reason: str = "") -> api.Cordon:
    return (await client.nodes.CordonNode(api.CordonNodeRequest(name=name, reason=reason))).cordon


async def uncordon(client: AsyncClient, name: str) -> None:
    await client.nodes.UncordonNode(api.UncordonNodeRequest(name=name))


async def drain(client: AsyncClient, name: str, grace: float, reason: str = "") -> api.DrainNodeResponse:
    return await client.nodes.DrainNode(
        api.DrainNodeRequest(name=name, grace=to_duration(grace), reason=reason)
    )


async def cordons(client: AsyncClient) -> list[api.Cordon]:
    return list((await client.nodes.ListCordons(api.ListCordonsRequest())).cordons)


async def test_nothing_new_is_placed_on_what_is_cordoned(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, fleet()) as client:
        made = await cordon(client, N0, "fan")
        assert (made.target, made.reason, made.author) == (N0, "fan", "local")
        assert not made.HasField("drain_deadline")
        assert await cordon(client, N0) == made, "asking twice changes nothing"
        assert (await client.reserve(1, "me")).gpus[0].node == "n1"
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.reserve(1, "me")
        assert caught.value.metadata["cordoned"] == "2"
        for name in (N0, N0, GPU):
            await uncordon(client, name)
        assert await cordons(client) == []
        assert (await client.reserve(2, "me")).gpus[0].node == "n0"


async def test_what_is_not_there_is_neither_cordoned_nor_drained(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, fleet()) as client:
        for name in ("nodes/none", "nodes/n0/gpus/none", "nodes/n0/gpus/n1-0"):
            for only in (True, False):
                with pytest.raises(NotFoundError):
                    await client.nodes.CordonNode(api.CordonNodeRequest(name=name, validate_only=only))
                with pytest.raises(NotFoundError):
                    await client.nodes.DrainNode(api.DrainNodeRequest(name=name, validate_only=only))
        with pytest.raises(NotFoundError):
            await client.nodes.UncordonNode(api.UncordonNodeRequest(name="nodes/none", validate_only=True))


async def test_a_watch_of_what_will_be_taken_away_tells_only_that_and_once_when_it_is_over(
    tmp_path: Path,
) -> None:
    async with allocator_client(tmp_path, fleet()) as client:
        early = await client.reserve(1, "early", nodes=[N0])
        await drain(client, N0, 600, "fan")
        watch = aiter(client.allocator.WatchReservations(api.WatchReservationsRequest(revoked=True)))

        async def told() -> list[tuple[str, bool, str]]:
            found = await asyncio.wait_for(anext(watch), 60)
            return [(one.name, one.HasField("revoke_time"), one.end_reason) for one in found.reservations]

        assert await told() == [(early.name, True, "nodes/n0 is drained: fan")]
        other = await client.reserve(1, "other")
        await other.renew()
        await uncordon(client, N0)
        assert await told() == [(early.name, False, "")]
        await early.renew()
        await drain(client, N1, 600)
        assert await told() == [(other.name, True, "nodes/n1 is drained")]
        await other.release()
        assert [one[:2] for one in await told()] == [(other.name, False)]


def divided() -> FakeFleet:
    """A node whose GPU is divided into two MIG instances, of which only they are named."""
    parts = [gpu_message(f"MIG-{index}", index) for index in range(2)]
    for part in parts:
        part.parent_uuid, part.mig_profile = "GPU-Parent", "1g.10gb"
    return FakeFleet(node_message("n0", *parts), node_message("n1", count=1))


async def test_a_cordon_of_a_gpu_covers_its_mig_instances(tmp_path: Path) -> None:
    """Nothing new comes onto them, who is there is told to leave, and the ranking and the explanation agree."""
    one_part = api.Ask(gpu_count=1, mig_profile="1g.10gb", min_memory_bytes=0)
    async with allocator_client(tmp_path, divided()) as client:
        held = await client.reserve(1, "me", mig_profile="1g.10gb", min_memory="0")
        await cordon(client, "nodes/n0/gpus/mig-1")  # a GPU that is known, before its parent
        await uncordon(client, "nodes/n0/gpus/mig-1")
        answer = await drain(client, PARENT, grace=3600)
        assert [one.name for one in answer.reservations] == [held.name]
        assert (await reread(client, held.name)).HasField("revoke_time")
        check = await client.capacity.CheckAvailability(api.CheckAvailabilityRequest(ask=one_part))
        assert not check.available
        assert "cordoned" in check.message
        explained = await client.capacity.ExplainPlacement(api.ExplainPlacementRequest(ask=one_part))
        assert any(f"{PARENT} is cordoned" in remedy for remedy in explained.remedies)
        ranked = (await client.capacity.RankNodes(api.RankNodesRequest())).nodes
        assert {one.name: one.idle_gpu_count for one in ranked}[N0] == 0
        await uncordon(client, PARENT)
        assert not (await reread(client, held.name)).HasField("revoke_time")
        assert (await client.reserve(1, "me", mig_profile="1g.10gb", min_memory="0")).gpus


async def test_a_drain_of_a_gpu_tells_who_holds_an_instance_of_it_since_before_that_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reservation names the instance alone; the node says of which GPU it is."""

    def unrecorded(one: Reservation) -> str:
        return to_gpus(replace(one, gpus=tuple(replace(gpu, parent="") for gpu in one.gpus)))

    to_gpus = store.to_gpus
    with monkeypatch.context() as earlier:
        earlier.setattr(store, "to_gpus", unrecorded)
        async with allocator_client(tmp_path, divided()) as client:
            held = await client.reserve(1, "me", mig_profile="1g.10gb", min_memory="0")
    async with allocator_client(tmp_path, divided()) as client:
        answer = await drain(client, PARENT, grace=3600)
        assert [one.name for one in answer.reservations] == [held.name]
        assert (await reread(client, held.name)).HasField("revoke_time")


async def test_a_drain_ends_what_is_left_at_its_deadline(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, fleet()) as client:
        there = await client.reserve(1, "me", ttl=600, nodes=[N0])
        elsewhere = await client.reserve(1, "me", ttl=600, nodes=[N1])
        found = await drain(client, N0, 0.5, "fan")
        assert [one.name for one in found.reservations] == [there.name]
        assert found.reservations[0].end_reason == "nodes/n0 is drained: fan"
        assert found.reservations[0].revoke_time == found.cordon.drain_deadline
        await eventually(lambda: reread(client, there.name), lambda found: found.state == CANCELLED)
        last = await reread(client, there.name)
        assert (last.end_reason, last.HasField("revoke_time")) == ("nodes/n0 is drained: fan", False)
        with pytest.raises(FailedPreconditionError):
            await there.renew()
        assert (await reread(client, elsewhere.name)).state == api.Reservation.STATE_ACTIVE
        assert [list(one.reservations) for one in await cordons(client)] == [[]]


async def test_a_drain_reaches_a_grant_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can look it up yet, and its holder would never be told."""
    writing, go, hit = asyncio.Event(), asyncio.Event(), tasks.hit_async

    async def slow(name: str) -> None:
        if name == "allocator.reserve.before_commit":
            writing.set()
            await go.wait()
        await hit(name)

    async with allocator_client(tmp_path, fleet()) as client:
        monkeypatch.setattr(tasks, "failpoints_set", lambda: ["allocator.reserve.before_commit"])
        monkeypatch.setattr(tasks, "hit_async", slow)
        granted = asyncio.ensure_future(client.reserve(1, "me", ttl=600, nodes=[N1]))
        await writing.wait()
        drained = asyncio.create_task(drain(client, N1, 300))
        await eventually(lambda: cordons(client))
        go.set()
        there = await granted
        assert [one.name for one in (await drained).reservations] == [there.name]
        assert (await reread(client, there.name)).end_reason == f"{N1} is drained"


async def test_lifting_a_cordon_gives_no_time_to_who_has_to_leave_for_another_reason(tmp_path: Path) -> None:
    settings = {"preemption_min_runtime_seconds": 0, "preemption_grace_seconds": 200}
    async with (
        serving(fleet()) as fleet_address,
        allocator(tmp_path, fleet_address, **settings) as address,
        calling(address) as client,
        connect_async(address) as operator,
    ):
        await client.ready()
        there = await client.reserve(nodes=[N1], preemptible=True)
        waits = asyncio.create_task(
            client.reserve(nodes=[N1], priority=1, may_preempt=True, wait=to_duration(500))
        )
        reason = await eventually(lambda: client.get(there.name), lambda found: found.end_reason)
        assert "preempted" in reason
        waits.cancel()
        await asyncio.wait([waits])
        await drain(operator, N1, 300)
        await uncordon(operator, N1)
        left = await client.get(there.name)
        assert left.end_reason == reason
        assert 150 < (to_datetime(left.revoke_time) - datetime.now(UTC)).total_seconds() <= 200


@pytest.mark.parametrize(
    ("spot", "fields"),
    [(Spot("n0"), {}), (Spot("n0", "gpu-parent"), {"mig_profile": "1g.10gb", "min_memory": "0"})],
    ids=["a node", "a GPU of MIG instances"],
)
async def test_a_drain_that_a_crash_cut_short_goes_on_before_any_node_reported(
    tmp_path: Path, spot: Spot, fields: dict[str, Any]
) -> None:
    """Killed after the cordon was on disk and before the holders were told; and the host rebooted since."""
    clock, site = ManualClock(), divided() if spot.gpu else fleet()
    async with allocator_client(tmp_path, site, clock=clock) as client:
        there = await client.reserve(1, "me", ttl=600, nodes=[N0], **fields)
    async with open_store(tmp_path / DATABASE, "an earlier boot") as store:
        cut_short = Cordon(spot, "fan", "ann", datetime(2023, 11, 14, tzinfo=UTC), 50.0, 300.0)
        await CordonStore(store, "an earlier boot").save([cut_short])
    async with before_any_report(tmp_path, site, clock) as client:
        assert await told(client, there.name, clock) == (f"{spot.name} is drained: fan", 300)
        [kept] = await cordons(client)
        assert to_datetime(kept.drain_deadline) - clock.wall() == timedelta(seconds=300), "it starts anew"


async def test_what_an_admin_drains_no_operator_lifts_or_rewrites(tmp_path: Path) -> None:
    async with callers(tmp_path, fleet(), "ada", "ann") as (ada, ann):
        for client in (ann, ada):  # what takes an operator to do takes an operator to undo
            await cordon(ada, GPU, "mine")
            await uncordon(client, GPU)
        await cordon(ann, N0, "fan")
        await drain(ada, N0, 3600, "recall")
        with pytest.raises(PermissionDeniedError, match=r"nodes/n0 is drained by ada: .* needs role admin"):
            await uncordon(ann, N0)
        with pytest.raises(PermissionDeniedError):
            await ann.nodes.UncordonNode(api.UncordonNodeRequest(name=N0, validate_only=True))
        kept = await cordon(ann, N0, "no matter")
        assert (kept.reason, kept.author, kept.HasField("drain_deadline")) == ("recall", "ada", True)
        assert [one.target for one in await cordons(ann)] == [N0]
        await uncordon(ada, N0)
        assert await cordons(ann) == []


async def told(client: AsyncClient, name: str, clock: ManualClock) -> tuple[str, float | None]:
    """Why a reservation is to be taken away, and in how many seconds."""
    one = await reread(client, name)
    if not one.HasField("revoke_time"):
        return one.end_reason, None
    return one.end_reason, (to_datetime(one.revoke_time) - clock.wall()) / timedelta(seconds=1)


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


@pytest.mark.parametrize("renewed", [False, True])
async def test_after_a_reboot_holders_have_all_of_the_grace_again_by_the_drain_that_ends_first(
    tmp_path: Path, renewed: bool
) -> None:
    """What a drain lists as its deadline is what they are told, however late they last renewed.

    The one that came first had the later deadline, and after the reboot has the earlier one.
    """
    clock, site = ManualClock(), fleet()
    async with allocator_client(tmp_path, site, clock=clock) as client:
        there = await client.reserve(2, "me", ttl=600, nodes=[N0])
        await drain(client, GPU, 500)
        clock.advance(450)
        await drain(client, N0, 100)
        assert await told(client, there.name, clock) == (f"{GPU} is drained", 50)
        if renewed:
            await there.renew()
    clock.reboot()
    for _ in range(2):  # and a restart of the allocator changes nothing
        async with allocator_client(tmp_path, site, clock=clock) as client:
            assert await told(client, there.name, clock) == (f"{N0} is drained", 100)
            left = [to_datetime(one.drain_deadline) - clock.wall() for one in await cordons(client)]
            assert left == [timedelta(seconds=100), timedelta(seconds=500)]
            with pytest.raises(ResourceExhaustedError) as refused:
                await client.reserve(1, "new", nodes=[N0])
            assert refused.value.metadata["cordoned"] == "2"


async def test_lifting_a_drain_leaves_the_others_of_the_same_reservation(tmp_path: Path) -> None:
    """Those of another node of it, and of one of its GPUs; that its node is cordoned again is none of them."""
    clock = ManualClock()
    async with allocator_client(tmp_path, fleet(), clock=clock) as client:
        there = await client.reserve(1, "me", ttl=600, member_count=2, gang_strategy="strict_spread")
        for name, grace in ((N0, 300), (GPU, 400), (N1, 200)):
            await drain(client, name, grace)
        await cordon(client, N0, "another reason")
        await uncordon(client, N1)
        assert await told(client, there.name, clock) == (f"{N0} is drained", 300)
        await uncordon(client, N0)
        assert await told(client, there.name, clock) == (f"{GPU} is drained", 400)
        await uncordon(client, GPU)
        assert await told(client, there.name, clock) == ("", None)


async def test_drains_of_mig_instances_that_are_not_known_yet_are_lifted_and_made(tmp_path: Path) -> None:
    """Since the restart their node has said nothing, so nobody knows whose instances they are."""
    clock, site = ManualClock(), divided()
    async with allocator_client(tmp_path, site, clock=clock) as client:
        there = await client.reserve(1, "me", ttl=600, mig_profile="1g.10gb", min_memory="0")
        await drain(client, PARENT, 100)
    async with before_any_report(tmp_path, site, clock) as client:
        assert await told(client, there.name, clock) == (f"{PARENT} is drained", 100)
        await uncordon(client, PARENT)
        assert await told(client, there.name, clock) == ("", None)
        await drain(client, PARENT, 200)
        assert await told(client, there.name, clock) == (f"{PARENT} is drained", 200)
        assert [list(one.reservations) for one in await cordons(client)] == [[there.name]]
