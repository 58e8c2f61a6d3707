"""Bookings: GPUs that are kept for an owner from a moment on, for a while. Pure.

    BOOKED ──claimed──> CLAIMED ──time is over, or given back──> ENDED
       ├──nobody claims it──> EXPIRED
       └──cancel──> CANCELLED

A booking names its GPUs from the moment it is made, and no GPU is in two that are open at one time. Whatever would still be on
one of its GPUs at its start is not placed there: for that every lease counts as lasting a time. One with a limit lasts that
long, as it ends then; a preemptible one no longer than the notice it gets; any other one the horizon, though it may
be renewed for ever: a booking that is further away has precedence, and its holder gets the notice. In its time the owner alone
places on its GPUs, as often as they like.

Starts and ends are seconds of the wall clock (since 1970), so a booking moves with that clock when it is set. Once begun it stays
begun, and how long nobody claims it is counted by the boot clock, as leases are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from operator import attrgetter

from gpuscale.allocator.domain.model import WHOLE, Ask
from gpuscale.common.errors import AlreadyExistsError, NotFoundError
from gpuscale.common.names import booking_name

NOTICE = 600.0
"""Seconds that holders have to leave for a booking."""
UNCLAIMED = 900.0
"""Seconds after which the GPUs of a booking are given back while nothing of its owner is on them."""
MOST_OPEN = 1000
"""Most bookings that have not ended."""
KEPT = 14 * 86_400.0
"""Seconds for which one is kept after its end, to be looked up."""


class BookingState(StrEnum):
    """Where a booking stands."""

    BOOKED = "booked"
    CLAIMED = "claimed"
    ENDED = "ended"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Booking:
    """GPUs that are kept for an owner.

    `spots` are its GPUs: (node, UUID). `note` says what people should know: that it was moved, or that a GPU of it is not
    usable.
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

    @property
    def name(self) -> str:
        """`bookings/{booking}`."""
        return booking_name(self.id)

    @property
    def open(self) -> bool:
        """Whether its GPUs are, or will be, kept."""
        return self.state in (BookingState.BOOKED, BookingState.CLAIMED)

    @property
    def gpus(self) -> frozenset[str]:
        """The UUIDs of its GPUs, in lower case as an ask names them."""
        return frozenset(uuid.lower() for _, uuid in self.spots)

    @property
    def nodes(self) -> frozenset[str]:
        """Where they are."""
        return frozenset(node for node, _ in self.spots)

    @property
    def whole_nodes(self) -> bool:
        """Whether it keeps the nodes for itself too, with their CPU and memory: never."""
        return False

    @property
    def why(self) -> str:
        """What holders are told who have to leave for it."""
        return f"booked by {self.owner} ({self.name})"

    def restricted(self, ask: Ask) -> Ask | None:
        """The ask, on its GPUs alone; None if it names others."""
        gpus, nodes = ask.gpus & self.gpus or self.gpus, ask.nodes & self.nodes or self.nodes
        if (ask.gpus and gpus.isdisjoint(ask.gpus)) or (ask.nodes and nodes.isdisjoint(ask.nodes)):
            return None
        return replace(ask, gpus=gpus, nodes=nodes)


@dataclass(eq=False)
class Bookings:
    """All bookings; `opened` has those that have begun, with the boot time since which nothing of the owner is on them.

    `open` are those that are open, what begins first first.
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
        """What the same request has booked before; AlreadyExistsError if it was another, or one that is open has the id."""
        known = self._all.get(self._by_request.get(wish.request_id, ""))
        if known is not None and known.fingerprint == wish.fingerprint:
            return known
        if known is not None:
            message = (
                f"request_id {wish.request_id} was used before with other arguments or by another caller"
            )
            raise AlreadyExistsError(
                message, reason="REQUEST_ID_REUSED", metadata={"request_id": wish.request_id}
            )
        if wish.id in self._all and self._all[wish.id].open:
            raise AlreadyExistsError(f"there is a {wish.name} already", metadata={"name": wish.name})
        return None

    def put(self, one: Booking) -> None:
        """Add one, or take it in place of what it was."""
        self.remove(one.id)
        self._all[one.id] = one
        self._by_request[one.request_id] = one.id
        if one.open:
            self.open = tuple(sorted((*self.open, one), key=attrgetter("start", "id")))
        else:
            self.opened.pop(one.id, None)

    def remove(self, booking_id: str) -> None:
        """Know nothing of one any more; nothing if it is not known."""
        known = self._all.pop(booking_id, None)
        if known is not None:
            self._by_request.pop(known.request_id)
            self.open = tuple(one for one in self.open if one.id != booking_id)

    def begun(self, one: Booking, wall: float) -> bool:
        """Whether the time of one has come: it does not go back when the clock does."""
        return one.start <= wall or one.id in self.opened

    def in_the_way(self, limit: float, wall: float, *, preemptible: bool) -> list[Booking]:
        """Those that a lease would run into that is granted now, with this limit (0 for none)."""
        ends = wall + self.lasts(limit, preemptible=preemptible)
        return [one for one in self.open if one.start < ends or one.id in self.opened]

    def lasts(self, limit: float, *, preemptible: bool) -> float:
        """For how long a lease counts that has this limit, or so much of it left (0 for none)."""
        return min(limit or self.horizon, NOTICE if preemptible else self.horizon)

    def meeting(self, start: float, end: float, *, but: str = "") -> list[Booking]:
        """Those that are open at some time between, but for one."""
        return [one for one in self.open if one.start < end and start < one.end and one.id != but]

    def peak(self, tenant: str, start: float, end: float) -> int:
        """Most thousandths of GPUs that a tenant has booked at any time between."""
        own = [one for one in self.meeting(start, end) if one.tenant == tenant]
        moments = [start, *(one.start for one in own if one.start > start)]
        return max(milli(one for one in own if one.start <= at < one.end) for at in moments)

    def hours(self, tenant: str, start: float, end: float) -> float:
        """GPU-hours that a tenant has booked between."""
        own = (one for one in self.meeting(start, end) if one.tenant == tenant)
        return sum(len(one.spots) * (min(one.end, end) - max(one.start, start)) for one in own) / 3600


def local(moment: float) -> str:
    """A moment as messages tell it: services do not know where their callers are."""
    return f"{datetime.fromtimestamp(moment, UTC):%a %Y-%m-%d %H:%M} UTC"


def milli(bookings: Iterable[Booking]) -> int:
    """Thousandths of GPUs that bookings keep."""
    return sum(WHOLE * len(one.spots) for one in bookings)
