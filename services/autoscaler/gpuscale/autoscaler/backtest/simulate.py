"""Runs a policy over a workload: the very engine that scales live endpoints, with a virtual clock. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from gpuscale.autoscaler.backtest.report import Moment, Report, Timeline, measure
from gpuscale.autoscaler.backtest.trace import Request
from gpuscale.autoscaler.backtest.world import Pool, Setting, World
from gpuscale.autoscaler.domain.engine import evaluate
from gpuscale.autoscaler.domain.model import (
    EndpointSpec,
    HostSignal,
    PushedSignal,
    QueueCount,
    QueueSignal,
    Signal,
)
from gpuscale.autoscaler.domain.policies.outcome import Inputs
from gpuscale.autoscaler.domain.remembered import Remembered
from gpuscale.autoscaler.domain.signals import Sample

ARRIVAL_RATE = "arrival_rate"
"""Name of the pushed metric that a backtest knows: arrivals a second since the evaluation before."""
LONGEST_TAIL = 3600.0
"""Seconds that a run goes on after the last arrival, at most, while something waits or is in hand."""
MOST_EVALUATIONS = 1_000_000
"""Evaluations of a run: a workload that spans more ticks than this is refused."""
IDLE_HOST = {"cpu_percent": 0.0, "load_per_core": 0.0, "memory_available_bytes": float(1 << 50)}
"""What the hosts of a backtest show: they have room for everything."""


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
    """What the policy of a spec makes of a workload.

    Args:
        spec: the endpoint, evaluated at its own tick.
        requests: in the order of arrival; not empty.
        setting: what replicas are like.
        goal: seconds that a request may wait.
        begin: the time of day at the first second, for schedules.
        stopped: asked at every evaluation whether the run is to stop.

    Raises:
        StoppedError: it was told to.
    """
    replay = Replay(spec, requests, setting, begin)
    while not replay.over:
        if replay.ticks_next and stopped():
            raise StoppedError
        replay.step()
    return replay.report(goal)


class Replay:
    """An endpoint's policy on a workload: a world, and what is remembered of the endpoint.

    Args:
        spec: the endpoint, evaluated at its own tick.
        requests: in the order of arrival; not empty.
        setting: what replicas are like.
        begin: the time of day at the first second.
        pool: GPUs that it shares with others; those of its setting where it shares none.
    """

    def __init__(
        self,
        spec: EndpointSpec,
        requests: Sequence[Request],
        setting: Setting,
        begin: datetime,
        pool: Pool | None = None,
    ) -> None:
        self.world = World(setting, spec.min_replicas, pool)
        self.timeline = Timeline()
        self._spec = spec
        self._requests = requests
        self._begin = begin
        self._position, self._next_tick = 0, 0.0
        self._past = Remembered()
        self._changes: dict[str, float] = {}
        self._ticked = (0.0, 0, 0)
        self._start_up = setting.cold_start(1)

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
        """Let the next request come, or evaluate."""
        if self.ticks_next:
            self.tick(self._next_tick)
            self._next_tick += self._spec.period
        else:
            self.world.arrive(self._requests[self._position])
            self._position += 1

    def report(self, goal: float) -> Report:
        """The figures of the run."""
        last = self._requests[-1].arrival
        return measure(self.world, len(self._requests), goal, last, self.timeline.moments)

    def tick(self, moment: float) -> None:
        """Evaluate the policy, and do what it says."""
        world = self.world
        world.advance(moment)
        samples = {signal.id: self._sample(signal) for signal in self._spec.signals}
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
        self.timeline.add(Moment(world.now, world.wanted, world.ready, world.waiting))

    def _sample(self, signal: Signal) -> Sample:
        world, source = self.world, signal.source
        match source:
            case QueueSignal(count=QueueCount.OLDEST_AGE) if not world.waiting:
                return Sample(at=world.now, problem="no message waits")
            case QueueSignal(count=count):
                return Sample((self._count(count),), world.now, proven_empty=world.settled)
            case PushedSignal(metric) if metric == ARRIVAL_RATE:
                return Sample((self._count(QueueCount.RATE_IN),), world.now, proven_empty=world.settled)
            case HostSignal(metric) if metric in IDLE_HOST:
                return Sample((IDLE_HOST[metric],), world.now, proven_empty=True)
            case _:
                return Sample(problem="a backtest knows queues, idle hosts and the metric arrival_rate only")

    def _count(self, count: QueueCount) -> float:
        """What of the queue counts; rates since the evaluation before."""
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
