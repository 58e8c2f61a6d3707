"""What a snapshot, or what an agent says has changed, must be to be believed, beyond the rules of the contract.

Deltas are the hot path of the fleet: thousands come in each second. A whole snapshot passes the contract's full
validation. Of a delta, the numbers are compared with the range that the contract gives their field, a column at a time;
only what is no number, or out of its range, meets the full validation.
"""

from collections.abc import Mapping, Sequence
from math import isnan
from operator import add, le
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.api.types.v1 import options_pb2
from gpuscale.common.rpc.validation import number_range, violations
from gpuscale.monitor.wire.merging import NO_NUMBERS, Change, Numbers, Picture

LONGEST_PERIOD_SECONDS = 3600


def refuse_snapshot(snapshot: types_api.Snapshot, node: str, epoch: str) -> str:
    """Why a snapshot of a stream that began with this node and epoch is refused; empty if it is not."""
    problems = violations(snapshot)
    if problems:
        return f"{problems[0].field} {problems[0].description}"
    if snapshot.node != node or snapshot.epoch != epoch:
        return "its node and epoch are not those of Hello"
    if not snapshot.HasField("period") or snapshot.period.seconds > LONGEST_PERIOD_SECONDS:
        return "its period is not within an hour"
    seen: set[str] = set()
    for index, gpu in enumerate(snapshot.gpus):
        uuid = gpu.uuid.lower()
        if uuid in seen:
            return f"gpus[{index}] has the UUID of another one"
        seen.add(uuid)
    return refuse_memory(snapshot)


def refuse_memory(snapshot: types_api.Snapshot) -> str:
    """Why a GPU of a snapshot cannot have the memory that it shows; empty if all can."""
    for index, gpu in enumerate(snapshot.gpus):
        reading = gpu.reading
        if not reading.HasField("memory_total_bytes"):
            continue
        total = reading.memory_total_bytes
        if reading.memory_free_bytes > total:
            return f"gpus[{index}].reading.memory_free_bytes is above memory_total_bytes"
        # Free and used are read one after the other, and v1 records count reserved memory as used.
        if reading.memory_free_bytes + reading.memory_used_bytes > total * 1.05:
            return f"gpus[{index}].reading.memory_used_bytes and memory_free_bytes are above memory_total_bytes together"
    return ""


_GPU_STATES = frozenset(types_api.GpuState.values())
_MOST_INTEGER = {FieldDescriptor.CPPTYPE_INT32: 2**31 - 1, FieldDescriptor.CPPTYPE_INT64: 2**53}
_NANOS = 1_000_000_000
# The years 1 to 9999, as timestamp.proto has it.
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799


class _Kind:
    """A type of reading, by number of the field: the names of all, and the ranges of those that are numbers."""

    def __init__(self, kind: type[Message]) -> None:
        # Held, so that protobuf need not make an object for a field each time that it is listed.
        descriptor: Any = kind.DESCRIPTOR  # to the stubs one of two classes, by implementation
        self.fields: list[FieldDescriptor] = list(descriptor.fields)
        self.names = {field.number: field.name for field in self.fields}
        self.ranges: dict[int, tuple[float, float]] = {}
        for field in self.fields:
            within = _range(field)
            if within is not None:
                self.ranges[field.number] = within


def _range(field: FieldDescriptor) -> tuple[float, float] | None:
    """The values that a number may have; None for what is no number."""
    if field.is_repeated or field.message_type is not None:
        return None
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return 0, 1
    within = number_range(field, field.GetOptions().Extensions[options_pb2.rules])
    most = _MOST_INTEGER.get(field.cpp_type)
    return within if within is None or most is None else (max(within[0], -most), min(within[1], most))


_GPU = _Kind(types_api.GpuReading)
_HOST = _Kind(types_api.HostReading)
_MEMORY = _USED, _FREE, _TOTAL = tuple(
    types_api.GpuReading.DESCRIPTOR.fields_by_name[f"memory_{name}_bytes"].number
    for name in ("used", "free", "total")
)


def refuse_change(change: Change, base: Picture) -> str:
    """Why a change cannot follow `base`, whose seq it names; empty if it can. Changes nothing."""
    _, time_seconds, time_nanos, age_seconds, age_nanos = change.stamp
    if age_seconds < 0 or not 0 <= age_nanos < _NANOS:
        return "age must be at least 0 s"
    if not (_FIRST_SECOND <= time_seconds <= _LAST_SECOND and 0 <= time_nanos < _NANOS):
        return "sample_time must be a time within the years 1 to 9999"
    problem = _refuse_reading(_HOST, change.host) if change.host is not None else ""
    if problem:
        return f"host.{problem}"
    count, gpus = len(base.uuids), change.gpus
    if len(gpus) > count:
        return "gpus has more than there are"
    for index, one in enumerate(gpus):
        problem = _refuse_gpu(one, count)
        if problem:
            return f"gpus[{index}].{problem}"
    if change.numbers is not NO_NUMBERS:
        problem = _refuse_numbers(change.numbers, count)
        if problem:
            return f"numbers.{problem}"
    elif not gpus:
        return ""
    return _refuse_merged(change, base) if gpus or not _fits(change.numbers, base) else ""


def _refuse_gpu(change: api.GpuDelta, count: int) -> str:
    if not 0 <= change.place < count:
        return "place is that of no GPU"
    if change.state not in _GPU_STATES:
        return "state must be a value of GpuState"
    if change.HasField("quarantine"):
        problems = violations(change)
        if problems:
            return f"{problems[0].field} {problems[0].description}"
    return _refuse_reading(_GPU, change)


def _refuse_reading(kind: _Kind, change: api.GpuDelta | api.HostDelta) -> str:
    """Why readings cannot have changed like this; empty if they can."""
    ranges, reading, cleared = kind.ranges, change.reading, change.cleared_fields
    for field, value in reading.ListFields():
        within = ranges.get(field.number)
        if within is not None and within[0] <= value <= within[1]:
            continue
        if within is None and field.number not in cleared:
            return f"reading.{field.name} is not cleared first"
        problems = violations(reading)
        if problems:
            return f"reading.{problems[0].field} {problems[0].description}"
    if len(cleared) > len(kind.names) or any(number not in kind.names for number in cleared):
        return "cleared_fields names what is no field"
    return ""


def _refuse_numbers(numbers: Numbers, count: int) -> str:
    """Why these cannot be numbers of `count` GPUs; empty if they can."""
    places, fields, columns = numbers
    if places and not (min(places) >= 0 and max(places) < count):
        return "places has one that is that of no GPU"
    if not columns or len(columns[0]) != (len(places) or count):
        return "values has not one of each field for each GPU"
    # What is not a number is above and below nothing, but shows in a sum.
    any_nan = isnan(sum(map(sum, columns)))
    for number, values in zip(fields, columns, strict=True):
        within = _GPU.ranges.get(number)
        if within is None:
            return "fields has one that is no number"
        if min(values) < within[0] or max(values) > within[1] or (any_nan and isnan(sum(values))):
            return f"values has {_GPU.names[number]} beyond {within[0]:g} to {within[1]:g}"
    return ""


def _fits(numbers: Numbers, base: Picture) -> bool:
    """Whether memory in use and free is surely within the total; what is absent counts as 0."""
    _, fields, columns = numbers
    told = {number: columns[fields.index(number)] for number in _MEMORY if number in fields}
    if not told:
        return True
    used, free, total = [_memory(number, told, base, numbers.places) for number in _MEMORY]
    return all(map(le, map(add, used, free), total))


def _memory(
    number: int, told: Mapping[int, Sequence[float]], base: Picture, places: Sequence[int]
) -> Sequence[float]:
    """One figure of memory, after the change, of each GPU that its numbers are about."""
    if number in told:
        return told[number]
    known = base.memory_totals if number == _TOTAL else base.column(number)
    return [known[place] for place in places] if places else known


def _refuse_merged(change: Change, base: Picture) -> str:
    """The full check: validate the snapshot that the change leads to."""
    copy = types_api.Snapshot()
    copy.CopyFrom(base.snapshot)
    after = Picture(copy)
    after.merge(change)
    return refuse_memory(after.snapshot)
