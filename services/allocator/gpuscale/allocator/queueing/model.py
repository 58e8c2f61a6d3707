"""Values of the queue: requests that wait, what it knows of leases and quotas, and what it decides. Pure.

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
    """What a tenant may hold and use in a calendar month, None for no limit, and its weight when requests are served in turn."""

    tenant: str
    gpu_milli_limit: int | None = None
    weight: float = 1.0
    gpu_hours_per_month: float | None = None


@dataclass(frozen=True, slots=True)
class MonthStanding:
    """GPU-hours of a tenant in the calendar month (UTC): `used`, and `booked` for the rest of it. It `ends` so many seconds after 1970."""

    used: float = 0.0
    booked: float = 0.0
    ends: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What the queue knows of a live reservation.

    `since` is when it was granted, `ends` when it ends unless it is renewed; a `revoked` one will end then whatever
    its holder does. In a forecast it `ends` when that is likely, and probably not before `earliest` or after `latest`.
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


class Kept(Protocol):
    """What is kept for somebody else: GPUs (their UUIDs in lower case) or, with `whole_nodes`, the nodes."""

    @property
    def gpus(self) -> frozenset[str]:
        """The GPUs."""
        ...

    @property
    def nodes(self) -> frozenset[str]:
        """Where they are."""
        ...

    @property
    def whole_nodes(self) -> bool:
        """Whether all of the nodes is kept."""
        ...


class QueueWorld(Protocol):
    """What the queue asks of the fleet and the ledger; every answer is as of now."""

    def place(self, ask: Ask, now: float, *, again: bool) -> Pick | Refusal:
        """Which GPUs serve the ask, or why none do; `again` says that it was placed before."""
        ...

    def place_after(self, ask: Ask, now: float, freed: Collection[str]) -> Pick | Refusal:
        """The same, if the reservations with these ids held nothing; those that hold nothing are passed over."""
        ...

    def leases(self, nodes: Collection[str]) -> Sequence[LeaseTerms]:
        """The leases that hold something of these nodes."""
        ...

    def ending_first(self) -> Iterator[LeaseTerms]:
        """All leases, what ends first first. To be read at once: leases that come or go meanwhile are not followed."""
        ...

    def revocable(self) -> Sequence[LeaseTerms]:
        """The leases that are preemptible or revoked."""
        ...

    def gpu_milli_held(self, tenant: str) -> int:
        """What the tenant holds."""
        ...

    def gpu_milli_past(self, tenant: str) -> float:
        """What the tenant held in the past, as a mean in which an earlier time counts less; 0 where the past does not count."""
        ...

    def quota(self, tenant: str) -> Quota:
        """The quota of the tenant; one without a limit where none was set."""
        ...

    def expected(self, lease: LeaseTerms, now: float) -> LeaseTerms:
        """The lease with the end that is likely; as it is where nothing is known of its kind."""
        ...

    def lasts(self, order: Order) -> float:
        """Seconds that a lease of this order is likely to last; those of one that is not renewed where nothing is known."""
        ...

    def month(self, tenant: str) -> MonthStanding:
        """What the tenant has of this calendar month."""
        ...

    def booked(self, order: Order) -> Sequence[Booking]:
        """The bookings that the order would run into."""
        ...

    def claim(self, order: Order) -> "Ask | QueueObstacle":
        """What an order asks for that claims a booking, which gets the booking's limit; or why it cannot yet, or any more."""
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
    """Why a request is not served yet, as a code and in words; `lasting` where waiting would not help."""

    reason: Reason
    message: str
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Foreseen:
    """When a request will be served, and the range in which that probably is; the range is None where nothing was learned."""

    start: float | None
    earliest: float | None = None
    latest: float | None = None


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Where a request stands: how many are before it, why it is not served, and why there (empty where past use does not count).

    `start` is when it is served if every lease ends in time; None where that is not known. `foreseen` is better, where it is known.
    """

    position: int
    obstacle: QueueObstacle
    start: float | None = None
    foreseen: Foreseen | None = None
    order: str = ""


@dataclass(eq=False, slots=True)
class Waiter:
    """A request in the queue.

    `until` is when it stops waiting. `place` is None before the first round, `obstacle` is what the last placement found
    (None where a quota stood in the way), `foreseen` when it will be served, as far as that is known.
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
        """The higher, the sooner it is served."""
        return self.order.priority


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the queue: most requests in it; least runtime and grace of a preempted lease, in seconds; whether past use counts."""

    max_waiting: int = 1000
    min_runtime: float = 300.0
    grace: float = 30.0
    past_counts: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """Decision: this request gets these GPUs. It is to be carried out before the next decision is asked for."""

    waiter: Waiter
    pick: Pick


@dataclass(frozen=True, slots=True)
class Revoke:
    """Decision: these leases end after the grace, in favour of the request. Carried out before the next is asked for."""

    waiter: Waiter
    leases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Looked:
    """No decision: a request was looked at and stays. Here other work may come between."""

    waiter: Waiter
    moved: bool


Step = Grant | Revoke | Looked
