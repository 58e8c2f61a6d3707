"""The simulated endpoint: replicas that start, work, drain and go, and a queue in front of them. Pure.

Replicas have `slots` each and take the oldest request whenever one is free, as consumers with a prefetch of `slots` do;
of several the one with the least in hand. A replica that is told to go finishes what it has and takes no more, unless
the world is one that kills.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuscale.client.traces import Request


@dataclass(frozen=True, slots=True)
class Setting:
    """What replicas are like."""

    slots: int  # requests that a replica serves at a time
    # seconds from the decision to being ready, for the n-th replica that is started
    cold_start: Callable[[int], float]
    max_gpus: int | None = None  # GPUs that there are; None for no bound
    gpus_each: int = 1  # GPUs of a replica
    kills: bool = False  # a replica that is told to go drops what it has in hand, and it is served anew


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
    """What happened."""

    # seconds that each request waited before it was first taken in hand
    waits: list[float] = field(default_factory=list[float])
    gpu_seconds: float = 0.0  # seconds for which GPUs were held, from the grant to the release
    backlog_seconds: float = 0.0  # the queue's length, integrated over time
    pending_seconds: float = 0.0  # replicas wanted and not granted, integrated over time
    killed: int = 0  # requests that were dropped in hand
    wasted: int = 0  # replicas that went before they had been ready for twice their start-up time
    # when the count wanted changed, and to what
    changes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class SimulatedPool:
    """GPUs that several worlds share. What becomes free goes to the first of them that is short."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._held = 0
        self._worlds: list[World] = []

    def join(self, world: World) -> None:
        """Let a world take part; those that came before it are served first."""
        self._worlds.append(world)

    def take(self, gpus: int) -> bool:
        """Hold some more, if they are free."""
        if self._most is not None and self._held + gpus > self._most:
            return False
        self._held += gpus
        return True

    def free(self) -> int | None:
        """How many are free; None where there is no bound."""
        return None if self._most is None else self._most - self._held

    def give(self, gpus: int) -> None:
        """Let some go."""
        self._held -= gpus
        for world in self._worlds:
            world.match()


class World:
    """An endpoint at work. Time only goes on through `advance` and `wait`."""

    def __init__(self, setting: Setting, replicas: int, pool: SimulatedPool | None = None) -> None:
        self.setting = setting
        self._pool = SimulatedPool(setting.max_gpus) if pool is None else pool
        self._pool.join(self)
        self.now = 0.0
        self.wanted = replicas
        self.tally = BacktestTally()
        self.arrived = 0
        self.granted = 0
        """Replicas that hold GPUs and are to stay."""
        self._replicas: list[_Replica] = []
        self._queue: deque[tuple[Request, bool]] = deque()
        self._events: list[tuple[float, int, _Replica, Request | None]] = []
        self._sequence = 0
        self._starts = 0
        while self.granted < replicas and self._pool.take(setting.gpus_each):
            self._start(0.0)  # those that there are at the beginning are ready
        self.tally.changes.append((0.0, replicas))

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest request of the queue came; 0 where it is empty."""
        return self.now - self._queue[0][0].arrival if self._queue else 0.0

    @property
    def taken(self) -> int:
        """Requests that were ever taken in hand."""
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
        """Requests that each of the ready replicas works on."""
        return tuple(one.busy for one in self._replicas if not one.leaving and one.ready_at <= self.now)

    @property
    def settled(self) -> bool:
        """Whether nothing waits and nothing is in hand."""
        return not self._queue and self.in_hand == 0

    def gpu_limit(self, unbounded: int) -> int:
        """Most replicas that there are GPUs for, those that hold some included."""
        free = self._pool.free()
        return unbounded if free is None else self.granted + max(0, free) // self.setting.gpus_each

    def arrive(self, request: Request) -> None:
        """A request comes, at its time."""
        self.advance(request.arrival)
        self.arrived += 1
        self._queue.append((request, True))
        self._dispatch()

    def scale(self, wanted: int) -> None:
        """Aim at another number of replicas."""
        if wanted != self.wanted:
            self.wanted = wanted
            self.tally.changes.append((self.now, wanted))
        self.match()

    @property
    def next_event(self) -> float:
        """When something happens next by itself; infinity where nothing does."""
        return self._events[0][0] if self._events else math.inf

    def wait(self, moment: float) -> None:
        """Let time go on to `moment`, up to which nothing happens by itself."""
        self._pass(moment)

    def advance(self, moment: float) -> None:
        """Let time go on to `moment`, with everything that becomes ready or done on the way."""
        while self._events and self._events[0][0] <= moment:
            at, _, replica, request = heapq.heappop(self._events)
            self._pass(at)
            if request is None:
                self._dispatch()
            elif not replica.gone:
                replica.busy -= 1
                if replica.leaving and replica.busy == 0:
                    self._remove(replica)
                self._dispatch()
        self._pass(moment)

    def _pass(self, moment: float) -> None:
        gap = moment - self.now
        if gap > 0:
            self.tally.gpu_seconds += gap * len(self._replicas) * self.setting.gpus_each
            self.tally.backlog_seconds += gap * len(self._queue)
            self.tally.pending_seconds += gap * max(0, self.wanted - self.granted)
            self.now = moment

    def match(self) -> None:
        """Start or stop replicas towards the count wanted, as far as there are GPUs."""
        while self.granted > self.wanted:
            staying = [one for one in self._replicas if not one.leaving]
            # Those on their way up first, then the least busy, then the newest.
            self._stop(min(staying, key=lambda one: (one.ready_at <= self.now, one.busy, -one.number)))
        while self.granted < self.wanted and self._pool.take(self.setting.gpus_each):
            self._starts += 1
            self._start(self.setting.cold_start(self._starts))

    def _start(self, delay: float) -> None:
        self.granted += 1
        replica = _Replica(self._sequence, self.now, self.now + delay)
        self._replicas.append(replica)
        self._push(replica.ready_at, replica, None)

    def _stop(self, replica: _Replica) -> None:
        replica.leaving = True
        self.granted -= 1
        start_up = replica.ready_at - replica.started
        self.tally.wasted += self.now < replica.ready_at + 2 * start_up
        if self.setting.kills and replica.busy:
            self.tally.killed += replica.busy
            dropped = [entry[3] for entry in self._events if entry[2] is replica and entry[3] is not None]
            self._queue.extendleft((request, False) for request in reversed(dropped))
            replica.busy = 0
        if replica.busy == 0:
            self._remove(replica)
            self._dispatch()

    def _remove(self, replica: _Replica) -> None:
        replica.gone = True
        self._replicas.remove(replica)
        self._pool.give(self.setting.gpus_each)

    def _push(self, at: float, replica: _Replica, request: Request | None) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at, self._sequence, replica, request))

    def _dispatch(self) -> None:
        """Give what waits to the replicas that have a slot free, the least busy first."""
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
