"""Explains the contract's messages and fields: comments and bounds, from the descriptor set shipped with it."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto

from gpuscale.cli.grammar.nouns import NOUNS
from gpuscale.cli.grammar.selecting import near
from gpuscale.common.errors import NotFoundError
from gpuscale.common.rpc.validation import read_rules

_WIDTH = 100
"""Characters of a line."""
FILE = "contract.binpb"
_PACKAGE = ".gpuscale.api."
# Field numbers of FileDescriptorProto, DescriptorProto and EnumDescriptorProto, which make up the paths of comments.
_MESSAGES, _ENUMS, _NESTED, _NESTED_ENUMS, _FIELDS, _VALUES = 4, 5, 3, 4, 2, 2
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


@dataclass(frozen=True)
class Entry:
    """A field or message; its parts are fields of a message, or values of an enum."""

    name: str
    type: str
    text: str
    json_name: str = ""
    bounds: str = ""
    parts: Sequence["Entry"] = ()


@dataclass
class _Contract:
    messages: dict[str, DescriptorProto] = field(default_factory=dict[str, DescriptorProto])
    enums: dict[str, EnumDescriptorProto] = field(default_factory=dict[str, EnumDescriptorProto])
    comments: dict[str, str] = field(default_factory=dict[str, str])

    def add(
        self, kind: Any, name: str, path: tuple[int, ...], comments: Mapping[tuple[int, ...], str]
    ) -> None:
        self.messages[name] = kind
        self.comments[name] = comments.get(path, "")
        for index, one in enumerate(kind.field):
            self.comments[f"{name}.{one.name}"] = comments.get((*path, _FIELDS, index), "")
        for index, one in enumerate(kind.nested_type):
            self.add(one, f"{name}.{one.name}", (*path, _NESTED, index), comments)
        for index, one in enumerate(kind.enum_type):
            self.add_enum(one, f"{name}.{one.name}", (*path, _NESTED_ENUMS, index), comments)

    def add_enum(
        self, kind: Any, name: str, path: tuple[int, ...], comments: Mapping[tuple[int, ...], str]
    ) -> None:
        self.enums[name] = kind
        self.comments[name] = comments.get(path, "")
        for index, one in enumerate(kind.value):
            self.comments[f"{name}.{one.name}"] = comments.get((*path, _VALUES, index), "")


@cache
def _contract() -> _Contract:
    found = _Contract()
    data = resources.files("gpuscale.api").joinpath(FILE).read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        comments = {
            tuple(one.path): " ".join(one.leading_comments.split()) for one in file.source_code_info.location
        }
        for index, message in enumerate(file.message_type):
            found.add(message, f".{file.package}.{message.name}", (_MESSAGES, index), comments)
        for index, enum in enumerate(file.enum_type):
            found.add_enum(enum, f".{file.package}.{enum.name}", (_ENUMS, index), comments)
    return found


def describe(root: str, path: str, *, recursive: bool = False) -> Entry:
    """The field at a path of a message, or the message itself; `recursive`: with the parts of parts.

    `root` is such as `autoscaler.v1.Endpoint`; `path` is of field or JSON names, such as `spec.min_replicas`, or empty.

    Raises:
        NotFoundError: there is no such field.
    """
    contract, owner = _contract(), f"{_PACKAGE}{root}"
    entry = Entry("", _short(owner), contract.comments[owner], parts=_parts(contract, owner, recursive))
    for name in filter(None, path.split(".")):
        fields = contract.messages[owner].field if owner in contract.messages else ()
        found = next((one for one in fields if name in {one.name, one.json_name}), None)
        if found is None:
            known = near(name, (one.name for one in fields)) if fields else ": it has no fields"
            raise NotFoundError(f"{entry.name or entry.type} has no field {name!r}{known}")
        entry = _field(contract, owner, found)
        owner = _owner(contract, found)
        entry = replace(entry, parts=_parts(contract, owner, recursive))
    return entry


def root_of(name: str) -> str:
    """The message of a plural kind, or of a name such as `Ask`; empty if there is none."""
    if message := next((noun.message for noun in NOUNS if noun.plural == name), ""):
        return message
    found = (one.removeprefix(_PACKAGE) for one in _contract().messages if one.startswith(_PACKAGE))
    return next((one for one in found if one.rpartition(".")[2] == name), "")


def _owner(contract: _Contract, one: FieldDescriptorProto) -> str:
    """The message type of a field, or of a map's values."""
    values = contract.messages.get(one.type_name)
    return values.field[1].type_name if values and values.options.map_entry else one.type_name


def _parts(contract: _Contract, owner: str, recursive: bool) -> tuple[Entry, ...]:
    """The fields of a message, or the values of an enum. No message contains itself."""
    if owner in contract.messages:
        found = list[Entry]()
        for one in contract.messages[owner].field:
            entry, inner = _field(contract, owner, one), _owner(contract, one)
            if recursive and inner in contract.messages and inner.startswith(_PACKAGE):
                entry = replace(entry, parts=_parts(contract, inner, recursive))
            found.append(entry)
        return tuple(found)
    if owner in contract.enums:
        names = [one.name for one in contract.enums[owner].value if one.number]
        return tuple(Entry(name, "", contract.comments[f"{owner}.{name}"]) for name in names)
    return ()


def _field(contract: _Contract, owner: str, one: FieldDescriptorProto) -> Entry:
    rules = asdict(read_rules(one.options, contract.messages[owner].options))
    bounds: list[str] = []
    for name, value in rules.items():
        words = name.replace("_", " ")
        if value is True:
            bounds.append(words)
        elif value and isinstance(value, str):
            bounds.append(f"{words} {value}")
        elif isinstance(value, (int, float)) and value is not False:
            bounds.append(f"{words} {value:.15g}")
    text = contract.comments[f"{owner}.{one.name}"]
    return Entry(one.name, _type(contract, one), text, one.json_name, ", ".join(bounds))


def _type(contract: _Contract, one: FieldDescriptorProto) -> str:
    entry = contract.messages.get(one.type_name)
    if entry is not None and entry.options.map_entry:
        return f"map<{_type(contract, entry.field[0])}, {_type(contract, entry.field[1])}>"
    name = _short(one.type_name) if one.type_name else _SCALARS[one.type]
    return f"{name}[]" if one.label == FieldDescriptorProto.LABEL_REPEATED else name


def _short(full_name: str) -> str:
    return full_name.rpartition(".")[2]


def entry_data(name: str, entry: Entry) -> dict[str, object]:
    """An entry as data."""
    data: dict[str, object] = {"name": name, "type": entry.type, "description": entry.text}
    if entry.json_name:
        data["jsonName"] = entry.json_name
    if entry.bounds:
        data["bounds"] = entry.bounds
    if entry.parts:
        data["parts"] = [entry_data(part.name, part) for part in entry.parts]
    return data


def tree_lines(path: str, entry: Entry) -> list[str]:
    """A line with name and type for an entry and each of its parts."""
    lines = [f"{path}   {entry.type}"]
    for part in entry.parts:
        lines += [f"  {line}" for line in tree_lines(part.name, part)]
    return lines


def entry_lines(path: str, entry: Entry) -> list[str]:
    """An entry as text: type, comment, bounds, and those of its parts."""
    json_name = f"   in JSON: {entry.json_name}" if entry.json_name not in {"", entry.name} else ""
    lines = [f"{path}   {entry.type}{json_name}", *textwrap.wrap(entry.text, _WIDTH)]
    if entry.bounds:
        lines.append(f"Bounds: {entry.bounds}.")
    for part in entry.parts:
        bounds = f" ({part.bounds})" if part.bounds else ""
        lines += ["", f"  {part.name}   {part.type}".rstrip()]
        indent = "    "
        lines += textwrap.wrap(part.text + bounds, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines
