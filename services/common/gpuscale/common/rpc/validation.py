"""Checks of messages against the rules that stand in the contract (`FieldRules` in options.proto, and its defaults).

The checks of a message type are compiled once, at its first message. The interceptor applies them to every request that
is one message. Messages of a request stream it only decodes: there a wrong message may be dropped where a wrong request
must be refused, so the service asks `violations` itself.

What a single field cannot say is the service's to check: that one member of a oneof is set, that min is not above max.
A number without presence that is required must not be 0: the wire does not tell 0 from absent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gpuscale.api.types.v1 import options_pb2
from gpuscale.common.errors import FieldViolation, InvalidArgumentError
from gpuscale.common.rpc.field_checks import (
    NOT_SET,
    ValueCheck,
    number_range,
    plain_length,
    stated_check,
    value_check,
)

MAX_VIOLATIONS: Final = 16
"""So many are reported at most, so that an error fits into gRPC's trailing metadata."""
MAX_ITEMS: Final = 1_000
MAX_KEY_SHOWN: Final = 64
FEW_PARTS: Final = 3
"""Of a message with more lists, maps and messages than this, little is set: only that is looked at, at first."""

_Problems = Sequence[tuple[str, str]]
"""What is wrong below a value: path from there on (`[3].name`, or empty for the value itself), and what is wrong."""
_PartCheck = Callable[[Any], _Problems]
"""Checks a message, a list, a map, or an item of one."""
_NONE: Final[_Problems] = ()


def violations(message: Message) -> list[FieldViolation]:
    """What is wrong with a message, by field path such as `spec.rules[2].step.threshold`; empty when nothing is.

    Only the first 16 are returned. Descriptions never repeat a value.
    """
    descriptor: Any = message.DESCRIPTOR  # to the stubs one of two classes, by implementation
    found = _checks(descriptor).problems(message)
    return [FieldViolation(path.removeprefix("."), problem) for path, problem in found[:MAX_VIOLATIONS]]


def validate(message: Message) -> None:
    """Refuse a message that breaks a rule.

    Raises:
        InvalidArgumentError: with the violations.
    """
    found = violations(message)
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise InvalidArgumentError(f"{first.field} {first.description}{more}", violations=found)


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A field that holds one number or text."""

    name: str
    number: int
    presence: bool
    required: bool
    check: ValueCheck | None
    text: bool

    def problem(self, message: Message, value: Any) -> str | None:
        """What is wrong with the field's value."""
        # Without presence an empty text means none; a zero is a number like others.
        absent = not message.HasField(self.name) if self.presence else self.text and not value
        if absent or (self.required and not value):
            return NOT_SET if self.required else None
        return None if self.check is None else self.check(value)


@dataclass(frozen=True, slots=True)
class _Part:
    """A field that holds a message, a list or a map."""

    name: str
    field: FieldDescriptor
    required: bool
    check: _PartCheck

    def problems(self, message: Message) -> _Problems:
        """What is wrong with the field, with paths from the field on."""
        if self.field.is_repeated:
            values = getattr(message, self.name)
            if values:
                return self.check(values)
        elif message.HasField(self.name):
            return self.check(getattr(message, self.name))
        return (("", NOT_SET),) if self.required else _NONE


class _MessageChecks:
    """Compiled checks of one message type.

    Snapshots of thousands of agents pass here. So numbers and texts are compared without a call
    each (only a value that fails this screen meets its full check), and paths are put together only where something is wrong.
    Of a wide message, such as an ask for GPUs, only what is set is looked at, unless that is not all in order.
    """

    __slots__ = ("_needed", "_numbers", "_other", "_parts", "_screens", "_texts")

    def __init__(self, descriptor: Descriptor) -> None:
        self._numbers: list[tuple[str, float, float, _Scalar]] = []
        self._texts: list[tuple[str, int, _Scalar]] = []
        self._other: list[_Scalar] = []
        self._parts: list[_Part] = []
        self._screens: dict[FieldDescriptor, Callable[[Any], object] | None] = {}
        self._needed: set[FieldDescriptor] = set()
        for field in descriptor.fields:
            rules = field.GetOptions().Extensions[options_pb2.rules]
            self._screens[field] = None
            self._compile(field, rules)
            if rules.required:
                self._needed.add(field)

    def problems(self, message: Message) -> _Problems:
        """What is wrong with a message; stops soon after `MAX_VIOLATIONS`."""
        if len(self._parts) > FEW_PARTS and self._is_right(message):
            return _NONE
        found: list[tuple[str, str]] = []
        for scalar in self._suspects(message):
            problem = scalar.problem(message, getattr(message, scalar.name))
            if problem is not None:
                found.append((f".{scalar.name}", problem))
        for part in self._parts:
            for path, problem in part.problems(message):
                found.append((f".{part.name}{path}", problem))
            if len(found) >= MAX_VIOLATIONS:
                break
        return found

    def _is_right(self, message: Message) -> bool:
        """Whether all that is set is certainly right, and nothing is missing; where it is not, the full checks say why."""
        missing = len(self._needed)
        for field, value in message.ListFields():
            screen = self._screens[field]
            if screen is not None and screen(value):
                return False
            if missing and field in self._needed:
                missing -= 1
        return not missing

    def _suspects(self, message: Message) -> Sequence[_Scalar]:
        """Fields that need their full check, in the contract's order."""
        failed: list[_Scalar] = []
        for name, low, high, scalar in self._numbers:
            if not low <= getattr(message, name) <= high:
                failed.append(scalar)
        for name, longest, scalar in self._texts:
            text = getattr(message, name)
            if len(text) > longest or not text.isprintable():
                failed.append(scalar)
        return sorted((*failed, *self._other), key=attrgetter("number")) if failed else self._other

    def _compile(self, field: FieldDescriptor, rules: options_pb2.FieldRules) -> None:
        if field.is_repeated or field.message_type is not None:
            check = _list_or_map_check(field, rules) if field.is_repeated else _single_check(field, rules)
            if check is not None:
                self._parts.append(_Part(field.name, field, rules.required, check))
                self._screens[field] = check
            return
        text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        scalar = _Scalar(
            field.name, field.number, field.has_presence, rules.required, value_check(field, rules), text
        )
        within, length = number_range(field, rules), plain_length(field, rules)
        full = scalar.check
        if within is not None:
            self._numbers.append((field.name, *within, scalar))
        elif length is not None:
            self._texts.append((field.name, length, scalar))
        elif full is not None or scalar.required:
            self._other.append(scalar)
        if rules.required:
            self._screens[field] = lambda value: not value or (full is not None and full(value))
        elif full is not None:
            self._screens[field] = full
            if not (scalar.presence or text) and full(0) is not None:
                self._needed.add(field)  # unset it counts as 0, which is wrong


_compiled: dict[Descriptor, _MessageChecks] = {}


def _checks(descriptor: Descriptor) -> _MessageChecks:
    checks = _compiled.get(descriptor)
    if checks is None:
        checks = _compiled[descriptor] = _MessageChecks(descriptor)
    return checks


def _single_check(field: FieldDescriptor, rules: options_pb2.FieldRules) -> _PartCheck | None:
    """The check of one message, of an item of a list, or of a key or value of a map."""
    check = value_check(field, rules)
    if check is not None:
        return _describing(check)
    if field.message_type is None:
        return None
    descriptor = field.message_type
    return lambda message: _checks(descriptor).problems(
        message
    )  # types may contain themselves: compiled when met


def _describing(check: ValueCheck) -> _PartCheck:
    def describing(value: Any) -> _Problems:
        problem = check(value)
        return _NONE if problem is None else (("", problem),)

    return describing


def _list_or_map_check(field: FieldDescriptor, rules: options_pb2.FieldRules) -> _PartCheck:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return _map_check(entry, rules)
    return _list_check(field, rules)


def _list_check(field: FieldDescriptor, rules: options_pb2.FieldRules) -> _PartCheck:
    max_items = rules.max_items if rules.HasField("max_items") else MAX_ITEMS
    unique = rules.unique
    item_check = _single_check(field, rules)
    if field.enum_type is not None:
        item_check = _describing(stated_check(field.enum_type))

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


def _map_check(entry: Descriptor, rules: options_pb2.FieldRules) -> _PartCheck:
    """The rules are about the keys; values have the defaults of their type, and `max_length`."""
    max_items = rules.max_items if rules.HasField("max_items") else MAX_ITEMS
    max_length = rules.max_length if rules.HasField("max_length") else None
    key_check = _single_check(entry.fields_by_name["key"], rules)
    entry_check = _single_check(entry.fields_by_name["value"], options_pb2.FieldRules(max_length=max_length))

    def entries(values: Any) -> _Problems:
        if len(values) > max_items:
            return (("", f"must have at most {max_items} entries"),)
        found: list[tuple[str, str]] = []
        for key in values:
            problems = [
                *(key_check(key) if key_check else _NONE),
                *(entry_check(values[key]) if entry_check else _NONE),
            ]
            found += ((_key(key) + path, problem) for path, problem in problems)
            if len(found) >= MAX_VIOLATIONS:
                break
        return found

    return entries


def _key(key: object) -> str:
    """A map's key as part of a path: `["gpu"]`, cut where it is long."""
    text = str(key)
    shown = text if len(text) <= MAX_KEY_SHOWN else text[:MAX_KEY_SHOWN] + "..."
    return '["' + shown.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"]'
