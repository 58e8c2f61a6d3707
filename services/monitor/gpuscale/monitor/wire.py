"""The agent's values as messages, changes merged into snapshots, and their ages advanced. No gRPC calls."""

import os
import time
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isnan
from struct import pack
from sys import intern
from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import gpu_name
from gpuscale.common.wire import seconds, to_duration, to_timestamp
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.model.readings import (
    GpuProcess,
    GpuReading,
    GpuState,
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

# The contract allows no control characters in text, but users can put them in names of processes.
_LONGEST_TEXT = 1024
_TICKS = os.sysconf("SC_CLK_TCK")

_FIELDS = types_api.GpuReading.DESCRIPTOR.fields
PUT_ALONE = {"absent", "throttle_reason_mask"} | {
    one.name for one in _FIELDS if one.is_repeated or one.cpp_type > FieldDescriptor.CPPTYPE_BOOL
}
"""Readings that are no numbers (above BOOL are enums, texts and messages), and the mask, which is sent with its reasons."""
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
        host_reading=_filled(types_api.HostReading, snapshot.host_reading, snapshot.host_read_at, now),
        gpus=[
            types_api.Gpu(
                name=gpu_name(snapshot.node, gpu.identity.uuid),
                uuid=gpu.identity.uuid,
                index=gpu.identity.index,
                model=text(gpu.identity.model),
                simulated=gpu.identity.simulated,
                pci_bus_id=gpu.identity.pci_bus_id,
                state=GPU_STATES[gpu.state],
                reading=_filled(types_api.GpuReading, gpu.reading, gpu.read_at, now),
                mig_profile=gpu.identity.mig_profile,
                parent_uuid=gpu.identity.parent_uuid,
                numa_node=gpu.identity.place.numa_node,
                pci_path=gpu.identity.place.path,
                nvlinks=[types_api.NvLinkPeer(uuid=uuid, link_count=n) for uuid, n in gpu.identity.nvlinks],
                quarantine=text(gpu.quarantine.reason) if gpu.quarantine else "",
                quarantine_time=to_timestamp(gpu.quarantine.since) if gpu.quarantine else None,
                gpu_instance_id=gpu.identity.gpu_instance_id,
                serial=text(gpu.identity.serial),
                vbios_version=text(gpu.identity.vbios_version),
                pods=map(text, gpu.pods),
            )
            for gpu in snapshot.gpus
        ],
        gpu_problem=text(snapshot.gpu_problem),
        simulated=snapshot.simulated,
    )


def _filled(
    kind: type[_Reading], reading: GpuReading | HostReading, read_at: float | None, now: float
) -> _Reading:
    """A message with all readings that are not absent, and their age."""
    named = zip(reading._fields, reading, strict=True)
    found: dict[str, Any] = {name: value for name, value in named if value is not None}
    others = {name: found.pop(name) for name in found.keys() & PUT_ALONE}
    message = kind(**found)
    for name, value in others.items():
        put(message, name, value)
    if read_at is not None:
        put(message, "age", now - read_at)
    return message


def put(message: Any, name: str, value: Any) -> tuple[int, ...]:
    """Set one reading, or its `age` in seconds, in a GpuReading or HostReading.

    Returns the field numbers to clear before merging it as a change: those now absent, lists and messages.
    """
    fields = message.DESCRIPTOR.fields_by_name
    if name == "absent":
        message.absent_readings.extend(
            types_api.AbsentReading(field=one.field, status=_STATUS[one.status], detail=text(one.detail))
            for one in value
        )
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


def text(text: str) -> str:
    """Replace control characters and truncate, as the contract demands."""
    shown = text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
    return shown[:_LONGEST_TEXT]


_NANOS = 1_000_000_000
_NOT_TOLD = float("nan")
MOST_FIELDS = 256
"""Most fields of a reading that a delta changes; agents of later versions have more than this one."""
_GPU_FIELDS = {field.number: field.name for field in _FIELDS}
_HOST_FIELDS = {field.number: field.name for field in types_api.HostReading.DESCRIPTOR.fields}
_REALS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_FLOATS = frozenset(field.number for field in _FIELDS if field.cpp_type in _REALS)


class Stamp(NamedTuple):
    """A delta's seq, the sample time on the agent's wall clock, and the age."""

    seq: int
    time_seconds: int
    time_nanos: int
    age_seconds: int
    age_nanos: int

    @property
    def age(self) -> float:
        """The age in seconds."""
        return self.age_seconds + self.age_nanos / _NANOS


class Numbers(NamedTuple):
    """A decoded table of numbers."""

    places: Sequence[int] = ()  # indexes of GPUs; empty for all
    fields: Sequence[int] = ()  # numbers of fields of GpuReading
    columns: Sequence[Sequence[float]] = ()  # per field, a value per GPU; empty if the table is malformed
    table: "array[float]" = array("d")  # all columns in one


NO_NUMBERS = Numbers()


@dataclass(slots=True)
class Change:
    """A decoded delta."""

    stamp: Stamp
    host: monitor_internal.HostDelta | None
    gpus: Sequence[monitor_internal.GpuDelta]
    numbers: Numbers

    @classmethod
    def of(cls, delta: monitor_internal.SnapshotDelta) -> "Change":
        """Decode a delta, without validation and without numbers that only later versions know."""
        time, age = delta.sample_time, delta.age
        numbers = NO_NUMBERS
        if delta.HasField("numbers"):
            table = delta.numbers
            fields, places, values = table.fields[:], table.places[:], table.values[:]
            width, rest = divmod(len(values), len(fields)) if fields else (0, 0)
            complete = width > 0 and not rest and len(fields) <= MOST_FIELDS
            columns = [values[at : at + width] for at in range(0, len(values), width)] if complete else ()
            if complete and not _GPU_FIELDS.keys() >= set(fields):
                known = [place for place, field in enumerate(fields) if field in _GPU_FIELDS]
                fields, columns = [fields[place] for place in known], [columns[place] for place in known]
                values = [value for column in columns for value in column]
            packed = array("d", pack(f"{len(values)}d", *values)) if complete else NO_NUMBERS.table
            numbers = Numbers(places, fields, columns, packed) if fields else NO_NUMBERS
        return cls(
            Stamp(delta.seq, time.seconds, time.nanos, age.seconds, age.nanos),
            delta.host if delta.HasField("host") else None,
            tuple(delta.gpus),
            numbers,
        )

    def changed_places(self) -> Collection[int] | None:
        """Indexes of changed GPUs; None for all."""
        if self.numbers.columns and not self.numbers.places:
            return None
        return {*self.numbers.places, *(gpu.place for gpu in self.gpus)}

    def touches(self, fields: frozenset[int]) -> bool:
        """Whether it may change a GPU's state or one of these fields of GpuReading."""
        return len(self.gpus) > 0 or not fields.isdisjoint(self.numbers.fields)


class Picture:
    """A snapshot that changes are merged into; `uuids` in lower case, `period` in seconds.

    It is kept encoded, in a quarter of a message's memory, beside the numbers and host readings that nearly every change replaces.
    They are merged only when someone reads, which is rare with thousands of nodes.
    """

    __slots__ = (
        "_encoded", "_fields", "_host", "_open", "_rested", "_stamp", "_table", "boot_id", "period", "uuids"
    )  # fmt: skip

    def __init__(self, snapshot: types_api.Snapshot) -> None:
        self.boot_id = snapshot.host.boot_id
        self.uuids = tuple([intern(gpu.uuid.lower()) for gpu in snapshot.gpus])
        self.period = seconds(snapshot.period)
        self._encoded = snapshot.SerializeToString()
        self._open: types_api.Snapshot | None = snapshot
        self._stamp: Stamp | None = None
        self._host: types_api.HostReading | None = None
        self._fields: tuple[int, ...] = ()
        self._table = array("d")  # of each of `_fields`, the value of each GPU
        self._rested: dict[int, array[float]] = {}  # cached columns of `_encoded`

    @property
    def snapshot(self) -> types_api.Snapshot:
        """The snapshot with all changes; a new message after each change."""
        if self._open is not None:
            return self._open
        snapshot = types_api.Snapshot()
        self.write(snapshot)
        return snapshot

    @property
    def host_reading(self) -> types_api.HostReading:
        """The readings of the host with all changes."""
        return self.snapshot.host_reading if self._host is None else self._host

    def column(self, field: int) -> Sequence[float]:
        """A numeric field of each GPU; 0 if absent."""
        column = self._column(self._fields.index(field)) if field in self._fields else None
        if column is not None and not isnan(sum(column)):
            return column
        rested = self._rested.get(field)
        if rested is None:
            found = [getattr(gpu.reading, _GPU_FIELDS[field]) for gpu in self.snapshot.gpus]
            rested = self._rested[field] = array("d", found)
        if column is None:
            return rested
        return [old if new != new else new for new, old in zip(column, rested, strict=True)]

    def _column(self, place: int) -> "array[float]":
        return self._table[place * len(self.uuids) : (place + 1) * len(self.uuids)]

    def write(self, snapshot: types_api.Snapshot) -> None:
        """Write the snapshot with all changes into an empty message."""
        snapshot.ParseFromString(self._encoded)
        if self._host is not None:
            snapshot.host_reading.CopyFrom(self._host)
        readings = [gpu.reading for gpu in snapshot.gpus] if self._fields else []
        for place, field in enumerate(self._fields):
            name, kind = _GPU_FIELDS[field], float if field in _FLOATS else int
            for reading, value in zip(readings, self._column(place), strict=True):
                if value == value:  # NaN was not sent
                    setattr(reading, name, kind(value))
        if self._stamp is not None:
            time, age = snapshot.sample_time, snapshot.age
            snapshot.seq, time.seconds, time.nanos, age.seconds, age.nanos = self._stamp

    def rest(self) -> None:
        """Free the decoded message."""
        self._open = None

    def merge(self, change: Change) -> None:
        """Merge a validated change."""
        if change.host is not None:
            host = types_api.HostReading()  # new, to free cleared fields
            host.CopyFrom(self.host_reading)
            _clear(host, _HOST_FIELDS, change.host.cleared_fields)
            host.MergeFrom(change.host.reading)
            self._host = host
        if change.gpus:
            snapshot = self.snapshot
            for changed in change.gpus:
                gpu = snapshot.gpus[changed.place]
                if changed.state:
                    gpu.state = changed.state
                if changed.HasField("quarantine"):
                    gpu.quarantine = changed.quarantine
                    gpu.quarantine_time.CopyFrom(changed.quarantine_time)
                    if not changed.quarantine:
                        gpu.ClearField("quarantine_time")
                _clear(gpu.reading, _GPU_FIELDS, changed.cleared_fields)
                gpu.reading.MergeFrom(changed.reading)
            self._encoded = snapshot.SerializeToString()
            self._fields, self._table, self._rested = (), array("d"), {}
        places, fields, columns, table = change.numbers
        count, same = len(self.uuids), len(table) > 0 and not places and self._fields == tuple(fields)
        if same:  # as nearly always
            self._table = table
        for field, values in () if same else zip(fields, columns, strict=True):
            if field not in self._fields:
                self._fields = _wider(self._fields, field)
                self._table.extend([_NOT_TOLD] * count)
                self._rested.pop(field, None)  # frees memory: the table is read now
            begin = self._fields.index(field) * count
            if not places:
                self._table[begin : begin + count] = array("d", values)
            for place, value in zip(places, values if places else (), strict=True):
                self._table[begin + place] = value
        self._stamp = change.stamp
        self._open = None


@lru_cache(1024)
def _wider(fields: tuple[int, ...], field: int) -> tuple[int, ...]:
    """Fields and another one: the same tuple for all nodes."""
    return *fields, field


def count_on(snapshot: types_api.Snapshot, elapsed: float) -> None:
    """Add `elapsed` seconds to every age in a snapshot."""
    nanos = round(elapsed * _NANOS)
    _add(snapshot.age, nanos)
    if snapshot.host_reading.HasField("age"):
        _add(snapshot.host_reading.age, nanos)
    for gpu in snapshot.gpus:
        reading = gpu.reading
        if reading.HasField("age"):
            _add(reading.age, nanos)


def _clear(reading: Message, names: dict[int, str], cleared: Iterable[int]) -> None:
    for number in cleared:
        if number in names:
            reading.ClearField(names[number])


def _add(age: Duration, nanos: int) -> None:
    age.seconds, age.nanos = divmod(age.seconds * _NANOS + age.nanos + nanos, _NANOS)
