"""Manifests: YAML documents that declare resources, or policies to backtest.

    kind: Endpoint                    kind: Policy
    name: jobs                        name: ours
    spec:                             preset: {preset: gpuscale, slots: 8, goal: 5s}
      minReplicas: 0

A document is the protobuf JSON mapping of a resource, with its kind. The output of `get -o yaml` is a manifest too: the
kind follows from a name such as `endpoints/jobs`. Every error begins with `file:line:column`. The type of a value comes from
the contract, not from its look: a queue named `no` or `1e3` is that text. Anchors and aliases are refused, since they can
make a small file huge.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.grammar.jsonpath import camel
from gpuscale.cli.grammar.selecting import near
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.sizes import parse_duration

if TYPE_CHECKING:
    from google._upb._message import FieldDescriptor as UpbFieldDescriptor

    Field = FieldDescriptor | UpbFieldDescriptor

MAX_CHARACTERS: Final = 1 << 20
_NULL: Final = "tag:yaml.org,2002:null"


class ManifestError(InvalidArgumentError):
    """An invalid file; the message begins with `file:line:column`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file; lines and columns count from 1."""

    source: str
    line: int
    column: int

    def error(self, text: str) -> ManifestError:
        """An error at this place."""
        return ManifestError(f"{self.source}:{self.line}:{self.column}: {text}")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value, or null."""

    place: Place
    text: str
    null: bool


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    place: Place
    items: "Sequence[Tree]"


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping, in the order of the file; keys are unique."""

    place: Place
    entries: "Sequence[tuple[Scalar, Tree]]"


Tree = Scalar | Items | Entries


def read_documents(text: str, source: str) -> list[Tree]:
    """The documents of a text, without empty ones; errors name it as `source`.

    Raises ManifestError: it is not valid YAML, or has anchors or duplicate keys.
    """
    start = Place(source, 1, 1)
    if len(text) > MAX_CHARACTERS:
        raise start.error(f"more than {MAX_CHARACTERS} characters")
    try:
        yaml: Any = YAML(typ="safe", pure=True)
        # An empty document, such as after a last `---`, is a null.
        return [_tree(node, source) for node in yaml.compose_all(StringIO(text)) if node.tag != _NULL]
    except MarkedYAMLError as error:
        marked: Any = error
        mark = marked.problem_mark or marked.context_mark
        place = Place(source, mark.line + 1, mark.column + 1) if mark else start
        raise place.error(f"{marked.problem or marked.context}") from error
    except RecursionError as error:
        raise start.error("nested too deeply") from error
    except YAMLError as error:
        raise start.error(str(error).partition("\n")[0]) from error


def _tree(node: Any, source: str) -> Tree:
    place = Place(source, node.start_mark.line + 1, node.start_mark.column + 1)
    if node.anchor is not None:
        raise place.error("anchors and aliases are not allowed")
    if node.id == "sequence":
        return Items(place, [_tree(child, source) for child in node.value])
    if node.id != "mapping":
        return Scalar(place, str(node.value), null=node.tag == _NULL)
    entries: list[tuple[Scalar, Tree]] = []
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = _tree(key_node, source)
        if not isinstance(key, Scalar):
            raise key.place.error("a key must be a single value")
        if key.text in seen:
            raise key.place.error(f"{key.text} is given twice")
        seen.add(key.text)
        entries.append((key, _tree(value_node, source)))
    return Entries(place, entries)


Resource = (
    api.Endpoint
    | api.QueueWatcher
    | allocator_api.UsePolicy
    | allocator_api.NotificationTarget
    | allocator_api.PowerBudget
)

_KINDS: Mapping[str, tuple[type[Resource], str]] = {
    "QueueWatcher": (api.QueueWatcher, names.WATCHER),
    "Endpoint": (api.Endpoint, names.ENDPOINT),
    "UsePolicy": (allocator_api.UsePolicy, names.POLICY),
    "NotificationTarget": (allocator_api.NotificationTarget, names.TARGET),
    "PowerBudget": (allocator_api.PowerBudget, names.BUDGET),
}
LISTS: Mapping[str, str] = {
    "queueWatchers": "QueueWatcher",
    "endpoints": "Endpoint",
    "usePolicies": "UsePolicy",
    "notificationTargets": "NotificationTarget",
    "powerBudgets": "PowerBudget",
}
"""The kind of resource in a list with this key."""
# Messages that are text in JSON.
_TEXT_MESSAGES: Mapping[str, str] = {
    "google.protobuf.Duration": "a duration, such as 60s, 500ms or 1h30m",
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
class DeclaredDocument:
    """A resource, and the YAML that declares it."""

    resource: Resource
    tree: Tree


def parse(text: str, source: str) -> list[Resource]:
    """The resources of `declared` alone."""
    return [one.resource for one in declared(text, source)]


def declared(text: str, source: str) -> list[DeclaredDocument]:
    """The resources in all documents of a text; errors name it as `source`.

    Raises ManifestError: it is not valid YAML, or does not fit the contract.
    """
    found: list[DeclaredDocument] = []
    for document in read_documents(text, source):
        entries = _entries(document).entries
        if not entries or any(key.text not in LISTS for key, _ in entries):
            found.append(DeclaredDocument(_resource(document, ""), document))
            continue
        for key, items in entries:  # whole lists, as `get -o yaml` prints them
            found += [DeclaredDocument(_resource(item, LISTS[key.text]), item) for item in _items(items)]
    return found


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
    resource.name = name if names.match(pattern, name) else f"{pattern.partition('/')[0]}/{name}"
    if names.match(pattern, resource.name) is None:
        fault = (
            f"{name!r} is not a valid name: 1-63 of a-z, 0-9, '-', '.' and '_'" if name else "name is missing"
        )
        raise by_key.get("name", document).place.error(fault)
    return resource


def fill(message: Message, table: Entries) -> None:
    """Set the fields of a message from a mapping. Raises ManifestError: a field is unknown or given twice, or a value has another type."""
    fields = {name: field for field in message.DESCRIPTOR.fields for name in (field.json_name, field.name)}
    known = [field.json_name for field in message.DESCRIPTOR.fields]
    seen: set[int] = set()
    for key, value in table.entries:
        field = fields.get(key.text)
        if field is None:
            raise key.place.error(f"unknown field {key.text!r}{near(key.text, known)}")
        if field.number in seen:
            raise key.place.error(f"{field.json_name} is given twice")
        seen.add(field.number)
        oneof = field.containing_oneof
        taken: str | None = message.WhichOneof(oneof.name) if oneof is not None else None
        if taken is not None:
            raise key.place.error(f"{key.text} excludes {taken}")
        if isinstance(value, Scalar) and value.null:
            continue
        of = field.message_type
        if of is None or of.full_name in _TEXT_MESSAGES:
            plain = [_leaf(field, one) for one in _items(value)] if field.is_repeated else _leaf(field, value)
            _parse(message, field, value, plain)
        elif of.GetOptions().map_entry:
            leaf = of.fields_by_name["value"]
            _parse(message, field, value, {at.text: _leaf(leaf, one) for at, one in _entries(value).entries})
        elif field.is_repeated:
            for item in _items(value):
                fill(getattr(message, field.name).add(), _entries(item))
        else:
            part: Message = getattr(message, field.name)
            part.SetInParent()
            fill(part, _entries(value))


def _parse(message: Message, field: "Field", value: Tree, plain: object) -> None:
    """Let protobuf read a value; numbers may be text."""
    try:
        json_format.ParseDict({field.json_name: plain}, message)
    except json_format.ParseError as error:
        raise value.place.error(f"{field.json_name} must be {_expected(field)}") from error


_DURATION_UNITS = re.compile(r".*\d(ms|[mhd].*)")
"""A duration with units that protobuf does not know."""


def _leaf(field: "Field", value: Tree) -> str | bool:
    text = _scalar(value).text
    of_time = field.message_type is not None and field.message_type.full_name == "google.protobuf.Duration"
    if of_time and _DURATION_UNITS.fullmatch(text):
        with suppress(ValueError):
            return f"{parse_duration(text):.9f}s"
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


_POLICY_KINDS = ("Policy", "Endpoint")


def parse_policies(text: str, source: str) -> list[api.BacktestPolicy]:
    """The policies in all documents of a text: presets, specs, or endpoints, for their specs.

    Raises ManifestError: it is not valid YAML, or does not fit the contract.
    """
    found: list[api.BacktestPolicy] = []
    for document in read_documents(text, source):
        entries = _entries(document).entries
        given = next((value for key, value in entries if key.text == "kind"), None)
        kind = given.text if isinstance(given, Scalar) else ""
        if kind not in _POLICY_KINDS:
            place = (given or document).place
            raise place.error(
                f"kind must be {' or '.join(_POLICY_KINDS)}" + (f", not {kind}" if kind else "")
            )
        rest = Entries(document.place, [entry for entry in entries if entry[0].text != "kind"])
        policy = api.BacktestPolicy()
        if kind == "Endpoint":
            endpoint = api.Endpoint()
            fill(endpoint, rest)
            policy.name = endpoint.name.removeprefix("endpoints/")
            policy.spec.CopyFrom(endpoint.spec)
        else:
            fill(policy, rest)
        if not policy.name:
            raise document.place.error("name is missing")
        if policy.WhichOneof("policy") is None:
            raise document.place.error("preset or spec is missing")
        found.append(policy)
    return found


_STEP = re.compile(r"\w+|\[\d+\]")


def place_of(tree: Tree, path: str) -> Place:
    """The place of a field such as `spec.rules[2].step`; if it is missing, of its parent."""
    for step in _STEP.findall(path):
        inner: Tree | None = None
        if isinstance(tree, Items) and step.startswith("["):
            inner = next(iter(tree.items[int(step[1:-1]) :]), None)
        elif isinstance(tree, Entries):
            inner = next((value for key, value in tree.entries if key.text in {step, camel(step)}), None)
        if inner is None:
            break
        tree = inner
    return tree.place


def placed(error: InvalidArgumentError, tree: Tree, prefix: str = "") -> InvalidArgumentError:
    """The error with the place of each invalid field; `prefix` begins the paths of the error, but not those in the file."""
    if not error.violations:
        return tree.place.error(error.message)
    lines: list[str] = []
    for one in error.violations:
        path = one.field.removeprefix(prefix)
        place = place_of(tree, path)
        why = one.description.removeprefix(f"{one.field} ")
        lines.append(f"{place.source}:{place.line}:{place.column}: {path} {why}")
    return InvalidArgumentError("\n".join(lines), reason=error.reason, violations=error.violations)
