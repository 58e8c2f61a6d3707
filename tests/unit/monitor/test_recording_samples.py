"""From snapshots to samples: nothing of what nobody takes. What is kept of each is in test_samples_oracle.py."""

import asyncio
from contextlib import suppress
from math import isnan

import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.app.fleet import Observing
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.history.history import History
from gpuscale.monitor.observing.samples import SampleObserver, gpu_sample
from gpuscale.monitor.recording import RecordingOrder, Recordings, Target
from gpuscale.monitor.wire import Change, Picture
from tests.support.clock import ManualClock
from tests.support.monitor_values import DEFAULT_TIERS, hello, telemetry
from tests.support.monitor_values import snapshot as whole_snapshot

ROOM = 1 << 30


def snapshot(percent: float) -> Picture:
    reading = types_api.GpuReading(utilization_percent=percent, age=to_duration(0.0))
    gpu = types_api.Gpu(uuid="GPU-1", reading=reading)
    return Picture(types_api.Snapshot(node="alpha", period=to_duration(1.0), gpus=[gpu]))


def test_a_reading_of_0_is_kept_and_an_absent_one_is_not() -> None:
    assert gpu_sample(types_api.GpuReading(power_watts=0.0))[5] == 0.0
    assert all(map(isnan, gpu_sample(types_api.GpuReading())))


def test_a_table_with_more_values_than_gpus_is_an_error_wherever_it_is_merged() -> None:
    """Validation refuses it; what comes here in spite of that must not be taken for something else."""
    power = types_api.GpuReading.DESCRIPTOR.fields_by_name["power_watts"].number
    table = monitor_internal.GpuNumbers(fields=[power], places=[0], values=[1.0, 2.0])
    picture, wrong = snapshot(30.0), Change.of(monitor_internal.SnapshotDelta(numbers=table))
    observer = SampleObserver(History(DEFAULT_TIERS, ROOM), Recordings())
    observer.observe("alpha", picture, 100.0, None)
    with pytest.raises(ValueError, match="longer than argument 1"):
        picture.merge(wrong)
    with pytest.raises(ValueError, match="longer than argument 1"):
        observer._gpus["alpha"].merge(wrong.numbers)


def test_without_memory_for_history_only_what_is_recorded_is_looked_at() -> None:
    history, recordings = History(DEFAULT_TIERS, 0), Recordings()
    observer = SampleObserver(history, recordings)
    observer.observe("alpha", snapshot(30.0), 100.0, None)
    assert observer._gpus == {}
    target = Target("nodes/alpha/gpus/gpu-1", "GPU-1", 0, "", 1.0)
    recording = recordings.start(RecordingOrder("r", "q", "f", 1.0, 60.0, [target]), 100.5)
    observer.observe("alpha", snapshot(30.0), 101.0, None)
    observer.observe("beta", snapshot(30.0), 101.0, None)
    assert (recording.sample_count, set(observer._gpus)) == (1, {"alpha"})
    recordings.stop("r", 102.0)
    observer.observe("alpha", snapshot(30.0), 103.0, None)
    assert (recording.sample_count, observer._gpus, len(history)) == (1, {}, 0)


@pytest.mark.looptime
async def test_nothing_is_kept_of_a_node_that_is_forgotten() -> None:
    """Hosts come and go under new names for as long as the fleet runs."""
    clock = ManualClock()
    nodes = Nodes(clock, 10)
    observing = Observing(nodes, clock, DEFAULT_TIERS, ROOM)
    with nodes.connected(hello("alpha"), lambda: None) as stream:
        assert nodes.take(stream, telemetry(whole_snapshot("alpha")))
    for number in range(5):
        with nodes.connected(hello(f"beta-{number}"), lambda: None) as stream:
            assert nodes.take(stream, telemetry(whole_snapshot(f"beta-{number}")))
        nodes.forget(f"beta-{number}")
    with suppress(TimeoutError):
        await asyncio.wait_for(observing.run(), timeout=3.0)
    observer = observing._samples
    assert observer._kept == observer._gpus.keys() == observer._hosts.keys() == {"alpha"}
