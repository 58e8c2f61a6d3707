"""What a queue watcher watches, and what it read: pure values.

Ready and unacknowledged messages are counted apart, and a count that could not be read is None, never zero: a rule
that sees None holds (seeds/000 counted every broker error as an empty queue, and scaled in).
"""

import math
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

DEFAULT_INTERVAL = 1.0
DEFAULT_VIRTUAL_HOST = "/"


class QueueState(Enum):
    """Whether a queue can be read."""

    PENDING = "pending"
    """Not read yet."""
    OK = "ok"
    """Read; single counts may still be unknown."""
    UNREACHABLE = "unreachable"
    """The broker cannot be reached."""
    AUTH_FAILED = "auth_failed"
    """The broker refuses the user or password, or the user may not read the queue."""
    NOT_FOUND = "not_found"
    """The broker has no such queue or virtual host."""
    TIMEOUT = "timeout"
    """The broker does not answer in time."""
    ERROR = "error"
    """The broker answered with something else, or the configuration does not name it any more."""


@dataclass(frozen=True, slots=True)
class QueueReading:
    """What was read of a queue last.

    Attributes:
        state: whether it can be read now.
        ready: messages that no consumer has taken; None when unknown.
        unacked: messages taken and not yet acknowledged; None when unknown.
        consumers: None when unknown.
        observed_at: seconds since boot of the last success; None before the first. It outlives a failure, the
            counts do not.
        message: why it stands as it does, without secrets; empty when there is nothing to say.
    """

    state: QueueState
    ready: int | None = None
    unacked: int | None = None
    consumers: int | None = None
    observed_at: float | None = None
    message: str = ""

    @property
    def total(self) -> int | None:
        """Ready and unacknowledged messages together; None unless both are known."""
        if self.ready is None or self.unacked is None:
            return None
        return self.ready + self.unacked


PENDING = QueueReading(QueueState.PENDING, message="not read yet")


@dataclass(frozen=True, slots=True)
class QueueFailure:
    """Why a queue could not be read: a state other than OK and PENDING, and one sentence without secrets."""

    state: QueueState
    message: str


def failed(previous: QueueReading, failure: QueueFailure) -> QueueReading:
    """The reading after a failure: no counts, and the time of the last success before it."""
    return QueueReading(failure.state, observed_at=previous.observed_at, message=failure.message)


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """One queue: the configured name of its broker, its virtual host and its name."""

    broker: str
    virtual_host: str
    queue: str


@dataclass(frozen=True, slots=True)
class WatchSpec:
    """What a user wants watched, and every how many seconds."""

    target: QueueTarget
    interval: float = DEFAULT_INTERVAL


@dataclass(frozen=True, slots=True)
class Watcher:
    """A queue watcher: its id, what it watches, and the tag of this version of its spec."""

    id: str
    spec: WatchSpec
    etag: str
    create_time: datetime


@dataclass(frozen=True, slots=True)
class Declared:
    """What a passive declare tells of a queue: messages that no consumer has taken, and consumers."""

    ready: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What the management API tells of a queue: messages not taken, and messages taken and not acknowledged."""

    ready: int
    unacked: int


def of_declared(declared: Declared, observed_at: float, unacked_unknown: str) -> QueueReading:
    """The reading where only a passive declare succeeded; the last argument says why `unacked` is unknown."""
    return QueueReading(
        QueueState.OK,
        ready=declared.ready,
        consumers=declared.consumers,
        observed_at=observed_at,
        message=unacked_unknown,
    )


def of_totals(totals: Totals, observed_at: float, consumers: int | str) -> QueueReading:
    """The reading where the management API answered; `consumers` is their number, or says why it is unknown."""
    known = consumers if isinstance(consumers, int) else None
    why = "" if isinstance(consumers, int) else consumers
    return QueueReading(QueueState.OK, totals.ready, totals.unacked, known, observed_at, why)


def next_sweep(now: float, interval: float) -> float:
    """When a queue is read again: the next multiple of its interval, all in seconds of one clock.

    Queues of one interval fall on one instant, so that a single request serves them all; an instant that a slow
    broker let pass is skipped.
    """
    after = (math.floor(now / interval) + 1) * interval
    return after if after > now else after + interval
