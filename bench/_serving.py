"""Servers of a language model behind a router, scaled by the very engine that scales live endpoints, in virtual time.

The router gives each request to the ready replica with the fewest; a request that no replica is ready for waits at the router.
Replicas take their cold start, show their metrics every five seconds, as an adapter reads them, and finish what they have when
they are to go.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from gpuscale.autoscaler.domain.engine import evaluate
from gpuscale.autoscaler.domain.inputs import Inputs
from gpuscale.autoscaler.domain.serving import PREFIX
from gpuscale.autoscaler.domain.signals import EndpointPast
from gpuscale.autoscaler.domain.spec import EndpointSpec, ReplicaSignal
from gpuscale.autoscaler.signals.sources import ReplicaServers
from tests.support.clock import ManualClock
from tests.support.llm_model import Ask, LlmServer, Served, Speed

READ_EVERY = 5.0
LONGEST_TAIL = 600.0


@dataclass(slots=True)
class _Replica:
    id: str
    started: float
    ready_at: float
    server: LlmServer
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a load: percent of requests within all goals, GPU hours from start to end, and changes."""

    attained: float
    hours: float
    changes: int
    most: int


class Site:
    """One endpoint, its replicas of one GPU each, and the load that comes."""

    def __init__(self, spec: EndpointSpec, speed: Speed, cold_start: float, asks: Sequence[Ask]) -> None:
        self.clock = ManualClock(0.0)
        self.text: list[str] = []
        self._spec, self._speed, self._cold_start, self._asks = spec, speed, cold_start, asks
        self._servers = ReplicaServers(self.clock)
        self._replicas: list[_Replica] = []
        self._queue: deque[Ask] = deque()
        self._served: list[Served] = []
        self._past = EndpointPast()
        self._changes: dict[str, float] = {}
        self._wanted = self._number = self._moves = self._most = 0
        self._gpu_seconds = 0.0
        self._scale(spec.min_replicas, ready=True)
        self._moves = 0

    def run(self, goals: dict[str, float]) -> Outcome:
        """Let it all happen."""
        period = self._spec.period
        tick, read, last = period, READ_EVERY, self._asks[-1].at
        waiting = deque(self._asks)
        while waiting or (self._busy() and self.clock.now() < last + LONGEST_TAIL):
            moment = min(tick, read, waiting[0].at if waiting else tick)
            self._advance(moment)
            if waiting and waiting[0].at <= moment:
                self._queue.append(waiting.popleft())
                self._route()
            if read <= moment:
                self._read()
                read += READ_EVERY
            if tick <= moment:
                self._evaluate()
                tick += period
        within = sum(
            all((late := getattr(one, goal)) is not None and late <= most for goal, most in goals.items())
            for one in self._served
        )
        return Outcome(100 * within / len(self._asks), self._gpu_seconds / 3600, self._moves, self._most)

    def _busy(self) -> bool:
        return bool(self._queue) or any(one.server.load for one in self._replicas)

    def _ready(self) -> list[_Replica]:
        return [one for one in self._replicas if one.ready_at <= self.clock.now() and not one.leaving]

    def _advance(self, moment: float) -> None:
        gap = moment - self.clock.now()
        self._gpu_seconds += gap * len(self._replicas)
        self.clock.advance(max(0.0, gap))
        for one in self._replicas:
            one.server.advance(moment)
        self._replicas = [one for one in self._replicas if not one.leaving or one.server.load]
        self._route()

    def _route(self) -> None:
        ready = self._ready()
        while self._queue and ready:
            best = min(ready, key=lambda one: one.server.load)
            ask = self._queue.popleft()
            self._served.append(best.server.take(ask))

    def _read(self) -> None:
        for one in self._ready():
            self._servers.heard("e", one.id, 0.0, one.server.reading(), "")
        self._servers.keep("e", [one.id for one in self._replicas])

    def _evaluate(self) -> None:
        ids, now = [one.id for one in self._ready()], self.clock.now()
        samples = {
            one.id: self._servers.sample("e", one.source.metric.removeprefix(PREFIX), ids, one.oldest)
            for one in self._spec.measured
            if isinstance(one.source, ReplicaSignal)
        }
        self._past = self._past.with_samples(self._spec, samples)
        inputs = Inputs(
            before=self._wanted,
            ready=len(ids),
            now=now,
            wall=datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=now),
            observations=self._past.observations(self._spec, samples, now),
            series=self._past.series,
            last_changes=self._changes,
            bursts=self._past.bursts,
            startup=self._cold_start,
        )
        result = evaluate(self._spec, inputs, self._past.memory)
        self._past = replace(self._past, memory=result.memory, bursts=result.bursts)
        self._changes |= dict.fromkeys(result.evaluation.effective, now)
        self.text.append(
            f"{now:6.0f} {len(ids):2} ready, {result.evaluation.wanted:2}: {result.evaluation.steps[0].text}"
        )
        self._scale(result.evaluation.wanted)

    def _scale(self, wanted: int, *, ready: bool = False) -> None:
        self._moves += wanted != self._wanted
        self._wanted, self._most = wanted, max(self._most, wanted)
        now = self.clock.now()
        staying = [one for one in self._replicas if not one.leaving]
        for _ in range(wanted - len(staying)):
            self._number += 1
            at = now if ready else now + self._cold_start
            self._replicas.append(_Replica(f"r{self._number}", now, at, LlmServer(self._speed, at)))
        # Those on their way up first, then the least busy, then the newest.
        staying.sort(key=lambda one: (one.ready_at <= now, one.server.load, -one.started))
        for one in staying[: max(0, len(staying) - wanted)]:
            one.leaving = True
        self._replicas = [one for one in self._replicas if not one.leaving or one.server.load]


def load(rate: Callable[[float], float], seconds: float, dice: random.Random) -> Iterator[Ask]:
    """Requests at a rate that changes, with prompts and answers of very different lengths."""
    at, most = 0.0, 24.0
    while (at := at + dice.expovariate(most)) < seconds:
        if dice.random() < rate(at) / most:
            prompt = min(4000, max(10, round(dice.lognormvariate(5.8, 0.8))))
            yield Ask(at, prompt, min(1000, max(5, round(dice.lognormvariate(5.0, 0.6)))))


def bursts(dice: random.Random, seconds: float) -> Callable[[float], float]:
    """Between 1 and 24 requests a second: a level, and bursts of one to five minutes that come at random."""
    level, plan, at = dice.uniform(1.0, 4.0), list[tuple[float, float, float]](), dice.uniform(60.0, 300.0)
    while at < seconds:
        length = dice.uniform(60.0, 300.0)
        plan.append((at, at + length, dice.uniform(8.0, 24.0)))
        at += length + dice.expovariate(1 / 400.0)
    return lambda now: next((high for start, end, high in plan if start <= now < end), level)


def waves(dice: random.Random, seconds: float) -> Callable[[float], float]:
    """Between 1 and 24 requests a second: up and down within ten to forty minutes."""
    import math

    length, phase = dice.uniform(600.0, 2400.0), dice.uniform(0.0, 6.28)
    return lambda now: 12.5 + 11.5 * math.sin(2 * math.pi * now / length + phase)
