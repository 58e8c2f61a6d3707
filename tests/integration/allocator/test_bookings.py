"""Bookings over real gRPC and a real store: kept free, claimed, given back, moved; through restarts and steps of the clock."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from gpuscale.allocator.usecases import booking as use_case
from gpuscale.api.allocator import v1 as api
from gpuscale.client import (
    AsyncClient,
    FailedPreconditionError,
    InvalidArgumentError,
    Mirror,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from gpuscale.common import wire
from gpuscale.common.rpc import feed
from gpuscale.common.runtime.tasks import SystemClock
from tests.support.allocator import callers, reread, reserve_request
from tests.support.fake_fleet import FakeFleet, NodeState, node_message
from tests.support.waiting import eventually

HOUR = 3600.0
DAY = 24 * HOUR
State = api.Booking.State
WEEK: dict[str, Any] = {"ttl": 7 * DAY}
"""Of a lease that lasts as long as time is let pass here."""


class MovedClock(SystemClock):
    """This host's clock, `ahead` of it by some time that has passed, and its date set by `set_by`."""

    ahead = 0.0
    set_by = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def wall(self) -> datetime:
        return super().wall() + timedelta(seconds=self.ahead + self.set_by)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    monkeypatch.setattr(use_case, "LOOK", 0.02)
    monkeypatch.setattr(use_case, "CHECK", 0.02)
    return MovedClock()


def fleet(**nodes: int) -> FakeFleet:
    """Nodes whose readings stay fresh for as long as time is let pass."""
    return FakeFleet(*(node_message(name, count=count, period=30 * DAY) for name, count in nodes.items()))


async def book(
    client: AsyncClient,
    clock: MovedClock,
    gpus: int = 1,
    *,
    at: float,
    hours: float = 2,
    name: str = "",
    tenant: str = "",
    **ask: Any,
) -> api.Booking:
    """Book GPUs from `at` seconds on."""
    booking = api.Booking(
        ask=api.Ask(gpu_count=gpus, **ask),
        start_time=wire.to_timestamp(clock.wall() + timedelta(seconds=at)),
        duration=wire.to_duration(hours * HOUR),
        tenant=tenant,
    )
    request = api.CreateBookingRequest(booking=booking, request_id=str(uuid4()), booking_id=name)
    return (await client.bookings.CreateBooking(request)).booking


async def got(client: AsyncClient, name: str) -> api.Booking:
    return (await client.bookings.GetBooking(api.GetBookingRequest(name=name))).booking


async def becomes(client: AsyncClient, name: str, state: State.ValueType) -> api.Booking:
    await eventually(lambda: got(client, name), lambda found: found.state == state)
    return await got(client, name)


async def until(meets: Callable[[api.Reservation], bool], client: AsyncClient, name: str) -> api.Reservation:
    await eventually(lambda: reread(client, name), meets)
    return await reread(client, name)


async def test_what_is_booked_is_kept_free_of_what_would_run_into_it(
    tmp_path: Path, clock: MovedClock
) -> None:
    async with callers(tmp_path, fleet(n0=2), clock=clock) as (ann, bob, _):
        made = await book(ann, clock, 2, at=2 * HOUR, name="demo")
        assert (made.name, made.owner, made.state) == ("bookings/demo", "ann", State.STATE_BOOKED)
        assert list(made.gpus) == ["nodes/n0/gpus/n0-0", "nodes/n0/gpus/n0-1"]
        with pytest.raises(ResourceExhaustedError, match=r"booked by ann \(bookings/demo\) from ") as refused:
            await bob.reserve(1, **WEEK)
        assert (refused.value.reason, refused.value.metadata["booked"]) == ("NO_CAPACITY", "true")
        assert refused.value.metadata.keys() == {"booked"}
        with pytest.raises(ResourceExhaustedError, match="bookings/demo"):
            await bob.reserve(1, time_limit=2.1 * HOUR, **WEEK)
        short = await bob.reserve(1, time_limit=1.9 * HOUR, **WEEK)
        soft = await bob.reserve(1, preemptible=True, **WEEK)
        left = short.reservation.limit_time.ToDatetime(UTC) - clock.wall()
        assert left.total_seconds() == pytest.approx(1.9 * HOUR, abs=60)
        clock.ahead += 1.86 * HOUR  # the preemptible one gets its notice, at most ten minutes before
        told = await until(lambda one: one.HasField("revoke_time"), bob, soft.name)
        assert told.end_reason == "booked by ann (bookings/demo)"
        assert abs(told.revoke_time.ToDatetime(UTC) - made.start_time.ToDatetime(UTC)) < timedelta(seconds=5)
        clock.ahead += 0.14 * HOUR
        ended = await until(lambda one: one.HasField("end_time"), bob, short.name)
        assert (ended.state, ended.end_reason) == (ended.STATE_CANCELLED, "its time limit is over")
        await until(lambda one: one.HasField("end_time"), bob, soft.name)
        claimed = await ann.reserve(2, booking="demo", **WEEK)
        assert {gpu.name for gpu in claimed.gpus} == set(made.gpus)
        assert (await becomes(ann, made.name, State.STATE_CLAIMED)).reservations == [claimed.name]
        clock.ahead += 2 * HOUR
        over = await until(lambda one: one.HasField("end_time"), ann, claimed.name)
        assert over.end_reason == "its time limit is over"
        await becomes(ann, made.name, State.STATE_ENDED)
        await bob.reserve(2, **WEEK)


async def test_a_lease_without_a_limit_gives_way_to_a_booking_beyond_the_horizon(
    tmp_path: Path, clock: MovedClock
) -> None:
    async with callers(tmp_path, fleet(n0=1), clock=clock) as (ann, bob, _):
        held = await bob.reserve(1, **WEEK)
        with pytest.raises(ResourceExhaustedError, match=r"Book a start of .* or later"):
            await book(ann, clock, at=23 * HOUR)
        made = await book(ann, clock, at=25 * HOUR)
        clock.ahead += 25 * HOUR - 300
        told = await until(lambda one: one.HasField("revoke_time"), bob, held.name)
        assert told.end_reason == f"booked by ann ({made.name})"
        # Nobody has to leave for what is cancelled.
        await ann.bookings.CancelBooking(api.CancelBookingRequest(name=made.name))
        await until(lambda one: not one.HasField("revoke_time"), bob, held.name)
        clock.ahead += 1000
        assert not (await until(lambda one: True, bob, held.name)).HasField("end_time")


async def test_what_nobody_claims_is_given_back_and_so_is_what_the_owner_released(
    tmp_path: Path, clock: MovedClock
) -> None:
    async with callers(tmp_path, fleet(n0=2), clock=clock) as (ann, bob, _):
        never = await book(ann, clock, at=HOUR)
        once = await book(ann, clock, at=HOUR)
        clock.ahead += HOUR + 1
        for _ in range(2):  # as often as they like, one after the other
            lease = await ann.reserve(1, booking=once.name, **WEEK)
            await becomes(ann, once.name, State.STATE_CLAIMED)
            await lease.release()
        clock.ahead += 800
        with pytest.raises(ResourceExhaustedError, match="booked by ann"):
            await bob.reserve(1, **WEEK)
        clock.ahead += 101
        await becomes(ann, never.name, State.STATE_EXPIRED)
        await becomes(ann, once.name, State.STATE_ENDED)
        await bob.reserve(2, **WEEK)
        with pytest.raises(FailedPreconditionError) as over:
            await ann.bookings.CancelBooking(api.CancelBookingRequest(name=never.name))
        assert over.value.reason == "BOOKING_OVER"
        with pytest.raises(FailedPreconditionError) as closed:
            await ann.reserve(1, booking=never.name)
        assert closed.value.reason == "BOOKING_NOT_OPEN"
        last = await book(ann, clock, at=16 * DAY)
        clock.ahead += 15 * DAY
        found = partial(ann.bookings.ListBookings, api.ListBookingsRequest(show_ended=True))
        await eventually(found, lambda answer: [one.name for one in answer.bookings] == [last.name])


async def test_a_claim_waits_for_the_start_and_a_step_of_the_clock_ends_no_lease(
    tmp_path: Path, clock: MovedClock
) -> None:
    async with callers(tmp_path, fleet(n0=1), clock=clock) as (ann, bob, _):
        held = await bob.reserve(1, time_limit=HOUR, **WEEK)
        made = await book(ann, clock, at=1.5 * HOUR, hours=1)
        with pytest.raises(FailedPreconditionError, match="begins") as early:
            await ann.reserve(1, booking=made.name)
        assert early.value.reason == "BOOKING_NOT_OPEN"
        claim = reserve_request(booking=made.name, wait=wire.to_duration(60), **WEEK)
        stream = ann.allocator.ReserveAndWatch(api.ReserveAndWatchRequest(reserve=claim), timeout=30)
        news = aiter(stream)
        place = (await anext(news)).waiting
        assert place.reason == api.NoRoomReason.NO_ROOM_REASON_BOOKING_NOT_OPEN
        clock.set_by += 2 * HOUR  # it has begun, and its end is half an hour away
        told = await until(lambda one: one.HasField("revoke_time"), bob, held.name)
        left = told.revoke_time.ToDatetime(UTC) - clock.wall()
        assert left.total_seconds() == pytest.approx(600, abs=10)  # the whole notice, and not at once
        clock.set_by -= 2 * HOUR  # what has begun stays begun
        await held.release()
        granted = (await anext(news)).reservation
        while not granted.name:
            granted = (await anext(news)).reservation
        length = granted.limit_time.ToDatetime(UTC) - clock.wall()
        assert length.total_seconds() == pytest.approx(HOUR, abs=10)  # never longer than was booked
        clock.set_by -= HOUR
        assert (await until(lambda one: True, ann, granted.name)).state == granted.STATE_ACTIVE


async def test_a_booking_is_kept_while_the_allocator_is_away_over_its_start(
    tmp_path: Path, clock: MovedClock
) -> None:
    async with callers(tmp_path, fleet(n0=1), clock=clock) as (ann, *_):
        await book(ann, clock, at=HOUR, name="demo")
    clock.ahead += 1.5 * HOUR  # and over the quarter of an hour after it
    async with callers(tmp_path, fleet(n0=1), clock=clock) as (ann, bob, _):
        with pytest.raises(ResourceExhaustedError, match="bookings/demo"):
            await bob.reserve(1)
        assert len((await ann.reserve(1, booking="demo")).gpus) == 1


async def test_everybody_sees_who_booked_what_and_only_its_owner_and_admins_change_it(
    tmp_path: Path, clock: MovedClock
) -> None:
    names = "ann", "bob", "ada", "eve"
    async with callers(tmp_path, fleet(n0=2), *names, clock=clock) as (ann, bob, ada, eve):
        made = await book(ann, clock, at=HOUR, name="a1")
        await book(bob, clock, at=HOUR, name="b1")
        page = await eve.bookings.ListBookings(api.ListBookingsRequest(filter="owner = ann"))
        assert [one.name for one in page.bookings] == ["bookings/a1"]
        for stranger in (bob, eve):
            with pytest.raises(PermissionDeniedError):
                await stranger.bookings.CancelBooking(api.CancelBookingRequest(name=made.name))
        with pytest.raises(PermissionDeniedError) as refused:
            await bob.reserve(1, booking=made.name)
        assert refused.value.reason == "NOT_OWNER"
        with pytest.raises(PermissionDeniedError):
            await book(bob, clock, at=9 * HOUR, tenant="ann")
        with pytest.raises(NotFoundError):
            await bob.reserve(1, booking="no-such")
        with pytest.raises(InvalidArgumentError, match="gpuscale-booking"):
            await bob.reserve(1, labels={"gpuscale-booking": "a1"})
        for _ in range(2):
            done = await ada.bookings.CancelBooking(api.CancelBookingRequest(name=made.name))
            assert done.booking.state == State.STATE_CANCELLED
        assert len((await eve.bookings.ListBookings(api.ListBookingsRequest())).bookings) == 1
        listed = await eve.bookings.ListBookings(api.ListBookingsRequest(show_ended=True))
        assert len(listed.bookings) == 2


async def test_what_cannot_be_booked_is_refused_by_its_field(tmp_path: Path, clock: MovedClock) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"at": -120.0}, "booking.start_time"), ({"gpu_milli": 500}, "booking.ask.gpu_milli"),
        ({"cpu_milli": 4000}, "booking.ask.cpu_milli"), ({"mig_profile": "1g.10gb"}, "booking.ask.mig_profile"),
        ({"hours": 400}, "booking.duration"), ({"gpus": 0}, "booking.ask.gpu_count"), ({"at": 2.516e11}, "booking.start_time"),
    ]  # fmt: skip
    async with callers(tmp_path, fleet(n0=1), clock=clock) as (ann, *_):
        for fields, field in wrong:
            with pytest.raises(InvalidArgumentError) as refused:
                await book(ann, clock, **({"at": HOUR} | fields))
            assert [one.field for one in refused.value.violations] == [field]
        with pytest.raises(InvalidArgumentError, match=r"\) is after the year 9998"):
            await book(ann, clock, at=2.516e11)


async def test_a_booking_of_an_older_version_that_ends_after_the_last_year_is_listed_and_cancelled(
    tmp_path: Path, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(use_case, "LATEST", float("inf"))
    async with callers(tmp_path, fleet(n0=1), clock=clock) as (ann, *_):
        start = datetime(9999, 12, 31, 23, tzinfo=UTC) - clock.wall()
        made = await book(ann, clock, at=start.total_seconds())
        for told in (made.start_time, made.end_time):
            wire.to_datetime(told).astimezone(timezone(timedelta(hours=14)))
        assert [*(await ann.bookings.ListBookings(api.ListBookingsRequest())).bookings] == [made]
        await ann.bookings.CancelBooking(api.CancelBookingRequest(name=made.name))
        assert not (await ann.bookings.ListBookings(api.ListBookingsRequest())).bookings


async def test_quotas_count_what_is_booked(tmp_path: Path, clock: MovedClock) -> None:
    async with callers(tmp_path, fleet(n0=4), clock=clock) as (ann, bob, ada):
        quota = api.Quota(name="quotas/ann", gpu_milli_limit=2000)
        await ada.quotas.SetQuota(api.SetQuotaRequest(quota=quota))
        await book(ann, clock, 2, at=2 * HOUR)
        with pytest.raises(ResourceExhaustedError) as refused:
            await book(ann, clock, 1, at=3 * HOUR)
        assert refused.value.reason == "QUOTA_EXCEEDED"
        await book(ann, clock, 2, at=4 * HOUR)  # when the first is over
        with pytest.raises(ResourceExhaustedError, match=r"booked 2; .*1\. Cancel a booking, or") as over:
            await ann.reserve(1, time_limit=3 * HOUR)
        assert over.value.reason == "QUOTA_EXCEEDED"
        await ann.reserve(2, time_limit=HOUR)
        await bob.reserve(2)


async def test_a_booking_is_moved_from_gpus_that_cannot_be_used_and_says_so(
    tmp_path: Path, clock: MovedClock
) -> None:
    telling = fleet(n0=1, n1=1)
    async with callers(tmp_path, telling, clock=clock) as (ann, _, ada):
        made = await book(ann, clock, at=HOUR)
        assert list(made.gpus) == ["nodes/n0/gpus/n0-0"]
        await ada.nodes.CordonNode(api.CordonNodeRequest(name="nodes/n0"))
        await eventually(lambda: got(ann, made.name), lambda found: found.gpus == ["nodes/n1/gpus/n1-0"])
        assert "moved from n0" in (await got(ann, made.name)).note
        telling.put(node_message("n1", count=1, state=NodeState.NODE_STATE_OFFLINE, period=30 * DAY))
        await eventually(lambda: got(ann, made.name), lambda found: "cannot be used" in found.note)
        await ada.nodes.UncordonNode(api.UncordonNodeRequest(name="nodes/n0"))
        await eventually(lambda: got(ann, made.name), lambda found: found.gpus == ["nodes/n0/gpus/n0-0"])


async def test_watchers_are_told_of_bookings_that_are_made_claimed_and_over(
    tmp_path: Path, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "PERIOD", 0.02)
    async with callers(tmp_path, fleet(n0=2), "ann", "eve", clock=clock) as (ann, eve):
        made = await book(ann, clock, at=60)
        seen = Mirror()

        async def follow() -> None:
            async for message in eve.bookings.WatchBookings(api.WatchBookingsRequest()):
                seen.take(message)

        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            await eventually(lambda: settled(seen))
            assert [*seen.items] == [made.name]
            clock.ahead += 120
            lease = await ann.reserve(1, booking=made.name, **WEEK)
            await eventually(lambda: len(seen.items[made.name].reservations) == 1)
            await lease.release()
            await ann.bookings.CancelBooking(api.CancelBookingRequest(name=made.name))
            await eventually(lambda: not seen.items)
            following.cancel()


async def settled(seen: Mirror) -> bool:
    return bool(seen.complete)
