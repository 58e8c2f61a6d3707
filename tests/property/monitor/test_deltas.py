"""Whatever an agent reads in whatever order, its changes lead the fleet to the same picture, within the dead-bands."""

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.monitor.agent.dead_bands import DeadBands
from gpuscale.monitor.agent.deltas import Deltas
from gpuscale.monitor.fleet.delta import refuse_change
from gpuscale.monitor.merging import Change, Picture
from tests.support.monitor_values import GIB, epoch_id

BANDS = DeadBands()
STATUSES = st.sampled_from(
    [types_api.ReadingStatus.READING_STATUS_TIMEOUT, types_api.ReadingStatus.READING_STATUS_LOST]
)


def maybe(values: st.SearchStrategy[float]) -> st.SearchStrategy[float | None]:
    return st.none() | values


@st.composite
def gpu_readings(draw: st.DrawFn) -> types_api.GpuReading:
    """Readings of which any may be absent, and which move by more or less than their dead-bands."""
    reading = types_api.GpuReading(
        utilization_percent=draw(maybe(st.sampled_from([0.0, 0.3, 0.4, 50.0, 50.6, 100.0]))),
        memory_total_bytes=draw(st.none() | st.sampled_from([80 * GIB, 80 * GIB + 1000, 40 * GIB])),
        memory_used_bytes=draw(st.none() | st.sampled_from([0, 1000, 2 * 1024**2, 20 * GIB])),
        memory_free_bytes=draw(st.none() | st.sampled_from([0, 5000, 3 * 1024**2, 19 * GIB])),
        temperature_celsius=draw(maybe(st.sampled_from([-3.0, 0.0, 40.0, 40.4]))),
        sm_clock_mhz=draw(maybe(st.sampled_from([0.0, 10.0, 1980.0]))),
        energy_joules=draw(maybe(st.sampled_from([0.0, 900.0, 5000.0]))),
        throttle_reason_mask=draw(st.none() | st.sampled_from([0, 1, 4])),
        remapped_rows_failed=draw(st.none() | st.booleans()),
        recovery_action=draw(st.none() | st.sampled_from(list(types_api.RecoveryAction.values()))),
        throttle_reasons=draw(st.lists(st.sampled_from(["a", "b"]), max_size=2)),
        age=draw(st.none() | st.sampled_from([0.0, 0.1, 0.3, 1.0, 7.5]).map(to_duration)),
    )
    for pid in draw(st.lists(st.integers(1, 3), max_size=3)):
        reading.processes.add(pid=pid, memory_used_bytes=draw(st.none() | st.integers(0, 2)))
    for name in draw(st.lists(st.sampled_from(["power_watts", "utilization_percent"]), max_size=2)):
        reading.absent_readings.add(field=name, status=draw(STATUSES))
    return reading


@st.composite
def snapshots(draw: st.DrawFn) -> types_api.Snapshot:
    """A snapshot of a node whose list of GPUs hardly ever changes."""
    uuids = draw(st.sampled_from([["GPU-1", "GPU-2", "GPU-3"]] * 6 + [["GPU-2", "GPU-1"], []]))
    states = st.sampled_from([types_api.GpuState.GPU_STATE_OK] * 3 + [types_api.GpuState.GPU_STATE_HUNG])
    return types_api.Snapshot(
        node="alpha",
        epoch=epoch_id(1),
        age=to_duration(draw(st.sampled_from([0.0, 0.01, 2.0]))),
        period=to_duration(1.0),
        host_reading=types_api.HostReading(
            cpu_percent=draw(maybe(st.sampled_from([0.0, 0.4, 90.0]))),
            load_1m=draw(maybe(st.sampled_from([0.0, 0.01]))),
            network_sent_bytes=draw(st.none() | st.sampled_from([0, 5000, 10**9])),
            age=draw(st.none() | st.sampled_from([0.0, 5.0]).map(to_duration)),
        ),
        gpus=[
            types_api.Gpu(
                uuid=uuid, index=index, state=draw(states), quarantine=draw(st.sampled_from(["", "", "xid 79"])),
                reading=draw(gpu_readings()),
            )
            for index, uuid in enumerate(uuids)
        ],
        gpu_problem=draw(st.sampled_from([""] * 7 + ["NVML: driver not loaded"])),
    )  # fmt: skip


def assert_near(told: Message, meant: Message) -> None:
    """Each field is there in both or in neither, and what may differ is within its dead-band."""
    bands = BANDS.by_number(type(meant))
    have = {field.number: value for field, value in told.ListFields()}
    want = {field.number: value for field, value in meant.ListFields()}
    assert have.keys() == want.keys()
    for number, value in want.items():
        if isinstance(value, Duration):
            assert abs(have[number].ToNanoseconds() - value.ToNanoseconds()) <= bands[number] * 1e9
        elif number in bands:
            assert math.isclose(have[number], value, rel_tol=0.0, abs_tol=bands[number])
        else:
            assert have[number] == value


@settings(max_examples=50, deadline=None)
@given(meant=st.lists(snapshots(), min_size=2, max_size=5), every=st.sampled_from([3.0, 100.0]))
def test_changes_lead_to_what_the_agent_meant(meant: list[types_api.Snapshot], every: float) -> None:
    deltas = Deltas(BANDS, full_every=every)
    picture = Picture(types_api.Snapshot())
    readings: dict[str, list[types_api.GpuReading]] = {}
    for seq, snapshot in enumerate(meant):
        snapshot.seq = seq
        snapshot.sample_time.FromSeconds(1_000 + seq)
        delta = deltas.next(snapshot, now=float(seq))
        if delta is None:
            picture = Picture(types_api.Snapshot.FromString(snapshot.SerializeToString()))
        else:
            delta = monitor_api.SnapshotDelta.FromString(delta.SerializeToString())
            assert delta.base_seq == picture.snapshot.seq
            change = Change.of(delta)
            assert refuse_change(change, picture) == ""
            picture.merge(change)
        told = picture.snapshot
        assert (told.seq, told.sample_time, told.age) == (seq, snapshot.sample_time, snapshot.age)
        assert [gpu.uuid for gpu in told.gpus] == [gpu.uuid for gpu in snapshot.gpus]
        assert told.gpu_problem == snapshot.gpu_problem
        assert_near(told.host_reading, snapshot.host_reading)
        for had, gpu in zip(told.gpus, snapshot.gpus, strict=True):
            assert (had.state, had.quarantine) == (gpu.state, gpu.quarantine)
            assert_near(had.reading, gpu.reading)
            known = readings.setdefault(gpu.uuid, [])
            known.append(ageless(gpu.reading))
            assert ageless(had.reading) in known, "a mixture of two readings, or of two GPUs"


def ageless(reading: types_api.GpuReading) -> types_api.GpuReading:
    """A copy of a reading without its age."""
    copy = types_api.GpuReading()
    copy.CopyFrom(reading)
    copy.ClearField("age")
    return copy
