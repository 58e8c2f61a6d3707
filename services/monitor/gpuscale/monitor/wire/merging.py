"""Merging changes into snapshots, and advancing their ages."""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import seconds
from gpuscale.internal.monitor import v1 as monitor_internal

_NANOS = 1_000_000_000
_NOT_TOLD = float("nan")
_GPU_FIELDS = {field.number: field.name for field in types_api.GpuReading.DESCRIPTOR.fields}
_HOST_FIELDS = {field.number: field.name for field in types_api.HostReading.DESCRIPTOR.fields}
_FLOATS = frozenset(
    field.number
    for field in types_api.GpuReading.DESCRIPTOR.fields
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
)


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
        """Decode a delta, without validation."""
        time, age = delta.sample_time, delta.age
        numbers = NO_NUMBERS
        if delta.HasField("numbers"):
            table = delta.numbers
            fields, places, values = table.fields[:], table.places[:], table.values[:]
            width, rest = divmod(len(values), len(fields)) if fields else (0, 0)
            complete = width > 0 and not rest and len(fields) <= len(_GPU_FIELDS)
            columns = [values[at : at + width] for at in range(0, len(values), width)] if complete else ()
            numbers = Numbers(places, fields, columns)
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

    __slots__ = ("_columns", "_encoded", "_host", "_open", "_rested", "_stamp", "boot_id", "period", "uuids")

    def __init__(self, snapshot: types_api.Snapshot) -> None:
        self.boot_id = snapshot.host.boot_id
        self.uuids = tuple([gpu.uuid.lower() for gpu in snapshot.gpus])
        self.period = seconds(snapshot.period)
        self._encoded = snapshot.SerializeToString()
        self._open: types_api.Snapshot | None = snapshot
        self._stamp: Stamp | None = None
        self._host: types_api.HostReading | None = None
        self._columns: dict[int, array[float]] = {}
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
        column = self._columns.get(field)
        if column is not None and not isnan(sum(column)):
            return column
        rested = self._rested.get(field)
        if rested is None:
            found = [getattr(gpu.reading, _GPU_FIELDS[field]) for gpu in self.snapshot.gpus]
            rested = self._rested[field] = array("d", found)
        if column is None:
            return rested
        return [old if new != new else new for new, old in zip(column, rested, strict=True)]

    def write(self, snapshot: types_api.Snapshot) -> None:
        """Write the snapshot with all changes into an empty message."""
        snapshot.ParseFromString(self._encoded)
        if self._host is not None:
            snapshot.host_reading.CopyFrom(self._host)
        readings = [gpu.reading for gpu in snapshot.gpus] if self._columns else []
        for field, values in self._columns.items():
            name, kind = _GPU_FIELDS[field], float if field in _FLOATS else int
            for reading, value in zip(readings, values, strict=True):
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
            self._columns, self._rested = {}, {}
        if change.numbers.columns:
            self._note(change.numbers)
        self._stamp = change.stamp
        self._open = None

    def _note(self, numbers: Numbers) -> None:
        """Keep the newest number of each field and GPU until someone reads."""
        waiting, places = self._columns, numbers.places
        untold = array("d", [_NOT_TOLD]) * len(self.uuids)
        for field, values in zip(numbers.fields, numbers.columns, strict=True):
            if not places:
                waiting[field] = array("d", values)
                continue
            column = waiting[field] = waiting.get(field, untold)[:]  # a copy: readers may hold the old one
            for place, value in zip(places, values, strict=True):
                column[place] = value


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
        reading.ClearField(names[number])


def _add(age: Duration, nanos: int) -> None:
    age.seconds, age.nanos = divmod(age.seconds * _NANOS + age.nanos + nanos, _NANOS)
