"""A simulated endpoint: replicas that start, work, drain and stop, and a queue in front of them. Pure.

Replicas have `slots` each and take the oldest request whenever one is free, like consumers with a prefetch of `slots`; of several
free ones, the least busy takes it. A replica that is stopped finishes its requests and takes no more, unless the world kills.

Its workload may come from the history of an endpoint's queues. Arrivals are measured if the broker reports them. Otherwise they
are computed: arrivals are departures plus growth, and requests in hand leave after their service time (Little's law), which
follows from the rates if it is not given.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise

from gpuscale.client.traces import MOST_REQUESTS, Request


@dataclass(frozen=True, slots=True)
class Setting:
    """The replicas' properties."""

    slots: int  # concurrent requests of a replica
    # seconds from the decision to ready, for the n-th replica started
    cold_start: Callable[[int], float]
    max_gpus: int | None = None  # number of GPUs; None for no bound
    gpus_each: int = 1  # GPUs of a replica
    kills: bool = False  # whether a stopped replica drops its requests, which are then served again


@dataclass(slots=True)
class _Replica:
    number: int
    started: float
    ready_at: float
    busy: int = 0
    leaving: bool = False
    gone: bool = False


@dataclass(slots=True)
class BacktestTally:
    """Totals of a run."""

    # seconds that each request waited before it was first started
    waits: list[float] = field(default_factory=list[float])
    gpu_seconds: float = 0.0  # seconds for which GPUs were held, from grant to release
    backlog_seconds: float = 0.0  # the queue's length, integrated over time
    pending_seconds: float = 0.0  # replicas wanted and not granted, integrated over time
    killed: int = 0  # requests interrupted
    wasted: int = 0  # replicas stopped before they had been ready for twice their start-up time
    # when the count wanted changed, and to what
    changes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class SimulatedPool:
    """GPUs that several worlds share. Freed GPUs go to the first world that is short."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._held = 0
        self._worlds: list[World] = []

    def join(self, world: World) -> None:
        """Add a world; earlier ones are served first."""
        self._worlds.append(world)

    def take(self, gpus: int) -> bool:
        """Hold more GPUs, if they are free."""
        if self._most is not None and self._held + gpus > self._most:
            return False
        self._held += gpus
        return True

    def free(self) -> int | None:
        """How many are free; None without a bound."""
        return None if self._most is None else self._most - self._held

    def give(self, gpus: int) -> None:
        """Release GPUs."""
        self._held -= gpus
        for world in self._worlds:
            world.match()


class World:
    """A running endpoint. Time only advances through `advance` and `wait`."""

    def __init__(self, setting: Setting, replicas: int, pool: SimulatedPool | None = None) -> None:
        self.setting = setting
        self._pool = SimulatedPool(setting.max_gpus) if pool is None else pool
        self._pool.join(self)
        self.now = 0.0
        self.wanted = replicas
        self.tally = BacktestTally()
        self.arrived = 0
        self.granted = 0
        """Replicas that hold GPUs and will stay."""
        self._replicas: list[_Replica] = []
        self._queue: deque[tuple[Request, bool]] = deque()
        self._events: list[tuple[float, int, _Replica, Request | None]] = []
        self._sequence = 0
        self._starts = 0
        while self.granted < replicas and self._pool.take(setting.gpus_each):
            self._start(0.0)  # the initial ones are ready
        self.tally.changes.append((0.0, replicas))

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest request in the queue arrived; 0 if it is empty."""
        return self.now - self._queue[0][0].arrival if self._queue else 0.0

    @property
    def taken(self) -> int:
        """Requests that were ever started."""
        return len(self.tally.waits)

    @property
    def in_hand(self) -> int:
        """Requests that replicas work on."""
        return sum(one.busy for one in self._replicas)

    @property
    def ready(self) -> int:
        """Replicas that take requests."""
        return sum(not one.leaving and one.ready_at <= self.now for one in self._replicas)

    @property
    def loads(self) -> tuple[int, ...]:
        """Requests in hand of each ready replica."""
        return tuple(one.busy for one in self._replicas if not one.leaving and one.ready_at <= self.now)

    @property
    def settled(self) -> bool:
        """Whether nothing waits and nothing is in hand."""
        return not self._queue and self.in_hand == 0

    def gpu_limit(self, unbounded: int) -> int:
        """Most replicas for which there are GPUs, including those that hold some."""
        free = self._pool.free()
        return unbounded if free is None else self.granted + max(0, free) // self.setting.gpus_each

    def arrive(self, request: Request) -> None:
        """A request arrives."""
        self.advance(request.arrival)
        self.arrived += 1
        self._queue.append((request, True))
        self._dispatch()

    def scale(self, wanted: int) -> None:
        """Change the wanted number of replicas."""
        if wanted != self.wanted:
            self.wanted = wanted
            self.tally.changes.append((self.now, wanted))
        self.match()

    @property
    def next_event(self) -> float:
        """When something happens next without input; infinity if nothing does."""
        return self._events[0][0] if self._events else math.inf

    def wait(self, moment: float) -> None:
        """Advance to `moment`, before which nothing happens."""
        gap = moment - self.now
        if gap > 0:
            self.tally.gpu_seconds += gap * len(self._replicas) * self.setting.gpus_each
            self.tally.backlog_seconds += gap * len(self._queue)
            self.tally.pending_seconds += gap * max(0, self.wanted - self.granted)
            self.now = moment

    def advance(self, moment: float) -> None:
        """Advance to `moment`, with everything that becomes ready or done on the way."""
        while self._events and self._events[0][0] <= moment:
            at, _, replica, request = heapq.heappop(self._events)
            self.wait(at)
            if request is None:
                self._dispatch()
            elif not replica.gone:
                replica.busy -= 1
                if replica.leaving and replica.busy == 0:
                    self._remove(replica)
                self._dispatch()
        self.wait(moment)

    def match(self) -> None:
        """Start or stop replicas towards the wanted count, as far as there are GPUs."""
        while self.granted > self.wanted:
            staying = [one for one in self._replicas if not one.leaving]
            # Starting ones first, then the least busy, then the newest.
            replica = min(staying, key=lambda one: (one.ready_at <= self.now, one.busy, -one.number))
            replica.leaving = True
            self.granted -= 1
            self.tally.wasted += self.now < replica.ready_at + 2 * (replica.ready_at - replica.started)
            if self.setting.kills and replica.busy:
                self.tally.killed += replica.busy
                dropped = [entry[3] for entry in self._events if entry[2] is replica and entry[3] is not None]
                self._queue.extendleft((request, False) for request in reversed(dropped))
                replica.busy = 0
            if replica.busy == 0:
                self._remove(replica)
                self._dispatch()
        while self.granted < self.wanted and self._pool.take(self.setting.gpus_each):
            self._starts += 1
            self._start(self.setting.cold_start(self._starts))

    def _start(self, delay: float) -> None:
        self.granted += 1
        replica = _Replica(self._sequence, self.now, self.now + delay)
        self._replicas.append(replica)
        self._push(replica.ready_at, replica, None)

    def _remove(self, replica: _Replica) -> None:
        replica.gone = True
        self._replicas.remove(replica)
        self._pool.give(self.setting.gpus_each)

    def _push(self, at: float, replica: _Replica, request: Request | None) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at, self._sequence, replica, request))

    def _dispatch(self) -> None:
        slots = self.setting.slots
        while self._queue:
            replica, least = None, slots
            for one in self._replicas:  # the oldest of several
                if one.busy < least and not one.leaving and one.ready_at <= self.now:
                    replica, least = one, one.busy
            if replica is None:
                return
            request, first = self._queue.popleft()
            if first:
                self.tally.waits.append(self.now - request.arrival)
            replica.busy += 1
            self._push(self.now + request.service, replica, request)


SPACING = 30.0
"""Least seconds between two recorded readings."""
KEPT = 2_880
"""Readings kept per endpoint: a day's."""
LONGEST_GAP = 10 * SPACING
"""Longer gaps between readings are left out: nobody knows what arrived in them."""
LONGEST_HELD = 3_600.0
"""Unchanged readings are recorded once in this time, and when they change."""
UNKNOWN = -1.0
"""Stands for an unknown rate."""


class NoWorkloadError(Exception):
    """No workload can be derived from a history; the text says why."""


@dataclass(frozen=True, slots=True)
class RecordedReading:
    """All queues of an endpoint at a time: messages ready and in hand, and arrivals and deliveries per second.

    `at`: seconds since 1970, which survive a restart. `since`: all readings from then on were the same; None if unknown.
    """

    at: float
    ready: float
    unacked: float
    published: float = UNKNOWN
    delivered: float = UNKNOWN
    since: float | None = None

    @property
    def weight(self) -> float:
        """The number of readings that it represents."""
        return 1.0 if self.since is None else (self.at - self.since) / SPACING

    def goes_on_from(self, before: RecordedReading) -> bool:
        """Whether it equals the previous reading, which is recent enough to cover the time between."""
        return (
            replace(self, at=before.at, since=before.since) == before
            and 0 <= self.at - before.at <= LONGEST_GAP
        )


def workload(readings: Sequence[RecordedReading], service: float | None = None) -> list[Request]:
    """The requests of a history, oldest first, evenly spread between readings; `service` seconds each, or learned."""
    if len(readings) < 2:
        raise NoWorkloadError(f"less than {2 * SPACING:g} s of it were recorded")
    if service is None:
        told = [one for one in readings if one.delivered >= 0]
        delivered = sum(one.delivered * one.weight for one in told)
        busy = sum(one.unacked * one.weight for one in told)
        if delivered <= 0 or busy <= 0:
            raise NoWorkloadError("its watchers tell no rates, so the service time must be given")
        service = busy / delivered
    found = list(islice(_requests(readings, service), MOST_REQUESTS + 1))
    if not found:
        raise NoWorkloadError("nothing arrived in its recorded history")
    if len(found) > MOST_REQUESTS:
        raise NoWorkloadError(f"more than {MOST_REQUESTS} requests arrived, which are too many to run")
    return found


def _requests(readings: Sequence[RecordedReading], service: float) -> Iterator[Request]:
    begin, owed = readings[0].at, 0.0
    for _ in range(int(readings[0].ready + readings[0].unacked)):
        yield Request(0.0, service)
    for one, other in pairwise(readings):
        gap = other.at - one.at
        held = other.since is not None and other.since <= one.at
        if gap > LONGEST_GAP and not held:
            begin += gap
            continue
        if one.published >= 0 and other.published >= 0:
            came = gap * (one.published + other.published) / 2
        else:
            growth = other.ready + other.unacked - one.ready - one.unacked
            left = gap * (one.unacked + other.unacked) / 2 / service if service > 0 else 0.0
            came = max(0.0, growth + left)
        count = int(came + owed)
        owed += came - count
        for number in range(count):
            yield Request(one.at - begin + gap * (number + 0.5) / count, service)
