"""From the agent's values to the contract: absent stays absent, ages are counted to the moment of sending."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.validation import violations
from gpuscale.common.topology import PciPlace
from gpuscale.common.wire import seconds
from gpuscale.monitor.model.readings import (
    GPU_FIELDS,
    HOST_FIELDS,
    Absent,
    GpuProcess,
    GpuReading,
    GpuState,
    GpuView,
    HostReading,
    Quarantine,
    ReadingStatus,
    RecoveryAction,
    throttle_reasons,
)
from gpuscale.monitor.wire import to_snapshot
from tests.support.monitor_values import identity, snapshot_read

READING = GpuReading(utilization_percent=0.0, processes=(GpuProcess(7, None, "a\x1b[2Jb\n"),))
SNAPSHOT = snapshot_read(
    100.0,
    seq=7,
    host_reading=HostReading(cpu_percent=12.5, absent=(Absent("load_1m", ReadingStatus.ERROR, "no"),)),
    host_read_at=99.5,
    driver_version="550.54.15",
    gpus=(GpuView(identity(), GpuState.OK, READING, 99.0),),
)


def sent_with(**changes: Any) -> types_api.Snapshot:
    return to_snapshot(replace(SNAPSHOT, **changes), now=100.0)


def test_ages_are_those_of_the_moment_of_sending() -> None:
    message = to_snapshot(SNAPSHOT, now=102.0)
    assert seconds(message.age) == 2.0
    assert seconds(message.gpus[0].reading.age) == 3.0
    assert seconds(message.host_reading.age) == 2.5
    assert seconds(message.period) == 1.0


def test_zero_is_sent_and_what_is_unknown_is_not() -> None:
    reading = sent_with().gpus[0].reading
    assert reading.HasField("utilization_percent")
    assert reading.utilization_percent == 0.0
    assert not reading.HasField("memory_free_bytes")
    assert not reading.processes[0].HasField("memory_used_bytes")


def test_a_gpu_that_was_never_read_has_no_age() -> None:
    nothing = GpuReading.nothing(ReadingStatus.TIMEOUT, "no answer yet")
    message = sent_with(gpus=(GpuView(identity(), GpuState.SLOW, nothing, None),)).gpus[0]
    assert message.state == types_api.GpuState.GPU_STATE_SLOW
    assert not message.reading.HasField("age")
    assert [absent.field for absent in message.reading.absent_readings] == list(GPU_FIELDS)
    assert message.reading.absent_readings[0].status == types_api.ReadingStatus.READING_STATUS_TIMEOUT


def test_every_reading_reaches_the_wire() -> None:
    others = {"processes": (GpuProcess(1),), "recovery_action": RecoveryAction.GPU_RESET}
    full = GpuReading(**dict.fromkeys(GPU_FIELDS, 3) | others)
    host = HostReading(**dict.fromkeys(HOST_FIELDS, 3))
    message = sent_with(host_reading=host, gpus=(GpuView(identity(), GpuState.OK, full, 1.0),))
    sent = {field.name for field, _ in message.gpus[0].reading.ListFields()}
    assert sent == {*GPU_FIELDS, "age", "throttle_reasons"}
    assert {field.name for field, _ in message.host_reading.ListFields()} == {*HOST_FIELDS, "age"}


def test_what_users_and_drivers_wrote_keeps_to_the_rules_of_the_contract() -> None:
    """Any user can name a process with control characters; the node must not be refused for it."""
    message = sent_with(gpu_problem="x" * 5000 + "\n")
    assert violations(message) == []
    assert message.gpus[0].reading.processes[0].command == "a?[2Jb?"
    assert len(message.gpu_problem) == 1024


def test_gpus_are_named_by_uuid_and_simulated_ones_flagged() -> None:
    simulated = replace(identity(), simulated=True)
    message = sent_with(simulated=True, gpus=(GpuView(simulated, GpuState.OK, READING, 1.0),))
    assert message.gpus[0].name == "nodes/alpha/gpus/gpu-00000000"
    assert message.gpus[0].uuid == "GPU-00000000"
    assert message.simulated
    assert message.gpus[0].simulated


def test_what_a_gpu_is_and_what_the_operator_says_of_its_node_reaches_the_wire() -> None:
    place, nvlinks = PciPlace("pci0000:16/0000:17:00.0", 1), (("GPU-7", 4), ("GPU-8", 2))
    part = replace(identity(1), mig_profile="1g.10gb", parent_uuid="GPU-0", place=place, nvlinks=nvlinks)
    process = GpuProcess(7, reservation="reservations/r3")
    quarantine = Quarantine("XID 79", datetime(2026, 1, 1, tzinfo=UTC))
    view = GpuView(part, GpuState.OK, GpuReading(processes=(process,)), 1.0, quarantine=quarantine)
    message = sent_with(gpus=(view,), labels=(("zone", "a"),))
    gpu = message.gpus[0]
    told = (gpu.mig_profile, gpu.parent_uuid, gpu.numa_node, gpu.quarantine)
    assert told == ("1g.10gb", "GPU-0", 1, "XID 79")
    assert gpu.quarantine_time.ToDatetime(UTC) == datetime(2026, 1, 1, tzinfo=UTC)
    assert {peer.uuid: peer.link_count for peer in gpu.nvlinks} == {"GPU-7": 4, "GPU-8": 2}
    assert gpu.reading.processes[0].reservation == "reservations/r3"
    assert dict(message.host.labels) == {"zone": "a"}
    assert violations(message) == []


def test_throttle_reasons_are_told_by_name() -> None:
    assert throttle_reasons(0) == ()
    assert throttle_reasons(0x1 | 0x4 | 0x40) == ("gpu_idle", "sw_power_cap", "hw_thermal_slowdown")
    assert throttle_reasons(1 << 40) == ("bit_40",)
