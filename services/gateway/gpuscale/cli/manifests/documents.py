"""Manifests: YAML documents that say which queue watchers and endpoints there should be.

    kind: Endpoint
    name: jobs
    spec:
      minReplicas: 0
      ...

A document is the protobuf JSON mapping of the resource, and its kind. What `get -o yaml` prints is a manifest too: there
the name, such as `endpoints/jobs`, says the kind. Every complaint names the place as `file:line:column`. The type of each
value comes from the contract, never from the look of the text: a queue named `no` or `1e3` is that text.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.manifests.yaml_tree import (
    Entries,
    Items,
    ManifestError,
    Place,
    Scalar,
    Tree,
    read_documents,
)
from gpuscale.common import names

if TYPE_CHECKING:
    from google._upb._message import FieldDescriptor as UpbFieldDescriptor

    Field = FieldDescriptor | UpbFieldDescriptor

__all__ = ["Declared", "ManifestError", "Resource", "declared", "fill", "parse"]

Resource = api.Endpoint | api.QueueWatcher

_KINDS: Mapping[str, tuple[type[Resource], str]] = {
    "QueueWatcher": (api.QueueWatcher, names.WATCHER),
    "Endpoint": (api.Endpoint, names.ENDPOINT),
}
_LISTS: Mapping[str, str] = {"queueWatchers": "QueueWatcher", "endpoints": "Endpoint"}
# Messages that the JSON mapping writes as a text.
_TEXT_MESSAGES: Mapping[str, str] = {
    "google.protobuf.Duration": "a duration in seconds, such as 60s",
    "google.protobuf.Timestamp": "a time, such as 2026-01-31T12:00:00Z",
}
_SCALARS: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number",
    FieldDescriptor.CPPTYPE_INT64: "a whole number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a text",
}


@dataclass(frozen=True)
class Declared:
    """A resource, and the part of a document that it was read from."""

    resource: Resource
    tree: Tree


def parse(text: str, source: str) -> list[Resource]:
    """The resources of all documents of a text; `source` is what to call it in complaints.

    Raises:
        ManifestError: it is not YAML, or not what the contract allows.
    """
    return [one.resource for one in declared(text, source)]


def declared(text: str, source: str) -> list[Declared]:
    """`parse`, with where each stands."""
    return [one for document in read_documents(text, source) for one in _resources(document)]


def _resources(document: Tree) -> Iterator[Declared]:
    """The resources of a document: one, or whole lists as `get -o yaml` prints them."""
    entries = _entries(document).entries
    if not entries or any(key.text not in _LISTS for key, _ in entries):
        yield Declared(_resource(document, ""), document)
        return
    for key, items in entries:
        for item in _items(items):
            yield Declared(_resource(item, _LISTS[key.text]), item)


def _resource(document: Tree, kind: str) -> Resource:
    entries = _entries(document).entries
    by_key = {key.text: value for key, value in entries}
    name = _scalar(by_key["name"]).text if "name" in by_key else ""
    if "kind" in by_key:
        kind = _scalar(by_key["kind"]).text
    kind = kind or next((each for each, (_, pattern) in _KINDS.items() if names.match(pattern, name)), "")
    if kind not in _KINDS:
        place = by_key.get("kind", document).place
        raise place.error(f"kind must be {' or '.join(_KINDS)}" + (f", not {kind}" if kind else ""))
    cls, pattern = _KINDS[kind]
    resource = cls()
    fill(resource, Entries(document.place, [entry for entry in entries if entry[0].text != "kind"]))
    resource.name = _name(pattern, name, by_key.get("name", document).place)
    return resource


def _name(pattern: str, name: str, place: Place) -> str:
    full = name if names.match(pattern, name) else f"{pattern.partition('/')[0]}/{name}"
    if names.match(pattern, full) is None:
        raise place.error(
            f"{name!r} is not a name: 1-63 of a-z, 0-9, '-', '.' and '_'" if name else "name is missing"
        )
    return full


def fill(message: Message, table: Entries) -> None:
    """Set the fields of a message that stand in a mapping.

    Raises:
        ManifestError: a field that is not known or stands twice, or a value of another type.
    """
    fields = {name: field for field in message.DESCRIPTOR.fields for name in (field.json_name, field.name)}
    seen: set[int] = set()
    for key, value in table.entries:
        field = fields.get(key.text)
        if field is None:
            raise key.place.error(f"unknown field {key.text!r}{_hint(key.text, message)}")
        if field.number in seen:
            raise key.place.error(f"{field.json_name} stands twice")
        seen.add(field.number)
        oneof = field.containing_oneof
        taken: str | None = message.WhichOneof(oneof.name) if oneof is not None else None
        if taken is not None:
            raise key.place.error(f"{key.text} cannot stand beside {taken}")
        if not (isinstance(value, Scalar) and value.null):
            _set(message, field, value)


def _hint(typed: str, message: Message) -> str:
    fields = [field.json_name for field in message.DESCRIPTOR.fields]
    near = difflib.get_close_matches(typed, fields, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(fields)}"


def _set(message: Message, field: "Field", value: Tree) -> None:
    of = field.message_type
    if of is None or of.full_name in _TEXT_MESSAGES:
        _parse(
            message,
            field,
            value,
            [_leaf(field, item) for item in _items(value)] if field.is_repeated else _leaf(field, value),
        )
    elif of.GetOptions().map_entry:
        leaf = of.fields_by_name["value"]
        _parse(message, field, value, {key.text: _leaf(leaf, item) for key, item in _entries(value).entries})
    elif field.is_repeated:
        for item in _items(value):
            fill(getattr(message, field.name).add(), _entries(item))
    else:
        part: Message = getattr(message, field.name)
        part.SetInParent()
        fill(part, _entries(value))


def _parse(message: Message, field: "Field", value: Tree, plain: object) -> None:
    """Let protobuf read a value by its JSON mapping, which takes numbers as texts too."""
    try:
        json_format.ParseDict({field.json_name: plain}, message)
    except json_format.ParseError as error:
        raise value.place.error(f"{field.json_name} must be {_expected(field)}") from error


def _leaf(field: "Field", value: Tree) -> str | bool:
    text = _scalar(value).text
    if field.cpp_type != FieldDescriptor.CPPTYPE_BOOL:
        return text
    if text not in {"true", "false"}:
        raise value.place.error(f"{field.json_name} must be {_expected(field)}")
    return text == "true"


def _expected(field: "Field") -> str:
    if field.enum_type is not None:
        return "one of " + ", ".join(value.name for value in field.enum_type.values if value.number)
    if field.message_type is not None:
        return _TEXT_MESSAGES[field.message_type.full_name]
    return _SCALARS[field.cpp_type]


def _entries(tree: Tree) -> Entries:
    if not isinstance(tree, Entries):
        raise tree.place.error("must be a mapping")
    return tree


def _items(tree: Tree) -> list[Tree]:
    if not isinstance(tree, Items):
        raise tree.place.error("must be a list")
    return list(tree.items)


def _scalar(tree: Tree) -> Scalar:
    if not isinstance(tree, Scalar):
        raise tree.place.error("must be a single value")
    return tree
