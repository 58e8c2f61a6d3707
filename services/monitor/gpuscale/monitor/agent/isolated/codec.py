"""The values of a GPU source as JSON, and back. Pure.

Both ends are the same program of the same version: fields go by their places, and what cannot be decoded is a bug.
"""

import json
from dataclasses import fields
from typing import Any

from gpuscale.monitor.model.readings import (
    Absent,
    DriverEvent,
    GpuEventKind,
    GpuIdentity,
    GpuProcess,
    GpuReading,
    GpuSample,
    GpuState,
    Inventory,
    MissingGpu,
    ProcessKey,
    ReadingStatus,
    RecoveryAction,
)

# What `json.loads` gives; every use below says what it takes it for.
Json = Any

_PROCESSES = GpuReading._fields.index("processes")
_RECOVERY = GpuReading._fields.index("recovery_action")
_IDENTITY = tuple(field.name for field in fields(GpuIdentity))
_PROCESS = tuple(field.name for field in fields(GpuProcess))
_LINEAGE = _PROCESS.index("lineage")
_NVLINKS = _IDENTITY.index("nvlinks")
_ABSENT = GpuReading._fields.index("absent")


def encode(value: object) -> bytes:
    """A value of lists, texts and numbers."""
    return json.dumps(value, separators=(",", ":")).encode("utf-8")


def decode(data: bytes) -> Json:
    """What `encode` was given; tuples are lists."""
    return json.loads(data)


def inventory_out(inventory: Inventory) -> Json:
    """What was found when the source was opened."""
    gpus = [[getattr(gpu, name) for name in _IDENTITY] for gpu in inventory.gpus]
    return [
        gpus,
        inventory.driver_version,
        inventory.problem,
        inventory.has_events,
        [[one.index, one.pci_bus_id, one.problem] for one in inventory.missing],
    ]


def inventory_in(data: Json) -> Inventory:
    """The inventory that went out."""
    gpus, version, problem, has_events, missing = data
    lost = tuple(MissingGpu(*values) for values in missing)
    return Inventory([_identity(values) for values in gpus], version, problem, has_events, lost)


def sample_out(sample: GpuSample) -> Json:
    """A reading of one GPU."""
    reading: list[object] = list(sample.reading)
    processes, recovery = sample.reading.processes, sample.reading.recovery_action
    if processes is not None:
        reading[_PROCESSES] = [_process_out(process) for process in processes]
    reading[_RECOVERY] = None if recovery is None else recovery.name
    reading[_ABSENT] = [[one.field, one.status.name, one.detail] for one in sample.reading.absent]
    return [sample.state.name, reading, sample.link_ends, sample.calls, sample.refusals]


def sample_in(data: Json) -> GpuSample:
    """The sample that went out."""
    state, reading, ends, calls, refusals = data
    if reading[_PROCESSES] is not None:
        reading[_PROCESSES] = tuple(_process_in(values) for values in reading[_PROCESSES])
    if reading[_RECOVERY] is not None:
        reading[_RECOVERY] = RecoveryAction[reading[_RECOVERY]]
    reading[_ABSENT] = tuple(
        Absent(field, ReadingStatus[status], detail) for field, status, detail in reading[_ABSENT]
    )
    return GpuSample(GpuState[state], GpuReading(*reading), tuple(ends), calls, refusals)


def event_out(event: DriverEvent | None) -> Json:
    """What a driver said has happened; None for nothing."""
    return None if event is None else [event.uuid, event.kind.name, event.xid]


def event_in(data: Json) -> DriverEvent | None:
    """The event that went out."""
    if data is None:
        return None
    uuid, kind, xid = data
    return DriverEvent(uuid, GpuEventKind[kind], xid)


def _identity(values: Json) -> GpuIdentity:
    values[_NVLINKS] = tuple((uuid, count) for uuid, count in values[_NVLINKS])
    return GpuIdentity(*values)


def _process_out(process: GpuProcess) -> Json:
    values: list[object] = [getattr(process, name) for name in _PROCESS]
    values[_LINEAGE] = [[key.pid, key.started] for key in process.lineage]
    return values


def _process_in(values: Json) -> GpuProcess:
    values[_LINEAGE] = tuple(ProcessKey(pid, started) for pid, started in values[_LINEAGE])
    return GpuProcess(*values)
