"""What changed from one snapshot to the next, for a receiver that was sent the one before.

A GPU (or the host) is named once any of its readings has moved by more than its dead-band from what the receiver has, and
then it is given exactly. So what the receiver has of a GPU is always one reading of it as it was, never a mixture of two,
and no value drifts further than its band. Whatever is not a reading (which GPUs there are, what they are) is seldom
different, and then the whole snapshot is sent.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.monitor.agent.dead_bands import DeadBands, Difference, Listed, difference

# Held, so that protobuf need not make an object for a field each time that it is listed.
_FIELDS = [*types_api.GpuReading.DESCRIPTOR.fields, *types_api.HostReading.DESCRIPTOR.fields]
_NUMBERS = frozenset(
    field.number
    for field in types_api.GpuReading.DESCRIPTOR.fields
    if field.message_type is None
    and not field.is_repeated
    and field.cpp_type != FieldDescriptor.CPPTYPE_STRING
)
# Beyond this a double does not hold every integer.
_LARGEST_INTEGER = 2**53


@dataclass(frozen=True, slots=True)
class _SentGpu:
    """What the receiver has of a GPU."""

    state: int
    quarantine: str
    reading: Listed


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the receiver has: the number, all that is no reading, and the readings."""

    seq: int
    frame: bytes
    host: Listed
    gpus: list[_SentGpu]


class Deltas:
    """Follows one receiver, and says what to send it.

    Args:
        bands: how far readings may move untold.
        full_every: seconds after which a whole snapshot is sent again.
    """

    def __init__(self, bands: DeadBands, full_every: float) -> None:
        self._host_bands = bands.by_number(types_api.HostReading)
        self._gpu_bands = bands.by_number(types_api.GpuReading)
        self._full_every = full_every
        self._full_at = 0.0
        self._sent: _Sent | None = None

    def reset(self) -> None:
        """The receiver has nothing that can be built upon."""
        self._sent = None

    def next(self, snapshot: types_api.Snapshot, now: float) -> monitor_api.SnapshotDelta | None:
        """What leads from the snapshot before to this one; None where the whole has to be sent. It counts as sent."""
        frame, sent = _frame(snapshot), self._sent
        if sent is None or sent.frame != frame or now - self._full_at >= self._full_every:
            whole = [_SentGpu(gpu.state, gpu.quarantine, gpu.reading.ListFields()) for gpu in snapshot.gpus]
            self._sent = _Sent(snapshot.seq, frame, snapshot.host_reading.ListFields(), whole)
            self._full_at = now
            return None
        changes = _Changes(snapshot, sent.seq)
        host = self._host(changes.delta, sent.host, snapshot)
        gpus = [self._gpu(changes, place, sent.gpus[place], gpu) for place, gpu in enumerate(snapshot.gpus)]
        self._sent = _Sent(snapshot.seq, frame, host, gpus)
        return changes.finished(len(gpus))

    def _host(self, delta: monitor_api.SnapshotDelta, sent: Listed, snapshot: types_api.Snapshot) -> Listed:
        found = difference(sent, snapshot.host_reading.ListFields(), self._host_bands)
        if found is None:
            return sent
        delta.host.reading.SetInParent()
        delta.host.cleared_fields.extend(found.cleared)
        for field, value in found.changed:
            if _tell(delta.host.reading, field, value):
                delta.host.cleared_fields.append(field.number)
        return found.listed

    def _gpu(self, changes: "_Changes", place: int, sent: _SentGpu, gpu: types_api.Gpu) -> _SentGpu:
        found = difference(sent.reading, gpu.reading.ListFields(), self._gpu_bands)
        same = sent.state == gpu.state and sent.quarantine == gpu.quarantine
        if found is None and same:
            return sent
        found = found or Difference(sent.reading, [], [])
        change = monitor_api.GpuDelta(place=place, cleared_fields=found.cleared)
        if sent.state != gpu.state:
            change.state = gpu.state
        if sent.quarantine != gpu.quarantine:
            change.quarantine = gpu.quarantine
        changes.named.append((change, found))
        return _SentGpu(gpu.state, gpu.quarantine, found.listed)


class _Changes:
    """A delta in the making, and the GPUs that it names: what is told of each alone, and how its reading differs."""

    def __init__(self, snapshot: types_api.Snapshot, base_seq: int) -> None:
        self.delta = monitor_api.SnapshotDelta(
            seq=snapshot.seq, base_seq=base_seq, sample_time=snapshot.sample_time, age=snapshot.age
        )
        self.named: list[tuple[monitor_api.GpuDelta, Difference]] = []

    def finished(self, gpu_count: int) -> monitor_api.SnapshotDelta:
        """The delta of a snapshot with so many GPUs."""
        together = self._tell_together(gpu_count) if self.named else frozenset[int]()
        for change, found in self.named:
            for field, value in found.changed:
                if field.number not in together and _tell(change.reading, field, value):
                    change.cleared_fields.append(field.number)
            if _says_something(change):
                self.delta.gpus.append(change)
        return self.delta

    def _tell_together(self, gpu_count: int) -> AbstractSet[int]:
        """Put numbers that all GPUs have whose readings differ into one table; the fields that were."""
        places = [change.place for change, found in self.named if found.changed]
        readings = [
            {field.number: value for field, value in found.listed} for _, found in self.named if found.changed
        ]
        changed = {field.number for _, found in self.named for field, _ in found.changed}
        fields = sorted(
            number for number in changed & _NUMBERS if all(_fits(values.get(number)) for values in readings)
        )
        if fields:
            self.delta.numbers.fields.extend(fields)
            if len(places) < gpu_count:
                self.delta.numbers.places.extend(places)
            self.delta.numbers.values.extend(values[number] for number in fields for values in readings)
        return frozenset(fields)


def _fits(value: float | None) -> bool:
    """Whether a number is there, and is one that a double holds exactly."""
    return value is not None and (isinstance(value, float) or abs(value) <= _LARGEST_INTEGER)


def _says_something(change: monitor_api.GpuDelta) -> bool:
    return bool(
        change.state or change.HasField("quarantine") or change.cleared_fields or change.HasField("reading")
    )


def _frame(snapshot: types_api.Snapshot) -> bytes:
    """All of a snapshot that a delta cannot tell."""
    frame = types_api.Snapshot()
    frame.CopyFrom(snapshot)
    _clear(frame, ("seq", "sample_time", "age", "host_reading"))
    for gpu in frame.gpus:
        _clear(gpu, ("state", "quarantine", "reading"))
    return frame.SerializeToString(deterministic=True)


def _clear(message: Message, names: Iterable[str]) -> None:
    for name in names:
        message.ClearField(name)


def _tell(told: Message, field: FieldDescriptor, value: Any) -> bool:
    """Copy a field; whether it is none that merging would replace, and so has to be cleared by the receiver."""
    if field.is_repeated:
        getattr(told, field.name).MergeFrom(value)
    elif field.message_type is not None:
        getattr(told, field.name).CopyFrom(value)
    else:
        setattr(told, field.name, value)
        return field.cpp_type == FieldDescriptor.CPPTYPE_STRING
    return True
