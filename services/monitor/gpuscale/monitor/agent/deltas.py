"""Changes between snapshots, for a receiver that has the one before.

Once a reading of a GPU or the host moves by more than its dead-band from what the receiver has, all changed readings of it are
sent. So the receiver always has one actual reading, never a mixture, and no value drifts beyond its band. Any change that is not
of a reading takes a whole snapshot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import is_not
from typing import Any

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration, to_timestamp
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.model.readings import GpuReading, GpuState, GpuView, HostReading, Quarantine, Snapshot
from gpuscale.monitor.wire import GPU_STATES, PUT_ALONE, put, text

Bands = tuple[float, ...]
"""The dead-band of each field of a reading, in order; 0 sends every change."""


BANDS = {
    "percent": 0.5,
    "bytes": 1024.0 * 1024.0,
    "celsius": 0.5,
    "watts": 1.0,
    "mhz": 15.0,
    "joules": 1000.0,
}
"""How far a reading may move before it is sent, by its unit, the last word of its name. Others always are."""
AGE_BAND = 0.25
"""The same of the age of readings, in seconds."""


def bands_of(fields: Iterable[str]) -> Bands:
    """The bands of these fields."""
    return tuple(BANDS.get(name.rpartition("_")[2], 0.0) for name in fields)


def moves(before: Sequence[object], after: Sequence[object], bands: Bands) -> list[int]:
    """Indexes of all readings that differ, if one moved by more than its dead-band; else empty."""
    others = compress(count(), map(is_not, before, after))  # soonest told, and most are the same object
    differ = [place for place in others if before[place] != after[place]]
    return [] if all(is_near(before[place], after[place], bands[place]) for place in differ) else differ


def is_near(before: object, after: object, band: float) -> bool:
    """Whether both are absent, or both are numbers within a dead-band of each other."""
    if before is None or after is None:
        return before is after
    if isinstance(before, int | float) and isinstance(after, int | float):
        return abs(after - before) <= band
    return False


_GPU_FIELDS = types_api.GpuReading.DESCRIPTOR.fields_by_name
# Field numbers of numeric readings by index.
_NUMBERS = {
    place: _GPU_FIELDS[name].number for place, name in enumerate(GpuReading._fields) if name not in PUT_ALONE
}
_KINDS = frozenset({float, int, bool})
# Above this, a double does not hold every integer.
_LARGEST = 2**53


@dataclass(frozen=True, slots=True)
class _SentHost:
    reading: HostReading
    age: float | None


@dataclass(frozen=True, slots=True)
class _SentGpu:
    state: GpuState
    quarantine: Quarantine | None
    reading: GpuReading
    age: float | None


@dataclass(frozen=True, slots=True)
class _Sent:
    """What the receiver has; `frame` is everything that a delta cannot change."""

    seq: int
    frame: tuple[object, ...]
    host: _SentHost
    gpus: list[_SentGpu]


_Change = tuple[monitor_internal.GpuDelta, GpuReading, Sequence[int]]
"""A changed GPU, its reading, and the indexes of readings that differ."""


class Deltas:
    """Computes what to send one receiver; a whole snapshot every `full_every` seconds."""

    def __init__(self, full_every: float) -> None:
        self._host_bands = bands_of(HostReading._fields)
        self._gpu_bands = bands_of(GpuReading._fields)
        self._full_every = full_every
        self._full_at = 0.0
        self._full_until = float("-inf")
        self._sent: _Sent | None = None

    def reset(self) -> None:
        """Send a whole snapshot next."""
        self._sent = None

    def refused(self, now: float) -> None:
        """Send whole snapshots for `full_every` seconds: a fleet of an earlier version may not know a number that changes."""
        self._full_until = now + self._full_every

    def next(self, snapshot: Snapshot, now: float) -> monitor_internal.SnapshotDelta | None:
        """The change since the last call, as of `now`; None if the whole snapshot must be sent."""
        sent = self._sent
        frame = (
            snapshot.node,
            snapshot.epoch,
            snapshot.period,
            snapshot.host,
            snapshot.driver_version,
            snapshot.cuda_version,
            snapshot.gpu_problem,
            snapshot.simulated,
            snapshot.labels,
            tuple([(view.identity, view.pods) for view in snapshot.gpus]),
        )
        full = now < self._full_until or now - self._full_at >= self._full_every
        if full or sent is None or sent.frame != frame:
            host = _SentHost(snapshot.host_reading, _age(snapshot.host_read_at, now))
            gpus = [
                _SentGpu(view.state, view.quarantine, view.reading, _age(view.read_at, now))
                for view in snapshot.gpus
            ]
            self._sent = _Sent(snapshot.seq, frame, host, gpus)
            self._full_at = now
            return None
        delta = monitor_internal.SnapshotDelta(
            seq=snapshot.seq,
            base_seq=sent.seq,
            sample_time=to_timestamp(snapshot.sample_time),
            age=to_duration(now - snapshot.taken_at),
        )
        host, reading, age = sent.host, snapshot.host_reading, _age(snapshot.host_read_at, now)
        differ = moves(host.reading, reading, self._host_bands)
        aged = not is_near(host.age, age, AGE_BAND)
        if differ or aged:
            delta.host.reading.SetInParent()
            for place in differ:
                name = HostReading._fields[place]
                delta.host.cleared_fields.extend(put(delta.host.reading, name, reading[place]))
            if aged:
                delta.host.cleared_fields.extend(put(delta.host.reading, "age", age))
            host = _SentHost(reading if differ else host.reading, age if aged else host.age)
        changes: list[_Change] = []
        gpus = [
            self._gpu(changes, place, before, view, now)
            for place, (before, view) in enumerate(zip(sent.gpus, snapshot.gpus, strict=True))
        ]
        if changes:
            _tell(delta, changes, len(gpus))
        self._sent = _Sent(snapshot.seq, frame, host, gpus)
        return delta

    def _gpu(self, changes: list[_Change], place: int, sent: _SentGpu, view: GpuView, now: float) -> _SentGpu:
        reading, age = view.reading, _age(view.read_at, now)
        differ = moves(sent.reading, reading, self._gpu_bands)
        aged = not is_near(sent.age, age, AGE_BAND)
        same = sent.state is view.state and sent.quarantine == view.quarantine
        if not differ and not aged and same:
            return sent
        change = monitor_internal.GpuDelta(place=place)
        if sent.state is not view.state:
            change.state = GPU_STATES[view.state]
        if sent.quarantine != view.quarantine:
            change.quarantine = ""
            if view.quarantine is not None:
                change.quarantine = text(view.quarantine.reason)
                change.quarantine_time.CopyFrom(to_timestamp(view.quarantine.since))
        if aged:
            change.cleared_fields.extend(put(change.reading, "age", age))
        changes.append((change, reading, differ))
        return _SentGpu(
            view.state, view.quarantine, reading if differ else sent.reading, age if aged else sent.age
        )


def _tell(delta: monitor_internal.SnapshotDelta, changes: Sequence[_Change], gpu_count: int) -> None:
    """Write changes into a delta: numbers that all changed GPUs have as a table, the rest GPU by GPU."""
    moved = [(change.place, reading) for change, reading, differ in changes if differ]
    differ_anywhere = set[int]().union(*(differ for _, _, differ in changes))
    columns = set[int]()
    for column in sorted(differ_anywhere & _NUMBERS.keys()):
        values: list[Any] = [reading[column] for _, reading in moved]
        if _KINDS.issuperset(map(type, values)) and -_LARGEST <= min(values) <= max(values) <= _LARGEST:
            columns.add(column)
            delta.numbers.fields.append(_NUMBERS[column])
            delta.numbers.values.extend(values)
    if columns and len(moved) < gpu_count:
        delta.numbers.places.extend(place for place, _ in moved)
    for change, reading, differ in changes:
        for place in differ:
            if place not in columns:
                change.cleared_fields.extend(put(change.reading, GpuReading._fields[place], reading[place]))
        if any(
            (change.state, change.HasField("quarantine"), change.cleared_fields, change.HasField("reading"))
        ):
            delta.gpus.append(change)


def _age(read_at: float | None, now: float) -> float | None:
    return None if read_at is None else now - read_at
