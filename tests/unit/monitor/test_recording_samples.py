"""From snapshots to samples: each reading once, and nothing of what nobody takes."""

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
from gpuscale.monitor.history.ring import Point
from gpuscale.monitor.observing.samples import SampleObserver, gpu_sample
from gpuscale.monitor.recording import RecordingOrder, Recordings, Target
from gpuscale.monitor.wire import Change, Picture
from tests.support.clock import ManualClock
from tests.support.monitor_values import DEFAULT_TIERS, hello, telemetry
from tests.support.monitor_values import snapshot as whole_snapshot

ROOM = 1 << 30


def snapshot(percent: float | None, *, age: float = 0.0, period: float = 1.0) -> Picture:
    reading = types_api.GpuReading(utilization_percent=percent, age=to_duration(age))
    gpu = types_api.Gpu(uuid="GPU-1", reading=reading)
    return Picture(types_api.Snapshot(node="alpha", period=to_duration(period), gpus=[gpu]))


def changed(*places: int) -> Change:
    return Change.of(
        monitor_internal.SnapshotDelta(gpus=[monitor_internal.GpuDelta(place=place) for place in places])
    )


def numbers(columns: dict[str, tuple[float, ...]], *places: int) -> Change:
    """A change of numbers, by name of the field; of all GPUs without places."""
    fields = types_api.GpuReading.DESCRIPTOR.fields_by_name
    table = monitor_internal.GpuNumbers(
        fields=[fields[name].number for name in columns],
        places=places,
        values=[value for column in columns.values() for value in column],
    )
    return Change.of(monitor_internal.SnapshotDelta(numbers=table))


def utilization(history: History) -> list[Point]:
    series = history.get("gpu-1")
    return series.points(0, 0, 0.0, 1e6) if series is not None else []


def test_a_reading_that_snapshots_repeat_counts_once() -> None:
    """A GPU whose driver is slow keeps its last reading, and the age of that grows."""
    history = History(DEFAULT_TIERS, ROOM)
    observer = SampleObserver(history, Recordings())
    for second in range(10):
        observer.observe("alpha", snapshot(30.0, age=float(second)), 100.0 + second, None)
    assert [point.samples for point in utilization(history)] == [1]
    observer.observe("alpha", snapshot(30.0, age=0.1), 110.0, None)
    assert len(utilization(history)) == 2


def test_a_reading_of_0_is_kept_and_an_absent_one_is_not() -> None:
    assert gpu_sample(types_api.GpuReading(power_watts=0.0))[5] == 0.0
    assert all(map(isnan, gpu_sample(types_api.GpuReading())))


def test_what_did_not_change_is_a_new_sample_with_the_old_value() -> None:
    history = History(DEFAULT_TIERS, ROOM)
    observer = SampleObserver(history, Recordings())
    observer.observe("alpha", snapshot(30.0), 100.0, None)
    observer.observe("alpha", snapshot(30.0), 101.0, changed())
    observer.observe("alpha", snapshot(50.0), 102.0, changed(0))
    assert [point.mean for point in utilization(history)] == [30.0, 30.0, 50.0]


def test_tables_of_numbers_lead_to_the_samples_that_the_readings_would() -> None:
    """Of changes the observer looks at the tables alone; what is kept must be what the snapshot then shows."""
    base = types_api.Snapshot(node="alpha", period=to_duration(1.0))
    for index in range(3):
        reading = types_api.GpuReading(memory_total_bytes=80, memory_used_bytes=8, age=to_duration(0.0))
        if index:  # the first has no utilization before a table brings it
            reading.utilization_percent = 10.0 * index
        base.gpus.add(uuid=f"GPU-{index}", reading=reading)
    observer = SampleObserver(History(DEFAULT_TIERS, ROOM), Recordings())
    picture = Picture(base)
    observer.observe("alpha", picture, 100.0, None)
    for second, change in enumerate(
        (
            numbers({"utilization_percent": (1.0, 2.0, 3.0), "memory_used_bytes": (8.0, 16.0, 24.0)}),
            numbers({"memory_used_bytes": (40.0,), "power_watts": (9.0,)}, 2),
            numbers({"memory_total_bytes": (160.0, 160.0, 160.0)}),
            numbers({"sm_clock_mhz": (5.0, 6.0), "energy_joules": (1.0, 2.0)}, 2, 0),
            changed(1),
            numbers({"temperature_celsius": (1.0, 2.0, 3.0), "memory_total_bytes": (40.0, 50.0, 60.0)}),
        )
    ):
        picture.merge(change)
        observer.observe("alpha", picture, 101.0 + second, change)
        gpus = observer._gpus["alpha"]
        seen = [tuple(gpus.values[place::3]) for place in range(3)]
        shown = [gpu_sample(gpu.reading) for gpu in picture.snapshot.gpus]
        assert [repr(row) for row in seen] == [repr(row) for row in shown]


def test_a_table_with_more_values_than_gpus_is_an_error_wherever_it_is_merged() -> None:
    """Validation refuses it; what comes here in spite of that must not be taken for something else."""
    picture, wrong = snapshot(30.0), numbers({"power_watts": (1.0, 2.0)}, 0)
    observer = SampleObserver(History(DEFAULT_TIERS, ROOM), Recordings())
    observer.observe("alpha", picture, 100.0, None)
    with pytest.raises(ValueError, match="longer than argument 1"):
        picture.merge(wrong)
    with pytest.raises(ValueError, match="longer than argument 1"):
        observer._gpus["alpha"].merge(wrong.numbers)


def test_a_host_is_noted_with_what_changed_of_it() -> None:
    history = History(DEFAULT_TIERS, ROOM)
    observer = SampleObserver(history, Recordings())
    picture = snapshot(30.0)
    picture.snapshot.host_reading.CopyFrom(types_api.HostReading(cpu_percent=5.0, age=to_duration(0.0)))
    picture = Picture(picture.snapshot)
    observer.observe("alpha", picture, 100.0, None)
    for second, percent in ((101.0, None), (102.0, 7.0)):
        delta = monitor_internal.SnapshotDelta()
        if percent is not None:
            delta.host.reading.cpu_percent = percent
        change = Change.of(delta)
        picture.merge(change)
        observer.observe("alpha", picture, second, change)
    series = history.get("nodes/alpha")
    assert [point.mean for point in series.points(0, 0, 0.0, 1e6)] == [5.0, 5.0, 7.0]
    assert [point.mean for point in series.points(3, 0, 0.0, 1e6)] == [30.0, 30.0, 30.0]


def test_nothing_read_is_no_sample() -> None:
    history = History(DEFAULT_TIERS, ROOM)
    observer = SampleObserver(history, Recordings())
    observer.observe("alpha", snapshot(None), 100.0, None)
    never = snapshot(10.0)
    never.snapshot.gpus[0].reading.ClearField("age")
    observer.observe("alpha", never, 101.0, None)
    assert utilization(history) == []


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
