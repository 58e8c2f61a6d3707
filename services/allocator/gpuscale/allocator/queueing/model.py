"""Values of the queue: waiting requests, leases and quotas, its decisions, and what it needs of the allocator. Pure.

Times are seconds of CLOCK_BOOTTIME; GPUs are counted in thousandths (`model.WHOLE` is one).
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from gpuscale.allocator.domain.accounting import DAY, GPU_HOUR, MonthlyUse, month_of
from gpuscale.allocator.domain.bookings import Booking, Bookings, local
from gpuscale.allocator.domain.durations import Durations, Span, held_since, kin_of, kin_of_order
from gpuscale.allocator.domain.ledger import Ledger, due_at, leaves_at
from gpuscale.allocator.domain.model import Ask, Order, Pick, Reservation, State
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Refusal


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may hold, and use per calendar month, None for no limit; and its weight in the queue."""

    tenant: str
    gpu_milli_limit: int | None = None
    weight: float = 1.0
    gpu_hours_per_month: float | None = None


@dataclass(frozen=True, slots=True)
class MonthStanding:
    """GPU-hours of a tenant in the calendar month (UTC): `used`, and `booked` for its rest; it `ends` at a time since 1970."""

    used: float = 0.0
    booked: float = 0.0
    ends: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What the queue knows of a live reservation.

    `since` is when it was granted, `ends` when it ends unless renewed; a `revoked` one ends then in any case. In a forecast,
    `ends` is the likely end, probably between `earliest` and `latest`.
    """

    id: str
    priority: int
    preemptible: bool
    gpu_milli: int
    since: float
    ends: float
    revoked: bool = False
    earliest: float | None = None
    latest: float | None = None

    def attained(self, now: float) -> float:
        """Attained service: GPUs times the time they were held (Tiresias, NSDI'19)."""
        return max(0.0, now - self.since) * self.gpu_milli


class Reason(StrEnum):
    """Why a request is not served yet."""

    NO_CAPACITY = "NO_CAPACITY"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    BEHIND_OTHERS = "BEHIND_OTHERS"
    BOOKED = "BOOKED"
    BOOKING_NOT_OPEN = "BOOKING_NOT_OPEN"


@dataclass(frozen=True, slots=True)
class QueueObstacle:
    """Why a request is not served yet, as a code and in words; `lasting` if waiting does not help, or until a time since 1970."""

    reason: Reason
    message: str
    lasting: bool = False
    until: float | None = None


ORDER_KEPT, ORDER_REST, ORDER_PART = 1.0, 400.0, 100
"""Seconds for which the order of leases by end is cached, or this many times the time it took if that is longer; and the part of
the leases from which a full sort is cheaper."""
LOOKED_AT_ONCE = 512
"""Leases whose likely end is computed before other work may run: about 2 ms."""
_UNLIMITED = Quota("")


@dataclass(eq=False)
class QueueWorld:
    """Answers the queue's questions about the fleet and the ledger, as of now; `quotas` has the tenants for which one was set.

    `now` tells the seconds of CLOCK_BOOTTIME, `wall` the date.
    """

    ledger: Ledger
    placer: Placer
    quotas: Mapping[str, Quota]
    bookings: Bookings
    now: Callable[[], float]
    wall: Callable[[], datetime]
    past: Mapping[str, float] = field(default_factory=dict[str, float])
    months: MonthlyUse = field(default_factory=MonthlyUse)
    durations: Durations = field(default_factory=Durations)
    _since: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _order: Sequence[str] = field(default=(), init=False)
    _order_until: float = field(default=0.0, init=False)
    _order_uses: int = field(default=0, init=False)
    _order_fence: int = field(default=0, init=False)

    def place(self, ask: Ask, now: float, *, again: bool) -> Pick | Refusal:
        """Which GPUs serve the ask, or why none do; `again` marks an ask that was placed before."""
        return self.placer.place(ask, now, again=again)

    def place_after(
        self, ask: Ask, now: float, freed: Collection[str], *, told: bool = False
    ) -> Pick | Refusal:
        """The same, if the reservations with these ids held nothing; those that hold nothing are ignored."""
        live = self.ledger.live
        return self.placer.place_after(ask, now, [one for one in freed if one in live], told=told)

    def leases(self, nodes: Collection[str]) -> Sequence[LeaseTerms]:
        """The leases that hold something of these nodes."""
        held = dict.fromkeys(one.id for node in nodes for one in self.ledger.use.reservations(node))
        return [self._terms(self.ledger.live[one]) for one in held]

    def ending_first(self) -> Iterator[LeaseTerms]:
        """The terms of all leases by their end, as `_ending_first`."""
        return map(self._terms, self._ending_first())

    def likely_first(
        self, looked_at: int, most: int, now: float
    ) -> Generator[None, None, Sequence[LeaseTerms]]:
        """Of the first by their end those whose likely end is first, with it where it is not certain and its kind is known.

        Other work may run at each step.
        """
        first, spans, ends = [*islice(self._ending_first(), looked_at)], list[Span | None](), list[float]()
        for nth, one in enumerate(first, 1):
            known = one.revoke_at is None and not self.ledger.closing(one.id)
            span = self.durations.remaining(kin_of(one), now - self.granted_at(one)) if known else None
            spans.append(span)
            ends.append(due_at(one) if span is None else min(now + span.early, leaves_at(one)))
            if nth % LOOKED_AT_ONCE == 0:
                yield
        found: list[LeaseTerms] = []
        for nth in nsmallest(most, range(len(first)), key=ends.__getitem__):
            found.append(self._terms(first[nth]))
            if span := spans[nth]:
                low, high = (min(now + left, leaves_at(first[nth])) for left in (span.low, span.high))
                found[-1] = replace(found[-1], ends=ends[nth], earliest=low, latest=high)
        return found

    def _ending_first(self) -> Iterator[Reservation]:
        """All leases by their end. Consume it at once: leases that come or go meanwhile are not followed.

        For many leases the order may be up to `ORDER_KEPT` old: no end is certain, so they need not be sorted each time. Those
        granted since come last.
        """
        live, now = self.ledger.live, self.now()
        if now >= self._order_until or not self._order_uses:
            self._order = [one.id for one in sorted(live.values(), key=due_at)]
            took = self.now() - now
            self._order_until = now + max(ORDER_KEPT, ORDER_REST * took)
            self._order_uses = 1 + len(live) // ORDER_PART
            self._order_fence = self.ledger.fence
        self._order_uses -= 1
        known = filter(None, map(live.get, self._order))
        yield from (one for one in known if one.fence <= self._order_fence and not one.waiting)
        since = sorted(self.ledger.live_since(self._order_fence), key=due_at)
        yield from (one for one in since if not one.waiting)

    def revocable(self) -> Sequence[LeaseTerms]:
        """The leases that are preemptible or revoked."""
        terms = [
            self._terms(one)
            for one in self.ledger.live.values()
            if (one.preemptible or one.revoke_at is not None or self.ledger.closing(one.id))
            and not one.waiting
        ]
        since = {lease.id for lease in terms}
        self._since = {key: value for key, value in self._since.items() if key in since}
        return terms

    def _terms(self, one: Reservation) -> LeaseTerms:
        return LeaseTerms(
            id=one.id,
            priority=one.priority,
            # A lease not on disk yet cannot be revoked, and one whose end is being written need not be.
            preemptible=one.preemptible and one.state is not State.PENDING,
            gpu_milli=sum([gpu.milli for gpu in one.gpus]),
            since=self.granted_at(one),
            ends=due_at(one),
            revoked=one.revoke_at is not None or self.ledger.closing(one.id),
        )

    def gpu_milli_held(self, tenant: str) -> int:
        """What the tenant holds."""
        return self.ledger.use.tenants.get(tenant, 0)

    def quota(self, tenant: str) -> Quota:
        """The quota of the tenant; one without limits if none is set."""
        return self.quotas.get(tenant, _UNLIMITED)

    def lasts(self, order: Order) -> float:
        """How many seconds a lease of this order probably lasts; as if not renewed if nothing is known."""
        span = self.durations.remaining(kin_of_order(order))
        return min(order.ttl if span is None else span.early, order.lasts or float("inf"))

    def month(self, tenant: str, at: float | None = None) -> MonthStanding:
        """The tenant's use of this calendar month, or of that of a time; with bookings after it."""
        at = self.wall().timestamp() if at is None else at
        day = int(at) * 1000 // DAY
        month, next_month = month_of(day)
        used, ends = self.months[month, tenant] / GPU_HOUR, next_month * DAY / 1000
        return MonthStanding(used, self.bookings.hours(tenant, at, ends), ends)

    def booked(self, order: Order) -> Sequence[Booking]:
        """The bookings that the order would run into."""
        if not self.bookings.open:
            return ()
        wall = self.wall().timestamp()
        return self.bookings.in_the_way(order.limit, wall, preemptible=order.preemptible)

    def claim(self, order: Order) -> Ask | QueueObstacle:
        """The ask of an order that claims a booking, limited by it; or why it cannot claim it now."""
        booking, wall = self.bookings.get(order.booking), self.wall().timestamp()
        ask, left = booking.restricted(order.ask), min(booking.end - wall, booking.end - booking.start)
        if not booking.open or left <= 0 or ask is None:
            why = f"{booking.name} is {booking.state}" if not booking.open else f"{booking.name} is over"
            why = why if ask is not None else f"{booking.name} has other GPUs than those requested"
            return QueueObstacle(Reason.BOOKING_NOT_OPEN, why, lasting=True)
        if not self.bookings.begun(booking, wall):
            return QueueObstacle(Reason.BOOKING_NOT_OPEN, f"{booking.name} begins {local(booking.start)}")
        order.booked = left
        return ask

    def granted_at(self, one: Reservation) -> float:
        """When it was granted, on the boot clock.

        For one from an earlier run only the date is known (`held_since`): computed once, so that later steps of the wall clock
        do not matter.
        """
        known = self.ledger.granted_at(one.id)
        if known is not None:
            return known
        if one.id not in self._since:
            age = (self.wall() - held_since(one)).total_seconds()
            self._since[one.id] = self.now() - max(0.0, age)
        return self._since[one.id]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """When a request will probably be served, and the likely range; without a range if nothing was learned."""

    start: float | None
    earliest: float | None = None
    latest: float | None = None


class QueuePlace(NamedTuple):
    """A request's place: how many precede it, why it is not served, and why it stands there (empty without past use).

    `start` is when it is served if every lease ends in time; None if unknown. `foreseen` is better, if known.
    """

    position: int
    obstacle: QueueObstacle
    start: float | None = None
    foreseen: Foreseen | None = None
    order: str = ""


@dataclass(eq=False)
class Alike:
    """What was found of one of the requests that differ in nothing that decides whether they are served."""

    found: QueueObstacle | None = None
    version: int = -1


@dataclass(eq=False, slots=True)
class Waiter:
    """A request in the queue.

    `until` is when it stops waiting. `place` is None before the first round, `obstacle` is what the last placement found (None
    if a quota blocks it), `foreseen` when it will be served, if known.
    """

    order: Order
    number: int
    since: float
    until: float
    alike: Alike = field(default_factory=Alike)
    place: QueuePlace | None = None
    obstacle: QueueObstacle | None = None
    foreseen: Foreseen | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """Queue settings: most requests; least runtime and grace of a preempted lease, in seconds; whether past use counts."""

    max_waiting: int = 1000
    min_runtime: float = 300.0
    grace: float = 30.0
    past_counts: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """Decision: this request gets these GPUs. Carry it out before asking for the next decision."""

    waiter: Waiter
    pick: Pick


@dataclass(frozen=True, slots=True)
class Revoke:
    """Decision: these leases end after the grace, for this request. Carry it out before asking for the next decision."""

    waiter: Waiter
    leases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Looked:
    """No decision: requests up to this one were looked at and stay; these of them `moved`. Other work may run here."""

    waiter: Waiter
    moved: Sequence[Waiter]


Step = Grant | Revoke | Looked
