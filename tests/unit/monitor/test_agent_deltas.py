"""What an agent sends after a whole snapshot: no more than what moved, and a whole one where changes cannot tell it."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration, to_timestamp
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent.deltas import Deltas
from gpuscale.monitor.model.readings import GpuIdentity, GpuReading, GpuState, GpuView, HostReading, Snapshot
from tests.support.monitor_values import GIB, snapshot_read

MIB = 1024**2
PLAIN = GpuReading(
    utilization_percent=10.0,
    memory_total_bytes=80 * GIB,
    memory_free_bytes=70 * GIB,
    memory_used_bytes=9 * GIB,
    throttle_reason_mask=1,
)
TAKEN_AT = 100.0


def taken(first: GpuReading = PLAIN, second: GpuReading = PLAIN) -> Snapshot:
    """A snapshot of two GPUs."""
    views = tuple(
        GpuView(GpuIdentity(f"GPU-{index}", index, "Test GPU"), GpuState.OK, reading, TAKEN_AT - 0.25)
        for index, reading in enumerate((first, second), 1)
    )
    return snapshot_read(TAKEN_AT, host_reading=HostReading(cpu_percent=5.0), gpus=views)


def reading(**fields: Any) -> Snapshot:
    """A snapshot of two GPUs, where the readings of the second are given."""
    return taken(second=PLAIN._replace(**fields))


def change(before: Snapshot, after: Snapshot) -> monitor_internal.SnapshotDelta:
    """What is sent of `after` to a receiver that has `before`, both at the moment when they were taken."""
    deltas = Deltas(full_every=60.0)
    assert deltas.next(replace(before, seq=5), now=TAKEN_AT) is None
    delta = deltas.next(replace(after, seq=7), now=TAKEN_AT)
    assert delta is not None
    assert (delta.base_seq, delta.seq) == (5, 7)
    return delta


def told(delta: monitor_internal.SnapshotDelta) -> dict[str, list[float]]:
    """The table of numbers of a delta, by name of the field."""
    by_number = types_api.GpuReading.DESCRIPTOR.fields_by_number
    width = len(delta.numbers.values) // max(1, len(delta.numbers.fields))
    return {
        by_number[field].name: list(delta.numbers.values[index * width : (index + 1) * width])
        for index, field in enumerate(delta.numbers.fields)
    }


def test_where_nothing_changed_a_heartbeat_is_sent() -> None:
    later = datetime(2026, 1, 1, 0, 0, 7, tzinfo=UTC)
    delta = change(reading(), replace(reading(), taken_at=TAKEN_AT - 0.5, sample_time=later))
    assert (delta.age, delta.sample_time) == (to_duration(0.5), to_timestamp(later))
    assert not delta.HasField("host")
    assert not delta.HasField("numbers")
    assert not delta.gpus
    assert delta.ByteSize() < 30


@pytest.mark.parametrize(
    ("field", "before", "within", "beyond"),
    [
        ("utilization_percent", 10.0, 10.5, 10.6),
        ("memory_used_bytes", 9 * GIB, 9 * GIB + MIB, 9 * GIB + MIB + 1),
        ("temperature_celsius", 40.0, 39.5, 39.4),
        ("power_watts", 300.0, 301.0, 301.1),
        ("ecc_volatile_corrected_count", 3, 3, 4),
    ],
)
def test_a_gpu_is_named_once_a_reading_moves_beyond_its_dead_band(
    field: str, before: float, within: float, beyond: float
) -> None:
    base = reading(**{field: before})
    assert not change(base, reading(**{field: within})).HasField("numbers")
    delta = change(base, reading(**{field: beyond}))
    assert list(delta.numbers.places) == [1]
    assert told(delta) == {field: [beyond]}


def test_gpus_that_all_changed_need_no_places() -> None:
    after = taken(PLAIN._replace(memory_free_bytes=1), PLAIN._replace(memory_free_bytes=2))
    delta = change(reading(), after)
    assert list(delta.numbers.places) == []
    assert told(delta) == {"memory_free_bytes": [1, 2]}


def test_what_only_one_of_the_changed_gpus_has_is_told_of_that_one() -> None:
    second = PLAIN._replace(memory_free_bytes=2, power_watts=50.0)
    delta = change(reading(), taken(PLAIN._replace(memory_free_bytes=1), second))
    assert told(delta) == {"memory_free_bytes": [1, 2]}
    assert [(one.place, one.reading.power_watts) for one in delta.gpus] == [(1, 50.0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": taken().gpus[::-1]},
        {"gpus": tuple(one._replace(identity=replace(one.identity, model="B")) for one in taken().gpus)},
        {"driver_version": "999.1"},
        {"gpu_problem": "NVML: driver not loaded"},
        {"epoch": "another"},
    ],
    ids=["other gpus", "other model", "other host", "a problem", "other epoch"],
)
def test_what_is_no_reading_is_told_by_a_whole_snapshot(changes: dict[str, Any]) -> None:
    deltas = Deltas(full_every=60.0)
    assert deltas.next(reading(), now=0.0) is None
    altered = replace(reading(), **changes)
    assert deltas.next(altered, now=1.0) is None
    assert deltas.next(altered, now=2.0) is not None


def test_a_whole_snapshot_comes_now_and_then_and_when_asked_for() -> None:
    deltas = Deltas(full_every=3.0)
    sent = [deltas.next(reading(), now=float(second)) is None for second in range(7)]
    assert sent == [True, False, False, True, False, False, True]
    assert deltas.next(reading(), now=7.0) is not None
    deltas.reset()
    assert deltas.next(reading(), now=7.5) is None


def test_snapshots_are_whole_for_a_time_after_a_change_was_refused() -> None:
    """A fleet of an earlier version refuses each change of a number that it does not know."""
    deltas = Deltas(full_every=60.0)
    assert deltas.next(taken(), now=TAKEN_AT) is None
    deltas.refused(TAKEN_AT)
    assert deltas.next(taken(), now=TAKEN_AT + 59.0) is None
    assert deltas.next(taken(), now=TAKEN_AT + 61.0) is not None
