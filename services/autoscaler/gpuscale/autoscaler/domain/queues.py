"""What queue watchers watch and read: pure values.

Ready and unacknowledged messages are counted separately, and an unreadable count is None, never zero: a rule that sees None
holds (seeds/000 counted every broker error as an empty queue, and scaled in).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import NamedTuple, TypeVar

import re2

T = TypeVar("T")

DEFAULT_INTERVAL = 1.0
LARGEST_COUNT = 2**63 - 1
"""More messages than our answers can hold, or any broker has."""
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
    """The broker refuses the user or password, or the user's access to the queue."""
    NOT_FOUND = "not_found"
    """The broker has no such queue or virtual host."""
    TIMEOUT = "timeout"
    """The broker does not answer in time."""
    ERROR = "error"
    """The broker sent an unexpected answer, or the configuration no longer names it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The broker's own statistics of a queue."""

    published: float  # messages published per second
    delivered: float  # messages delivered per second
    at: float  # when that was read, in seconds since boot
    # how long the message at its head had waited then; None if unknown, or none waits
    oldest_age: float | None = None


class QueueReading(NamedTuple):
    """The last reading of a queue. A tuple, since one is made for every queue of every sweep."""

    state: QueueState  # whether it can be read now
    ready: int | None = None  # messages that no consumer has taken; None when unknown
    unacked: int | None = None  # messages taken and not yet acknowledged; None when unknown
    consumers: int | None = None  # None when unknown
    # seconds since boot of the last success; None before the first. It outlives a failure, unlike the counts
    observed_at: float | None = None
    message: str = ""  # why it has this state, without secrets; may be empty
    rates: Rates | None = None  # rates per second; None when unknown
    queue_count: int = 1  # number of queues it covers

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


def combined(readings: Sequence[QueueReading]) -> QueueReading:
    """The sum of one or more readings: each sum is known if all of its parts are."""
    if not readings:
        raise ValueError("there is nothing to add up")
    if len(readings) == 1:
        return readings[0]
    times = _known(one.observed_at for one in readings)
    whole = QueueReading(
        QueueState.OK,
        observed_at=min(times, default=None),
        queue_count=sum(one.queue_count for one in readings),
    )
    lost = [one for one in readings if one.state is not QueueState.OK]
    if lost:
        return whole._replace(state=lost[0].state, message=lost[0].message)
    rates = _known(one.rates for one in readings)
    # The oldest message is known if it is known of each queue that has one.
    ages = _known(one.rates.oldest_age for one in readings if one.rates is not None and one.ready != 0)
    said = filter(None, (one.message for one in readings))
    return whole._replace(
        ready=_total(one.ready for one in readings),
        unacked=_total(one.unacked for one in readings),
        consumers=_total(one.consumers for one in readings),
        message=next(said, ""),
        rates=Rates(
            math.fsum(one.published for one in rates),
            math.fsum(one.delivered for one in rates),
            min(one.at for one in rates),
            max(ages, default=None),
        )
        if rates
        else None,
    )


def _known(values: Iterable[T | None]) -> list[T]:
    """The values, if all are known; else none."""
    known: list[T] = []
    for one in values:
        if one is None:
            return []
        known.append(one)
    return known


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum of one or more counts, if all are known."""
    known = _known(counts)
    return countable(sum(known)) if known else None


def countable(count: int | None) -> int | None:
    """A count that 64 bits hold; of a larger one nothing is known."""
    return None if count is not None and count > LARGEST_COUNT else count


class QueueTarget(NamedTuple):
    """What to read of a broker: a queue by name, or all whose names match a pattern.

    A tuple, since it is looked up several times for every queue of every sweep, and a tuple's hash is cheapest.
    """

    broker: str  # its configured name
    virtual_host: str  # where the queues are
    queue: str  # the name, or the pattern
    pattern: bool = False  # whether `queue` is one
    rates: bool = False  # whether rates are read too


@dataclass(frozen=True, slots=True)
class WatchSpec:
    """What to watch: queues by name, or by one pattern, as a `QueueTarget` each, and the interval in seconds."""

    broker: str
    virtual_host: str
    queues: tuple[str, ...]
    pattern: bool = False
    rates: bool = False
    interval: float = DEFAULT_INTERVAL

    @property
    def targets(self) -> Sequence[QueueTarget]:
        """What to read for it; the readings are added up."""
        return [
            QueueTarget(self.broker, self.virtual_host, queue, self.pattern, self.rates)
            for queue in self.queues
        ]


@dataclass(frozen=True, slots=True)
class Watcher:
    """A queue watcher: its id, what it watches, and the tag of this version of its spec."""

    id: str
    spec: WatchSpec
    etag: str
    create_time: datetime


def of_totals(ready: int, unacked: int, observed_at: float, consumers: int | str) -> QueueReading:
    """The reading if the management API answered; `consumers` is their number, or why it is unknown."""
    if isinstance(consumers, int):
        return QueueReading(QueueState.OK, ready, unacked, consumers, observed_at)
    return QueueReading(QueueState.OK, ready, unacked, None, observed_at, consumers)


def next_sweep(now: float, interval: float) -> float:
    """When to read a queue again: the next multiple of its interval, in seconds of one clock.

    Queues with the same interval are read at the same instants, so that a single request serves them all; instants missed
    because of a slow broker are skipped.
    """
    after = (math.floor(now / interval) + 1) * interval
    return after if after > now else after + interval


def _compiled(pattern: str) -> re2.Pattern:
    options = re2.Options()
    options.max_mem = 1 << 15  # the worst that fits takes a few milliseconds for a name of 255 characters
    options.never_capture = True
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        said: bytes = error.args[0]
        raise ValueError(f"must be a regular expression of RE2: {said.decode('utf-8', 'replace')}") from None


def pattern_problem(pattern: str) -> str:
    """What is wrong with a pattern, for error messages; empty for a valid one."""
    try:
        _compiled(pattern)
    except ValueError as error:
        return str(error)
    return ""


class NamePattern:
    """A pattern that caches its matches, as queues seldom change; ValueError if it is invalid."""

    def __init__(self, pattern: str) -> None:
        self._pattern = _compiled(pattern)
        self._known: dict[str, bool] = {}

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The names that it was not matched with yet."""
        return [name for name in names if name not in self._known]

    def learn(self, names: Iterable[str]) -> None:
        """Match it with names. RE2 lets other threads run meanwhile."""
        self._known |= {name: self._pattern.fullmatch(name) is not None for name in names}

    def of(self, names: Collection[str]) -> list[str]:
        """The queue names that match as a whole."""
        self.learn(self.unknown(names))
        self._known = {name: self._known[name] for name in names}
        return [name for name, matched in self._known.items() if matched]
