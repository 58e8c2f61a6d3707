"""Leases that end in ways nobody planned: given up half-way, slept over, ended unnoticed; and what is said then."""

from __future__ import annotations

import asyncio
import time

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, Lease, LostReservationError
from gpuscale.testing import FakeServer

State = api.Reservation.State
HOUR = 3600.0


def sleep_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sleeps for an hour: what was waited for has not passed, the time since boot has."""
    before = time.clock_gettime
    asleep = {time.CLOCK_BOOTTIME: HOUR}
    monkeypatch.setattr(
        "gpuscale.client.lease.time.clock_gettime", lambda clock: before(clock) + asleep.get(clock, 0.0)
    )


def states(server: FakeServer) -> list[int]:
    return [one.state for one in server.reservations]


async def test_a_cancelled_reserve_leaves_nothing_held(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant was on its way back when its task was cancelled: nobody would have held it, or given it back."""
    async with server.connect_async() as client:
        granted = asyncio.Event()
        reserving = asyncio.create_task(_hold(client, granted, monkeypatch))
        await granted.wait()
        assert states(server) == [State.STATE_ACTIVE]
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        assert states(server) == [State.STATE_RELEASED]


async def _hold(client: AsyncClient, granted: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    real = client.allocator.Reserve

    async def reserve(request: api.ReserveRequest, timeout: float | None = None) -> api.ReserveResponse:
        response = await real(request, timeout=timeout)
        granted.set()
        await asyncio.Event().wait()
        return response

    monkeypatch.setattr(client.allocator, "Reserve", reserve)
    async with client.reserve(ttl=HOUR):
        pass


def test_ctrl_c_in_a_reserve_leaves_nothing_held(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with server.connect() as client:
        real = client.allocator.Reserve

        def reserve(request: api.ReserveRequest, timeout: float | None = None) -> api.ReserveResponse:
            real(request, timeout=timeout)
            raise KeyboardInterrupt

        monkeypatch.setattr(client.allocator, "Reserve", reserve)
        with pytest.raises(KeyboardInterrupt):
            client.reserve(ttl=HOUR)
    assert states(server) == [State.STATE_RELEASED]


def test_what_others_hold_is_not_given_back_with_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: api.ReserveRequest, timeout: float | None = None) -> api.ReserveResponse:
        raise KeyboardInterrupt

    with server.connect() as client:
        client.reserve(holder="me", ttl=HOUR)
        monkeypatch.setattr(client.allocator, "Reserve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.reserve(holder="me")
    assert states(server) == [State.STATE_ACTIVE]


def test_a_host_that_slept_has_lost_its_lease(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known at once by who asks, and soon by who waits: no renewal has to be refused first."""
    monkeypatch.setattr("gpuscale.client.lease.LOOK", 0.05)
    with server.connect() as client:
        lease = client.reserve(ttl=300)
        with pytest.raises(LostReservationError, match="not renewed in time"), lease:
            _sleep_in(lease, monkeypatch)


def _sleep_in(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    lease.check()
    sleep_over(monkeypatch)
    assert lease.lost_reason
    assert lease.lost.wait(30)


async def test_a_block_that_kept_the_loop_to_itself_is_told_of_the_loss(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing could be renewed meanwhile, and no task could notice: the clock says it all the same."""
    async with server.connect_async() as client:
        with pytest.raises(LostReservationError, match="not renewed in time"):
            async with client.reserve(ttl=300) as lease:
                sleep_over(monkeypatch)
        assert lease.lost.is_set()


async def test_a_reservation_that_was_over_before_the_block_is_said_to_be_lost(server: FakeServer) -> None:
    """It ended between two renewals, and the block ended before the next."""
    with server.connect() as client:
        lease = client.reserve(ttl=300)
        with pytest.raises(LostReservationError, match="taken away by an admin"), lease:
            server.cancel(lease.name)
    async with server.connect_async() as client:
        with pytest.raises(LostReservationError, match="taken away by an admin"):
            async with client.reserve(ttl=300) as lease:
                server.cancel(lease.name)


async def test_what_was_given_back_by_hand_is_not_lost(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.client.lease_timer.LONGEST_PAUSE", 0.01)
    async with server.connect_async() as client, client.reserve(ttl=300) as lease:
        with server.connect() as other, other.reserve(ttl=300) as sync:
            await lease.release()
            await lease.keep()  # has nothing to do any more
            sync.release()
            sleep_over(monkeypatch)
            lease.check()
            sync.check()
    assert states(server) == [State.STATE_RELEASED] * 2
