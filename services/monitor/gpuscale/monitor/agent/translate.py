"""From the agent's values to the messages of the contract."""

from collections.abc import Iterable

from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import gpu_name
from gpuscale.common.wire import to_duration, to_timestamp
from gpuscale.monitor.agent.model import (
    Absent,
    GpuProcess,
    GpuReading,
    GpuState,
    GpuView,
    HostReading,
    ReadingStatus,
    Snapshot,
)

_STATUS = {one: types_api.ReadingStatus.Value(f"READING_STATUS_{one.name}") for one in ReadingStatus}
_STATE = {one: types_api.GpuState.Value(f"GPU_STATE_{one.name}") for one in GpuState}

# The contract takes no control characters in a text, and every user of a host may name a process as they like.
_LONGEST_TEXT = 1024


def to_snapshot(snapshot: Snapshot, now: float) -> types_api.Snapshot:
    """The message of a snapshot that is sent at `now`, in seconds of the agent's clock."""
    return types_api.Snapshot(
        node=snapshot.node,
        epoch=snapshot.epoch,
        seq=snapshot.seq,
        sample_time=to_timestamp(snapshot.sample_time),
        age=to_duration(now - snapshot.taken_at),
        period=to_duration(snapshot.period),
        host=types_api.Host(
            hostname=_text(snapshot.host.hostname),
            operating_system=_text(snapshot.host.operating_system),
            boot_id=snapshot.host.boot_id,
            driver_version=_text(snapshot.driver_version),
        ),
        host_reading=_host_reading(snapshot.host_reading, snapshot.host_read_at, now),
        gpus=[_gpu(snapshot.node, gpu, now) for gpu in snapshot.gpus],
        gpu_problem=_text(snapshot.gpu_problem),
        simulated=snapshot.simulated,
    )


def _gpu(node: str, gpu: GpuView, now: float) -> types_api.Gpu:
    identity = gpu.identity
    return types_api.Gpu(
        name=gpu_name(node, identity.uuid),
        uuid=identity.uuid,
        index=identity.index,
        model=_text(identity.model),
        simulated=identity.simulated,
        pci_bus_id=identity.pci_bus_id,
        state=_STATE[gpu.state],
        reading=_gpu_reading(gpu.reading, gpu.read_at, now),
    )


def _gpu_reading(reading: GpuReading, read_at: float | None, now: float) -> types_api.GpuReading:
    return types_api.GpuReading(
        utilization_percent=reading.utilization_percent,
        memory_utilization_percent=reading.memory_utilization_percent,
        memory_total_bytes=reading.memory_total_bytes,
        memory_used_bytes=reading.memory_used_bytes,
        memory_free_bytes=reading.memory_free_bytes,
        memory_reserved_bytes=reading.memory_reserved_bytes,
        temperature_celsius=reading.temperature_celsius,
        power_watts=reading.power_watts,
        power_limit_watts=reading.power_limit_watts,
        sm_clock_mhz=reading.sm_clock_mhz,
        memory_clock_mhz=reading.memory_clock_mhz,
        performance_state=reading.performance_state,
        processes=[_process(process) for process in reading.processes or ()],
        absent_readings=_absent(reading.absent),
        age=None if read_at is None else to_duration(now - read_at),
    )


def _process(process: GpuProcess) -> types_api.GpuProcess:
    return types_api.GpuProcess(
        pid=process.pid,
        memory_used_bytes=process.memory_used_bytes,
        command=None if process.command is None else _text(process.command),
    )


def _host_reading(reading: HostReading, read_at: float | None, now: float) -> types_api.HostReading:
    return types_api.HostReading(
        cpu_percent=reading.cpu_percent,
        load_1m=reading.load_1m,
        load_5m=reading.load_5m,
        load_15m=reading.load_15m,
        cpu_count=reading.cpu_count,
        memory_total_bytes=reading.memory_total_bytes,
        memory_available_bytes=reading.memory_available_bytes,
        memory_used_bytes=reading.memory_used_bytes,
        swap_total_bytes=reading.swap_total_bytes,
        swap_used_bytes=reading.swap_used_bytes,
        absent_readings=_absent(reading.absent),
        age=None if read_at is None else to_duration(now - read_at),
    )


def _absent(absent: Iterable[Absent]) -> list[types_api.AbsentReading]:
    return [
        types_api.AbsentReading(field=one.field, status=_STATUS[one.status], detail=_text(one.detail))
        for one in absent
    ]


def _text(text: str) -> str:
    """The text as the contract takes it."""
    shown = text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
    return shown[:_LONGEST_TEXT]
