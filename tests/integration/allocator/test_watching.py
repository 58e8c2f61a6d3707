"""What a watcher of reservations is told."""

import asyncio
from pathlib import Path

import pytest

from gpuscale.allocator.servicers import answers
from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient
from tests.support.allocator import allocator_client, callers, release
from tests.support.fake_fleet import FakeFleet, node_message

Told = api.WatchReservationsResponse


async def first(client: AsyncClient, **fields: str) -> Told:
    stream = client.allocator.WatchReservations(api.WatchReservationsRequest(**fields))
    message = await asyncio.wait_for(anext(aiter(stream)), 60)
    stream.cancel()
    return message


def names(told: Told) -> list[str]:
    return [one.name for one in told.reservations]


async def test_a_watcher_goes_on_where_it_left_off_and_is_told_what_ended_meanwhile(tmp_path: Path) -> None:
    wanted = {"filter": 'labels.team = "vision"', "holder": "me"}
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=6))) as client:
        kept, gone = [await client.reserve(1, "me", labels={"team": "vision"}) for _ in range(2)]
        told = await first(client, **wanted)
        assert (names(told), told.full, told.reset) == ([kept.name, gone.name], True, False)
        await release(client, gone)
        for holder, team in (("me", "x"), ("else", "vision")):
            await client.reserve(1, holder, labels={"team": team})
        new = await client.reserve(1, "me", labels={"team": "vision"})
        told = await first(client, **wanted, resume_token=told.resume_token)
        assert (names(told), told.full, told.reset) == ([gone.name, new.name], True, False)
        assert told.reservations[0].end_cause == api.Reservation.END_CAUSE_RELEASED
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=6))) as client:
        told = await first(client, **wanted, resume_token=told.resume_token)
        assert (names(told), told.full, told.reset) == ([kept.name, new.name], True, True)


async def test_watchers_cost_a_message_of_each_reservation_and_renewals_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[str](), answers.from_reservation
    monkeypatch.setattr(
        answers, "from_reservation", lambda one, *rest: (made.append(one.id), make(one, *rest))[1]
    )
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=8))) as client:
        held = [await client.reserve(1, "me") for _ in range(8)]
        watches = [
            aiter(client.allocator.WatchReservations(api.WatchReservationsRequest())) for _ in range(20)
        ]
        for watch in watches:
            assert len((await anext(watch)).reservations) == 8
        for one in held * 3:
            again = api.RenewReservationRequest(name=one.name, fence=one.fence)
            await client.allocator.RenewReservation(again)
        await release(client, held[0])
        for watch in watches:
            assert names(await anext(watch)) == [held[0].name]
        assert len(made) == 9


async def test_only_its_owner_and_admins_see_the_fence_in_a_watch(tmp_path: Path) -> None:
    names = ("ann", "eve", "ada", "bob")
    async with callers(tmp_path, FakeFleet(node_message("n0", count=2)), *names) as clients:
        held = await clients[0].reserve(1, "me")
        seen = [[one.fence for one in (await first(client)).reservations] for client in clients]
        assert seen == [[held.fence], [0], [held.fence], [0]]


async def test_a_lease_is_checked_on_a_node_by_its_name_or_id(tmp_path: Path) -> None:
    async with allocator_client(tmp_path, FakeFleet(node_message("n0", count=2))) as client:
        held = await client.reserve(1, "me")
        asked = {"name": held.name, "fence": held.fence, "gpu_uuids": [held.gpus[0].uuid]}
        for node in ("nodes/n0", "n0"):
            answer = await client.allocator.CheckLease(api.CheckLeaseRequest(**asked, node=node))
            assert answer.lowest_fences == [held.fence]
