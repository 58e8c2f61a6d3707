"""What becomes of a reservation: renewed, released, listed, run out, kept over restarts and reboots, forgotten."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from gpuscale.allocator.domain.ledger import RETENTION
from gpuscale.allocator.servicers.servicer import AllocatorServicer
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common import errors
from gpuscale.common.wire import last_key, open_page
from tests.support.allocator import Client, Reservation, callers, release, reread, reserve_request, running
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.waiting import eventually


async def test_lists_come_in_pages_filtered_and_sorted_and_their_tokens_are_bound_to_that(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, FakeFleet(node_message("n0", count=8))) as client:
        made = [await client.reserve(holder=f"holder-{index % 2}") for index in range(5)]
        await client.release(made[0])

        async def names(**fields: object) -> list[str]:
            return [one.name for one in await client.listed(page_size=2, **fields)]

        assert await names() == [one.name for one in made[1:]], "by age"
        assert await names(show_ended=True) == [one.name for one in made]
        assert await names(holder="holder-1") == [made[1].name, made[3].name]
        odd = 'holder = "holder-1" OR state = RELEASED'
        assert await names(filter=odd) == [made[1].name, made[3].name]
        assert await names(filter=odd, show_ended=True) == [made[index].name for index in (0, 1, 3)]
        on_gpu = f'gpus.node:n0 AND gpus.uuid:"{made[3].gpus[0].uuid}"'
        for one in (on_gpu, f"{on_gpu} AND holder = holder-1"):
            looks = patch.object(
                AllocatorServicer, "_shown", autospec=True, side_effect=AllocatorServicer._shown
            )
            with looks as shown:
                assert await names(filter=one) == [made[3].name]
            assert {call.args[1].id for call in shown.mock_calls} == {
                made[3].name.removeprefix("reservations/")
            }
        by_holder = await names(order_by="holder desc, create_time desc")
        assert by_holder == [made[index].name for index in (3, 1, 4, 2)]
        ordered: dict[str, object] = {"order_by": "fence", "page_size": 2}
        token = (await client.page(**ordered)).next_page_token
        for other in ({"order_by": "fence desc"}, {"filter": "fence > 0"}, {"holder": "holder-1"}):
            with pytest.raises(errors.InvalidArgumentError, match="repeat the filters"):
                await client.page(**{**ordered, **other}, page_token=token)
        with pytest.raises(errors.InvalidArgumentError) as caught:
            await client.page(filter="colour = red")
        assert caught.value.violations[0].field == "filter"


async def test_a_page_token_tells_no_fence(tmp_path: Path) -> None:
    """But what a viewer is shown: the holder, the time and the id."""
    async with running(tmp_path, FakeFleet(node_message("n0", count=2))) as client:
        one = await client.reserve()
        await client.reserve()
        token = (await client.page(order_by="holder", page_size=1)).next_page_token
    request = allocator_api.ListReservationsRequest(order_by="holder", page_token=token)
    open_page(request)
    created, its_id = one.create_time.ToMicroseconds() / 1e6, one.name.removeprefix("reservations/")
    place = [["test", False], [f"{created:020.6f} {its_id}", False]]
    assert json.loads(last_key(request.page_token)) == place


async def test_what_ended_before_a_reboot_is_kept_for_two_weeks_after_it(tmp_path: Path) -> None:
    """However often the allocator is started."""
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=1, period=10 * RETENTION))
    async with running(tmp_path, fleet, clock=clock) as client:
        over = await client.release(await client.reserve())
    clock.reboot()
    for _ in range(2):
        async with running(tmp_path, fleet, clock=clock) as client:
            assert await client.get(over.name) == over
        clock.advance(RETENTION / 2)
    async with running(tmp_path, fleet, clock=clock) as client:
        await eventually(lambda: _gone(client, over))


async def test_an_ended_reservation_is_forgotten_two_weeks_later_and_its_fence_is_not(tmp_path: Path) -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=1, period=10 * RETENTION))
    async with running(tmp_path, fleet, clock=clock) as client:
        granted = await client.reserve()
        over = await client.release(granted)
        clock.advance(RETENTION - 1)
        assert (await client.get(granted.name)).state == Reservation.STATE_RELEASED
        clock.advance(1)
        await eventually(lambda: _gone(client, granted))
    async with running(tmp_path, fleet, clock=clock) as client:
        assert (await client.page(show_ended=True)).kept_since == over.end_time
        assert (await client.reserve()).fence > granted.fence


async def test_only_the_owner_or_an_admin_may_change_a_reservation(tmp_path: Path) -> None:
    """Nor does a request id that leaked give anybody else the handle of the grant."""
    request = reserve_request()
    async with callers(tmp_path, FakeFleet(node_message("n0", count=4))) as (ann, bob, ada):
        granted = (await ann.allocator.Reserve(request)).reservation
        assert granted.owner == "ann"
        with pytest.raises(errors.AlreadyExistsError):
            await bob.allocator.Reserve(request)
        told = await reread(bob, granted.name)
        assert (told.state, told.fence) == (Reservation.STATE_ACTIVE, 0)
        for fence in (granted.fence, 0):  # without the fence, too, which is not told to everybody
            change = {"name": granted.name, "fence": fence}
            for refused in (
                bob.allocator.RenewReservation(allocator_api.RenewReservationRequest(**change)),
                bob.allocator.ReleaseReservation(allocator_api.ReleaseReservationRequest(**change)),
            ):
                with pytest.raises(errors.PermissionDeniedError, match="belongs to ann") as caught:
                    await refused
                assert (caught.value.reason, caught.value.metadata["owner"]) == ("NOT_OWNER", "ann")
        with pytest.raises(errors.FailedPreconditionError, match="fence 0 does not belong"):
            await release(ann, told)
        renewal = allocator_api.RenewReservationRequest(name=granted.name, fence=granted.fence)
        assert (await ada.allocator.RenewReservation(renewal)).reservation.owner == "ann"
        await release(ada, granted)
        assert (await reread(ada, granted.name)).state == Reservation.STATE_RELEASED


async def _gone(client: Client, one: Reservation) -> bool:
    try:
        await client.get(one.name)
    except errors.NotFoundError:
        return True
    return False
