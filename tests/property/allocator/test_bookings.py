"""Whatever is booked, granted, claimed and cancelled, through steps of the clock and restarts: no GPU is in two bookings at one
time, and at the start of a booking its GPUs are free."""

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuscale.allocator.domain.bookings import NOTICE, Booking, Bookings, BookingState
from gpuscale.allocator.domain.ledger import Ledger, due_at
from gpuscale.allocator.domain.model import BOOKING_LABEL, Order, Pick, State
from gpuscale.allocator.queueing.model import QueueObstacle, QueueWorld, Rules
from gpuscale.allocator.queueing.queue import Queue
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.usecases.booking import Calendar
from gpuscale.common.errors import ResourceExhaustedError
from gpuscale.common.security.auth import Principal, Role
from tests.support.allocator_values import ask
from tests.support.clock import ManualClock
from tests.unit.allocator.queue_site import FirstFit

HORIZON = 4 * 3600.0
SIZES = {"n0": 2}
ADMIN = Principal("ada", Role.ADMIN, "token")
OFFSETS = st.sampled_from([0.0, 900.0, 3600.0, 5 * 3600.0])


class Disk(dict[str, Booking]):
    async def save(self, one: Booking) -> None:
        self[one.id] = one

    async def remove(self, ids: Iterable[str]) -> None:
        for one in ids:
            del self[one]


class Told:
    """Leases that are revoked without a disk; the view knows all nodes."""

    complete = True

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.revoked: list[tuple[str, str]] = []

    async def revoke(self, ids: Iterable[str], at: float | None, reason: str) -> None:
        for one in ids:
            self.ledger.revoke(one, at, reason)
            if at is not None:
                self.revoked.append((one, reason))


class BookingMachine(RuleBasedStateMachine):
    """Bookings, leases and clocks over five GPUs."""

    @initialize(stepped=st.booleans())
    def begin(self, stepped: bool) -> None:
        self.names = 0
        self.clock, self.ledger, self.disk = ManualClock(), Ledger(new_id=self.name), Disk()
        self.stepped = stepped
        self.placed: dict[str, float] = {}
        self.open()

    def name(self, _: float = 0.0) -> str:
        self.names += 1
        return f"x{self.names:04}"

    def open(self) -> None:
        """As at a start: what the disk has, and nothing else."""
        self.bookings = Bookings(HORIZON)
        for one in self.disk.values():
            self.bookings.put(one)
        world = QueueWorld(
            self.ledger, FirstFit(self.ledger, SIZES), {}, self.bookings, self.clock.now, self.clock.wall
        )  # type: ignore[arg-type]
        self.queue, self.told = Queue(world, Rules()), Told(self.ledger)
        changes: Any = Changes()
        self.calendar = Calendar(
            self.bookings, self.disk, world, self.told, self.told, changes, {}, self.clock
        )  # type: ignore[arg-type]

    def now(self, doing: Coroutine[Any, Any, object]) -> None:
        asyncio.run(doing)  # type: ignore[arg-type]

    @rule(count=st.integers(1, 2), after=OFFSETS, hours=st.sampled_from([0.25, 1, 3]))
    def book(self, count: int, after: float, hours: float) -> None:
        start, name = self.clock.wall().timestamp() + after, self.name()
        wish = Booking(name, name, name, "ann", "ann", "", ask(count), start, start + hours * 3600, start)
        try:
            self.now(self.calendar.create(wish))
        except ResourceExhaustedError:
            return
        made = self.disk[name]
        assert len(made.spots) == count

    @rule(
        count=st.integers(1, 2),
        limit=st.sampled_from([0.0, 0.0, 600.0, 8 * 3600.0]),
        preemptible=st.booleans(),
        data=st.data(),
    )
    def reserve(self, count: int, limit: float, preemptible: bool, data: st.DataObject) -> None:
        claims = ["", *(one.id for one in self.bookings.open if one.start <= self.clock.wall().timestamp())]
        name, booking = self.name(), data.draw(st.sampled_from(claims))
        labels = {BOOKING_LABEL: booking} if booking else {}
        order = Order(name, name, "job", "ann", 1e9, labels, ask(count), preemptible=preemptible)
        order.limit, order.booking = limit, booking
        found = self.queue.look(order, self.clock.now())
        if isinstance(found, Pick):
            granted = self.ledger.grant(order, found.gpus, now=self.clock.now(), wall=self.clock.wall())
            self.ledger.confirm(granted)
            self.placed[granted.id] = self.clock.wall().timestamp()
        elif booking:
            assert not isinstance(found, QueueObstacle) or booking in found.message

    @precondition(lambda self: self.ledger.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.ledger.live))), State.RELEASED)

    @precondition(lambda self: self.bookings.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(one.id for one in self.bookings.open)))
        if self.bookings.get(one).end > self.clock.wall().timestamp():
            self.now(self.calendar.cancel(one, ADMIN))

    @rule(steps=st.sampled_from([1, 8, 40]))
    def let_time_pass(self, steps: int) -> None:
        for _ in range(steps):
            self.clock.advance(150.0)
            for one in [one for one in self.ledger.live.values() if due_at(one) <= self.clock.now()]:
                self.end(one.id, State.CANCELLED)
            self.now(self.calendar.look())
            self.gpus_of_a_booking_are_free_at_its_start()

    @precondition(lambda self: self.stepped)
    @rule(by=st.sampled_from([-3600.0, 3600.0]))
    def set_the_clock(self, by: float) -> None:
        before = dict(self.ledger.live)
        self.clock.step_wall(by)
        assert before == dict(self.ledger.live)

    @rule()
    def restart(self) -> None:
        self.open()
        self.now(self.calendar.look())

    def end(self, name: str, state: State) -> None:
        one = self.ledger.live[name]
        self.ledger.settle(self.ledger.close(one, state, now=self.clock.now(), wall=self.clock.wall()))

    @invariant()
    def no_gpu_is_in_two_bookings_at_one_time(self) -> None:
        for one in self.bookings.open:
            others = (other for other in self.bookings.meeting(one.start, one.end, but=one.id))
            assert all(one.gpus.isdisjoint(other.gpus) for other in others)

    @invariant()
    def nobody_leaves_for_a_booking_who_was_not_to_expect_it(self) -> None:
        """None with a limit; the others only if they, and the booking, were there in time for their notice."""
        for lease, why in [] if self.stepped else self.told.revoked:
            [booking] = [one for one in self.bookings if one.why == why]
            one = self.ledger.get(lease)
            known = booking.start - max(self.placed[lease], booking.created)
            assert known >= (NOTICE if one.preemptible else HORIZON), (one, booking)
            assert one.preemptible or one.until is None

    def gpus_of_a_booking_are_free_at_its_start(self) -> None:
        """Of others; after the clock was set, once who was there has had the whole notice."""
        now, wall = self.clock.now(), self.clock.wall().timestamp()
        for one in self.bookings.open:
            if not self.bookings.begun(one, wall):
                continue
            if self.stepped and now - self.bookings.opened[one.id] <= NOTICE:
                continue
            holders = {name for uuid in one.gpus for name in self.ledger.use.gpu(uuid).reservations}
            of_others = [
                name for name in holders if self.ledger.live[name].labels.get(BOOKING_LABEL) != one.id
            ]
            assert of_others == [], (one, [replace(self.ledger.live[name]) for name in of_others])


class RequestId(str):
    """A request id that counts what it is compared with."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        RequestId.compared += 1
        return str.__eq__(self, other)


def test_a_request_is_looked_up_among_any_number_of_bookings() -> None:
    """Those that are over stay for two weeks, however many."""
    bookings, wish = Bookings(HORIZON), Booking("x", "x", "x", "ann", "ann", "", ask(), 0.0, 1.0, 0.0)
    for number in range(1000):
        over = replace(wish, id=f"x{number}", request_id=RequestId(number), state=BookingState.ENDED)
        bookings.put(over)
    assert bookings.replay(wish) is None
    assert bookings.replay(replace(wish, request_id="999")) is over
    bookings.remove(over.id)
    assert bookings.replay(replace(wish, request_id="999")) is None
    assert RequestId.compared < 10


TestBookings = BookingMachine.TestCase
TestBookings.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=25)
