"""Reserved GPUs for a block of code: kept, given back, and said to be lost before they are another's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from gpuscale import client as library
from gpuscale.api.allocator import v1 as api
from gpuscale.common.wire import to_duration
from gpuscale.testing import FakeServer
from tests.support.cli import python
from tests.support.waiting import eventually, eventually_sync

State = api.Reservation.State
REQUEST_ID = "00000000-0000-4000-8000-000000000001"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed every 0.1 s, so that no test waits for one."""
    monkeypatch.setattr(library.lease_timer, "LONGEST_PAUSE", 0.1)


def test_a_block_holds_gpus_and_gives_them_back(server: FakeServer) -> None:
    with server.connect() as client:
        with client.reserve(gpus=2, min_memory="8GiB") as lease:
            [held] = server.reservations
            assert held.state == State.STATE_ACTIVE
            assert lease.cuda_visible_devices == ",".join(gpu.uuid for gpu in held.gpus)
            lease.check()
        [ended] = server.reservations
    assert ended.state == State.STATE_RELEASED
    assert "@" in ended.holder


def test_a_program_is_told_its_gpus(server: FakeServer) -> None:
    with server.connect() as client, client.reserve(2, "me") as lease:
        shows = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['GPUSCALE_FENCE'])"
        ran = python(shows, environment=lease.env())
        assert ran.out.split() == [lease.cuda_visible_devices, str(lease.fence)]
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        assert lease.env({}).keys() == {
            "CUDA_VISIBLE_DEVICES",
            "GPUSCALE_GPU_UUIDS",
            "GPUSCALE_RESERVATION",
            "GPUSCALE_FENCE",
        }


def test_gpus_are_given_back_when_the_block_fails(server: FakeServer) -> None:
    with server.connect() as client, pytest.raises(KeyError), client.reserve(1):
        raise KeyError
    assert server.reservations[0].state == State.STATE_RELEASED


def test_a_lease_is_renewed_in_the_background(server: FakeServer) -> None:
    with server.connect() as client, client.reserve(1, ttl=60) as lease:
        first = lease.reservation
        eventually_sync(lambda: lease.reservation is not first)
        assert server.reservations[0].remaining.seconds >= 30


def hold_until_lost(lease: library.Lease, lose: Callable[[], None]) -> None:
    """A block that ends when it is told that the GPUs are lost."""
    with lease:
        lose()
        assert lease.lost.wait(30)
        with pytest.raises(library.LostReservationError):
            lease.check()


def test_a_holder_is_told_that_its_gpus_will_be_taken_away_and_that_they_will_not(server: FakeServer) -> None:
    with server.connect() as client, client.reserve(1) as lease:
        node = f"nodes/{lease.gpus[0].node}"
        client.nodes.DrainNode(api.DrainNodeRequest(name=node, grace=to_duration(600), reason="fan"))
        assert lease.revoked.wait(30)
        assert lease.revoke_reason == f"{node} is drained: fan"
        lease.check()
        client.nodes.UncordonNode(api.UncordonNodeRequest(name=node))
        eventually_sync(lambda: not lease.revoked.is_set())
        assert not lease.revoke_reason


def test_a_lost_reservation_is_told_within_its_lease(server: FakeServer) -> None:
    with server.connect() as client:
        lease = client.reserve(1, ttl=60)
        with pytest.raises(library.LostReservationError) as caught:
            hold_until_lost(lease, lambda: server.expire(lease.name))
    assert caught.value.reason == "LEASE_LOST"
    assert isinstance(caught.value, library.FailedPreconditionError)
    assert server.reservations[0].end_reason in caught.value.message


def test_an_allocator_that_is_gone_loses_the_lease_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.lease_timer, "MARGIN", 0.9)
    server = FakeServer(gpus=1)
    with server:
        client = server.connect()
        lease = client.reserve(1, ttl=5)
    with client, pytest.raises(library.LostReservationError, match="not renewed in time"):
        hold_until_lost(lease, lambda: None)


def test_a_client_that_is_closed_loses_its_leases(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    """Nobody renews them any more, and the holder must learn it."""
    monkeypatch.setattr(library.lease_timer, "MARGIN", 0.9)
    client = server.connect()
    with pytest.raises(library.LostReservationError):
        hold_until_lost(client.reserve(1, ttl=5), client.close)


async def test_an_async_client_that_is_closed_loses_its_leases(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> None:
    monkeypatch.setattr(library.lease_timer, "MARGIN", 0.9)
    client = server.connect_async()
    lease = await client.reserve(1, ttl=5)
    await client.close()
    async with asyncio.timeout(30):
        await lease.keep()
    assert lease.lost.is_set()


def fail_when_lost(lease: library.Lease, server: FakeServer) -> None:
    with lease:
        server.lose(lease.name)
        assert lease.lost.wait(30)
        raise ZeroDivisionError


def test_an_error_of_the_block_keeps_its_own_face(server: FakeServer) -> None:
    with server.connect() as client, pytest.raises(ZeroDivisionError) as caught:
        fail_when_lost(client.reserve(1, ttl=5), server)
    assert any("was lost" in note for note in caught.value.__notes__)


def test_a_call_without_an_answer_is_repeated_and_reserves_once(server: FakeServer) -> None:
    server.fail("Reserve", library.UnavailableError("starting", retry_after=0.01), times=2)
    with server.connect() as client, client.reserve(1):
        assert len(server.reservations) == 1


def test_a_refusal_is_not_repeated(server: FakeServer) -> None:
    server.fail("Reserve", library.ResourceExhaustedError("quota", reason="QUOTA_EXCEEDED"))
    with server.connect() as client, pytest.raises(library.ResourceExhaustedError):
        client.reserve(1)
    assert server.reservations == []


async def test_a_block_of_an_event_loop(server: FakeServer) -> None:
    async with server.connect_async() as client:
        async with client.reserve(gpus=2, holder="me") as lease:
            assert len(lease.gpu_uuids) == 2
            assert server.reservations[0].state == State.STATE_ACTIVE
        assert server.reservations[0].state == State.STATE_RELEASED
        before = len(asyncio.all_tasks())
        with pytest.raises(KeyError):
            async with client.reserve(1):
                raise KeyError
        assert server.reservations[1].state == State.STATE_RELEASED
        await eventually(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_lost_reservation_in_an_event_loop(server: FakeServer) -> None:
    async def hold(reserving: library.AsyncReserving) -> None:
        async with reserving as lease:
            server.lose(lease.name)
            async with asyncio.timeout(30):
                await lease.lost.wait()

    async with server.connect_async() as client:
        with pytest.raises(library.LostReservationError):
            await hold(client.reserve(1, ttl=5))
        one = await client.reserve(1)
        await one.renew()
        await one.release()
    assert server.reservations[-1].state == State.STATE_RELEASED


async def test_a_block_that_is_cancelled_gives_back(server: FakeServer) -> None:
    async with server.connect_async() as client:
        entered = asyncio.Event()

        async def block() -> None:
            async with client.reserve(1):
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert server.reservations[0].state == State.STATE_RELEASED


def test_a_repeated_request_id_gives_no_lease_that_has_ended(server: FakeServer) -> None:
    """The answer is what the id was granted, whatever has become of it; its GPUs may be another's."""
    with server.connect() as client:
        client.reserve(1, "me", request_id=REQUEST_ID).release()
        with pytest.raises(library.FailedPreconditionError) as caught:
            client.reserve(1, "me", request_id=REQUEST_ID)
    assert caught.value.reason == "RESERVATION_ENDED"
