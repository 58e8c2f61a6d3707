"""Whatever becomes of a source, the count that is aimed at never falls: ten cycles at none, one and several replicas.

Each source is first shown to bring the count down while it works, so that it is the fault which holds it.
"""

import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gpuscale.autoscaler.domain.engine import Memory, evaluate
from gpuscale.autoscaler.domain.inputs import Inputs
from gpuscale.autoscaler.domain.queues import QueueReading, QueueState
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaLease, ReplicaState
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import BandRule, Comparator, Kind, Rule, StepRule, ThresholdRule
from gpuscale.autoscaler.domain.rules.targets import TargetRule, TargetType
from gpuscale.autoscaler.domain.signals import EndpointPast, Sample
from gpuscale.autoscaler.domain.spec import (
    GpuSignal,
    HostSignal,
    Pace,
    PrometheusSignal,
    PushedSignal,
    QueueCount,
    QueueSignal,
    ReplicaSignal,
    Signal,
    Source,
    WaitingSignal,
)
from gpuscale.autoscaler.signals import polling
from gpuscale.autoscaler.signals.prometheus import PrometheusSettings
from gpuscale.autoscaler.signals.sources import SignalSources, Value, open_sources
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.secrets import SecretUrl
from tests.support import fake_allocator, fake_fleet
from tests.support import prometheus as fake_prometheus
from tests.support.autoscaler_values import WALL, endpoint, replica, spec
from tests.support.fake_fleet import FakeFleet, NodeState, gpu_message, node_message
from tests.support.prometheus import FakePrometheus, vector
from tests.support.waiting import eventually

CYCLES, TICK = 10, 0.04
MAX_AGE = 60.0
KINDS: tuple[Kind, ...] = (
    StepRule(Comparator.LESS_THAN, 10.0, -1),
    BandRule(low=10.0, high=90.0),
    ThresholdRule(90.0, 10.0),
    TargetRule(50.0, TargetType.VALUE),
    TargetRule(50.0),
    FormulaRule("ceil(s / 50)"),
)


class Site:
    """Every source there is, with what stands behind it: at first next to nothing to do, everywhere."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.fleet = FakeFleet()
        self.allocator = fake_allocator.FakeAllocator({})
        self.allocator.waiting = {"t": 1}
        self.prometheus = FakePrometheus()
        self.queue = QueueReading(QueueState.OK, 1, 0, 1, self.clock.now())
        self.replicas: list[Replica] = []
        self.sources: SignalSources
        self.node()

    def node(self, *, utilization: float | None = 1.0, count: int = 4, **fields: Any) -> None:
        """Say what the fleet knows of its one node, whose host is as busy as its GPUs."""
        gpus = [gpu_message(f"GPU-{number}", number, utilization=utilization) for number in range(count)]
        message = node_message("n", *gpus, **fields)
        if utilization is not None:
            message.snapshot.host_reading.cpu_percent = utilization
        self.fleet.put(message)

    def report(self, *, age: float = 0.0) -> None:
        """Have 1 reported for the endpoint and for each replica, and nothing else known."""
        self.sources.reported.forget("e")
        now = self.clock.now()
        for one in ("", *(item.id for item in self.replicas)):
            self.sources.reported.report(("e", one), {"m": Value(1.0, now - age)}, now)

    def have(self, count: int) -> None:
        """Have so many replicas, each ready and with a GPU."""
        self.replicas = [
            replica(number, ReplicaState.READY, lease=ReplicaLease(f"v{number}", number, (f"GPU-{number}",)))
            for number in range(count)
        ]
        self.report()

    def sample(self, source: Source) -> Sample:
        """What a source says now."""
        wanted = spec(signals=[Signal("s", source, MAX_AGE)], tick=TICK)
        return self.sources.sample(endpoint(wanted), self.replicas)["s"]

    def tells(self, source: Source) -> bool:
        """Whether a source says something that counts."""
        found = self.sample(source)
        fresh = found.at is not None and self.clock.now() - found.at <= MAX_AGE
        return (
            fresh
            and not (found.problem or found.silent_count)
            and all(math.isfinite(value) for value in found.values)
        )


@asynccontextmanager
async def open_site() -> AsyncGenerator[Site]:
    site = Site()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(fake_fleet.serving(site.fleet))
        allocator = await stack.enter_async_context(fake_allocator.serving(site.allocator))
        url = await stack.enter_async_context(fake_prometheus.serving(site.prometheus))
        site.sources = await stack.enter_async_context(
            open_sources(
                lambda watcher: site.queue if watcher == "jobs" else None,
                {"main": PrometheusSettings(url=SecretUrl(url), allow_private=True)},
                fleet=await stack.enter_async_context(open_channel(fleet)),
                allocator=await stack.enter_async_context(open_channel(allocator)),
                clock=site.clock,
            )
        )
        yield site


def lose_fleet(site: Site) -> None:
    site.node(period=0.05)
    site.fleet.fall_silent()
    site.fleet.break_streams()


def lose_allocator(site: Site) -> None:
    site.allocator.failure = UnavailableError("the allocator is away")


def answer(text: str) -> Callable[[Site], None]:
    return lambda site: setattr(site.prometheus, "answer", text)


def status(line: str) -> Callable[[Site], None]:
    return lambda site: setattr(site.prometheus, "status", line)


def queue(state: QueueState, *counts: int) -> Callable[[Site], None]:
    def fault(site: Site) -> None:
        site.queue = QueueReading(state, *counts, observed_at=site.clock.now())

    return fault


QUEUE = QueueSignal("jobs", QueueCount.TOTAL)
OWN, ALL = GpuSignal("utilization_percent", own_replicas=True), GpuSignal("utilization_percent")
CPU = HostSignal("cpu_percent")
QUERY = PrometheusSignal("main", "queue_depth")
CASES: Mapping[str, tuple[Source, Callable[[Site], None]]] = {
    **{f"queue {state.value}": (QUEUE, queue(state)) for state in QueueState if state is not QueueState.OK},
    "queue without unacked": (QUEUE, queue(QueueState.OK, 0)),
    "queue that nobody read for long": (
        QUEUE,
        lambda site: setattr(site, "queue", site.queue._replace(observed_at=site.clock.now() - 2 * MAX_AGE)),
    ),
    "metric that is reported no more": (PushedSignal("m"), lambda site: site.report(age=2 * MAX_AGE)),
    "metric that is forgotten": (PushedSignal("m"), lambda site: site.sources.forget("e")),
    "replicas report no more": (ReplicaSignal("m"), lambda site: site.report(age=2 * MAX_AGE)),
    "replicas that never reported": (ReplicaSignal("m"), lambda site: site.sources.forget("e")),
    "fleet away, own GPUs": (OWN, lose_fleet),
    "fleet away, all GPUs": (ALL, lose_fleet),
    "fleet away, hosts": (CPU, lose_fleet),
    "node stale": (ALL, lambda site: site.node(state=NodeState.NODE_STATE_STALE)),
    "node offline": (CPU, lambda site: site.node(state=NodeState.NODE_STATE_OFFLINE)),
    "GPUs gone": (OWN, lambda site: site.node(count=0)),
    "GPUs say nothing": (ALL, lambda site: site.node(utilization=None)),
    "prometheus without series": (QUERY, answer(vector())),
    "prometheus says NaN": (QUERY, answer(vector("NaN"))),
    "prometheus says -Inf": (QUERY, answer(vector("-Inf"))),
    "prometheus says rubbish": (QUERY, answer("0")),
    "prometheus fails": (QUERY, status("500 Oops")),
    "prometheus refuses": (QUERY, status("401 No")),
    "allocator away": (WaitingSignal(), lose_allocator),
}


def counts(site: Site, source: Source, kind: Kind, count: int) -> list[int]:
    """What is aimed at in each of ten evaluations on a source."""
    rule = Rule("r", "" if isinstance(kind, FormulaRule) else "s", kind, cooldown=0.0)
    wanted = spec(rule, signals=[Signal("s", source, MAX_AGE)], down=Pace(0.0))
    past, found = EndpointPast(Memory(0.0)), [count]
    for cycle in range(CYCLES):
        now = site.clock.now() + cycle * TICK
        samples = {"s": site.sample(source)}
        past = past.with_samples(wanted, samples)
        seen = past.observations(wanted, samples, now)
        result = evaluate(
            wanted, Inputs(found[-1], len(site.replicas), now, WALL, seen, past.series), past.memory
        )
        past = replace(past, memory=result.memory)
        found.append(result.evaluation.wanted)
    return found


@pytest.mark.parametrize("case", CASES)
async def test_a_source_that_fails_never_lowers_the_count(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "SHORTEST_PERIOD", TICK / 2)
    source, fault = CASES[case]
    async with open_site() as site:
        site.have(4)
        await eventually(lambda: site.tells(source))
        for kind in KINDS:
            assert counts(site, source, kind, 4)[-1] < 4, kind
        for count in (0, 1, 4):
            site.have(count)
            fault(site)
            await eventually(lambda: not site.tells(source))
            for kind in KINDS:
                assert counts(site, source, kind, count) == [count] * (CYCLES + 1), (count, kind)
