"""Explains the contract's messages and fields: comments and bounds, from the descriptor set shipped with it."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

from gpuscale.cli.grammar.nouns import NOUNS
from gpuscale.cli.grammar.selecting import near
from gpuscale.common.errors import NotFoundError
from gpuscale.common.rpc.validation import rules_of

_WIDTH = 100
"""Characters of a line."""
FILE = "contract.binpb"
_PACKAGE = "gpuscale.api."


@dataclass(frozen=True)
class Entry:
    """A field or message; its parts are fields of a message, or values of an enum."""

    name: str
    type: str
    text: str
    json_name: str = ""
    bounds: str = ""
    parts: Sequence["Entry"] = ()


@cache
def contract() -> tuple[DescriptorPool, Mapping[str, str]]:
    """The contract, and the comments of messages, enums, fields and values, by full name."""
    pool, comments = DescriptorPool(), dict[str, str]()
    data = resources.files("gpuscale.api").joinpath(FILE).read_bytes()
    for file in FileDescriptorSet.FromString(data).file:
        pool.AddSerializedFile(file.SerializeToString())
        for location in file.source_code_info.location:
            if not location.leading_comments or len(location.path) % 2:  # such as of a `reserved`
                continue
            one: Any = file
            names = [file.package]
            for number, index in zip(location.path[::2], location.path[1::2], strict=True):
                one = getattr(one, one.DESCRIPTOR.fields_by_number[number].name)[index]
                names.append(one.name)
            comments[".".join(names)] = " ".join(location.leading_comments.split())
    return pool, comments


def describe(root: str, path: str, *, recursive: bool = False) -> Entry:
    """The field at a path of a message, or the message itself; `recursive`: with the parts of parts.

    `root` is a message such as `autoscaler.v1.Endpoint`, or an enum; `path` is of field or JSON names, such as `spec.min_replicas`, or empty.

    Raises NotFoundError: there is no such field.
    """
    pool, comments = contract()
    try:
        owner: Any = pool.FindMessageTypeByName(f"{_PACKAGE}{root}")
    except KeyError:
        owner = pool.FindEnumTypeByName(f"{_PACKAGE}{root}")
    entry = Entry("", owner.name, comments[owner.full_name], parts=_parts(owner, recursive))
    for name in filter(None, path.split(".")):
        fields = getattr(owner, "fields", ())
        found = next((one for one in fields if name in {one.name, one.json_name}), None)
        if found is None:
            known = near(name, (one.name for one in fields)) if fields else ": it has no fields"
            raise NotFoundError(f"{entry.name or entry.type} has no field {name!r}{known}")
        owner = _kind(found)
        entry = replace(_field(found), parts=_parts(owner, recursive))
    return entry


def root_of(name: str) -> str:
    """The message of a plural kind, or of a name such as `Ask`; empty if there is none."""
    if message := next((noun.message for noun in NOUNS if noun.plural == name), ""):
        return message
    pool, comments = contract()
    for one in comments:
        if one.startswith(_PACKAGE) and one.endswith(f".{name}"):
            try:
                return pool.FindMessageTypeByName(one).full_name.removeprefix(_PACKAGE)
            except KeyError:  # an enum, a field or a value
                continue
    return ""


def _kind(field: Any) -> Any:
    """The message or enum of a field, or of a map's values; None for a plain one."""
    of = field.message_type
    if of is not None and of.GetOptions().map_entry:
        return _kind(of.fields_by_name["value"])
    return of or field.enum_type


def _parts(owner: Any, recursive: bool) -> tuple[Entry, ...]:
    """The fields of a message, or the values of an enum. No message contains itself."""
    if not hasattr(owner, "fields"):
        values = [one for one in getattr(owner, "values", ()) if one.number]
        _, comments = contract()
        return tuple(Entry(one.name, "", comments[f"{owner.full_name}.{one.name}"]) for one in values)
    found = list[Entry]()
    for one in owner.fields:
        entry, inner = _field(one), _kind(one)
        if recursive and hasattr(inner, "fields") and inner.full_name.startswith(_PACKAGE):
            entry = replace(entry, parts=_parts(inner, recursive))
        found.append(entry)
    return tuple(found)


def _field(field: Any) -> Entry:
    bounds: list[str] = []
    for name, value in asdict(rules_of(field)).items():
        words = name.replace("_", " ")
        if value is True:
            bounds.append(words)
        elif value and isinstance(value, str):
            bounds.append(f"{words} {value}")
        elif isinstance(value, (int, float)) and value is not False:
            bounds.append(f"{words} {value:.15g}")
    _, comments = contract()
    text = comments.get(field.full_name, "")
    return Entry(field.name, _type(field), text, field.json_name, ", ".join(bounds))


def _type(field: Any) -> str:
    of = field.message_type or field.enum_type
    if field.message_type is not None and of.GetOptions().map_entry:
        return f"map<{', '.join(map(_type, of.fields))}>"
    name = of.name if of else FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"{name}[]" if field.is_repeated else name


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
