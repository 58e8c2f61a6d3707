"""The compiled checks say the same as the rules, read one by one, for any message."""

import math
import string
from functools import cache
from typing import Any
from unicodedata import category

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common import names
from gpuscale.common.rpc.validation import MAX_VIOLATIONS, FieldRules, rules_of, violations
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

KINDS = (
    allocator_api.ReserveRequest, autoscaler_api.CreateEndpointRequest, autoscaler_internal.Report,
    types_api.Snapshot, types_api.GpuReading,
)  # fmt: skip
TEXTS = st.sampled_from(
    [
        *("", "a", "A b", " a", "\x00", "a\u202e"), *("x" * length for length in (63, 64, 254, 1024, 1025)),
        *("nodes/a", "nodes/A", "endpoints/e", "endpoints/e/replicas/r", "watchers/w", "adapters/a"),
        "01234567-89ab-cdef-0123-456789abcdef",
    ]
)  # fmt: skip
EDGES = (
    -1, 0, 1, 5, 10, 32, 33, 50, 100, 101, 1000, 4096, 4097, 10_000, 10_001, 65_535, 65_536, 604_800, 604_801,
)  # fmt: skip
FLOATS = st.sampled_from([*map(float, EDGES), -math.inf, math.inf, math.nan, 5e-324, 99.999, 0.1])
SECONDS = st.sampled_from([*EDGES, 315_576_000_001, -62_135_596_801, 253_402_300_800])
NANOS = st.sampled_from([0, 1, -1, 100_000_000, 999_999_999, 1_000_000_000])


@st.composite
def messages(draw: st.DrawFn, kind: type[Message]) -> Message:
    message = kind()
    fill(draw, message, depth=0)
    return message


def fill(draw: st.DrawFn, message: Any, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()) or depth > 4:
            continue
        if is_map(field):
            entries, item = getattr(message, field.name), field.message_type.fields_by_name["value"]
            for key in draw(st.lists(TEXTS, max_size=2)):
                if item.message_type:
                    fill(draw, entries[key], depth + 1)
                else:
                    entries[key] = draw(scalars(item))
        elif field.message_type in (Duration.DESCRIPTOR, Timestamp.DESCRIPTOR):
            stamp = getattr(message, field.name)
            stamp.seconds, stamp.nanos = draw(SECONDS), draw(NANOS)
        elif field.message_type:
            part = getattr(message, field.name)
            for item in [part.add() for _ in range(draw(st.integers(0, 2)))] if field.is_repeated else [part]:
                item.SetInParent()
                fill(draw, item, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(scalars(field), max_size=3)))
        else:
            setattr(message, field.name, draw(scalars(field)))


@cache
def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return TEXTS
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    rules = rules_of(field)
    bounds = [bound for bound in (rules.min, rules.max, rules.above) if bound is not None]
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        near = [
            x for bound in bounds for x in (bound, math.nextafter(bound, -1e9), math.nextafter(bound, 1e9))
        ]
        return st.sampled_from(near) | FLOATS if near else FLOATS
    edges = st.sampled_from([*(int(bound) + step for bound in bounds for step in (-1, 0, 1)), *EDGES])
    unsigned = field.cpp_type in (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
    return edges.map(abs) if unsigned else edges


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def expected(message: Any, prefix: str = "") -> set[str]:
    """Paths of the fields that break a rule, found in the plainest way."""
    found: set[str] = set()
    for field in message.DESCRIPTOR.fields:
        rules = rules_of(field)
        path, value = prefix + field.name, getattr(message, field.name)
        if field.is_repeated:
            found |= expected_of_many(field, rules, path, value)
        elif field.has_presence and not message.HasField(field.name):
            found |= {path} if rules.required else set()
        elif rules.required and field.message_type is None and not value:
            found.add(path)
        elif value or field.has_presence or field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
            found |= below(value, rules, field, path)
    return found


def expected_of_many(field: FieldDescriptor, rules: Any, path: str, values: Any) -> set[str]:
    if rules.required and not values:
        return {path}
    if is_map(field):
        return set[str]().union(
            *(expected_of_entry(field, rules, path, key, value) for key, value in values.items())
        )
    found = {path} if rules.unique and len(set(values)) < len(values) else set()
    return found.union(*(below(item, rules, field, f"{path}[{index}]") for index, item in enumerate(values)))


def expected_of_entry(field: FieldDescriptor, rules: Any, path: str, key: str, value: Any) -> set[str]:
    """The rules are about the key; of them only `max_length` is about the value too."""
    key_field, value_field = (field.message_type.fields_by_name[part] for part in ("key", "value"))
    of_value = rules.values or FieldRules()
    path += f'["{shown(key)}"]'
    return below(key, rules, key_field, path) | below(value, of_value, value_field, path)


def below(value: Any, rules: FieldRules, field: FieldDescriptor, path: str) -> set[str]:
    if field.message_type and field.message_type not in (Duration.DESCRIPTOR, Timestamp.DESCRIPTOR):
        return expected(value, path + ".")
    return {path} if breaks(value, rules, field) else set()


def breaks(value: Any, rules: FieldRules, field: FieldDescriptor) -> bool:
    if isinstance(value, str):
        return text_breaks(value, rules)
    if field.enum_type:
        return value not in field.enum_type.values_by_number
    if field.message_type is Duration.DESCRIPTOR:
        seconds, nanos = value.seconds, value.nanos
        if (
            abs(seconds) > 315_576_000_000
            or abs(nanos) >= 10**9
            or seconds < 0 < nanos
            or nanos < 0 < seconds
        ):
            return True
        value = seconds + nanos / 10**9
    elif field.message_type is Timestamp.DESCRIPTOR:
        return not (-62_135_596_800 <= value.seconds <= 253_402_300_799 and 0 <= value.nanos < 10**9)
    return (
        not math.isfinite(value)
        or (rules.min is not None and value < rules.min)
        or (rules.max is not None and value > rules.max)
        or (rules.above is not None and value <= rules.above)
    )


DEVICE = frozenset(string.ascii_letters + string.digits + "-_.:/")


def text_breaks(text: str, rules: FieldRules) -> bool:
    hidden = any(
        ord(one) < 32 or 127 <= ord(one) < 160 or category(one) in {"Cf", "Zl", "Zp"} for one in text
    )
    if hidden or len(text) > (1024 if rules.max_length is None else rules.max_length):
        return True
    if rules.resource:
        return names.match(rules.resource, text) is None
    if rules.format == "uuid":
        return len(text) != 36 or text.count("-") != 4
    if rules.format == "id":
        return not names.is_id(text)
    if rules.format == "device":
        return not text or len(text) > 253 or not set(text) <= DEVICE
    return rules.format == "label" and (
        not text or len(text) > 253 or text != text.strip() or not text.isprintable()
    )


def shown(key: str) -> str:
    cut = key if len(key) <= 64 else key[:64] + "..."
    return cut.encode("unicode_escape").decode("ascii")


@settings(max_examples=settings().max_examples * 2)
@given(st.data())
def test_the_violations_are_those_of_the_rules(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    message = data.draw(messages(kind))
    found = violations(message)
    paths = {violation.field for violation in found}
    if len(found) < MAX_VIOLATIONS:
        assert paths == expected(message)
    else:
        assert paths <= expected(message)


@settings(max_examples=settings().max_examples * 2)
@given(kind=st.sampled_from(KINDS), raw=st.binary(max_size=200))
def test_any_bytes_that_decode_can_be_checked(kind: type[Message], raw: bytes) -> None:
    try:
        message = kind.FromString(raw)
    except DecodeError:
        return
    assert len(violations(message)) <= MAX_VIOLATIONS
