"""Bookings: GPUs reserved in advance for an owner, for a period. Pure.

    BOOKED ──claimed──> CLAIMED ──time is over, or given back──> ENDED
       ├──nobody claims it──> EXPIRED
       └──cancel──> CANCELLED

A booking names its GPUs from the moment it is made, and no GPU is in two open bookings at the same time. Leases that would
still hold one of its GPUs at the start are not placed there, so every lease has an assumed length: its limit if it has one; the
notice if it is preemptible; otherwise the horizon, although it can be renewed for ever: a booking further away than that takes
precedence, and the holder gets notice. During the booking only the owner can reserve its GPUs, as often as they like.

Starts and ends are seconds of the wall clock (since 1970), so a booking moves when that clock is set. A booking that has begun
stays begun; how long it goes unclaimed is counted by the boot clock, like leases.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from operator import attrgetter
from typing import ClassVar

from gpuscale.allocator.domain.model import WHOLE, Ask
from gpuscale.common.errors import AlreadyExistsError, NotFoundError, request_id_reused
from gpuscale.common.names import booking_name

NOTICE = 600.0
"""Seconds of notice for holders that have to leave for a booking."""
UNCLAIMED = 900.0
"""Seconds after which a booking is given back while its owner uses none of its GPUs."""
MOST_OPEN = 1000
"""Most open bookings."""
KEPT = 14 * 86_400.0
"""Seconds for which an ended booking can be looked up."""


class BookingState(StrEnum):
    """The state of a booking."""

    BOOKED = "booked"
    CLAIMED = "claimed"
    ENDED = "ended"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Booking:
    """GPUs reserved in advance for an owner.

    `spots` are its GPUs: (node, UUID). `note` tells people that it was moved, or that one of its GPUs is unusable.
    """

    id: str
    request_id: str
    fingerprint: str
    owner: str
    tenant: str
    title: str
    ask: Ask
    start: float
    end: float
    created: float
    spots: tuple[tuple[str, str], ...] = ()
    state: BookingState = BookingState.BOOKED
    note: str = ""
    whole_nodes: ClassVar[bool] = False
    """Whether it also keeps CPU and memory of the nodes: never."""

    @property
    def name(self) -> str:
        """`bookings/{booking}`."""
        return booking_name(self.id)

    @property
    def open(self) -> bool:
        """Whether it keeps its GPUs, now or later."""
        return self.state in (BookingState.BOOKED, BookingState.CLAIMED)

    @property
    def gpus(self) -> frozenset[str]:
        """The UUIDs of its GPUs, in lower case as in asks."""
        return frozenset(uuid.lower() for _, uuid in self.spots)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes of its GPUs."""
        return frozenset(node for node, _ in self.spots)

    @property
    def why(self) -> str:
        """What holders that have to leave for it are told."""
        return f"booked by {self.owner} ({self.name})"

    def restricted(self, ask: Ask) -> Ask | None:
        """The ask restricted to its GPUs; None if it names others."""
        gpus, nodes = ask.gpus & self.gpus or self.gpus, ask.nodes & self.nodes or self.nodes
        if (ask.gpus and gpus.isdisjoint(ask.gpus)) or (ask.nodes and nodes.isdisjoint(ask.nodes)):
            return None
        return replace(ask, gpus=gpus, nodes=nodes)


@dataclass(eq=False)
class Bookings:
    """All bookings; `opened` has those that have begun, with the boot time since which the owner uses none of their GPUs.

    `open` has the open ones by start.
    """

    horizon: float
    opened: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _all: dict[str, Booking] = field(default_factory=dict[str, Booking], init=False)
    open: tuple[Booking, ...] = field(default=(), init=False)
    _by_request: dict[str, str] = field(default_factory=dict[str, str], init=False)

    def __iter__(self) -> Iterator[Booking]:
        """By id."""
        return iter(sorted(self._all.values(), key=attrgetter("id")))

    def get(self, booking_id: str) -> Booking:
        """Look one up. Raises NotFoundError."""
        if booking_id not in self._all:
            raise NotFoundError(f"no booking {booking_id}", metadata={"name": booking_name(booking_id)})
        return self._all[booking_id]

    def replay(self, wish: Booking) -> Booking | None:
        """What an identical request booked; AlreadyExistsError if it differed, or an open booking has the id."""
        known = self._all.get(self._by_request.get(wish.request_id, ""))
        if known is not None and known.fingerprint == wish.fingerprint:
            return known
        if known is not None:
            raise request_id_reused(wish.request_id)
        if wish.id in self._all and self._all[wish.id].open:
            raise AlreadyExistsError(f"{wish.name} already exists", metadata={"name": wish.name})
        return None

    def put(self, one: Booking) -> Booking | None:
        """Add or replace a booking; returns the one before."""
        before = self.remove(one.id)
        self._all[one.id] = one
        self._by_request[one.request_id] = one.id
        if one.open:
            self.open = tuple(sorted((*self.open, one), key=attrgetter("start", "id")))
        else:
            self.opened.pop(one.id, None)
        return before

    def remove(self, booking_id: str) -> Booking | None:
        """Remove a booking, if it is known; returns it."""
        if (known := self._all.pop(booking_id, None)) is not None:
            self._by_request.pop(known.request_id)
            self.open = tuple(one for one in self.open if one.id != booking_id)
        return known

    def begun(self, one: Booking, wall: float) -> bool:
        """Whether a booking has begun; setting the clock back does not undo that."""
        return one.start <= wall or one.id in self.opened

    def in_the_way(self, limit: float, wall: float, *, preemptible: bool) -> list[Booking]:
        """The bookings that a lease granted now, with this limit (0 for none), would run into."""
        ends = wall + self.lasts(limit, preemptible=preemptible)
        return [one for one in self.open if one.start < ends or one.id in self.opened]

    def lasts(self, limit: float, *, preemptible: bool) -> float:
        """How long a lease with this limit, or so much of it left (0 for none), is assumed to last."""
        return min(limit or self.horizon, NOTICE if preemptible else self.horizon)

    def meeting(self, start: float, end: float, *, but: str = "") -> list[Booking]:
        """The bookings that are open at some time in the period, except one."""
        return [one for one in self.open if one.start < end and start < one.end and one.id != but]

    def peak(self, tenant: str, start: float, end: float) -> int:
        """The most thousandths of GPUs that a tenant has booked at any time in the period."""
        own = [one for one in self.meeting(start, end) if one.tenant == tenant]
        moments = [start, *(one.start for one in own if one.start > start)]
        return max(milli(one for one in own if one.start <= at < one.end) for at in moments)

    def hours(self, tenant: str, start: float, end: float) -> float:
        """GPU-hours that a tenant has booked in the period."""
        own = (one for one in self.meeting(start, end) if one.tenant == tenant)
        return sum(len(one.spots) * (min(one.end, end) - max(one.start, start)) for one in own) / 3600


def local(moment: float) -> str:
    """A time for messages, in UTC: services do not know the callers' time zones."""
    return f"{datetime.fromtimestamp(moment, UTC):%a %Y-%m-%d %H:%M} UTC"


def milli(bookings: Iterable[Booking]) -> int:
    """Thousandths of GPUs that bookings keep."""
    return sum(WHOLE * len(one.spots) for one in bookings)
