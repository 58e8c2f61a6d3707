"""Whatever an agent reads in whatever order, its changes lead the fleet to the same picture, within the dead-bands."""

import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscale.api.types import v1 as types_api
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent.deltas import AGE_BAND, Deltas, bands_of
from gpuscale.monitor.fleet.validation import refuse_change
from gpuscale.monitor.model.readings import (
    Absent,
    GpuIdentity,
    GpuProcess,
    GpuReading,
    GpuState,
    GpuView,
    HostReading,
    Quarantine,
    ReadingStatus,
    RecoveryAction,
    Snapshot,
)
from gpuscale.monitor.wire import Change, Picture, to_snapshot
from tests.support.monitor_values import GIB, snapshot_read

STATUSES = st.sampled_from([ReadingStatus.TIMEOUT, ReadingStatus.LOST])


def maybe(values: Iterable[float]) -> st.SearchStrategy[float | None]:
    return st.none() | st.sampled_from(list(values))


@st.composite
def gpu_readings(draw: st.DrawFn) -> GpuReading:
    """Readings of which any may be absent, and which move by more or less than their dead-bands."""
    absent = draw(st.lists(st.sampled_from(["power_watts", "utilization_percent"]), max_size=2))
    pids = draw(st.none() | st.lists(st.integers(1, 3), max_size=3))
    used = st.none() | st.integers(0, 2)
    return GpuReading(
        utilization_percent=draw(maybe([0.0, 0.3, 0.4, 50.0, 50.6, 100.0])),
        memory_total_bytes=draw(st.none() | st.sampled_from([80 * GIB, 80 * GIB + 1000, 40 * GIB])),
        memory_used_bytes=draw(st.none() | st.sampled_from([0, 1000, 2 * 1024**2, 20 * GIB])),
        memory_free_bytes=draw(st.none() | st.sampled_from([0, 5000, 3 * 1024**2, 19 * GIB])),
        temperature_celsius=draw(maybe([-3.0, 0.0, 40.0, 40.4])),
        sm_clock_mhz=draw(maybe([0.0, 10.0, 1980.0])),
        energy_joules=draw(maybe([0.0, 900.0, 5000.0])),
        pcie_sent_bytes=draw(st.none() | st.sampled_from([0, 2**53 + 1])),
        throttle_reason_mask=draw(st.none() | st.sampled_from([0, 1, 4])),
        remapped_rows_failed=draw(st.none() | st.booleans()),
        recovery_action=draw(st.none() | st.sampled_from(list(RecoveryAction))),
        processes=None if pids is None else tuple(GpuProcess(pid, draw(used)) for pid in pids),
        absent=tuple(Absent(name, draw(STATUSES)) for name in absent),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """A snapshot, taken at second 0, of a node whose list of GPUs hardly ever changes."""
    uuids = draw(st.sampled_from([["GPU-1", "GPU-2", "GPU-3"]] * 6 + [["GPU-2", "GPU-1"], []]))
    states = st.sampled_from([GpuState.OK] * 3 + [GpuState.HUNG])
    return snapshot_read(
        -draw(st.sampled_from([0.0, 0.01, 2.0])),
        seq=0,
        host_reading=HostReading(
            cpu_percent=draw(maybe([0.0, 0.4, 90.0])),
            load_1m=draw(maybe([0.0, 0.01])),
            network_sent_bytes=draw(st.none() | st.sampled_from([0, 5000, 10**9])),
        ),
        host_read_at=draw(maybe([0.0, -5.0])),
        gpus=tuple(
            GpuView(
                GpuIdentity(uuid, index, "Test GPU"),
                draw(states),
                draw(gpu_readings()),
                draw(maybe([0.0, -0.1, -0.3, -1.0, -7.5])),
                draw(st.sampled_from([None, None, Quarantine("xid 79", datetime(2026, 1, 1, tzinfo=UTC))])),
            )
            for index, uuid in enumerate(uuids)
        ),
        gpu_problem=draw(st.sampled_from([""] * 7 + ["NVML: driver not loaded"])),
    )


def at(snapshot: Snapshot, seq: int) -> Snapshot:
    """The snapshot as if it was number `seq`, taken at that second."""
    views = (
        view._replace(read_at=None if view.read_at is None else view.read_at + seq) for view in snapshot.gpus
    )
    host_read_at = None if snapshot.host_read_at is None else snapshot.host_read_at + seq
    taken_at = snapshot.taken_at + seq
    return replace(snapshot, seq=seq, taken_at=taken_at, host_read_at=host_read_at, gpus=tuple(views))


def assert_near(told: Message, meant: Message) -> None:
    """Each field is there in both or in neither, and what may differ is within its dead-band."""
    have = {field.name: value for field, value in told.ListFields()}
    want = {field.name: value for field, value in meant.ListFields()}
    assert have.keys() == want.keys()
    for (name, value), band in zip(want.items(), bands_of(want), strict=True):
        if isinstance(value, Duration):
            assert abs(have[name].ToNanoseconds() - value.ToNanoseconds()) <= AGE_BAND * 1e9
        elif band:
            assert math.isclose(have[name], value, rel_tol=0.0, abs_tol=band)
        else:
            assert have[name] == value


@settings(max_examples=25, deadline=None)
@given(values=st.lists(snapshots(), min_size=2, max_size=5), every=st.sampled_from([3.0, 100.0]))
def test_changes_lead_to_what_the_agent_meant(values: list[Snapshot], every: float) -> None:
    deltas = Deltas(full_every=every)
    picture = Picture(types_api.Snapshot())
    readings: dict[str, list[types_api.GpuReading]] = {}
    for seq, value in enumerate(values):
        snapshot, now = at(value, seq), float(seq)
        meant = to_snapshot(snapshot, now)
        delta = deltas.next(snapshot, now)
        if delta is None:
            picture = Picture(types_api.Snapshot.FromString(meant.SerializeToString()))
        else:
            delta = monitor_internal.SnapshotDelta.FromString(delta.SerializeToString())
            assert delta.base_seq == picture.snapshot.seq
            change = Change.of(delta)
            assert refuse_change(change, picture) == ""
            picture.merge(change)
        told = picture.snapshot
        assert (told.seq, told.sample_time, told.age) == (seq, meant.sample_time, meant.age)
        assert [gpu.uuid for gpu in told.gpus] == [gpu.uuid for gpu in meant.gpus]
        assert told.gpu_problem == meant.gpu_problem
        assert_near(told.host_reading, meant.host_reading)
        for had, gpu in zip(told.gpus, meant.gpus, strict=True):
            for name in ("state", "quarantine", "quarantine_time"):
                assert getattr(had, name) == getattr(gpu, name)
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
