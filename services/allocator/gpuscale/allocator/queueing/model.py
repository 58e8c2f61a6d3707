"""Values of the queue: waiting requests, what it knows of leases and quotas, and its decisions. Pure.

Times are seconds of CLOCK_BOOTTIME; GPUs are counted in thousandths (`model.WHOLE` is one).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from gpuscale.allocator.domain.bookings import Booking
from gpuscale.allocator.domain.model import Ask, Order, Pick
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


class QueueWorld(Protocol):
    """What the queue asks of the fleet and the ledger; every answer is as of now."""

    def place(self, ask: Ask, now: float, *, again: bool) -> Pick | Refusal:
        """Which GPUs serve the ask, or why none do; `again` marks an ask that was placed before."""
        ...

    def place_after(self, ask: Ask, now: float, freed: Collection[str]) -> Pick | Refusal:
        """The same, if the reservations with these ids held nothing; those that hold nothing are ignored."""
        ...

    def leases(self, nodes: Collection[str]) -> Sequence[LeaseTerms]:
        """The leases that hold something of these nodes."""
        ...

    def ending_first(self) -> Iterator[LeaseTerms]:
        """All leases by their end. Consume it at once: leases that come or go meanwhile are not followed."""
        ...

    def revocable(self) -> Sequence[LeaseTerms]:
        """The leases that are preemptible or revoked."""
        ...

    def gpu_milli_held(self, tenant: str) -> int:
        """What the tenant holds."""
        ...

    def gpu_milli_past(self, tenant: str) -> float:
        """The tenant's past use as a decayed mean; 0 if past use does not count."""
        ...

    def quota(self, tenant: str) -> Quota:
        """The quota of the tenant; one without limits if none is set."""
        ...

    def expected(self, lease: LeaseTerms, now: float) -> LeaseTerms:
        """The lease with its likely end; unchanged if nothing is known of its kind."""
        ...

    def lasts(self, order: Order) -> float:
        """How many seconds a lease of this order probably lasts; as if not renewed if nothing is known."""
        ...

    def month(self, tenant: str) -> MonthStanding:
        """The tenant's use of this calendar month."""
        ...

    def booked(self, order: Order) -> Sequence[Booking]:
        """The bookings that the order would run into."""
        ...

    def claim(self, order: Order) -> "Ask | QueueObstacle":
        """The ask of an order that claims a booking, limited by it; or why it cannot claim it now."""
        ...


class Reason(StrEnum):
    """Why a request is not served yet."""

    NO_CAPACITY = "NO_CAPACITY"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    BEHIND_OTHERS = "BEHIND_OTHERS"
    BOOKED = "BOOKED"
    BOOKING_NOT_OPEN = "BOOKING_NOT_OPEN"


@dataclass(frozen=True, slots=True)
class QueueObstacle:
    """Why a request is not served yet, as a code and in words; `lasting` if waiting does not help."""

    reason: Reason
    message: str
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Foreseen:
    """When a request will probably be served, and the likely range; without a range if nothing was learned."""

    start: float | None
    earliest: float | None = None
    latest: float | None = None


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A request's place: how many precede it, why it is not served, and why it stands there (empty without past use).

    `start` is when it is served if every lease ends in time; None if unknown. `foreseen` is better, if known.
    """

    position: int
    obstacle: QueueObstacle
    start: float | None = None
    foreseen: Foreseen | None = None
    order: str = ""


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
    place: QueuePlace | None = None
    obstacle: QueueObstacle | None = None
    foreseen: Foreseen | None = None

    @property
    def priority(self) -> int:
        """Higher priorities are served sooner."""
        return self.order.priority


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
    """No decision: a request was looked at and stays. Other work may run here."""

    waiter: Waiter
    moved: bool


Step = Grant | Revoke | Looked
