"""Every source of signals there is, open together: each tells what stands behind it, and nothing that counts once that has failed; and requests that wait for GPUs.

What a rule makes of a signal that says nothing is in tests/property/autoscaler/test_engine_properties.py.
"""

from contextlib import AsyncExitStack
from functools import partial

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale.autoscaler.domain.signals import QueueReading, QueueState
from gpuscale.autoscaler.domain.spec import (
    GpuSignal,
    HostSignal,
    PrometheusSignal,
    PushedSignal,
    QueueCount,
    QueueSignal,
    ReplicaSignal,
    Signal,
    WaitingSignal,
)
from gpuscale.autoscaler.signals import polling
from gpuscale.autoscaler.signals import polling as waiting
from gpuscale.autoscaler.signals.polling import NoAnswerError, PollAnswer, waiting_requests, waiting_sample
from gpuscale.autoscaler.signals.prometheus import PrometheusSettings
from gpuscale.autoscaler.signals.sources import Value, open_sources
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.secrets import SecretUrl
from tests.support import fake_allocator, fake_fleet
from tests.support import prometheus as fake_prometheus
from tests.support.autoscaler_values import endpoint, lease, replica, spec
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message
from tests.support.prometheus import FakePrometheus, vector
from tests.support.waiting import eventually

MAX_AGE, TICK = 60.0, 0.04
VALUES = {
    QueueSignal("jobs", QueueCount.TOTAL): 3.0,
    PushedSignal("m"): 5.0,
    ReplicaSignal("m"): 7.0,
    GpuSignal("utilization_percent", own_replicas=True): 11.0,
    GpuSignal("utilization_percent"): 12.0,
    HostSignal("cpu_percent"): 17.0,
    PrometheusSignal("main", "queue_depth"): 19.0,
    WaitingSignal(): 23.0,
}
"""Each source, and what it shows while it works."""


async def test_each_source_tells_what_it_reads_and_nothing_once_that_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling, "SHORTEST_PERIOD", TICK / 2)
    clock, prometheus = SystemClock(), FakePrometheus()
    queue = QueueReading(QueueState.OK, 1, 2, 1, clock.now())
    node = node_message(
        "n", gpu_message("GPU-1", utilization=11.0), gpu_message("GPU-2", 1, utilization=13.0), period=0.5
    )
    node.snapshot.host_reading.cpu_percent = 17.0
    fleet, allocator = FakeFleet(node), fake_allocator.FakeAllocator({})
    allocator.waiting, prometheus.answer = {"t": 23}, vector("19")
    one = endpoint(
        spec(signals=[Signal(f"s{at}", source, MAX_AGE) for at, source in enumerate(VALUES)], tick=TICK)
    )
    ready = replica(state=ReplicaState.READY, lease=lease(1))
    async with AsyncExitStack() as stack:
        fleet_address = await stack.enter_async_context(fake_fleet.serving(fleet))
        allocator_address = await stack.enter_async_context(fake_allocator.serving(allocator))
        url = SecretUrl(await stack.enter_async_context(fake_prometheus.serving(prometheus)))
        sources = await stack.enter_async_context(
            open_sources(
                lambda watcher: queue if watcher == "jobs" else None,
                {"main": PrometheusSettings(url=url, allow_private=True)},
                fleet=await stack.enter_async_context(open_channel(fleet_address)),
                allocator=await stack.enter_async_context(open_channel(allocator_address)),
                clock=clock,
            )
        )
        for reporter, value in (("", 5.0), (ready.id, 7.0)):
            sources.reported.report(("e", reporter), {"m": Value(value, clock.now())}, clock.now())

        def shown() -> list[float | None]:
            """The value of each source; None: it says nothing that counts."""
            found = sources.sample(one, [ready]).values()
            tell = (bool(each.values) and not (each.problem or each.silent_count) for each in found)
            return [
                sum(each.values) / len(each.values) if told else None
                for each, told in zip(found, tell, strict=True)
            ]

        await eventually(lambda: shown() == [*VALUES.values()])
        queue = QueueReading(QueueState.UNREACHABLE, observed_at=clock.now())
        sources.forget("e")
        fleet.fall_silent()
        fleet.break_streams()
        prometheus.status = "500 Oops"
        allocator.failure = UnavailableError("the allocator is away")
        await eventually(lambda: shown() == [None] * len(VALUES))


async def test_requests_are_counted_by_tenant_over_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator({})
    async with serving(allocator) as address, open_channel(address) as channel:
        requests = partial(waiting_requests, allocator_api.QuotaServiceStub(channel), None)
        assert await requests() == {}
        allocator.waiting = {"a": 2, "b": 0, "c": 3}
        counts = await requests()
        assert counts == {"a": 2, "c": 3}
        answer = PollAnswer(counts, 5.0, "")
        for source, count in ((WaitingSignal(), 5.0), (WaitingSignal("c"), 3.0), (WaitingSignal("x"), 0.0)):
            sample = waiting_sample(source, answer)
            assert (sample.values, sample.at, sample.proven_empty) == ((count,), 5.0, count == 0)
        monkeypatch.setattr(waiting, "MAX_PAGES", 2)
        with pytest.raises(NoAnswerError, match="more than 2000 tenants"):
            await requests()
        allocator.failure = UnavailableError("it starts")
        with pytest.raises(NoAnswerError, match="the allocator does not answer: it starts"):
            await requests()


def test_a_failure_is_a_problem_with_the_time_of_the_last_answer() -> None:
    sample = waiting_sample(WaitingSignal(), PollAnswer(None, 5.0, "it is away"))
    assert (sample.values, sample.at, sample.problem) == ((), 5.0, "it is away")
