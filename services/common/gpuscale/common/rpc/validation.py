"""Validates messages against the annotations of the contract, read into `FieldRules`, and its defaults.

The checks of a message type are compiled at its first message. The interceptor validates every request except messages of
request streams: of these, a service may drop an invalid one instead of failing the call, so it calls `violations` itself.

The defaults, from rules.proto: texts have at most 1,024 characters, none of them control or invisible characters; numbers
are finite; enum values are defined; Duration and Timestamp are within the range that protobuf documents.

Services check what spans several fields, such as that a oneof is set or min is not above max. A required number without
presence must not be 0, which the wire cannot tell from absent.
"""

import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, itemgetter, le
from types import SimpleNamespace
from typing import Any, Final, TypeVar
from unicodedata import category

from google.protobuf import descriptor_pb2, duration_pb2, field_mask_pb2, message_factory, timestamp_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import FieldViolation, InvalidArgumentError
from gpuscale.common.names import ID_PATTERN, PATTERNS, expression, is_id, misfit
from gpuscale.common.sizes import duration_text
from gpuscale.common.wire import merge

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Rules of a field, or of the keys of a map; None or empty if not set."""

    required: bool = False  # must be set, not empty, not an UNSPECIFIED enum value
    min: float | None = None  # inclusive minimum; `min`, `above` and `max` of a Duration are in seconds
    above: float | None = None  # exclusive minimum
    max: float | None = None  # inclusive maximum
    max_length: int | None = None  # characters or bytes
    max_items: int | None = None  # items of a list or map
    unique: bool = False  # no duplicates in the list
    format: str = ""  # of the text, list items or map keys: a TextFormat of rules.proto, or `uuid`
    resource: str = ""  # pattern of resource names
    values: "FieldRules | None" = None  # rules of map values


_WORDS: Final = {"required": "required", "gte": "min", "gt": "above", "lte": "max", "max_len": "max_length"}
_WORDS.update({"max_items": "max_items", "max_pairs": "max_items", "unique": "unique"})


def rules_of(field: FieldDescriptor) -> FieldRules:
    """The rules of a field; KeyError for an unsupported one."""
    owner: Any = field.containing_type  # optional in the stubs
    known = annotations()
    said = known.field.FromString(field.GetOptions().SerializeToString())
    found = dict(_read(said.Extensions[known.rules]))
    kind = said.Extensions[known.reference].type
    if known.identifier in said.Extensions[known.behavior]:
        kind = (
            known.message.FromString(owner.GetOptions().SerializeToString()).Extensions[known.resource].type
        )
    found["resource"] = PATTERNS.get(kind.rpartition("/")[2], "")
    return FieldRules(**found)


def _read(rules: Any) -> Iterator[tuple[str, Any]]:
    """Convert a FieldRules message, or its part for a type, to arguments of `FieldRules`."""
    for field, value in rules.ListFields():
        if field.is_extension:
            yield "format", field.enum_type.values_by_number[value].name.removeprefix("TEXT_FORMAT_").lower()
        elif field.name == "uuid":
            yield "format", "uuid"
        elif field.name == "values":
            yield "values", FieldRules(**dict(_read(value)))
        elif field.name == "ignore":
            pass  # an empty optional text always counts as unset
        elif field.message_type is None:
            yield _WORDS[field.name], value
        elif field.message_type.full_name == "google.protobuf.Duration":
            yield _WORDS[field.name], value.seconds + value.nanos / 1e9
        else:
            yield from _read(value)


@cache
def annotations() -> Any:
    """The descriptors of the annotations, in a separate pool: the default one may have another version from a user's stubs."""
    pool: Any = DescriptorPool()  # stubs are incomplete
    for known in (descriptor_pb2, duration_pb2, field_mask_pb2, timestamp_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    data = pkgutil.get_data("gpuscale.api", "contract.binpb")  # importlib.resources takes 0.3 MB
    if data is None:
        raise FileNotFoundError("gpuscale.api has no contract.binpb: install the package again")
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        if file.package in {"buf.validate", "google.api"} or file.name.endswith("/rules.proto"):
            pool.AddSerializedFile(file.SerializeToString())
    behavior = pool.FindExtensionByName("google.api.field_behavior")
    return SimpleNamespace(
        field=message_factory.GetMessageClass(pool.FindMessageTypeByName("google.protobuf.FieldOptions")),
        message=message_factory.GetMessageClass(pool.FindMessageTypeByName("google.protobuf.MessageOptions")),
        rules=pool.FindExtensionByName("buf.validate.field"),
        behavior=behavior,
        reference=pool.FindExtensionByName("google.api.resource_reference"),
        resource=pool.FindExtensionByName("google.api.resource"),
        identifier=behavior.enum_type.values_by_name["IDENTIFIER"].number,
    )


ValueCheck = Callable[[Any], str | None]
"""Returns the problem with a value, as text to follow the field name, or None."""

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
"""Unicode categories of zero-width and bidirectional control characters, which would hide what is stored."""
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


def value_check(field: FieldDescriptor, rules: FieldRules) -> ValueCheck | None:
    """The check of one value of a field; None for no check, or for a message."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_STRING:
            return _text_check(rules)
        most, too_many = rules.max_length, f"must have at most {rules.max_length} bytes"
        return (lambda value: too_many if len(value) > most else None) if most else None
    if field.cpp_type in _FLOATS:
        return _number_check(rules)
    if field.cpp_type in _INTEGERS:
        return None if _limits(rules) == _NO_LIMITS else _number_check(rules)
    if field.enum_type is not None:
        defined, problem = (
            frozenset(field.enum_type.values_by_number),
            f"must be a value of {field.enum_type.name}",
        )
        return lambda value: None if value in defined else problem
    if field.message_type is Duration.DESCRIPTOR:
        bounds = _number_check(rules, duration_text)

        def duration_problem(value: Duration) -> str | None:
            seconds, nanos = value.seconds, value.nanos
            if abs(seconds) > _MAX_DURATION_SECONDS or abs(nanos) > _MAX_NANOS or seconds * nanos < 0:
                return "must be a duration within 10,000 years, with seconds and nanos of one sign"
            return bounds(seconds + nanos / 1e9)

        return duration_problem
    if field.message_type is Timestamp.DESCRIPTOR:
        return lambda value: (
            None
            if _MIN_TIMESTAMP_SECONDS <= value.seconds <= _MAX_TIMESTAMP_SECONDS
            and 0 <= value.nanos <= _MAX_NANOS
            else "must be a time within the years 1 to 9999, with nanos of 0 to 999,999,999"
        )
    return None


def number_range(field: FieldDescriptor, rules: FieldRules) -> Range | None:
    """A range in which a number or enum is valid, for a fast check; None without one."""
    if rules.required:
        return None
    if field.cpp_type in _FLOATS or field.cpp_type in _INTEGERS:
        return _finite_range(rules)
    if field.enum_type is not None:
        numbers = field.enum_type.values_by_number
        contiguous = len(numbers) == max(numbers) - min(numbers) + 1
        return (min(numbers), max(numbers)) if contiguous else None
    return None


def _text_check(rules: FieldRules) -> ValueCheck:
    longest = MAX_LENGTH if rules.max_length is None else rules.max_length
    pattern = rules.resource
    is_name = expression(pattern).fullmatch if pattern else None
    or_id = rules.format == "name_or_id"  # from older clients
    fits, problem = _SHAPES.get(rules.format, (None, ""))
    plain = rules.format != "any"

    def text_problem(value: str) -> str | None:
        if len(value) > longest:
            return f"must have at most {longest} characters"
        if plain and not value.isprintable():
            if _CONTROL.search(value):
                return "must not hold control characters"
            if any(category(character) in _INVISIBLE for character in value):
                return "must not hold invisible characters"
        if is_name is not None:
            return None if is_name(value) or (or_id and is_id(value)) else misfit(pattern, value)
        return None if fits is None or fits(value) else problem

    return text_problem


_SHAPES: Final[Mapping[str, tuple[Callable[[str], object], str]]] = {
    "uuid": (_UUID.fullmatch, "must be a UUID of 36 characters"),
    "id": (
        ID_PATTERN.fullmatch,
        "must be 1-63 of a-z, 0-9, '-', '.' and '_', with a letter or digit at the ends",
    ),
    "label": (
        lambda text: 0 < len(text) <= MAX_LABEL_LENGTH and text.isprintable() and text.strip() == text,
        f"must be 1-{MAX_LABEL_LENGTH} printable characters without spaces at the ends",
    ),
    "device": (
        _DEVICE.fullmatch,
        "must be a UUID of a GPU: 1-253 of A-Z, a-z, 0-9, '-', '_', '.', ':' and '/'",
    ),
}
"""By format, a predicate and the problem if it is false."""


_NO_LIMITS: Final = (-math.inf, math.inf, -math.inf)


def _limits(rules: FieldRules) -> tuple[float, float, float]:
    """`min`, `max` and `above`, infinite by default."""
    return (
        -math.inf if rules.min is None else rules.min,
        math.inf if rules.max is None else rules.max,
        -math.inf if rules.above is None else rules.above,
    )


def _finite_range(rules: FieldRules) -> Range:
    low, high, above = _limits(rules)
    return max(low, math.nextafter(above, math.inf), -_LARGEST), min(high, _LARGEST)


def _number_check(rules: FieldRules, shown: Callable[[float], str] = "{:.15g}".format) -> ValueCheck:
    """The check of a number against `min`, `max` and `above`."""
    least, most, above = _limits(rules)
    low, high = _finite_range(rules)

    def number_problem(value: float) -> str | None:
        if low <= value <= high:
            return None
        if not math.isfinite(value):
            return "must be a finite number"
        if value < least:
            return f"must be at least {shown(least)}"
        if value > most:
            return f"must be at most {shown(most)}"
        return f"must be greater than {shown(above)}"

    return number_problem


MAX_VIOLATIONS: Final = 16
"""Maximum reported, to fit into gRPC's trailing metadata."""
MAX_ITEMS: Final = 1_000
MAX_KEY_SHOWN: Final = 64
MANY_NUMBERS: Final = 16
"""A message with so many fields of numbers is expected to have most of them set."""

_Problems = Sequence[tuple[str, str]]
"""Problems in a value: the path below it (such as `[3].name`, empty for itself) and the text."""
_PartCheck = Callable[[Any], _Problems]
"""Checks a message, a list, a map, or an item."""
_NONE: Final[_Problems] = ()
_FIELD: Final = itemgetter(0)
_WRONG: Final[_Problems] = (("", "is wrong"),)


def violations(message: Message) -> list[FieldViolation]:
    """The problems of a message by field path, such as `spec.rules[2].step.threshold`, at most 16; no values."""
    descriptor: Any = message.DESCRIPTOR  # the stubs have two classes for it
    found = _checks(descriptor).problems(message)
    return [FieldViolation(path.removeprefix("."), problem) for path, problem in found[:MAX_VIOLATIONS]]


def merged(current: M, changed: M, mask: field_mask_pb2.FieldMask | None) -> M:
    """The message after an update: masked parts of spec come from `changed`, or are cleared; it must be valid."""
    if mask is None or not mask.paths:
        return changed
    descriptor: Any = changed.DESCRIPTOR
    if not mask.IsValidForDescriptor(descriptor) or not all(
        path == "spec" or path.startswith("spec.") for path in mask.paths
    ):
        raise InvalidArgumentError("update_mask must name spec or fields of it", field="update_mask")
    merge(changed, current, mask)
    validate(current)
    return current


def validate(message: Message) -> None:
    """Raise InvalidArgumentError with the violations of a message, if any."""
    found = violations(message)
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InvalidArgumentError(f"{first.field} {first.description}{more}", violations=found)


def quick_check_of(descriptor: Any) -> Callable[[Message], bool]:
    """A fast check for messages of a type: only where it is false `validate` may raise."""
    return _checks(descriptor).is_right


def forget_unknown(message: Message) -> None:
    """Replace unknown enum values by the OTHER value of their enum, or 0.

    For messages of programs that may be newer. Unknown values from people are rejected instead.
    """
    for field, value in message.ListFields():
        if field.enum_type is not None:
            numbers = field.enum_type.values_by_number
            other = next((number for number, one in numbers.items() if one.name.endswith("_OTHER")), 0)
            if field.is_repeated:
                value[:] = [one if one in numbers else other for one in value if one in numbers or other]
            elif value not in numbers:
                setattr(message, field.name, other)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for one in value if field.is_repeated else [value]:
                forget_unknown(one)


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A singular field that is not a message."""

    name: str
    presence: bool
    required: bool
    check: ValueCheck | None
    text: bool

    def problem(self, message: Message, value: Any) -> str | None:
        # Without presence, an empty text is unset; 0 is a number.
        absent = not message.HasField(self.name) if self.presence else self.text and not value
        if absent or (self.required and not value):
            return NOT_SET if self.required else None
        return None if self.check is None else self.check(value)


@dataclass(frozen=True, slots=True)
class _Part:
    """A message, list or map field."""

    name: str
    repeated: bool
    required: bool
    check: _PartCheck

    def problems(self, message: Message) -> _Problems:
        """The problems of the field, with paths below it."""
        if self.repeated:
            values = getattr(message, self.name)
            if values:
                return self.check(values)
        elif message.HasField(self.name):
            return self.check(getattr(message, self.name))
        return (("", NOT_SET),) if self.required else _NONE


class _MessageChecks:
    """Compiled checks of one message type.

    Snapshots of thousands of agents pass here. So a fast check of the set fields comes first; all fields are checked, and paths
    built, only if it fails. Where many fields are numbers, as of a GPU's readings, all of them are
    fetched and compared at once: unset, they are 0, which is in range.
    """

    __slots__ = ("_needed", "_numbers", "_others", "_parts", "_scalars", "_screens")

    def __init__(self, descriptor: Descriptor) -> None:
        self._scalars: list[_Scalar] = []
        self._parts: list[_Part] = []
        self._screens: dict[FieldDescriptor, Callable[[Any], object] | None] = {}
        self._needed: set[FieldDescriptor] = set()
        ranges: dict[str, Range] = {}
        for field in descriptor.fields:
            rules = rules_of(field)
            self._screens[field] = None
            if rules.required:
                self._needed.add(field)
            if field.is_repeated or field.message_type is not None:
                make = _repeated_check if field.is_repeated else _single_check
                check = make(field, rules)
                if check is not None:
                    self._parts.append(_Part(field.name, field.is_repeated, rules.required, check))
                    plain = None if field.is_repeated else value_check(field, rules)
                    self._screens[field] = plain or make(field, rules, quick=True)
            else:
                self._add_scalar(field, rules)
                within = number_range(field, rules)
                if within is None:
                    continue
                low, high = within
                if field.cpp_type not in _FLOATS:  # numbers of its own kind are compared faster
                    low, high = math.ceil(max(low, -(2**63))), math.floor(min(high, 2**64))
                if low <= 0 <= high:
                    ranges[field.name] = low, high
        self._numbers: tuple[Callable[[Any], Sequence[float]], Sequence[float], Sequence[float]] | None = None
        self._others: list[_Scalar] = []
        if len(ranges) >= MANY_NUMBERS:
            least, most = zip(*ranges.values(), strict=True)
            self._numbers = attrgetter(*ranges), least, most
            self._others = [scalar for scalar in self._scalars if scalar.name not in ranges]

    def problems(self, message: Message) -> _Problems:
        """The problems of a message, in the order of the contract; stops soon after `MAX_VIOLATIONS`."""
        if self.is_right(message):
            return _NONE
        found: list[tuple[str, str]] = []
        for scalar in self._scalars:
            problem = scalar.problem(message, getattr(message, scalar.name))
            if problem is not None:
                found.append((f".{scalar.name}", problem))
        for part in self._parts:
            for path, problem in part.problems(message):
                found.append((f".{part.name}{path}", problem))
            if len(found) >= MAX_VIOLATIONS:
                break
        return found

    def is_right(self, message: Message) -> bool:
        """Fast check: whether all set fields are valid and no required one is missing."""
        if self._numbers is not None:
            fetch, least, most = self._numbers
            numbers = fetch(message)
            if not (all(map(le, least, numbers)) and all(map(le, numbers, most))):
                return False
            for scalar in self._others:
                if scalar.problem(message, getattr(message, scalar.name)) is not None:
                    return False
            return not any(part.problems(message) for part in self._parts)
        screens, found = self._screens, message.ListFields()
        for field, value in found:
            screen = screens[field]
            if screen is not None and screen(value):
                return False
        return not self._needed or self._needed.issubset(map(_FIELD, found))

    def _add_scalar(self, field: FieldDescriptor, rules: FieldRules) -> None:
        check, text = value_check(field, rules), field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        if check is None and not rules.required:
            return
        self._scalars.append(_Scalar(field.name, field.has_presence, rules.required, check, text))
        self._screens[field] = check
        if rules.required and (field.has_presence or not text):  # other texts are listed only if not empty
            self._screens[field] = lambda value: not value or (check is not None and check(value))
        elif check is not None and not (field.has_presence or text) and check(0) is not None:
            self._needed.add(field)  # unset counts as 0, which is invalid


_compiled: dict[Descriptor, _MessageChecks] = {}


def _checks(descriptor: Descriptor) -> _MessageChecks:
    checks = _compiled.get(descriptor)
    if checks is None:
        checks = _compiled[descriptor] = _MessageChecks(descriptor)
    return checks


def _single_check(field: FieldDescriptor, rules: FieldRules, *, quick: bool = False) -> _PartCheck | None:
    """The check of a message, list item, map key or map value; a `quick` one only tells whether it is valid."""
    check = value_check(field, rules)
    if check is not None:
        return _describing(check)
    if field.message_type is None:
        return None
    descriptor = field.message_type  # types may be recursive: compile when needed
    if quick:  # without details, which would check each level twice
        known = _compiled.get
        return lambda one: _NONE if (known(descriptor) or _checks(descriptor)).is_right(one) else _WRONG
    return lambda message: _checks(descriptor).problems(message)


def _describing(check: ValueCheck) -> _PartCheck:
    def describing(value: Any) -> _Problems:
        problem = check(value)
        return _NONE if problem is None else (("", problem),)

    return describing


def _repeated_check(field: FieldDescriptor, rules: FieldRules, *, quick: bool = False) -> _PartCheck:
    """The check of a list or map; `quick` as in `_single_check`."""
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return _map_check(entry, rules, quick=quick)
    max_items = MAX_ITEMS if rules.max_items is None else rules.max_items
    unique = rules.unique
    item_check = _single_check(field, rules, quick=quick)
    if field.enum_type is not None:  # items have no unset value
        stated = frozenset(field.enum_type.values_by_number) - {0}
        problem = f"must be a value of {field.enum_type.name}, and not UNSPECIFIED"
        item_check = _describing(lambda value: None if value in stated else problem)

    def items(values: Any) -> _Problems:
        if len(values) > max_items:
            return (("", f"must have at most {max_items} items"),)
        found: list[tuple[str, str]] = []
        if unique and len(set(values)) < len(values):
            found.append(("", "must not have an item twice"))
        if item_check is None:
            return found
        for index, value in enumerate(values):
            for path, problem in item_check(value):
                found.append((f"[{index}]{path}", problem))
            if len(found) >= MAX_VIOLATIONS:
                break
        return found

    return items


def _map_check(entry: Descriptor, rules: FieldRules, *, quick: bool) -> _PartCheck:
    """The check of a map: the rules are for its keys, `rules.values` for its values."""
    max_items = MAX_ITEMS if rules.max_items is None else rules.max_items
    key_check = _single_check(entry.fields_by_name["key"], rules)
    entry_check = _single_check(entry.fields_by_name["value"], rules.values or FieldRules(), quick=quick)

    def entries(values: Any) -> _Problems:
        if len(values) > max_items:
            return (("", f"must have at most {max_items} entries"),)
        found: list[tuple[str, str]] = []
        for key in values:
            problems = [
                *(key_check(key) if key_check else _NONE),
                *(entry_check(values[key]) if entry_check else _NONE),
            ]
            if problems:
                text = str(key)
                shown = text if len(text) <= MAX_KEY_SHOWN else text[:MAX_KEY_SHOWN] + "..."
                quoted = shown.encode("unicode_escape").decode("ascii").replace('"', '\\"')
                found += ((f'["{quoted}"]{path}', problem) for path, problem in problems)
            if len(found) >= MAX_VIOLATIONS:
                break
        return found

    return entries


_WHOLE: Final = 1000
"""Thousandths of a GPU."""


def contradictions(ask: "allocator_api.Ask", path: str) -> Iterator[FieldViolation]:
    """Contradictions between fields of an ask for GPUs; `path` is the prefix of field paths, such as `ask.`."""
    if ask.gpu_milli == _WHOLE and ask.HasField("gpu_memory_bytes"):
        yield FieldViolation(
            f"{path}gpu_memory_bytes", "is for a share, but gpu_milli asks for the whole GPU: leave out one"
        )
    nodes, excluded_nodes = set(ask.nodes), set(ask.excluded_nodes)
    excluded = {name.lower() for name in ask.excluded_gpus}
    seen: set[str] = set()
    for index, name in enumerate(ask.gpus):
        key, node = name.lower(), name.rpartition("/gpus/")[0]
        found = {
            "is named twice": key in seen,
            "is one of excluded_gpus too": key in excluded,
            "is on one of excluded_nodes": node in excluded_nodes,
            "is on none of nodes": bool(nodes) and node not in nodes,
        }
        yield from (FieldViolation(f"{path}gpus[{index}]", what) for what, wrong in found.items() if wrong)
        seen.add(key)
    for index, name in enumerate(ask.nodes):
        if name in excluded_nodes:
            yield FieldViolation(f"{path}nodes[{index}]", "is one of excluded_nodes too")
