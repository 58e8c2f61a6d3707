"""Conversion between messages and frozen dataclasses with the same fields, in both directions.

A field's conversion follows from its descriptor and its type in the dataclass, so a field is named once on each side:

- a Duration is seconds, an enum the member of the same name, a resource name the id that it ends with;
- a repeated field is a tuple, or a set that is written in order; a message is the dataclass of its type;
- a oneof is a field of its name, which holds the dataclass named after the member's message.

An absent value on one side is absent, or the default, on the other. Defaults are not written, except in members of a oneof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from dataclasses import Field as DataclassField
from enum import Enum
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.rpc.validation import rules_of
from gpuscale.common.wire import seconds, to_duration

T = TypeVar("T")
Read = Callable[[Any, str], Any]
"""The value of a message, or of one of its fields; the text is its path in the request."""
Write = Callable[[Any, Any], None]
"""Sets a message, the second argument, or one of its fields, to a value."""
Scalar = tuple[Read, Callable[[Any], Any]]
"""How to read and make a value that is not a message."""
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    default: object
    read: Read
    write: Write


class Codec:
    """Reads and writes messages.

    `members`: dataclasses of members of oneofs, each with the name of its message. `messages` and `scalars`: conversion of
    dataclasses, and of fields by name, that differ from their messages.
    """

    def __init__(
        self,
        members: Sequence[type[Any]],
        messages: Mapping[type[Any], tuple[Read, Write]],
        scalars: Mapping[str, Scalar],
    ) -> None:
        self._members = {member.__name__: member for member in members}
        self._messages = messages
        self._scalars = scalars
        self._plans: dict[type[Any], tuple[_Field, ...]] = {}

    def read(self, kind: type[T], wire: Message, path: str) -> T:
        """The dataclass of a valid message at `path`; InvalidArgumentError if a field cannot be read."""
        found = ((one.name, one.read(wire, path)) for one in self._fields(kind, wire))
        return kind(**{name: value for name, value in found if value is not _ABSENT})

    def stated(self, kind: type[Any], wire: Message, path: str) -> dict[str, Any]:
        """The fields that a message sets, read like `read`."""
        known = {field.name for field, _ in wire.ListFields()}
        return {one.name: one.read(wire, path) for one in self._fields(kind, wire) if one.name in known}

    def write(self, value: object, wire: Message, *, in_full: bool = False) -> None:
        """Fill a message; `in_full`: including defaults."""
        for one in self._fields(type(value), wire):
            held = getattr(value, one.name)
            if held is not None and (in_full or held != one.default):
                one.write(held, wire)

    def _fields(self, kind: type[Any], wire: Message) -> tuple[_Field, ...]:
        """How to read and write each field, computed once per dataclass."""
        found = self._plans.get(kind)
        if found is None:
            hints = get_type_hints(kind)
            known: Mapping[str, Any] = wire.DESCRIPTOR.fields_by_name
            ways = [(one, self._way(one, hints[one.name], known.get(one.name))) for one in fields(kind)]
            found = self._plans[kind] = tuple(_Field(one.name, one.default, *way) for one, way in ways)
        return found

    def _way(self, one: DataclassField[Any], hint: Any, field: FieldDescriptor | None) -> tuple[Read, Write]:
        if field is None:
            return self._oneof(one.name)
        scalar = self._scalars.get(one.name)
        if scalar is not None or field.message_type is None:
            return _scalars(field, one.default, get_origin(hint), scalar or _scalar(field, hint))
        # The dataclass in a hint such as `tuple[Rule, ...]` or `Pace | None`.
        held: Any = next((part for part in get_args(hint) if part not in {Ellipsis, NoneType}), hint)
        if field.message_type.full_name == Duration.DESCRIPTOR.full_name:
            way: tuple[Read, Write] = (
                lambda wire, _: seconds(wire),
                lambda value, wire: wire.CopyFrom(to_duration(value)),
            )
        else:
            way = self._messages.get(held, (lambda wire, path: self.read(held, wire, path), self.write))
        return _messages(field, one.default, *way)

    def _oneof(self, name: str) -> tuple[Read, Write]:
        def read(wire: Any, path: str) -> Any:
            member = wire.WhichOneof(name)
            if member is None:
                raise InvalidArgumentError(f"{path}.{name} must be set", field=f"{path}.{name}")
            found = getattr(wire, member)
            return self.read(self._members[found.DESCRIPTOR.name], found, f"{path}.{member}")

        def write(value: Any, wire: Any) -> None:
            members = wire.DESCRIPTOR.oneofs_by_name[name].fields
            [member] = (one.name for one in members if one.message_type.name == type(value).__name__)
            target = getattr(wire, member)
            target.SetInParent()
            self.write(value, target, in_full=True)

        return read, write


def _messages(field: FieldDescriptor, default: object, read: Read, write: Write) -> tuple[Read, Write]:
    """A field of a message, or of several."""
    name = field.name

    def read_all(wire: Any, path: str) -> Any:
        return tuple(read(one, f"{path}.{name}[{index}]") for index, one in enumerate(getattr(wire, name)))

    def write_all(values: Any, wire: Any) -> None:
        for value in values:
            write(value, getattr(wire, name).add())

    def read_set(wire: Any, path: str) -> Any:
        if default is not MISSING and not wire.HasField(name):
            return _ABSENT
        return read(getattr(wire, name), f"{path}.{name}")

    def write_set(value: Any, wire: Any) -> None:
        target = getattr(wire, name)
        target.SetInParent()
        write(value, target)

    return (read_all, write_all) if field.is_repeated else (read_set, write_set)


def _scalars(field: FieldDescriptor, default: object, container: Any, scalar: Scalar) -> tuple[Read, Write]:
    """A field of a value that is not a message, of several, or of a map of them.

    Without presence, zero and empty text count as absent if there is a default.
    """
    name, has_presence, (read, make) = field.name, field.has_presence, scalar

    def read_all(wire: Any, path: str) -> Any:
        return container(
            read(one, f"{path}.{name}[{index}]") for index, one in enumerate(getattr(wire, name))
        )

    def write_all(values: Any, wire: Any) -> None:
        getattr(wire, name).extend(make(one) for one in sorted(values))

    def read_set(wire: Any, path: str) -> Any:
        held = getattr(wire, name)
        if default is not MISSING and not (wire.HasField(name) if has_presence else held):
            return _ABSENT
        return read(held, f"{path}.{name}")

    def write_set(value: Any, wire: Any) -> None:
        setattr(wire, name, make(value))

    def write_map(value: Any, wire: Any) -> None:
        getattr(wire, name).update(value)

    if field.message_type is not None:
        return read_set, write_map
    return (read_all, write_all) if field.is_repeated else (read_set, write_set)


def _scalar(field: FieldDescriptor, kind: Any) -> Scalar:
    if field.enum_type is not None:
        return _of_enum(field.enum_type, kind)
    resource = rules_of(field).resource
    if not resource:
        return (lambda value, _: value), (lambda value: value)
    collection, variable = resource.rstrip("}").split("{")
    return (
        lambda name, path: names.parse(resource, name, path)[variable] if name else "",
        lambda id_: collection + id_ if id_ else "",
    )


def _of_enum(described: EnumDescriptor, kind: type[Enum]) -> Scalar:
    """Enum values are named like the members, behind the name of the enum."""
    prefix = described.values_by_number[0].name.removesuffix("UNSPECIFIED")
    members = {value.name.removeprefix(prefix): value.number for value in described.values}
    numbers = {one: members[one.name] for one in kind if one.name in members}
    known = {number: one for one, number in numbers.items()}

    def read(value: int, path: str) -> Any:
        if value not in known:
            raise InvalidArgumentError(f"{path} must be set", field=path)
        return known[value]

    return read, numbers.__getitem__
