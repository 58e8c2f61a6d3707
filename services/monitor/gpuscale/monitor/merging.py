"""What both ends of a stream do with snapshots that they hold: merge what changed, and count ages on."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

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


@dataclass(slots=True)
class Change:
    """A delta, with its table of numbers taken apart.

    Attributes:
        delta: what changed.
        places: of the GPUs in the table; none for all.
        columns: number of a field of GpuReading, and its value for each of these GPUs.
    """

    delta: monitor_api.SnapshotDelta
    places: Sequence[int] = ()
    columns: Sequence[tuple[int, Sequence[float]]] = ()

    @classmethod
    def of(cls, delta: monitor_api.SnapshotDelta) -> "Change":
        """The change of a delta, whatever it holds."""
        if not delta.HasField("numbers"):
            return cls(delta)
        numbers = delta.numbers
        fields, values = numbers.fields[:], numbers.values[:]
        width = len(values) // len(fields) if fields else 0
        columns = [(field, values[index * width : (index + 1) * width]) for index, field in enumerate(fields)]
        return cls(delta, numbers.places[:], columns)

    def changed_places(self) -> Collection[int] | None:
        """Places of all GPUs that change; None for all."""
        if self.columns and not self.places:
            return None
        return {*self.places, *(one.place for one in self.delta.gpus)}


class Picture:
    """A snapshot that changes are merged into. `snapshot` is another message after some of them."""

    def __init__(self, snapshot: types_api.Snapshot) -> None:
        self.snapshot = snapshot
        # Held, since making an object for a part of a message costs more than changing it.
        self.readings = [gpu.reading for gpu in snapshot.gpus]

    def merge(self, change: Change) -> None:
        """Merge a change that fits."""
        snapshot, delta = self.snapshot, change.delta
        snapshot.seq = delta.seq
        snapshot.sample_time.CopyFrom(delta.sample_time)
        snapshot.age.CopyFrom(delta.age)
        cleared = delta.HasField("host") and _merge_host(delta.host, snapshot.host_reading)
        for one in delta.gpus:
            if _merge_gpu(one, snapshot.gpus[one.place]):
                cleared = True
        readings = [self.readings[place] for place in change.places] if change.places else self.readings
        for field, values in change.columns:
            name = _GPU_FIELDS[field]
            for reading, value in zip(
                readings, values if field in _FLOATS else map(int, values), strict=True
            ):
                setattr(reading, name, value)
        if cleared:  # a message keeps the memory of what was cleared in it, its copy does not
            copy = types_api.Snapshot()
            copy.CopyFrom(snapshot)
            self.snapshot = copy
            self.readings = [gpu.reading for gpu in copy.gpus]


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
