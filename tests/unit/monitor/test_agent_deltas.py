"""What an agent sends after a whole snapshot: no more than what moved, and a whole one where changes cannot tell it."""

from collections.abc import Callable

import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.monitor.agent.dead_bands import DeadBands
from gpuscale.monitor.agent.deltas import Deltas
from gpuscale.monitor.merging import Change, Picture
from tests.support.monitor_values import GIB, gpu, snapshot

MIB = 1024**2
FIELDS = types_api.GpuReading.DESCRIPTOR.fields_by_name


def reading(**fields: float) -> types_api.Snapshot:
    """A snapshot of two GPUs, where the readings of the second are given."""
    second = gpu("GPU-2")
    for name, value in fields.items():
        setattr(second.reading, name, value)
    return snapshot(gpus=(gpu("GPU-1"), second))


def change(before: types_api.Snapshot, after: types_api.Snapshot) -> monitor_api.SnapshotDelta:
    """What is sent of `after` to a receiver that has `before`."""
    before.seq, after.seq = 5, 7
    deltas = Deltas(DeadBands(), full_every=60.0)
    assert deltas.next(before, now=0.0) is None
    delta = deltas.next(after, now=1.0)
    assert delta is not None
    assert (delta.base_seq, delta.seq) == (5, 7)
    return delta


def told(delta: monitor_api.SnapshotDelta) -> dict[str, list[float]]:
    """The table of numbers of a delta, by name of the field."""
    by_number = types_api.GpuReading.DESCRIPTOR.fields_by_number
    width = len(delta.numbers.values) // max(1, len(delta.numbers.fields))
    return {
        by_number[field].name: list(delta.numbers.values[index * width : (index + 1) * width])
        for index, field in enumerate(delta.numbers.fields)
    }


def test_where_nothing_changed_a_heartbeat_is_sent() -> None:
    after = reading()
    after.age.CopyFrom(to_duration(0.5))
    after.sample_time.FromSeconds(77)
    delta = change(reading(), after)
    assert (delta.age, delta.sample_time) == (after.age, after.sample_time)
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


def test_a_slow_drift_is_told_once_it_adds_up() -> None:
    deltas = Deltas(DeadBands(), full_every=60.0)
    seen: list[float] = []
    for step in range(8):
        one = reading(utilization_percent=10.0 + 0.2 * step)
        one.seq = step
        delta = deltas.next(one, now=float(step))
        seen += told(delta).get("utilization_percent", []) if delta else []
    assert seen == pytest.approx([10.6, 11.2])


def test_a_gpu_that_is_named_is_given_exactly() -> None:
    """So that its readings are of one moment: no memory that is free and in use at once."""
    delta = change(reading(power_watts=300.0), reading(power_watts=310.0, memory_used_bytes=9 * GIB + 5))
    assert told(delta) == {"power_watts": [310.0], "memory_used_bytes": [9 * GIB + 5]}


def test_gpus_that_all_changed_need_no_places() -> None:
    after = snapshot(gpus=(gpu("GPU-1", free=1), gpu("GPU-2", free=2)))
    delta = change(reading(), after)
    assert list(delta.numbers.places) == []
    assert told(delta) == {"memory_free_bytes": [1, 2]}


def test_what_only_one_of_the_changed_gpus_has_is_told_of_that_one() -> None:
    after = snapshot(gpus=(gpu("GPU-1", free=1), gpu("GPU-2", free=2)))
    after.gpus[1].reading.power_watts = 50.0
    delta = change(reading(), after)
    assert told(delta) == {"memory_free_bytes": [1, 2]}
    assert [(one.place, one.reading.power_watts) for one in delta.gpus] == [(1, 50.0)]


def test_a_reading_that_is_absent_now_is_cleared_and_not_zero() -> None:
    after = reading()
    after.gpus[1].reading.ClearField("utilization_percent")
    after.gpus[1].reading.absent_readings.add(field="utilization_percent")
    delta = change(reading(), after)
    [one] = delta.gpus
    assert FIELDS["utilization_percent"].number in one.cleared_fields
    assert [absent.field for absent in one.reading.absent_readings] == ["utilization_percent"]


def test_an_integer_that_a_double_would_round_arrives_exactly() -> None:
    large = 2**53 + 1
    base = reading(energy_joules=0.0, pcie_sent_bytes=0)
    delta = change(base, reading(energy_joules=0.0, pcie_sent_bytes=large))
    picture = Picture(base)
    picture.merge(Change.of(delta))
    assert picture.snapshot.gpus[1].reading.pcie_sent_bytes == large


def other_gpus(one: types_api.Snapshot) -> None:
    one.gpus.reverse()


def other_model(one: types_api.Snapshot) -> None:
    one.gpus[0].model = "Another GPU"


def other_host(one: types_api.Snapshot) -> None:
    one.host.driver_version = "999.1"


def a_problem(one: types_api.Snapshot) -> None:
    one.gpu_problem = "NVML: driver not loaded"


def other_epoch(one: types_api.Snapshot) -> None:
    one.epoch = "another"


@pytest.mark.parametrize("alter", [other_gpus, other_model, other_host, a_problem, other_epoch])
def test_what_is_no_reading_is_told_by_a_whole_snapshot(alter: Callable[[types_api.Snapshot], None]) -> None:
    deltas = Deltas(DeadBands(), full_every=60.0)
    assert deltas.next(reading(), now=0.0) is None
    altered = reading()
    alter(altered)
    assert deltas.next(altered, now=1.0) is None
    assert deltas.next(altered, now=2.0) is not None


def test_a_whole_snapshot_comes_now_and_then_and_when_asked_for() -> None:
    deltas = Deltas(DeadBands(), full_every=3.0)
    sent = [deltas.next(reading(), now=float(second)) is None for second in range(7)]
    assert sent == [True, False, False, True, False, False, True]
    assert deltas.next(reading(), now=7.0) is not None
    deltas.reset()
    assert deltas.next(reading(), now=7.5) is None


def test_a_gpu_that_is_not_read_any_more_ages() -> None:
    after = reading()
    after.gpus[1].reading.age.CopyFrom(to_duration(1.25))
    delta = change(reading(), after)
    assert [(one.place, one.reading.age) for one in delta.gpus] == [(1, to_duration(1.25))]
