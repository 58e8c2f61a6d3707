"""What both ends of a stream do with snapshots that they hold: merge what changed, and count ages on."""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api

_NANOS = 1_000_000_000
_GPU_FIELDS = {field.number: field.name for field in types_api.GpuReading.DESCRIPTOR.fields}
_HOST_FIELDS = {field.number: field.name for field in types_api.HostReading.DESCRIPTOR.fields}
_FLOATS = frozenset(
    field.number
    for field in types_api.GpuReading.DESCRIPTOR.fields
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
)
_TOTAL = frozenset(number for number, name in _GPU_FIELDS.items() if name == "memory_total_bytes")


@dataclass(slots=True)
class Numbers:
    """A table of numbers, taken apart.

    Attributes:
        places: of the GPUs that it is about; none for all.
        fields: numbers of fields of GpuReading.
        columns: for each field, its value for each of these GPUs.
    """

    places: Sequence[int] = ()
    fields: Sequence[int] = ()
    columns: Sequence[Sequence[float]] = ()

    def replaces(self, other: "Numbers") -> bool:
        """Whether nothing of another table is left after this one."""
        return self.places == other.places and self.fields == other.fields


_NO_NUMBERS = Numbers()


@dataclass(slots=True)
class Change:
    """A delta, with its table of numbers taken apart."""

    delta: monitor_api.SnapshotDelta
    numbers: Numbers

    @classmethod
    def of(cls, delta: monitor_api.SnapshotDelta) -> "Change":
        """The change of a delta, whatever it holds."""
        if not delta.HasField("numbers"):
            return cls(delta, _NO_NUMBERS)
        numbers = delta.numbers
        fields, values = numbers.fields[:], numbers.values[:]
        width = len(values) // len(fields) if fields else 0
        columns = [array("d", values[index * width : (index + 1) * width]) for index in range(len(fields))]
        return cls(delta, Numbers(numbers.places[:], fields, columns))

    def changed_places(self) -> Collection[int] | None:
        """Places of all GPUs that change; None for all."""
        if self.numbers.columns and not self.numbers.places:
            return None
        return {*self.numbers.places, *(one.place for one in self.delta.gpus)}

    def touches(self, fields: frozenset[int]) -> bool:
        """Whether it may change the state of a GPU, or one of these fields of GpuReading."""
        return len(self.delta.gpus) > 0 or not fields.isdisjoint(self.numbers.fields)


class Picture:
    """A snapshot that changes are merged into.

    Most changes are a table of the same numbers as the one before. The newest one waits beside the snapshot until
    somebody looks: of thousands of nodes, few are looked at each second.
    """

    def __init__(self, snapshot: types_api.Snapshot) -> None:
        self._snapshot = snapshot
        self._late = _NO_NUMBERS
        self._totals: array[float] | None = None

    @property
    def snapshot(self) -> types_api.Snapshot:
        """The snapshot with all changes; another message after some of them."""
        if self._late.columns:
            numbers, self._late = self._late, _NO_NUMBERS
            _set_numbers(self._snapshot, numbers)
        return self._snapshot

    @property
    def sample_time(self) -> Timestamp:
        """When the snapshot was read, by the agent's wall clock."""
        return self._snapshot.sample_time

    @property
    def period(self) -> Duration:
        """How often the agent takes a snapshot."""
        return self._snapshot.period

    @property
    def gpu_count(self) -> int:
        """How many GPUs there are."""
        return len(self._snapshot.gpus)

    @property
    def memory_totals(self) -> "array[float]":
        """The memory of each GPU in bytes; 0 where it is absent."""
        if self._totals is None:
            self._totals = array("d", [gpu.reading.memory_total_bytes for gpu in self.snapshot.gpus])
        return self._totals

    def merge(self, change: Change) -> None:
        """Merge a change that fits."""
        delta = change.delta
        if delta.gpus or (change.numbers.columns and not change.numbers.replaces(self._late)):
            snapshot = self.snapshot
        else:
            snapshot = self._snapshot
        snapshot.seq = delta.seq
        snapshot.sample_time.CopyFrom(delta.sample_time)
        snapshot.age.CopyFrom(delta.age)
        cleared = delta.HasField("host") and _merge_host(delta.host, snapshot.host_reading)
        for one in delta.gpus:
            if _merge_gpu(one, snapshot.gpus[one.place]):
                cleared = True
        if change.numbers.columns:
            self._late = change.numbers
        if change.touches(_TOTAL):
            self._totals = None
        if cleared:  # a message keeps the memory of what was cleared in it, its copy does not
            self._snapshot = types_api.Snapshot()
            self._snapshot.CopyFrom(snapshot)


def _set_numbers(snapshot: types_api.Snapshot, numbers: Numbers) -> None:
    """Write a table into the readings."""
    gpus = [snapshot.gpus[place] for place in numbers.places] if numbers.places else snapshot.gpus
    readings = [gpu.reading for gpu in gpus]
    for field, values in zip(numbers.fields, numbers.columns, strict=True):
        name, told = _GPU_FIELDS[field], values if field in _FLOATS else map(int, values)
        for reading, value in zip(readings, told, strict=True):
            setattr(reading, name, value)


def count_on(snapshot: types_api.Snapshot, elapsed: float) -> None:
    """Make every age in a snapshot larger by the seconds that passed since it was made or received."""
    nanos = round(elapsed * _NANOS)
    _add(snapshot.age, nanos)
    if snapshot.host_reading.HasField("age"):
        _add(snapshot.host_reading.age, nanos)
    for gpu in snapshot.gpus:
        reading = gpu.reading
        if reading.HasField("age"):
            _add(reading.age, nanos)


def _merge_host(change: monitor_api.HostDelta, reading: types_api.HostReading) -> bool:
    """Merge what changed; whether the message has memory to give back."""
    _clear(reading, _HOST_FIELDS, change.cleared_fields)
    reading.MergeFrom(change.reading)
    return len(change.cleared_fields) > 0


def _merge_gpu(change: monitor_api.GpuDelta, gpu: types_api.Gpu) -> bool:
    """Merge what changed; whether the message has memory to give back."""
    if change.state:
        gpu.state = change.state
    if change.HasField("quarantine"):
        gpu.quarantine = change.quarantine
    reading = gpu.reading
    _clear(reading, _GPU_FIELDS, change.cleared_fields)
    reading.MergeFrom(change.reading)
    return len(change.cleared_fields) > 0 or change.HasField("quarantine")


def _clear(reading: Message, names: dict[int, str], cleared: Iterable[int]) -> None:
    for number in cleared:
        reading.ClearField(names[number])


def _add(age: Duration, nanos: int) -> None:
    age.seconds, age.nanos = divmod(age.seconds * _NANOS + age.nanos + nanos, _NANOS)
