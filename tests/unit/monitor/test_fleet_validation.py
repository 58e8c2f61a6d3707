"""Which snapshots and changes of them the fleet believes, and what it makes of those."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.validation import refuse_change, refuse_snapshot
from gpuscale.monitor.model.nodes import NodeState
from gpuscale.monitor.wire import Change, Picture
from tests.support.clock import ManualClock
from tests.support.monitor_values import GIB, epoch_id, gpu, hello, snapshot

Delta = monitor_internal.SnapshotDelta
FIELDS = {name: field.number for name, field in types_api.GpuReading.DESCRIPTOR.fields_by_name.items()}
HOST_FIELDS = {name: field.number for name, field in types_api.HostReading.DESCRIPTOR.fields_by_name.items()}


def delta(seq: int = 2, base_seq: int = 1, **numbers: tuple[float, ...]) -> Delta:
    """A delta with a table of numbers, by name of the field; of all GPUs."""
    values = [one for column in numbers.values() for one in column]
    table = monitor_internal.GpuNumbers(fields=[FIELDS[name] for name in numbers], values=values)
    return Delta(seq=seq, base_seq=base_seq, age=to_duration(0.25), numbers=table if numbers else None)


def request(message: Delta) -> monitor_internal.StreamTelemetryRequest:
    return monitor_internal.StreamTelemetryRequest(delta=message)


def base() -> types_api.Snapshot:
    return snapshot(gpus=(gpu("GPU-1"), gpu("GPU-2")))


def refusal(message: Delta) -> str:
    """Why a delta is refused; it changes nothing whether it is or not."""
    picture = Picture(base())
    found = refuse_change(Change.of(message), picture)
    assert picture.snapshot == base()
    return found


def one_gpu(**change: object) -> Delta:
    message = delta()
    message.gpus.append(monitor_internal.GpuDelta(**{"place": 1} | change))  # type: ignore[arg-type]
    return message


def with_places(*places: int) -> Delta:
    message = delta(power_watts=(1.0,) * len(places))
    message.numbers.places.extend(places)
    return message


def with_host(**change: object) -> Delta:
    message = delta()
    message.host.CopyFrom(monitor_internal.HostDelta(**change))  # type: ignore[arg-type]
    return message


def aged(message: Delta, seconds: float) -> Delta:
    message.age.CopyFrom(to_duration(seconds))
    return message


def dated(nanos: int, seconds: int = 0) -> Delta:
    message = delta()
    message.sample_time.seconds, message.sample_time.nanos = seconds, nanos
    return message


@pytest.mark.parametrize(
    "message",
    [
        delta(),
        delta(utilization_percent=(0.0, 100.0), power_watts=(1.5, 2.5)),
        delta(memory_free_bytes=(1, 2), memory_used_bytes=(3, 4)),
        delta(memory_free_bytes=(70 * GIB, 70 * GIB), memory_used_bytes=(13 * GIB, 13 * GIB)),
        delta(remapped_rows_failed=(0, 1), recovery_action=(1, 2)),
        with_places(1),
        one_gpu(state=types_api.GpuState.GPU_STATE_HUNG, cleared_fields=[FIELDS["utilization_percent"]]),
        one_gpu(cleared_fields=[FIELDS["memory_total_bytes"]]),
        one_gpu(reading=types_api.GpuReading(power_watts=5.0)),
        one_gpu(quarantine="xid 79"),
        with_host(reading=types_api.HostReading(cpu_percent=50)),
    ],
)
def test_changes_that_can_be_are_taken(message: Delta) -> None:
    assert refusal(message) == ""


@pytest.mark.parametrize(
    ("message", "at_fault"),
    [
        (delta(utilization_percent=(math.nan, 1.0)), "utilization_percent"),
        (delta(utilization_percent=(1.0, math.inf)), "utilization_percent"),
        (delta(utilization_percent=(-1.0, 1.0)), "utilization_percent"),
        (delta(utilization_percent=(1.0, 101.0)), "utilization_percent"),
        (delta(power_watts=(1.0, -0.5)), "power_watts"),
        (delta(memory_total_bytes=(0, GIB)), "memory_total_bytes"),
        (delta(performance_state=(1, 2**40)), "performance_state"),
        (delta(pcie_sent_bytes=(1, 2**60)), "pcie_sent_bytes"),
        (delta(recovery_action=(1, 99)), "recovery_action"),
        (delta(memory_free_bytes=(1, 81 * GIB)), "gpus[1].reading.memory_free_bytes"),
        (delta(memory_used_bytes=(20 * GIB, 1)), "gpus[0].reading.memory_used_bytes"),
        (delta(memory_total_bytes=(60 * GIB, 80 * GIB)), "gpus[0].reading.memory_free_bytes"),
        (one_gpu(reading=types_api.GpuReading(memory_free_bytes=81 * GIB)), "gpus[1].reading.memory_free_bytes"),
        (delta(power_watts=(1.0,)), "one for each field"),
        (delta(power_watts=(1.0, 2.0, 3.0)), "one for each field"),
        (delta(power_watts=()), "one for each field"),
        (delta(power_watts=(1.0,) * 10_000), "one for each field"),
        (delta(processes=(1.0, 2.0)), "not numeric"),
        (with_places(0, 2), "out of range"),
        (with_places(-1), "out of range"),
        (one_gpu(place=2), "out of range"),
        (one_gpu(place=-1), "out of range"),
        (one_gpu(quarantine="a\nb"), "quarantine"),
        (one_gpu(cleared_fields=[FIELDS["age"]] * 1000), "more than"),
        (one_gpu(reading=types_api.GpuReading(power_watts=math.nan)), "power_watts"),
        (one_gpu(reading=types_api.GpuReading(throttle_reasons=["idle"])), "throttle_reasons is not cleared first"),
        (
            one_gpu(
                reading=types_api.GpuReading(throttle_reasons=["a\x00"]), cleared_fields=[FIELDS["throttle_reasons"]]
            ),
            "throttle_reasons[0]",
        ),
        (Delta(gpus=[monitor_internal.GpuDelta()] * 10_000), "more than the node"),
        (with_host(reading=types_api.HostReading(cpu_percent=math.nan)), "host.reading.cpu_percent"),
        (with_host(reading=types_api.HostReading(memory_total_bytes=-1)), "host.reading.memory_total_bytes"),
        (with_host(cleared_fields=[999] * 1000), "host.cleared_fields"),
        (aged(delta(), -1.0), "age"),
        (dated(-1), "sample_time"),
        (dated(0, 10**12), "sample_time"),
    ],
)  # fmt: skip
def test_changes_that_cannot_be_are_refused(message: Delta, at_fault: str) -> None:
    assert at_fault in refusal(message)


class Index:
    """An index with one stream whose first snapshot was taken in."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.nodes = Nodes(self.clock, max_nodes=10)
        self.seen: list[tuple[int, object]] = []
        self.nodes.observers = (self._saw,)
        self._connection = self.nodes.connected(hello(), lambda: None)
        self.stream = self._connection.__enter__()
        assert self.whole(1)

    def _saw(self, node: str, picture: Picture, now: float, change: Change | None) -> None:
        self.seen.append((picture.snapshot.seq, None if change is None else change.changed_places()))

    def whole(self, seq: int) -> bool:
        message = base()
        message.seq = seq
        return self.nodes.take(self.stream, monitor_internal.StreamTelemetryRequest(snapshot=message))

    def take(self, message: Delta) -> bool:
        return self.nodes.take(self.stream, request(message))

    @property
    def shown(self) -> types_api.Snapshot:
        found = self.nodes.get("alpha").snapshot
        assert found is not None
        return found


@pytest.fixture
def index() -> Index:
    return Index()


def test_changes_are_merged_and_observers_are_told_which_gpus(index: Index) -> None:
    assert index.take(delta(power_watts=(5.0, 6.0)))
    assert index.take(one_gpu_after(2, 3))
    assert index.take(delta(seq=9, base_seq=3))
    assert [one.reading.power_watts for one in index.shown.gpus] == [5.0, 6.0]
    assert index.shown.gpus[0].state == types_api.GpuState.GPU_STATE_OK
    assert index.shown.gpus[1].state == types_api.GpuState.GPU_STATE_HUNG
    assert index.shown.gpus[1].name == "nodes/alpha/gpus/gpu-2"
    assert index.seen == [(1, None), (2, None), (3, {1}), (9, set())]
    assert index.stream.acked_seq == 9


def test_numbers_that_wait_are_there_for_whoever_looks(index: Index) -> None:
    """The newest table of the same numbers stands for those before it; other ones, and other GPUs', are kept."""
    index.nodes.observers = ()
    assert index.take(delta(power_watts=(5.0, 6.0), utilization_percent=(1, 2)))
    assert index.take(delta(seq=3, base_seq=2, power_watts=(7.0, 8.0), utilization_percent=(3, 4)))
    assert index.take(delta(seq=4, base_seq=3, power_watts=(9.0, 10.0)))
    assert index.take(delta(seq=5, base_seq=4))
    lone = delta(seq=6, base_seq=5, power_watts=(11.0,))
    lone.numbers.places[:] = [1]
    assert index.take(lone)
    readings = [gpu.reading for gpu in index.shown.gpus]
    assert [(one.power_watts, one.utilization_percent) for one in readings] == [(9.0, 3), (11.0, 4)]


def test_what_waits_is_kept_when_a_gpu_changes(index: Index) -> None:
    """Numbers and the host's readings wait beside the snapshot; a change of a single GPU goes into it, before its numbers."""
    host = with_host(reading=types_api.HostReading(cpu_percent=12.0, load_1m=3.0))
    host.numbers.CopyFrom(delta(power_watts=(5.0, 6.0), sm_clock_mhz=(1.0, 2.0)).numbers)
    assert index.take(host)
    change = one_gpu(reading=types_api.GpuReading(power_watts=9.0), cleared_fields=[FIELDS["sm_clock_mhz"]])
    change.base_seq, change.seq = 2, 3
    change.numbers.CopyFrom(delta(temperature_celsius=(40.0, 41.0)).numbers)
    assert index.take(change)
    cooler = with_host(
        reading=types_api.HostReading(cpu_percent=13.0), cleared_fields=[HOST_FIELDS["load_1m"]]
    )
    cooler.base_seq, cooler.seq = 3, 4
    assert index.take(cooler)
    first, second = (gpu.reading for gpu in index.shown.gpus)
    assert (first.power_watts, first.sm_clock_mhz, first.temperature_celsius) == (5.0, 1.0, 40.0)
    assert (second.power_watts, second.temperature_celsius) == (9.0, 41.0)
    assert not second.HasField("sm_clock_mhz")
    assert index.shown.host_reading.cpu_percent == 13.0
    assert not index.shown.host_reading.HasField("load_1m")
    assert index.shown.seq == 4


def test_between_two_looks_no_message_is_kept(index: Index) -> None:
    """Thousands of nodes would each keep one, which takes four times the memory of its encoding."""
    assert index.take(delta(power_watts=(1.0, 2.0)))
    assert index.whole(3)
    picture = index.nodes.get("alpha").picture
    assert picture._open is None
    assert index.shown is not index.shown


def test_a_table_with_more_fields_than_there_are_is_not_taken_apart() -> None:
    table = monitor_internal.GpuNumbers(fields=[1] * 1000, values=[1.0] * 2000)
    assert "one for each field" in refusal(Delta(numbers=table))
    assert Change.of(Delta(numbers=table)).numbers.columns == ()


def test_a_total_that_changes_is_the_one_that_counts(index: Index) -> None:
    total = index.shown.gpus[0].reading.memory_total_bytes
    assert index.take(delta(memory_used_bytes=(total, total), memory_free_bytes=(0, 0)))
    shrunk = delta(seq=3, base_seq=2, memory_total_bytes=(total // 2, total // 2))
    assert not index.take(shrunk), "what is in use is above the new total"
    assert index.whole(4)
    less = total // 4
    both = {"memory_used_bytes": (less, less), "memory_free_bytes": (less, less)}
    assert index.take(delta(seq=5, base_seq=4, **both))
    assert index.take(delta(seq=6, base_seq=5, memory_total_bytes=(2 * less, 2 * less)))
    assert not index.take(delta(seq=7, base_seq=6, memory_free_bytes=(2 * less, 2 * less)))


def test_a_total_that_was_changed_of_one_gpu_is_the_one_that_counts(index: Index) -> None:
    """Totals are remembered between tables of numbers; a change of one GPU comes beside the tables."""
    total = index.shown.gpus[1].reading.memory_total_bytes
    assert index.take(delta(memory_used_bytes=(0, 0), memory_free_bytes=(total, total)))
    shrunk = one_gpu(
        reading=types_api.GpuReading(memory_total_bytes=total // 2, memory_free_bytes=0, memory_used_bytes=0)
    )
    shrunk.base_seq, shrunk.seq = 2, 3
    assert index.take(shrunk)
    assert not index.take(delta(seq=4, base_seq=3, memory_free_bytes=(total, total)))


def test_a_total_that_waits_in_a_table_is_the_one_that_counts() -> None:
    """The newest table waits beside the snapshot until somebody looks, and nobody has here."""
    picture = Picture(base())
    total = picture.snapshot.gpus[0].reading.memory_total_bytes
    nothing = {"memory_used_bytes": (0, 0), "memory_free_bytes": (0, 0)}
    shrunk = Change.of(delta(memory_total_bytes=(total // 2, total // 2), **nothing))
    assert refuse_change(shrunk, picture) == ""
    picture.merge(shrunk)
    full = delta(seq=3, base_seq=2, memory_used_bytes=(0, 0), memory_free_bytes=(total, total))
    assert "memory_free_bytes is above" in refuse_change(Change.of(full), picture)


def one_gpu_after(base_seq: int, seq: int) -> Delta:
    message = one_gpu(state=types_api.GpuState.GPU_STATE_HUNG)
    message.base_seq, message.seq = base_seq, seq
    return message


@pytest.mark.parametrize(
    "bad",
    [
        delta(power_watts=(-1.0, 1.0)), delta(seq=1, base_seq=1), delta(seq=0, base_seq=1),
        delta(seq=5, base_seq=4), delta(seq=5, base_seq=0),
    ],
    ids=["negative", "seq again", "seq back", "base ahead", "base behind"],
)  # fmt: skip
def test_after_a_refusal_only_a_whole_snapshot_is_taken(index: Index, bad: Delta) -> None:
    before = types_api.Snapshot()
    before.CopyFrom(index.shown)
    assert not index.take(bad)
    assert index.stream.base_seq is None
    assert not index.take(delta(seq=6, base_seq=1)), "it leads nowhere: one before it is missing"
    assert index.shown == before
    assert (index.stream.rejected_count, index.nodes.get("alpha").rejected_count) == (2, 2)
    assert index.whole(7)
    assert index.take(delta(seq=8, base_seq=7))
    assert index.stream.rejected_count == 2


def test_a_new_stream_cannot_go_on_from_what_the_old_one_sent(index: Index) -> None:
    with index.nodes.connected(hello(), lambda: None) as again:
        assert not index.nodes.take(again, request(delta()))
        assert not index.take(delta()), "and the old one reports no more"


def test_no_memory_is_lost_to_what_was_cleared(index: Index) -> None:
    """A message keeps the memory of cleared lists until it is copied."""
    for seq in range(2, 40):
        message = one_gpu_after(seq - 1, seq)
        message.gpus[0].cleared_fields.append(FIELDS["throttle_reasons"])
        message.gpus[0].reading.throttle_reasons.append("x" * 500)
        held = index.shown
        assert index.take(message)
        assert index.shown is not held
    assert list(index.shown.gpus[1].reading.throttle_reasons) == ["x" * 500]


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_that_is_set_by_an_hour_changes_nothing(index: Index, step: float) -> None:
    """Ages decide, and those are counted on a clock that nobody sets."""
    index.clock.step_wall(step)
    assert index.nodes.get("alpha").state(index.clock.now()) is NodeState.ONLINE
    message = delta()
    message.sample_time.FromDatetime(index.clock.wall())
    assert index.take(message)
    index.clock.advance(2.5)
    assert index.nodes.get("alpha").state(index.clock.now()) is NodeState.ONLINE
    index.clock.advance(0.6)
    index.clock.step_wall(-step)
    assert index.nodes.get("alpha").state(index.clock.now()) is NodeState.STALE


def test_an_agent_whose_readings_are_frozen_turns_stale_though_it_sends(index: Index) -> None:
    for seq in range(2, 8):
        index.clock.advance(1.0)
        assert index.take(aged(delta(seq=seq, base_seq=seq - 1), seq - 1.0))
        stale = index.nodes.get("alpha").state(index.clock.now()) is NodeState.STALE
        assert stale == (seq - 1.0 > 3.0)


def check_faults(index: Index, check: Callable[[str, monitor_internal.ReportedFaults, float], None]) -> None:
    index.nodes.fault_observers = (check,)


def test_reported_faults_are_passed_on_and_are_no_snapshot(index: Index) -> None:
    heard: list[str] = []
    check_faults(index, lambda node, faults, now: heard.append(f"{node} {faults.faults[0].xid}"))
    faults = monitor_internal.ReportedFaults(faults=[monitor_internal.ReportedFault(uuid="GPU-1", xid=79)])
    assert index.nodes.take(index.stream, monitor_internal.StreamTelemetryRequest(faults=faults))
    assert heard == ["alpha 79"]
    assert index.take(delta()), "changes go on from the same snapshot"
    faults.faults[0].xid = -1
    assert not index.nodes.take(index.stream, monitor_internal.StreamTelemetryRequest(faults=faults))


def refusal_of(message: types_api.Snapshot) -> str:
    return refuse_snapshot(message, "alpha", epoch_id(1))


def reading(**fields: float) -> types_api.Snapshot:
    one = gpu()
    for name, value in fields.items():
        setattr(one.reading, name, value)
    return snapshot(gpus=(one,))


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"memory_total_bytes": 0}, "memory_total_bytes"),
        ({"memory_free_bytes": 81 * GIB}, "memory_free_bytes"),
        ({"memory_free_bytes": -1}, "memory_free_bytes"),
        ({"memory_used_bytes": 20 * GIB}, "memory_used_bytes"),
        ({"utilization_percent": math.nan}, "utilization_percent"),
    ],
)
def test_readings_that_cannot_be_are_refused(fields: dict[str, float], at_fault: str) -> None:
    assert f"reading.{at_fault}" in refusal_of(reading(**fields))


def test_memory_read_while_it_changes_is_taken() -> None:
    """Free and used are not read at one moment: a few percent too much is no lie."""
    assert refusal_of(reading(memory_free_bytes=70 * GIB, memory_used_bytes=13 * GIB)) == ""


@pytest.mark.parametrize("other", [snapshot("beta"), snapshot(epoch=2)])
def test_a_snapshot_of_another_node_or_run_than_hello_is_refused(other: types_api.Snapshot) -> None:
    assert refusal_of(other) == "its node and epoch are not those of Hello"


def test_one_gpu_twice_is_refused_whatever_the_case_of_its_uuid() -> None:
    assert refusal_of(snapshot(gpus=(gpu("GPU-1a"), gpu("gpu-1A")))) == "gpus[1] has the UUID of another one"


def test_a_period_that_hides_staleness_is_refused() -> None:
    message = snapshot()
    message.period.CopyFrom(to_duration(4000))
    assert "period" in refusal_of(message)
    message.ClearField("period")
    assert "period" in refusal_of(message)


def test_more_gpus_than_a_node_can_have_are_refused() -> None:
    assert refusal_of(snapshot(gpus=tuple(gpu(f"GPU-{n}") for n in range(1025)))).startswith("gpus ")


LATER = 99
"""A value of an enum that only a later version knows."""


def later(one: Any) -> None:
    """Let a GPU, or a change of one, say what only a later version knows; each enum by itself is in test_later_values.py."""
    one.state = one.reading.recovery_action = LATER
    one.reading.absent_readings.add(field="power_watts", status=LATER)


def test_a_snapshot_of_a_later_agent_is_taken(index: Index) -> None:
    message = snapshot(seq=2, gpus=(gpu("GPU-1"), gpu("GPU-2")))
    message.host_reading.absent_readings.add(field="load_1m", status=LATER)
    for one in message.gpus:
        later(one)
    assert index.nodes.take(index.stream, monitor_internal.StreamTelemetryRequest(snapshot=message))
    for shown in index.shown.gpus:
        assert shown.state == types_api.GpuState.GPU_STATE_OTHER
        assert shown.reading.recovery_action == types_api.RecoveryAction.RECOVERY_ACTION_OTHER
        [absent] = shown.reading.absent_readings
        assert absent.status == types_api.ReadingStatus.READING_STATUS_UNSPECIFIED


def test_what_a_later_agent_says_beside_is_left_out(index: Index) -> None:
    """A kind of message, and a field of a snapshot, that this version does not know: field 4000, with two bytes."""
    unknown = bytes.fromhex("82fa01020800")
    before = index.stream.rejected_count
    request = monitor_internal.StreamTelemetryRequest.FromString(unknown)
    assert request.WhichOneof("message") is None
    assert index.nodes.take(index.stream, request)
    message = types_api.Snapshot.FromString(snapshot(seq=2).SerializeToString() + unknown)
    assert index.nodes.take(index.stream, monitor_internal.StreamTelemetryRequest(snapshot=message))
    assert (index.stream.rejected_count, index.stream.acked_seq) == (before, 2)


def test_numbers_of_a_later_agent_are_left_out(index: Index) -> None:
    """And others of the same change are not: nodes of a host that is upgraded before the fleet stay in sight."""
    message = one_gpu(reading=types_api.GpuReading(power_watts=1.0), cleared_fields=[999])
    message.host.CopyFrom(with_host(cleared_fields=[999]).host)
    message.numbers.fields.extend([999, FIELDS["sm_clock_mhz"], 998])
    message.numbers.values.extend([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert index.take(message)
    assert [gpu.reading.sm_clock_mhz for gpu in index.shown.gpus] == [3.0, 4.0]
    alone = Delta(base_seq=message.seq, seq=message.seq + 1, sample_time=message.sample_time, age=message.age)
    alone.numbers.CopyFrom(monitor_internal.GpuNumbers(fields=[999], values=[1, 2]))
    assert index.take(alone)


def test_a_change_of_a_later_agent_is_taken(index: Index) -> None:
    cleared = [FIELDS["recovery_action"], FIELDS["absent_readings"]]
    message = one_gpu(reading=types_api.GpuReading(power_watts=1.0), cleared_fields=cleared)
    later(message.gpus[0])
    assert index.take(message)
    healthy, changed = index.shown.gpus
    assert healthy.state == types_api.GpuState.GPU_STATE_OK
    assert changed.state == types_api.GpuState.GPU_STATE_OTHER
    assert changed.reading.recovery_action == types_api.RecoveryAction.RECOVERY_ACTION_OTHER
