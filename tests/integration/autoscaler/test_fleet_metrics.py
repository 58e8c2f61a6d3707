"""Readings of GPUs and hosts as signals: which count, which are silent, and what holds while the fleet is away."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.autoscaler.domain.signals import Sample
from gpuscale.autoscaler.domain.spec import GpuSignal, HostSignal
from gpuscale.autoscaler.signals.fleet import FleetMetrics
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import to_duration
from tests.support import fake_allocator
from tests.support.autoscaler_app import endpoint, running
from tests.support.clock import ManualClock
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_fleet import FakeFleet, GpuState, NodeState, gpu_message, node_message, serving
from tests.support.waiting import eventually

OLDEST = 15.0
UTILIZATION = GpuSignal("utilization_percent")


def host_node(node: str, **reading: Any) -> monitor_api.Node:
    message = node_message(node)
    message.snapshot.host_reading.CopyFrom(types_api.HostReading(**reading))
    return message


@asynccontextmanager
async def following(fleet: FakeFleet, clock: ManualClock | None = None) -> AsyncGenerator[FleetMetrics]:
    """What follows a fleet, once it has taken in the first round."""
    async with serving(fleet) as address, open_channel(address) as channel:
        metrics = FleetMetrics(channel, clock or ManualClock())
        task = asyncio.create_task(metrics.run())
        try:
            first = metrics.hosts(HostSignal("cpu_percent"), OLDEST)
            assert first.problem == "the fleet has not answered yet"
            await eventually(
                lambda: (
                    "fleet" not in metrics.hosts(HostSignal("cpu_percent", frozenset({"-"})), OLDEST).problem
                )
            )
            yield metrics
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_nobody_follows_the_fleet_before_a_signal_wants_it() -> None:
    fleet = FakeFleet(node_message("n", count=1))
    async with serving(fleet) as address, open_channel(address) as channel:
        metrics = FleetMetrics(channel, ManualClock())
        task = asyncio.create_task(metrics.run())
        for _ in range(5):
            await asyncio.sleep(0)
        assert fleet.watchers == 0
        metrics.gpus(UTILIZATION, (), OLDEST)
        await eventually(lambda: fleet.watchers == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_gpus_of_all_nodes_of_some_and_of_the_endpoints_own_replicas() -> None:
    """Simulated GPUs count like real ones: all of these are."""
    fleet = FakeFleet(
        node_message("a", gpu_message("GPU-1", utilization=10.0), gpu_message("GPU-2", utilization=20.0)),
        node_message("b", gpu_message("GPU-3", utilization=30.0)),
    )
    async with following(fleet) as metrics:
        assert metrics.gpus(UTILIZATION, (), OLDEST).values == (10.0, 20.0, 30.0)
        some = GpuSignal("utilization_percent", frozenset({"b"}))
        assert metrics.gpus(some, (), OLDEST).values == (30.0,)
        own = GpuSignal("utilization_percent", own_replicas=True)
        assert metrics.gpus(own, ["gpu-3", "GPU-1"], OLDEST).values == (30.0, 10.0)
        assert metrics.gpus(own, [], OLDEST) == Sample(problem="no ready replica holds a GPU")
        lost = metrics.gpus(own, ["GPU-1", "GPU-9"], OLDEST)
        assert (lost.values, lost.silent_count) == ((10.0,), 1)


async def test_derived_readings_of_gpus_and_hosts() -> None:
    gpu = gpu_message("GPU-1", total=1000)
    gpu.reading.memory_used_bytes = gpu.reading.memory_total_bytes // 4
    host = host_node("a", load_1m=6.0, cpu_count=4, memory_total_bytes=1000, memory_available_bytes=250)
    host.snapshot.gpus.append(gpu)
    unable = host_node("b", memory_total_bytes=1000)
    unable.snapshot.host_reading.absent_readings.add(
        field="memory_available_bytes", status=types_api.ReadingStatus.READING_STATUS_NOT_SUPPORTED
    )
    async with following(FakeFleet(host, unable)) as metrics:
        assert metrics.gpus(GpuSignal("memory_used_percent"), (), OLDEST).values == (25.0,)
        assert metrics.hosts(HostSignal("load_per_core"), OLDEST).values == (1.5,)
        memory = metrics.hosts(HostSignal("memory_used_percent"), OLDEST)
        assert (memory.values, memory.silent_count) == ((75.0,), 0), "what cannot tell is left out"
        assert metrics.hosts(HostSignal("cpu_percent"), OLDEST).problem == "none of 2 reports cpu_percent"


async def test_what_does_not_answer_is_silent_and_what_cannot_tell_is_left_out() -> None:
    unable = gpu_message("GPU-5", utilization=None)
    unable.reading.absent_readings.add(
        field="utilization_percent", status=types_api.ReadingStatus.READING_STATUS_NOT_SUPPORTED
    )
    failed = gpu_message("GPU-6", utilization=None)
    failed.reading.absent_readings.add(
        field="utilization_percent", status=types_api.ReadingStatus.READING_STATUS_TIMEOUT
    )
    blind = node_message("d")
    blind.snapshot.gpu_problem = "driver not loaded"
    fleet = FakeFleet(
        node_message("a", gpu_message("GPU-1", utilization=10.0)),
        node_message("b", gpu_message("GPU-2"), state=NodeState.NODE_STATE_STALE),
        node_message("c", gpu_message("GPU-3"), gpu_message("GPU-4"), state=NodeState.NODE_STATE_OFFLINE),
        node_message(
            "e",
            unable,
            failed,
            gpu_message("GPU-7", state=GpuState.GPU_STATE_HUNG),
            gpu_message("GPU-8", state=GpuState.GPU_STATE_DIVIDED),
        ),
        blind,
    )
    async with following(fleet) as metrics:
        sample = metrics.gpus(UTILIZATION, (), OLDEST)
        assert (sample.values, sample.silent_count) == ((10.0,), 6)
        unknown = metrics.gpus(GpuSignal("utilization_percent", frozenset({"a", "z"})), (), OLDEST)
        assert (unknown.values, unknown.silent_count) == ((10.0,), 1)
        nothing = metrics.gpus(GpuSignal("utilization_percent", frozenset({"b"})), (), OLDEST)
        assert (nothing.values, nothing.problem) == ((), "none of 1 reports utilization_percent")


async def test_readings_count_for_three_periods_and_their_age_is_that_of_the_oldest() -> None:
    clock = ManualClock()
    fleet = FakeFleet(
        node_message("a", gpu_message("GPU-1", utilization=1.0), period=1.0, age=0.5),
        node_message("b", gpu_message("GPU-2", utilization=2.0), period=20.0),
    )
    async with following(fleet, clock) as metrics:
        start = clock.now()
        clock.advance(2.5)
        both = metrics.gpus(UTILIZATION, (), OLDEST)
        assert (both.values, both.silent_count) == ((1.0, 2.0), 0)
        assert both.at == pytest.approx(start - 0.5)
        clock.advance(0.1)
        one = metrics.gpus(UTILIZATION, (), OLDEST)
        assert (one.values, one.silent_count, one.at) == ((2.0,), 1, start)
        clock.advance(15.0)  # beyond max_age: shown with its age, and silent
        old = metrics.gpus(UTILIZATION, (), OLDEST)
        assert (old.values, old.silent_count, old.at) == ((2.0,), 2, start)


async def test_a_fleet_that_goes_and_comes_back() -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("a", gpu_message("GPU-1", utilization=1.0), period=1.0))
    async with following(fleet, clock) as metrics:
        fleet.forget("a")
        fleet.put(node_message("b", gpu_message("GPU-2", utilization=2.0), period=1.0))
        await eventually(lambda: metrics.gpus(UTILIZATION, (), OLDEST).values == (1.0, 2.0))
        fleet.fall_silent()
        fleet.break_streams()
        await eventually(lambda: fleet.watchers == 0)
        assert metrics.gpus(UTILIZATION, (), OLDEST).values == (1.0, 2.0)
        clock.advance(3.1)
        await eventually(lambda: "cannot be followed" in metrics.gpus(UTILIZATION, (), OLDEST).problem)
        fleet.speak()
        await eventually(lambda: metrics.gpus(UTILIZATION, (), OLDEST).values == (2.0,))


async def test_an_endpoint_scales_on_the_gpus_of_its_own_replicas(tmp_path: Path) -> None:
    """From the replica's reservation, over the fleet's reading of that GPU, to one more replica."""
    allocator = fake_allocator.FakeAllocator({"n": ["GPU-0", "GPU-1", "GPU-2"]})
    gpus = [gpu_message("GPU-0", utilization=90.0), gpu_message("GPU-1", 1), gpu_message("GPU-2", 2)]
    wanted = endpoint(low=1, high=2, gpus=1)
    own = api.GpuSignal(metric="utilization_percent", own_replicas=True)
    wanted.spec.signals.append(api.Signal(id="busy", gpu=own, max_age=to_duration(60)))
    band = api.BandRule(high=80, low=20)
    wanted.spec.rules.append(api.Rule(id="b", signal="busy", band=band, cooldown=to_duration(0)))
    async with (
        fake_allocator.serving(allocator) as address,
        serving(FakeFleet(node_message("n", *gpus))) as fleet,
        running(tmp_path, address, fleet_address=fleet) as autoscaler,
        FakeAdapter().connected(autoscaler.address),
    ):
        await autoscaler.create(wanted)
        # (90 + 0) / 2 lies within the band.
        await eventually(autoscaler.status, lambda found: found.ready_replicas == 2)
        assert sorted(allocator.held) == ["GPU-0", "GPU-1"]
        changes = [one for one in await autoscaler.history() if one.wanted != one.before]
        assert changes[0].observations[0].value == 90.0
