"""Validation of snapshots and deltas, by the contract and beyond.

Whole snapshots get the contract's full validation. Deltas are the fleet's hot path, with thousands a second: their numbers are
checked a column at a time against the range of their field, and only other values, or those out of range, get full validation.

Unknown enum values, from newer agents, count as OTHER or unset.
"""

from collections.abc import Sequence
from math import inf, isnan
from operator import add, le
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.validation import forget_unknown, number_range, rules_of, violations
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.wire import MOST_FIELDS, NO_NUMBERS, Change, Numbers, Picture

LONGEST_PERIOD_SECONDS = 3600


def broken_rule(message: Message) -> str:
    """The first rule of the contract that a message breaks, without unknown enum values; empty if none."""
    problems = violations(message)
    if problems:
        forget_unknown(message)
        problems = violations(message)
    return f"{problems[0].field} {problems[0].description}" if problems else ""


def refuse_snapshot(snapshot: types_api.Snapshot, node: str, epoch: str) -> str:
    """Why a snapshot is refused in a stream of this node and epoch; empty if it is valid."""
    problem = broken_rule(snapshot)
    if problem:
        return problem
    if snapshot.node != node or snapshot.epoch != epoch:
        return "its node and epoch are not those of Hello"
    if not snapshot.HasField("period") or snapshot.period.seconds > LONGEST_PERIOD_SECONDS:
        return "its period must be at most an hour"
    seen: set[str] = set()
    for index, gpu in enumerate(snapshot.gpus):
        uuid = gpu.uuid.lower()
        if uuid in seen:
            return f"gpus[{index}] has the UUID of another one"
        seen.add(uuid)
    return refuse_memory(snapshot)


def refuse_memory(snapshot: types_api.Snapshot) -> str:
    """Why the memory of a GPU in a snapshot is impossible; empty if it is not."""
    for index, gpu in enumerate(snapshot.gpus):
        reading = gpu.reading
        if not reading.HasField("memory_total_bytes"):
            continue
        total = reading.memory_total_bytes
        if reading.memory_free_bytes > total:
            return f"gpus[{index}].reading.memory_free_bytes is above memory_total_bytes"
        # Tolerant, since free and used are read one after the other and v1 records count reserved memory as used.
        if reading.memory_free_bytes + reading.memory_used_bytes > total * 1.05:
            return f"gpus[{index}].reading.memory_used_bytes and memory_free_bytes are above memory_total_bytes together"
    return ""


_GPU_STATES = frozenset(types_api.GpuState.values())
_MOST_INTEGER = {FieldDescriptor.CPPTYPE_INT32: 2**31 - 1, FieldDescriptor.CPPTYPE_INT64: 2**53}
_NANOS = 1_000_000_000
# The years 1 to 9999, the range of timestamp.proto.
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799


class _Kind:
    """The fields of a kind of reading by number: all names, and the ranges of numeric ones."""

    def __init__(self, kind: type[Message]) -> None:
        # Kept, since protobuf makes new objects each time fields are listed.
        descriptor: Any = kind.DESCRIPTOR  # its class depends on the implementation
        self.fields: list[FieldDescriptor] = list(descriptor.fields)
        self.names = {field.number: field.name for field in self.fields}
        self.ranges: dict[int, tuple[float, float]] = {}
        for field in self.fields:
            if field.is_repeated or field.message_type is not None:
                continue
            if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
                self.ranges[field.number] = 0, 1
                continue
            within = number_range(field, rules_of(field))
            most = _MOST_INTEGER.get(field.cpp_type, inf)
            if within is not None:
                self.ranges[field.number] = max(within[0], -most), min(within[1], most)


_GPU = _Kind(types_api.GpuReading)
_HOST = _Kind(types_api.HostReading)
_MEMORY = _USED, _FREE, _TOTAL = tuple(
    types_api.GpuReading.DESCRIPTOR.fields_by_name[f"memory_{name}_bytes"].number
    for name in ("used", "free", "total")
)


def refuse_change(change: Change, base: Picture) -> str:
    """Why a change of `base` is refused; empty if it is valid. Modifies neither."""
    _, time_seconds, time_nanos, age_seconds, age_nanos = change.stamp
    if age_seconds < 0 or not 0 <= age_nanos < _NANOS:
        return "age must be at least 0 s"
    if not (_FIRST_SECOND <= time_seconds <= _LAST_SECOND and 0 <= time_nanos < _NANOS):
        return "sample_time must be a time within the years 1 to 9999"
    problem = _refuse_reading(_HOST, change.host) if change.host is not None else ""
    if problem:
        return f"host.{problem}"
    if len(change.gpus) > len(base.uuids):
        return "gpus has more than the node"
    for index, gpu in enumerate(change.gpus):
        if not 0 <= gpu.place < len(base.uuids):
            return f"gpus[{index}].place is out of range"
        if gpu.state not in _GPU_STATES:
            gpu.state = types_api.GpuState.GPU_STATE_OTHER
        problem = broken_rule(gpu) if gpu.HasField("quarantine") else ""
        if problem := problem or _refuse_reading(_GPU, gpu):
            return f"gpus[{index}].{problem}"
    problem = _refuse_numbers(change.numbers, len(base.uuids)) if change.numbers is not NO_NUMBERS else ""
    if problem:
        return f"numbers.{problem}"
    if not change.gpus and (change.numbers is NO_NUMBERS or _fits(change.numbers, base)):
        return ""
    copy = types_api.Snapshot()
    copy.CopyFrom(base.snapshot)
    after = Picture(copy)
    after.merge(change)
    return refuse_memory(after.snapshot)


def _refuse_reading(kind: _Kind, change: monitor_internal.GpuDelta | monitor_internal.HostDelta) -> str:
    """Why changed readings are invalid; empty if they are not."""
    ranges, reading, cleared = kind.ranges, change.reading, change.cleared_fields
    for field, value in reading.ListFields():
        within = ranges.get(field.number)
        if within is not None and within[0] <= value <= within[1]:
            continue
        if within is None and field.number not in cleared:
            return f"reading.{field.name} is not cleared first"
        problem = broken_rule(reading)
        if problem:
            return f"reading.{problem}"
    return f"cleared_fields has more than {MOST_FIELDS}" if len(cleared) > MOST_FIELDS else ""


def _refuse_numbers(numbers: Numbers, count: int) -> str:
    """Why a table of numbers of `count` GPUs is invalid; empty if it is not."""
    places, fields, columns, _ = numbers
    if places and not 0 <= min(places) <= max(places) < count:
        return "places has one out of range"
    if not columns or len(columns[0]) != (len(places) or count):
        return "values must have one for each field and GPU"
    # NaN passes comparisons, but shows in a sum.
    any_nan = isnan(sum(map(sum, columns)))
    for number, values in zip(fields, columns, strict=True):
        within = _GPU.ranges.get(number)
        if within is None:
            return "fields has one that is not numeric"
        if min(values) < within[0] or max(values) > within[1] or (any_nan and isnan(sum(values))):
            return f"values has {_GPU.names[number]} beyond {within[0]:g} to {within[1]:g}"
    return ""


def _fits(numbers: Numbers, base: Picture) -> bool:
    """Whether used and free memory surely fit in the total; absent values count as 0."""
    _, fields, columns, _ = numbers
    told = {number: columns[fields.index(number)] for number in _MEMORY if number in fields}
    if not told:
        return True
    after: list[Sequence[float]] = []
    for number in _MEMORY:
        known = told.get(number)
        if known is None:
            column = base.column(number)
            known = [column[place] for place in numbers.places] if numbers.places else column
        after.append(known)
    used, free, total = after
    return all(map(le, map(add, used, free), total))
