"""Checks of single values: one compiled function for each kind of field and its rules.

The defaults are those that options.proto states for every field: texts of at most 1,024 characters without control or
invisible characters, finite numbers, defined enum values, and Duration and Timestamp within the range protobuf documents.
"""

import math
import re
import sys
from collections.abc import Callable
from typing import Any, Final
from unicodedata import category

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.types.v1 import options_pb2
from gpuscale.common.names import is_id, match, misfit

ValueCheck = Callable[[Any], str | None]
"""Returns what is wrong with a value, as words that follow the field's name; None when nothing is."""

Range = tuple[float, float]

NOT_SET: Final = "must be set"
MAX_LENGTH: Final = 1_024
MAX_LABEL_LENGTH: Final = 253

# Ranges that duration.proto and timestamp.proto document.
_MAX_DURATION_SECONDS: Final = 315_576_000_000
_MIN_TIMESTAMP_SECONDS: Final = -62_135_596_800
_MAX_TIMESTAMP_SECONDS: Final = 253_402_300_799
_MAX_NANOS: Final = 999_999_999
_LARGEST: Final = sys.float_info.max

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_INVISIBLE: Final = frozenset({"Cf", "Zl", "Zp"})
"""Unicode categories of zero-width and direction-turning characters: what is shown would not be what is stored."""
_DEVICE: Final = re.compile(r"[A-Za-z0-9._:/-]{1,253}")
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_INTEGERS: Final = frozenset(
    (
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    )
)
_FLOATS: Final = frozenset((FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE))


def value_check(field: FieldDescriptor, rules: options_pb2.FieldRules) -> ValueCheck | None:
    """The check of one value of a field; None where any value will do, or where the value is a message of its own."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _text_check(rules) if field.type == FieldDescriptor.TYPE_STRING else None
    if field.cpp_type in _FLOATS:
        return _float_check(rules)
    if field.cpp_type in _INTEGERS:
        return _bounds_check(rules)
    if field.enum_type is not None:
        return _enum_check(field.enum_type)
    if field.message_type is Duration.DESCRIPTOR:
        return _duration_check(rules)
    if field.message_type is Timestamp.DESCRIPTOR:
        return _timestamp_problem
    return None


def number_range(field: FieldDescriptor, rules: options_pb2.FieldRules) -> Range | None:
    """Values that a number or enum may certainly have, for a quick comparison; None where there is no such range."""
    if rules.required:
        return None
    if field.cpp_type in _FLOATS or field.cpp_type in _INTEGERS:
        low, high, above = _limits(rules)
        return max(low, math.nextafter(above, math.inf), -_LARGEST), min(high, _LARGEST)
    if field.enum_type is not None:
        numbers = field.enum_type.values_by_number
        contiguous = len(numbers) == max(numbers) - min(numbers) + 1
        return (min(numbers), max(numbers)) if contiguous else None
    return None


def plain_length(field: FieldDescriptor, rules: options_pb2.FieldRules) -> int | None:
    """Length up to which a printable text is certainly right; None where the text has to have a shape."""
    if field.type != FieldDescriptor.TYPE_STRING or rules.required or _shape_check(rules) is not None:
        return None
    return _longest(rules)


def _text_check(rules: options_pb2.FieldRules) -> ValueCheck:
    longest = _longest(rules)
    shape = _shape_check(rules)

    def text_problem(value: str) -> str | None:
        if len(value) > longest:
            return f"must have at most {longest} characters"
        if not value.isprintable():
            if _CONTROL.search(value):
                return "must not hold control characters"
            if any(category(character) in _INVISIBLE for character in value):
                return "must not hold invisible characters"
        return None if shape is None else shape(value)

    return text_problem


def _longest(rules: options_pb2.FieldRules) -> int:
    return rules.max_length if rules.HasField("max_length") else MAX_LENGTH


def _shape_check(rules: options_pb2.FieldRules) -> ValueCheck | None:
    if rules.resource:
        pattern = rules.resource
        return lambda value: None if match(pattern, value) is not None else misfit(pattern, value)
    return _SHAPES[rules.format]


def _uuid_problem(value: str) -> str | None:
    return None if _UUID.fullmatch(value) else "must be a UUID of 36 characters"


def _id_problem(value: str) -> str | None:
    return (
        None
        if is_id(value)
        else "must be 1-63 of a-z, 0-9, '-', '.' and '_', with a letter or digit at the ends"
    )


def _label_problem(value: str) -> str | None:
    if 0 < len(value) <= MAX_LABEL_LENGTH and value.isprintable() and value.strip() == value:
        return None
    return f"must be 1-{MAX_LABEL_LENGTH} printable characters without spaces at the ends"


def _device_problem(value: str) -> str | None:
    if _DEVICE.fullmatch(value):
        return None
    return "must be a UUID of a GPU: 1-253 of A-Z, a-z, 0-9, '-', '_', '.', ':' and '/'"


_SHAPES: Final[dict[int, ValueCheck | None]] = {
    options_pb2.TEXT_FORMAT_UNSPECIFIED: None,
    options_pb2.TEXT_FORMAT_UUID: _uuid_problem,
    options_pb2.TEXT_FORMAT_ID: _id_problem,
    options_pb2.TEXT_FORMAT_LABEL: _label_problem,
    options_pb2.TEXT_FORMAT_DEVICE: _device_problem,
}


def _limits(rules: options_pb2.FieldRules) -> tuple[float, float, float]:
    """`min`, `max` and `above`, infinite where they are not given."""
    return (
        rules.min if rules.HasField("min") else -math.inf,
        rules.max if rules.HasField("max") else math.inf,
        rules.above if rules.HasField("above") else -math.inf,
    )


def _bounds_check(rules: options_pb2.FieldRules, unit: str = "") -> ValueCheck | None:
    """The check of a finite number against `min`, `max` and `above`."""
    least, most, above = _limits(rules)
    if least == above == -math.inf and most == math.inf:
        return None

    def bounds_problem(value: float) -> str | None:
        if value < least:
            return f"must be at least {least:.15g}{unit}"
        if value > most:
            return f"must be at most {most:.15g}{unit}"
        return None if value > above else f"must be greater than {above:.15g}{unit}"

    return bounds_problem


def _float_check(rules: options_pb2.FieldRules) -> ValueCheck:
    bounds = _bounds_check(rules)

    def float_problem(value: float) -> str | None:
        if not math.isfinite(value):
            return "must be a finite number"
        return None if bounds is None else bounds(value)

    return float_problem


def _enum_check(enum: EnumDescriptor) -> ValueCheck:
    defined = frozenset(enum.values_by_number)
    return lambda value: None if value in defined else f"must be a value of {enum.name}"


def stated_check(enum: EnumDescriptor) -> ValueCheck:
    """The check of an item of a list of enum values: there, 0 does not stand for what was left out."""
    defined = frozenset(enum.values_by_number) - {0}
    return lambda value: None if value in defined else f"must be a value of {enum.name}, and not UNSPECIFIED"


def _duration_check(rules: options_pb2.FieldRules) -> ValueCheck:
    bounds = _bounds_check(rules, " s")

    def duration_problem(value: Duration) -> str | None:
        seconds, nanos = value.seconds, value.nanos
        if abs(seconds) > _MAX_DURATION_SECONDS or abs(nanos) > _MAX_NANOS or seconds * nanos < 0:
            return "must be a duration within 10,000 years, with seconds and nanos of one sign"
        return None if bounds is None else bounds(seconds + nanos / 1e9)

    return duration_problem


def _timestamp_problem(value: Timestamp) -> str | None:
    if _MIN_TIMESTAMP_SECONDS <= value.seconds <= _MAX_TIMESTAMP_SECONDS and 0 <= value.nanos <= _MAX_NANOS:
        return None
    return "must be a time within the years 1 to 9999, with nanos of 0 to 999,999,999"
