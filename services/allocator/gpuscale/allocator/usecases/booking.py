"""Use cases of bookings: create and cancel them, and make sure that their GPUs are free at the start.

Placement decides which leases may run into a booking (`Queue`, by `Bookings.in_the_way`). Those get notice here, `NOTICE`
before the start; unusable GPUs are replaced while nobody has claimed the booking; and a booking that nobody claims is given
back. All of it is checked every second while there are bookings, from what is known then, so a restart or a changed clock
leaves nothing undone.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from gpuscale.allocator.domain.accounting import DAY, month_of
from gpuscale.allocator.domain.bookings import (
    KEPT,
    MOST_OPEN,
    NOTICE,
    UNCLAIMED,
    Booking,
    Bookings,
    BookingState,
    local,
)
from gpuscale.allocator.domain.ledger import leaves_at
from gpuscale.allocator.domain.model import BOOKING_LABEL, WHOLE, Ask, Order, Pick, Reservation
from gpuscale.allocator.placing.refusal import Refusal
from gpuscale.allocator.queueing.backfill import beside
from gpuscale.allocator.queueing.model import QueueWorld, Quota
from gpuscale.allocator.queueing.queue import asked_milli
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.state.operators import BookingStore
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.allocator.usecases.leases import Leases
from gpuscale.allocator.usecases.reserving import refusal_error
from gpuscale.common import errors
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import Clock, uninterrupted
from gpuscale.common.security.auth import Principal, Role
from gpuscale.common.sizes import counted, hours_text

LOOK = 1.0
"""Seconds between two looks at all bookings."""
CHECK = 10.0
"""Seconds between checks whether their GPUs are usable."""
SKEW = 60.0
"""Seconds by which a start may be in the past: callers' clocks differ."""
LATEST = 253_370_764_800.0  # the year 9999: no message can hold the times after it

_log = get_logger(__name__)


@dataclass(eq=False)
class Calendar:
    """Creates, cancels and maintains bookings. Methods raise errors of the tree, as in the contract. `run` must run."""

    bookings: Bookings
    store: BookingStore
    world: QueueWorld
    view: FleetView
    leases: Leases
    changes: Changes
    quotas: Mapping[str, Quota]
    clock: Clock
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _any: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _check_again: float = field(default=0.0, init=False)

    @uninterrupted
    async def create(self, wish: Booking) -> Booking:
        """Book GPUs for a booking that has none yet, or return what an identical request booked."""
        async with self._turn:
            if (known := self.bookings.replay(wish)) is not None:
                return known
            wall = self.clock.wall().timestamp()
            if not wall - SKEW <= wish.start < LATEST:
                why = "in the past" if wish.start < LATEST else "after the year 9998"
                message = f"start_time ({local(wish.start)}) is {why}"
                raise errors.InvalidArgumentError(message, field="booking.start_time")
            if len(self.bookings.open) >= MOST_OPEN:
                message = f"{MOST_OPEN} bookings are open, which is the maximum; cancel some"
                raise errors.ResourceExhaustedError(message, reason="TOO_MANY_BOOKINGS")
            self._expect_quota(wish, wall)
            made = replace(wish, spots=self._spots(wish, wall), created=wall)
            await self._put(made)
        self._any.set()
        _log.info("booked", booking=made.name, owner=made.owner, start=local(made.start))
        return made

    @uninterrupted
    async def cancel(self, booking_id: str, caller: Principal) -> Booking:
        """Cancel a booking: what runs in it may go on until its end, and nobody has to leave for it."""
        async with self._turn:
            found = self.bookings.get(booking_id)
            if found.owner != caller.name and caller.role < Role.ADMIN:
                raise _not_owner(found, "cancel it")
            if found.state is BookingState.CANCELLED:
                return found
            if not found.open or found.end <= self.clock.wall().timestamp():
                message = f"{found.name} is over and cannot be changed"
                raise errors.FailedPreconditionError(message, reason="BOOKING_OVER")
            return await self._end(found, BookingState.CANCELLED)

    def expect_own(self, order: Order) -> None:
        """NotFoundError, or PermissionDeniedError (NOT_OWNER), unless the order may claim its booking, whose quota counts then."""
        found = self.bookings.get(order.booking)
        if found.owner != order.owner:
            raise _not_owner(found, "claim it")
        order.tenant = found.tenant

    def claims(self, one: Booking) -> list[Reservation]:
        """The live reservations of a booking."""
        own = (held for held in self._on(one) if held.labels.get(BOOKING_LABEL) == one.id)
        # By time too: an earlier booking may have had the same id.
        return [held for held in own if held.created.timestamp() >= one.created]

    async def run(self) -> NoReturn:
        """Check all bookings, for ever, while there are any."""
        writing = Attempts(_log, "cannot write changes of bookings", errors.UnavailableError)
        while True:
            if not self.bookings.open:
                self._any.clear()
                await self._any.wait()
            with writing:
                await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Do what is due for each open booking. Raises UnavailableError: it is still due."""
        now, wall = self.clock.now(), self.clock.wall().timestamp()
        check = self._check_again <= now and self.view.complete
        if check:
            self._check_again = now + CHECK
        async with self._turn:
            for one in self.bookings.open:
                await self._look_at(one, now, wall, check=check)
            over = [one for one in self.bookings if not one.open] if check else []
            if gone := [one.id for one in over if one.end + KEPT < wall]:
                await self.store.remove(gone)
                for booking_id in gone:
                    self.bookings.remove(booking_id)

    async def _look_at(self, one: Booking, now: float, wall: float, *, check: bool) -> None:
        claimed = bool(self.claims(one))
        if claimed and one.state is BookingState.BOOKED:
            one = await self._put(replace(one, state=BookingState.CLAIMED))
        if self.bookings.begun(one, wall):
            opened = self.bookings.opened
            if one.id not in opened:
                opened[one.id] = now
                self.changes.room(one.nodes)  # claims may wait for it
            if claimed:
                opened[one.id] = now
            if wall >= one.end or now - opened[one.id] >= UNCLAIMED:
                unclaimed = one.state is BookingState.BOOKED
                await self._end(one, BookingState.EXPIRED if unclaimed else BookingState.ENDED)
                return
        if check and not claimed:
            one = await self._refit(one, wall)
        if one.start - wall <= NOTICE:
            # Give notice to those who would still be on its GPUs: until its start or, after it, in full.
            at = now + (one.start - wall if one.start > wall else NOTICE)
            there = (held for held in self._on(one) if held.labels.get(BOOKING_LABEL) != one.id)
            if late := [held.id for held in there if leaves_at(held) > at and held.end_reason != one.why]:
                await self.leases.revoke(late, at, one.why)

    async def _refit(self, one: Booking, wall: float) -> Booking:
        """Replace GPUs that cannot be used, whoever holds them; without others, add a note."""
        on_nodes = {held.id for node in one.nodes for held in self.leases.ledger.use.reservations(node)}
        ask = replace(_plain(one.ask), gpus=one.gpus, nodes=one.nodes)
        same = self.world.place_after(ask, self.clock.now(), on_nodes)
        if isinstance(same, Pick):
            return one if "cannot be used" not in one.note else await self._put(replace(one, note=""))
        try:
            spots = self._spots(replace(one, start=max(one.start, wall)), wall)
        except errors.GpuscaleError:
            note = f"its GPUs cannot be used: {same.message}"
            return one if one.note == note else await self._put(replace(one, note=note))
        was = ", ".join(sorted(one.nodes))
        moved = replace(one, spots=spots, note=f"moved from {was} at {local(wall)}: {same.message}")
        await self._put(moved)
        await self._reprieve(one)
        _log.info("a booking was moved", booking=one.name, problem=same.message)
        return moved

    async def _end(self, one: Booking, state: BookingState) -> Booking:
        """End a booking and give back its GPUs; on disk first."""
        over = replace(one, state=state)
        await self.store.save(over)
        self.bookings.put(over)
        await self._reprieve(one)
        _log.info("a booking is over", booking=one.name, state=state.value)
        return over

    async def _put(self, after: Booking) -> Booking:
        """Update a booking: in memory at once, so that nothing is placed on it meanwhile, and on disk."""
        before = self.bookings.put(after)
        try:
            await self.store.save(after)
        except errors.GpuscaleError:
            if before is None:
                self.bookings.remove(after.id)
            else:
                self.bookings.put(before)
            raise
        return after

    async def _reprieve(self, one: Booking) -> None:
        """Take back the notice of those who may stay, and tell of the room; other bookings of their GPUs give notice again."""
        live = self.leases.ledger.reservations(ended=False)
        await self.leases.revoke([held.id for held in live if held.end_reason == one.why], None, "")
        self.changes.room(one.nodes)

    def _on(self, one: Booking) -> Iterator[Reservation]:
        use = self.leases.ledger.use
        held = dict.fromkeys(name for _, uuid in one.spots for name in use.gpu(uuid).reservations)
        return (self.leases.ledger.live[name] for name in held)

    def _expect_quota(self, wish: Booking, wall: float) -> None:
        quota = self.quotas.get(wish.tenant) or Quota(wish.tenant)
        limit, hours, at = quota.gpu_milli_limit, quota.gpu_hours_per_month, wish.start
        while hours is not None and at < wish.end:
            month = self.world.month(wish.tenant, max(wall, month_of(int(at) * 1000 // DAY)[0] * DAY / 1000))
            asked = asked_milli(wish.ask) / WHOLE * (min(wish.end, month.ends) - at) / 3600
            if month.used + month.booked + asked > hours:
                raise errors.ResourceExhaustedError(
                    f"tenant {wish.tenant} has {hours:g} GPU-hours for each month, of which it has used {hours_text(month.used)} and booked"
                    f" {hours_text(month.booked)} in the one that ends {local(month.ends)}; this asks for {hours_text(asked)} of it",
                    reason="QUOTA_EXCEEDED",
                )
            at = month.ends
        booked, asked = self.bookings.peak(wish.tenant, wish.start, wish.end), asked_milli(wish.ask)
        if limit is not None and booked + asked > limit:
            raise errors.ResourceExhaustedError(
                f"tenant {wish.tenant} may hold {counted(limit / 1000, 'GPU')} and has booked {booked / 1000:g} at that time; this asks"
                f" for {asked / 1000:g}",
                reason="QUOTA_EXCEEDED",
            )

    def _spots(self, wish: Booking, wall: float) -> tuple[tuple[str, str], ...]:
        """GPUs that are free at that time, preferring those that nobody has to leave. Raises like `create`."""
        now, ask = self.clock.now(), _plain(wish.ask)
        others = self.bookings.meeting(wish.start, wish.end, but=wish.id)
        live = [one for one in self.leases.ledger.live.values() if one.gpus]
        left = {one.id: leaves_at(one) - now for one in live}
        ahead, lasts = wish.start - wall, self.bookings.lasts
        sure = [one.id for one in live if left[one.id] <= ahead]
        soft = [one.id for one in live if lasts(left[one.id], preemptible=one.preemptible) <= ahead]
        found: Pick | Refusal
        for freed in (sure, soft):
            found = self.world.place_after(beside(ask, others), now, freed)
            if isinstance(found, Pick):
                return tuple((gpu.node, gpu.uuid) for gpu in found.gpus)
        free = self.world.place_after(ask, now, soft, told=True)
        if isinstance(free, Pick):
            names = ", ".join(
                f"{one.name} ({one.owner})"
                for one in others
                if not one.gpus.isdisjoint(gpu.uuid.lower() for gpu in free.gpus)
            )
            message = f"too few GPUs are free at that time: others are booked, by {names}"
            raise errors.ResourceExhaustedError(message, reason="NO_CAPACITY")
        if isinstance(self.world.place_after(ask, now, left), Pick):
            raise errors.ResourceExhaustedError(
                f"too few GPUs are free at that time: others are held under leases that may last longer. Book a start of {local(wall + self.bookings.horizon)}"
                " or later, so that holders get notice in time",
                reason="NO_CAPACITY",
            )
        raise refusal_error(free)


def _plain(ask: Ask) -> Ask:
    """The ask without what only matters now."""
    return replace(ask, max_utilization_percent=100.0, allow_unknown_utilization=True)


def _not_owner(one: Booking, what: str) -> errors.PermissionDeniedError:
    return errors.PermissionDeniedError(
        f"{one.name} belongs to {one.owner}, and only its owner may {what}: ask {one.owner} or an admin",
        reason="NOT_OWNER",
        metadata={"booking": one.id, "owner": one.owner},
    )
