"""What holders do with several leases at once: batches, the keep-alive stream, and the watch."""

from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import seconds, to_duration
from tests.support.allocator import Client, Reservation, reserve_request, running
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message


async def batch(client: Client, *requests: api.ReserveRequest) -> list[Reservation]:
    with rpc_errors():
        answer = await client.stub.BatchReserve(api.BatchReserveRequest(requests=requests), timeout=60)
    return list(answer.reservations)


async def release(client: Client, *ones: Reservation, fence: int | None = None) -> list[Reservation]:
    requests = [api.ReleaseReservationRequest(name=one.name, fence=fence or one.fence) for one in ones]
    with rpc_errors():
        answer = await client.stub.BatchRelease(api.BatchReleaseRequest(requests=requests), timeout=60)
    return list(answer.reservations)


async def keep_alive(client: Client, *messages: api.KeepAliveRequest) -> list[dict[str, api.LeaseStatus]]:
    """What each message is answered with, by name."""
    with rpc_errors():
        call = client.stub.KeepAlive(iter(messages), timeout=60)
        return [{status.name: status for status in answer.leases} async for answer in call]


def renewing(*ones: Reservation, fence: int | None = None) -> api.KeepAliveRequest:
    leases = [api.LeaseRenewal(name=one.name, fence=fence or one.fence) for one in ones]
    return api.KeepAliveRequest(leases=leases)


async def test_a_batch_is_granted_in_order_and_answered_again_when_repeated(tmp_path: Path) -> None:
    async with running(tmp_path, FakeFleet(node_message("n0", count=8))) as client:
        requests = [reserve_request(count) for count in (3, 1, 4)]
        granted = await batch(client, *requests)
        assert [len(one.gpus) for one in granted] == [3, 1, 4]
        assert [one.fence for one in granted] == sorted(one.fence for one in granted)
        assert len({gpu.uuid for one in granted for gpu in one.gpus}) == 8
        again = await batch(client, *requests)
        assert [(one.name, one.fence) for one in again] == [(one.name, one.fence) for one in granted]
        assert len(await client.live()) == 3


async def test_a_batch_is_granted_wholly_or_not_at_all(tmp_path: Path) -> None:
    async with running(tmp_path, FakeFleet(node_message("n0", count=4))) as client:
        with pytest.raises(ResourceExhaustedError):
            await batch(client, reserve_request(3), reserve_request(2))
        assert await client.live() == []
        used = reserve_request(1)
        kept = await batch(client, used)
        other = api.ReserveRequest()
        other.CopyFrom(used)
        other.holder = "else"
        with pytest.raises(AlreadyExistsError):
            await batch(client, reserve_request(1), other)
        assert [one.name for one in await client.live()] == [kept[0].name]
        assert len((await client.reserve(3)).gpus) == 3


async def test_what_is_wrong_in_a_batch_is_named_with_its_place(tmp_path: Path) -> None:
    async with running(tmp_path, FakeFleet(node_message("n0", count=4))) as client:
        wrong = {
            "requests[1].wait": reserve_request(wait=to_duration(5)),
            "requests[1].ask.gpu_count": reserve_request(0),
            "requests[1].ask.gpu_memory_bytes": reserve_request(gpu_milli=1000, gpu_memory_bytes=1),
        }
        for field, request in wrong.items():
            with pytest.raises(InvalidArgumentError) as caught:
                await batch(client, reserve_request(), request)
            assert [violation.field for violation in caught.value.violations] == [field]
        assert await client.live() == []


async def test_several_are_released_wholly_or_not_at_all(tmp_path: Path) -> None:
    async with running(tmp_path, FakeFleet(node_message("n0", count=4))) as client:
        one, other = await batch(client, reserve_request(1), reserve_request(2))
        with pytest.raises(NotFoundError):
            await release(client, one, Reservation(name="reservations/r99-zzzz", fence=99))
        with pytest.raises(FailedPreconditionError):
            await release(client, one, Reservation(name=other.name, fence=other.fence + 1))
        assert len(await client.live()) == 2
        for _ in range(2):  # again: what has ended is no error
            ended = await release(client, one, other, one)
            assert [answer.state for answer in ended] == [Reservation.STATE_RELEASED] * 3
        assert len((await client.reserve(4)).gpus) == 4


async def test_keep_alive_renews_what_it_can_and_names_what_it_cannot(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, FakeFleet(node_message("n0", count=8)), clock=clock) as client:
        one, other, over = [await client.reserve(ttl=60) for _ in range(3)]
        foreign = await client.reserve(ttl=60, holder="else")
        await client.release(over)
        clock.advance(40)
        unknown = Reservation(name="reservations/r99-zzzz", fence=9)
        first, second, third = await keep_alive(
            client,
            renewing(one, over, unknown),
            renewing(other, fence=other.fence + 1),
            api.KeepAliveRequest(holder="else"),
        )
        assert (first[one.name].error_reason, seconds(first[one.name].remaining)) == ("", 60)
        assert (first[over.name].error_reason, first[over.name].state) == (
            "RESERVATION_ENDED",
            Reservation.STATE_RELEASED,
        )
        assert first[unknown.name].error_reason == "NOT_FOUND"
        answered = (first[one.name], first[over.name], first[unknown.name], second[other.name])
        errors = [api.LeaseError.Name(each.error).removeprefix("LEASE_ERROR_") for each in answered]
        assert errors == ["UNSPECIFIED", "RESERVATION_ENDED", "NOT_FOUND", "FENCE_MISMATCH"]
        assert second[other.name].error_reason == "FENCE_MISMATCH"
        assert seconds(second[other.name].remaining) == 20
        assert list(third) == [foreign.name]
        left = {one.name: seconds(one.remaining) for one in await client.live()}
        assert left == {one.name: 60, other.name: 20, foreign.name: 60}


async def test_a_wrong_message_ends_the_stream_and_changes_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, FakeFleet(node_message("n0", count=1)), clock=clock) as client:
        one = await client.reserve(ttl=60)
        clock.advance(10)
        wrong = api.KeepAliveRequest(
            leases=[api.LeaseRenewal(name=one.name, fence=one.fence), api.LeaseRenewal(name="x", fence=1)]
        )
        with pytest.raises(InvalidArgumentError):
            await keep_alive(client, wrong)
        assert seconds((await client.get(one.name)).remaining) == 50
