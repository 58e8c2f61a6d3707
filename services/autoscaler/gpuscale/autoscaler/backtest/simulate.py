"""Runs policies over workloads and measures the result, with the engine that scales live endpoints, on a virtual clock.

Pure. Several endpoints with shared GPUs advance together, from one event of any of them to the next, so that a GPU freed by one
is available to another at that very moment. Endpoints listed first are served first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from operator import attrgetter

from gpuscale.autoscaler.backtest.world import Setting, SimulatedPool, World
from gpuscale.autoscaler.domain.engine import evaluate
from gpuscale.autoscaler.domain.inputs import Inputs
from gpuscale.autoscaler.domain.serving import PREFIX, percentile_of
from gpuscale.autoscaler.domain.signals import EndpointPast, Sample
from gpuscale.autoscaler.domain.spec import (
    EndpointSpec,
    HostSignal,
    PushedSignal,
    QueueCount,
    QueueSignal,
    ReplicaSignal,
    Signal,
)
from gpuscale.client.traces import Request
from gpuscale.client.tuning import Window

MOST_MOMENTS = 400
"""Points that a timeline is thinned out to."""

FLAP_SECONDS = 600.0
"""Opposite changes within this many seconds are a flap."""


@dataclass
class Timeline:
    """Points of a run, thinned out evenly: replicas wanted and ready, and most requests waiting up to the next point."""

    seconds: list[float] = field(default_factory=list[float])
    wanted: list[int] = field(default_factory=list[int])
    ready: list[int] = field(default_factory=list[int])
    waiting: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self._each, self._seen = 1, 0

    def add(self, at: float, wanted: int, ready: int, waiting: int) -> None:
        """Add a point, later than all before."""
        if self._seen % self._each:
            self.waiting[-1] = max(self.waiting[-1], waiting)
        else:
            self.seconds.append(at)
            self.wanted.append(wanted)
            self.ready.append(ready)
            self.waiting.append(waiting)
        self._seen += 1
        if len(self.seconds) > MOST_MOMENTS:
            self.waiting = [max(self.waiting[at : at + 2]) for at in range(0, len(self.waiting), 2)]
            del self.seconds[1::2], self.wanted[1::2], self.ready[1::2]
            self._each *= 2


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of a run, named as in the contract."""

    request_count: int  # how many there were
    unserved_count: int  # how many were never started
    violation_percent: float  # share that waited longer than the goal, or for ever
    wait_p50_seconds: float  # seconds of waiting
    wait_p95_seconds: float
    wait_p99_seconds: float
    backlog_hours: float  # the queue's length, integrated over time
    gpu_hours: float  # from grant to release, start-up included
    pending_replica_hours: float  # replicas wanted and not granted, integrated over time
    flap_count: int  # changes in the opposite direction of the previous one, within ten minutes of it
    change_count: int  # changes of the count
    killed_count: int  # requests interrupted
    wasted_start_count: int  # replicas stopped before they had been ready for twice their start-up time
    most_replicas: int  # the largest count
    timeline: Timeline = field(default_factory=Timeline)  # the run at its evaluations, thinned out
    windows: tuple[Window, ...] = ()  # the same, per equal part of the time


def measure(world: World, requests: int, goal: float, last: float) -> Report:
    """The figures of a finished world."""
    tally = world.tally
    waits = sorted(tally.waits)
    unserved = requests - len(waits)
    late = sum(wait > goal for wait in waits) + unserved
    changes = tuple(one for one in tally.changes if one[0] <= last)
    moves = [(at, after - before) for (_, before), (at, after) in pairwise(changes)]
    return Report(
        request_count=requests,
        unserved_count=unserved,
        violation_percent=100.0 * late / requests,
        wait_p50_seconds=_quantile(waits, 0.50),
        wait_p95_seconds=_quantile(waits, 0.95),
        wait_p99_seconds=_quantile(waits, 0.99),
        backlog_hours=tally.backlog_seconds / 3600,
        gpu_hours=tally.gpu_seconds / 3600,
        pending_replica_hours=tally.pending_seconds / 3600,
        flap_count=sum(
            (one > 0) != (other > 0) and later - earlier <= FLAP_SECONDS
            for (earlier, one), (later, other) in pairwise(moves)
        ),
        change_count=len(changes) - 1,
        killed_count=tally.killed,
        wasted_start_count=tally.wasted,
        most_replicas=max(count for _, count in changes),
    )


def oracle_gpu_hours(requests: Sequence[Request], slots: int, gpus_each: int = 1) -> float:
    """GPU hours of the work alone: what a policy with perfect knowledge and divisible replicas would need."""
    return sum(request.service for request in requests) * gpus_each / slots / 3600


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank of a share of sorted values; 0 where there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


WINDOWS = 10
"""Number of equal parts of a run with their own figures."""
ARRIVAL_RATE = "arrival_rate"
"""The pushed metric that a backtest provides: arrivals per second since the previous evaluation."""
LONGEST_TAIL = 3600.0
"""Most seconds that a run continues after the last arrival, while something waits or is in hand."""
MOST_EVALUATIONS = 1_000_000
"""Most evaluations of a run: a workload with more ticks is refused."""
IDLE_HOST = {"cpu_percent": 0.0, "load_per_core": 0.0, "memory_available_bytes": float(1 << 50)}
"""The hosts' facts in a backtest: room for everything."""


class StoppedError(Exception):
    """A run was told to stop."""


def run(
    spec: EndpointSpec,
    requests: Sequence[Request],
    setting: Setting,
    *,
    goal: float,
    begin: datetime = datetime(2024, 1, 1, tzinfo=UTC),
    stopped: Callable[[], bool] = lambda: False,
) -> Report:
    """Run a policy on requests in order of arrival.

    `goal`: most seconds to wait; `begin`: the time of day at second 0. Raises StoppedError once `stopped`, called at every
    evaluation, returns true.
    """
    replay = Replay(spec, requests, setting, begin)
    while not replay.over:
        if replay.ticks_next and stopped():
            raise StoppedError
        replay.step()
    return replay.report(goal)


class Replay:
    """An endpoint's policy on a workload, for `run`; `pool`: GPUs shared with others."""

    def __init__(
        self,
        spec: EndpointSpec,
        requests: Sequence[Request],
        setting: Setting,
        begin: datetime,
        pool: SimulatedPool | None = None,
    ) -> None:
        self.world = World(setting, spec.min_replicas, pool)
        self.timeline = Timeline()
        self._spec = spec
        self._requests = requests
        self._begin = begin
        self._position, self._next_tick = 0, 0.0
        self._past = EndpointPast()
        self._changes: dict[str, float] = {}
        self._ticked = (0.0, 0, 0)
        self._start_up = setting.cold_start(1)
        self._window = max(requests[-1].arrival, 1e-9) / WINDOWS
        self._held: list[float] = []

    @property
    def ticks_next(self) -> bool:
        """Whether an evaluation comes before the next request."""
        done = self._position == len(self._requests)
        return done or self._requests[self._position].arrival > self._next_tick

    @property
    def due(self) -> float:
        """When the next request or evaluation comes."""
        return self._next_tick if self.ticks_next else self._requests[self._position].arrival

    @property
    def over(self) -> bool:
        """Whether all is done, or will not be done in reasonable time."""
        all_came = self._position == len(self._requests)
        too_late = self._next_tick > self._requests[-1].arrival + LONGEST_TAIL
        return all_came and (self.world.settled or too_late)

    def step(self) -> None:
        """Process the next request or evaluation."""
        if self.ticks_next:
            self.tick(self._next_tick)
            self._next_tick += self._spec.period
        else:
            self.world.arrive(self._requests[self._position])
            self._position += 1

    def report(self, goal: float) -> Report:
        """The figures of the run, and of each part of the time; requests are started in order of arrival."""
        last, windows = self._requests[-1].arrival, list[Window]()
        report = measure(self.world, len(self._requests), goal, last)
        waits, held = self.world.tally.waits, [0.0, *self._held[: WINDOWS - 1]]
        held += [self.world.tally.gpu_seconds] * (WINDOWS + 1 - len(held))
        ends = [
            bisect_left(self._requests, self._window * (k + 1), key=attrgetter("arrival"))
            for k in range(WINDOWS - 1)
        ]
        for (begin, end), (before, after) in zip(
            pairwise([0, *ends, len(self._requests)]), pairwise(held), strict=True
        ):
            late = sum(wait > goal for wait in waits[begin:end]) + max(0, end - max(begin, len(waits)))
            windows.append(Window(end - begin, late, (after - before) / 3600))
        return replace(report, timeline=self.timeline, windows=tuple(windows))

    def tick(self, moment: float) -> None:
        """Evaluate the policy, and carry out the result."""
        world = self.world
        world.advance(moment)
        while moment >= self._window * (len(self._held) + 1) and len(self._held) < WINDOWS:
            self._held.append(world.tally.gpu_seconds)
        samples = {signal.id: self._sample(signal) for signal in self._spec.measured}
        self._ticked = (world.now, world.arrived, world.taken)
        self._past = self._past.with_samples(self._spec, samples)
        inputs = Inputs(
            before=world.wanted,
            ready=world.ready,
            now=world.now,
            wall=self._begin + timedelta(seconds=world.now),
            observations=self._past.observations(self._spec, samples, world.now),
            series=self._past.series,
            last_changes=self._changes,
            bursts=self._past.bursts,
            startup=self._start_up,
            gpu_limit=world.gpu_limit(self._spec.max_replicas),
        )
        result = evaluate(self._spec, inputs, self._past.memory)
        self._past = replace(self._past, memory=result.memory, bursts=result.bursts)
        self._changes |= dict.fromkeys(result.evaluation.effective, world.now)
        world.scale(result.evaluation.wanted)
        self.timeline.add(world.now, world.wanted, world.ready, world.waiting)

    def _sample(self, signal: Signal) -> Sample:
        world, source = self.world, signal.source
        match source:
            case QueueSignal(count=QueueCount.OLDEST_AGE) if not world.waiting:
                return Sample(at=world.now, problem="no message waits")
            case QueueSignal(count=count):
                return Sample((self._count(count),), world.now, proven_empty=world.settled)
            case PushedSignal(metric) if metric == ARRIVAL_RATE:
                return Sample((self._count(QueueCount.RATE_IN),), world.now, proven_empty=world.settled)
            case ReplicaSignal(metric) if metric.startswith(PREFIX):
                values = self._served(metric.removeprefix(PREFIX))
                problem = (
                    "" if values else "a backtest knows no such metric of servers, or nothing was served"
                )
                return Sample(values, world.now, problem, proven_empty=world.settled)
            case HostSignal(metric) if metric in IDLE_HOST:
                return Sample((IDLE_HOST[metric],), world.now, proven_empty=True)
            case _:
                return Sample(problem="a backtest knows queues, idle hosts and the metric arrival_rate only")

    def _served(self, metric: str) -> tuple[float, ...]:
        """What servers would report; time to first token is the time in the queue, a trace has nothing of the rest."""
        world, joint = self.world, percentile_of(metric)
        if joint is not None:
            waits = sorted(world.tally.waits[self._ticked[2] :]) if joint[0] == "ttft" else []
            return (_quantile(waits, joint[1] / 100),) if waits else ()
        match metric:
            case "running":
                return world.loads
            case "waiting":
                return (world.waiting,)
            case "requests_per_second":
                return (self._count(QueueCount.RATE_IN),)
            case "served_per_second":
                return (self._count(QueueCount.RATE_OUT),)
            case _:
                return ()

    def _count(self, count: QueueCount) -> float:
        """The value of a queue count; rates are since the previous evaluation."""
        world = self.world
        at, arrived, taken = self._ticked
        gap = world.now - at
        match count:
            case QueueCount.READY:
                return world.waiting
            case QueueCount.UNACKED:
                return world.in_hand
            case QueueCount.TOTAL:
                return world.waiting + world.in_hand
            case QueueCount.RATE_IN:
                return (world.arrived - arrived) / gap if gap > 0 else 0.0
            case QueueCount.RATE_OUT:
                return (world.taken - taken) / gap if gap > 0 else 0.0
            case QueueCount.OLDEST_AGE:
                return world.oldest_age


@dataclass(frozen=True, slots=True)
class Part:
    """One endpoint of a run: its spec, its requests in order of arrival (at least one), and its replicas' setting."""

    spec: EndpointSpec
    requests: Sequence[Request]
    setting: Setting


def run_shared(
    parts: Sequence[Part],
    *,
    goal: float,
    begin: datetime,
    most: int | None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Report]:
    """Like `run`, for endpoints that share `most` GPUs (None: unlimited); each goes on until all are done."""
    pool = SimulatedPool(most)
    replays = [Replay(part.spec, part.requests, part.setting, begin, pool) for part in parts]
    while not all(replay.over for replay in replays):
        if stopped():
            raise StoppedError
        moment = min(min(replay.due, replay.world.next_event) for replay in replays)
        for replay in replays:
            replay.world.wait(moment)
        for replay in replays:
            replay.world.advance(moment)
        for replay in replays:
            while replay.due <= moment:
                replay.step()
    return [replay.report(goal) for replay in replays]
