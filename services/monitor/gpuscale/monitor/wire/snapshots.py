"""Conversion of the agent's values to messages."""

import os
import time
from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import gpu_name
from gpuscale.common.wire import to_duration, to_timestamp
from gpuscale.monitor.model.readings import (
    GPU_FIELDS,
    HOST_FIELDS,
    Absent,
    GpuProcess,
    GpuReading,
    GpuState,
    GpuView,
    HostReading,
    ReadingStatus,
    RecoveryAction,
    Snapshot,
    throttle_reasons,
)

_STATUS = {status: types_api.ReadingStatus.Value(f"READING_STATUS_{status.name}") for status in ReadingStatus}
GPU_STATES = {state: types_api.GpuState.Value(f"GPU_STATE_{state.name}") for state in GpuState}
_RECOVERY = {
    action: types_api.RecoveryAction.Value(f"RECOVERY_ACTION_{action.name}") for action in RecoveryAction
}

GPU_NUMBERS = tuple(name for name in GPU_FIELDS if name not in {"processes", "recovery_action"})
"""Readings of a GPU that are copied to the field of the same name, like all of HOST_FIELDS."""

# The contract allows no control characters in text, but users can put them in names of processes.
_LONGEST_TEXT = 1024
_TICKS = os.sysconf("SC_CLK_TCK")

_Reading = TypeVar("_Reading", types_api.GpuReading, types_api.HostReading)


def to_snapshot(snapshot: Snapshot, now: float) -> types_api.Snapshot:
    """A snapshot as a message, with ages as of `now` on the agent's clock."""
    return types_api.Snapshot(
        node=snapshot.node,
        epoch=snapshot.epoch,
        seq=snapshot.seq,
        sample_time=to_timestamp(snapshot.sample_time),
        age=to_duration(now - snapshot.taken_at),
        period=to_duration(snapshot.period),
        host=types_api.Host(
            hostname=text(snapshot.host.hostname),
            operating_system=text(snapshot.host.operating_system),
            boot_id=snapshot.host.boot_id,
            driver_version=text(snapshot.driver_version),
            cuda_version=snapshot.cuda_version,
            labels=dict(snapshot.labels),
            process_ids_foreign=snapshot.host.process_ids_foreign,
            network_namespace=snapshot.host.network_namespace,
            network_adapters=[
                types_api.NetworkAdapter(
                    name=text(one.name), pci_path=one.place.path, numa_node=one.place.numa_node
                )
                for one in snapshot.host.adapters
            ],
        ),
        host_reading=_filled(
            types_api.HostReading(), snapshot.host_reading, HOST_FIELDS, snapshot.host_read_at, now
        ),
        gpus=[_gpu(snapshot.node, gpu, now) for gpu in snapshot.gpus],
        gpu_problem=text(snapshot.gpu_problem),
        simulated=snapshot.simulated,
    )


def _gpu(node: str, gpu: GpuView, now: float) -> types_api.Gpu:
    identity, reading = gpu.identity, gpu.reading
    message = _filled(types_api.GpuReading(), reading, GPU_NUMBERS, gpu.read_at, now)
    if reading.processes:
        message.processes.extend(map(_process, reading.processes))
    if reading.throttle_reason_mask:
        message.throttle_reasons.extend(throttle_reasons(reading.throttle_reason_mask))
    if reading.recovery_action is not None:
        message.recovery_action = _RECOVERY[reading.recovery_action]
    return types_api.Gpu(
        name=gpu_name(node, identity.uuid),
        uuid=identity.uuid,
        index=identity.index,
        model=text(identity.model),
        simulated=identity.simulated,
        pci_bus_id=identity.pci_bus_id,
        state=GPU_STATES[gpu.state],
        reading=message,
        mig_profile=identity.mig_profile,
        parent_uuid=identity.parent_uuid,
        numa_node=identity.place.numa_node,
        pci_path=identity.place.path,
        nvlinks=[types_api.NvLinkPeer(uuid=uuid, link_count=count) for uuid, count in identity.nvlinks],
        quarantine=text(gpu.quarantine.reason) if gpu.quarantine else "",
        quarantine_time=to_timestamp(gpu.quarantine.since) if gpu.quarantine else None,
        gpu_instance_id=identity.gpu_instance_id,
        serial=text(identity.serial),
        vbios_version=text(identity.vbios_version),
        pods=map(text, gpu.pods),
    )


def _filled(
    message: _Reading,
    reading: GpuReading | HostReading,
    names: Iterable[str],
    read_at: float | None,
    now: float,
) -> _Reading:
    """Set these readings, absent ones, and the age in a message."""
    for name in names:
        value = getattr(reading, name)
        if value is not None:
            setattr(message, name, value)
    if reading.absent:
        message.absent_readings.extend(_absent(reading.absent))
    if read_at is not None:
        message.age.CopyFrom(to_duration(now - read_at))
    return message


def put(message: Any, name: str, value: Any) -> tuple[int, ...]:
    """Set one reading, or its `age` in seconds, in a GpuReading or HostReading of a delta.

    Returns the field numbers to clear before merging it: those now absent, lists and messages.
    """
    fields = message.DESCRIPTOR.fields_by_name
    if name == "absent":
        message.absent_readings.extend(_absent(value))
        return (fields["absent_readings"].number,)
    if name == "processes":
        message.processes.extend(map(_process, value or ()))
        return (fields["processes"].number,)
    if name == "age":
        if value is not None:
            message.age.CopyFrom(to_duration(value))
        return (fields["age"].number,)
    cleared: tuple[int, ...] = ()
    if name == "throttle_reason_mask":
        message.throttle_reasons.extend(throttle_reasons(value or 0))
        cleared = (fields["throttle_reasons"].number,)
    if value is None:
        return (fields[name].number, *cleared)
    setattr(message, name, _RECOVERY[value] if isinstance(value, RecoveryAction) else value)
    return cleared


def _process(process: GpuProcess) -> types_api.GpuProcess:
    """A process as a message, with its start on the current wall clock."""
    started = None
    if process.lineage:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.lineage[0].started / _TICKS
        started = Timestamp(seconds=round(time.time() - age))
    return types_api.GpuProcess(
        pid=process.pid,
        memory_used_bytes=process.memory_used_bytes,
        command=None if process.command is None else text(process.command),
        reservation=process.reservation,
        holder_unknown=process.holder_unknown,
        user=text(process.user_name),
        program=text(process.program),
        start_time=started,
        container=text(process.container),
        pod=text(process.pod),
        utilization_percent=process.utilization_percent,
        memory_utilization_percent=process.memory_utilization_percent,
        encoder_utilization_percent=process.encoder_utilization_percent,
        decoder_utilization_percent=process.decoder_utilization_percent,
        start_ticks=process.lineage[0].started if process.lineage else None,
    )


def _absent(absent: Iterable[Absent]) -> list[types_api.AbsentReading]:
    return [
        types_api.AbsentReading(
            field=reading.field, status=_STATUS[reading.status], detail=text(reading.detail)
        )
        for reading in absent
    ]


def text(text: str) -> str:
    """Replace control characters and truncate, as the contract demands."""
    shown = text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
    return shown[:_LONGEST_TEXT]
