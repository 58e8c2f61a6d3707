"""Endpoint specs between the wire and the model: the codec of messages and dataclasses, and what it cannot know of specs.

`Codec` converts between messages and frozen dataclasses with the same fields, in both directions. A field's conversion follows
from its descriptor and its type in the dataclass, so a field is named once on each side:

- a Duration is seconds, an enum the member of the same name, a resource name the id that it ends with;
- a repeated field is a tuple, or a set that is written in order; a message is the dataclass of its type;
- a oneof is a field of its name, which holds the dataclass named after the member's message.

An absent value on one side is absent, or the default, on the other. Defaults are not written, except in members of a oneof.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from dataclasses import Field as DataclassField
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.autoscaler.domain.inputs import ANY, SetState, WorkerGroup
from gpuscale.autoscaler.domain.rules import KINDS
from gpuscale.autoscaler.domain.serving import METRICS, PREFIX, is_known
from gpuscale.autoscaler.domain.spec import (
    EndpointSpec,
    GpuSignal,
    HostSignal,
    ReplicaSignal,
    ReplicaTemplate,
    Source,
)
from gpuscale.autoscaler.domain.validate import SPEC, violations
from gpuscale.common import names
from gpuscale.common.errors import FieldViolation, InvalidArgumentError
from gpuscale.common.rpc.validation import contradictions, rules_of
from gpuscale.common.wire import seconds, to_duration
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

T = TypeVar("T")
Read = Callable[[Any, str], Any]
"""The value of a message, or of one of its fields; the text is its path in the request."""
Write = Callable[[Any, Any], None]
"""Sets a message, the second argument, or one of its fields, to a value."""
Scalar = tuple[Read, Callable[[Any], Any]]
"""How to read and make a value that is not a message."""
_AS_IT_IS: Scalar = (lambda value, _: value, lambda value: value)
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
        ordered = values if container is tuple else sorted(values)
        getattr(wire, name).extend(map(make, ordered))

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
    if (described := field.enum_type) is not None:
        # Values are named like the members, behind the name of the enum.
        prefix = described.values_by_number[0].name.removesuffix("UNSPECIFIED")
        members = {value.name.removeprefix(prefix): value.number for value in described.values}
        numbers = {one: members[one.name] for one in kind if one.name in members}
        known = {number: one for one, number in numbers.items()}

        def read(value: int, path: str) -> Any:
            if value not in known:
                raise InvalidArgumentError(f"{path} must be set", field=path)
            return known[value]

        return read, numbers.__getitem__
    resource = rules_of(field).resource
    if not resource:
        return _AS_IT_IS
    collection, variable = resource.rstrip("}").split("{")
    return (
        lambda name, path: names.parse(resource, name, path)[variable] if name else "",
        lambda id_: collection + id_ if id_ else "",
    )


M = TypeVar("M", bound=Message)
_TIME = re.compile(r"(?:[01][0-9]|2[0-3]):[0-5][0-9]|24:00")
_NOT_ASKED = {
    "member_count": "each replica is one member",
    "gang_strategy": "each replica is one member",
    "nodes": "a replica runs on a node of its adapter (name the adapter, or use node_labels)",
    "gpus": "a replica runs on a node of its adapter (use models or excluded_gpus)",
    "excluded_nodes": "a replica runs on a node of its adapter (name the adapter, or use node_labels)",
}
"""Fields of an ask that a replica cannot use, and why."""
_Short = Literal["gpu_count", "min_memory_bytes", "max_utilization_percent"]
_SHORT: tuple[_Short, ...] = get_args(_Short)
"""Fields of an ask that a template may also set directly."""


def spec_from_wire(wire: api.EndpointSpec, path: str = SPEC) -> EndpointSpec:
    """The spec of a valid message at `path`; InvalidArgumentError if it lacks a source or kind, or is unreadable."""
    unset = [
        FieldViolation(f"{path}.{name}[{index}].{member}", f"one {oneof} must be set")
        for name, oneof, member in (("signals", "source", "queue"), ("rules", "kind", "step"))
        for index, one in enumerate(getattr(wire, name))
        if one.WhichOneof(oneof) is None
    ]
    if unset:
        raise InvalidArgumentError(f"{unset[0].field}: {unset[0].description}", violations=unset)
    return CODEC.read(EndpointSpec, wire, path)


def _numbers(message: Descriptor) -> Iterator[str]:
    kinds = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64}
    return (one.name for one in message.fields if one.has_presence and one.cpp_type in kinds)


_READINGS: Mapping[type, tuple[str, str, frozenset[str]]] = {
    GpuSignal: (
        "gpu",
        "GPUs",
        frozenset({"memory_used_percent", *_numbers(types_api.GpuReading.DESCRIPTOR)}),
    ),
    HostSignal: (
        "host",
        "hosts",
        frozenset({"memory_used_percent", "load_per_core", *_numbers(types_api.HostReading.DESCRIPTOR)}),
    ),
}
"""Readings for signals: the numbers that agents send, and shares of them, 0-100 (docs/autoscaling.md), or of a core."""


def spec_violations(spec: EndpointSpec, path: str = SPEC) -> list[FieldViolation]:
    """Invalid fields, including those of its templates' asks; empty for a valid spec.

    `spec_from_wire` does not call it, so that specs stored earlier stay readable.
    """
    found = violations(spec, path)
    for index, signal in enumerate(spec.signals):
        if isinstance(signal.source, ReplicaSignal) and not is_known(signal.source.metric):
            some = ", ".join(PREFIX + one for one in (*METRICS, "ttft_p95_seconds", "itl_p95_seconds"))
            text = f"must be one of {some}, of any percentile from 1 to 99, where it begins with {PREFIX}"
            found.append(FieldViolation(f"{path}.signals[{index}].replicas.metric", text))
        if not isinstance(signal.source, GpuSignal | HostSignal):
            continue
        member, what, known = _READINGS[type(signal.source)]
        if signal.source.metric not in known:
            near = difflib.get_close_matches(signal.source.metric, sorted(known), n=1)
            text = f"must be a reading of {what}" + (f"; did you mean {near[0]}?" if near else "")
            found.append(FieldViolation(f"{path}.signals[{index}].{member}.metric", text))
    templates = {path: spec.template}
    templates |= {
        f"{path}.capability_sets[{index}]": one.template
        for index, one in enumerate(spec.capability_sets)
        if one.template is not None
    }
    for where, template in templates.items():
        if template.ask is not None:
            asked = ask_to_wire(replace(template, models=()))
            if template.models and asked.models:
                found.append(FieldViolation(f"{where}.template.ask.models", "must be left out beside models"))
            found += contradictions(asked, f"{where}.template.ask.")
    return found


def spec_to_wire(spec: EndpointSpec) -> api.EndpointSpec:
    """The message of a spec."""
    return to_wire(api.EndpointSpec(), spec)


def from_wire(kind: type[T], wire: Message, path: str) -> T:
    """A value of the model from its valid message at `path`; InvalidArgumentError if a part is unreadable."""
    return CODEC.read(kind, wire, path)


def to_wire(wire: M, value: object) -> M:
    """Fill an empty message with a value of the model."""
    CODEC.write(value, wire)
    return wire


def template_from_wire(wire: api.ReplicaTemplate, path: str = f"{SPEC}.template") -> ReplicaTemplate:
    """The template of a valid message at `path`, whose ask must be possible for a replica."""
    if not wire.HasField("ask"):
        return CODEC.read(ReplicaTemplate, wire, path)
    said = {field.name for field, _ in wire.ListFields()}
    problems: dict[str, str] = {
        name: f"cannot be combined with ask: set {path}.ask.{name}" for name in _SHORT if name in said
    }
    asked = {field.name for field, _ in wire.ask.ListFields()}
    problems |= {f"ask.{name}": f"must be absent: {why}" for name, why in _NOT_ASKED.items() if name in asked}
    if problems:
        name, problem = next(iter(problems.items()))
        raise InvalidArgumentError(f"{path}.{name} {problem}", field=f"{path}.{name}")
    short, rest = api.ReplicaTemplate(), allocator_api.Ask()
    short.CopyFrom(wire)
    short.ClearField("ask")
    rest.CopyFrom(wire.ask)
    for field in _SHORT:
        if field in asked:
            setattr(short, field, getattr(rest, field))
            rest.ClearField(field)
    return replace(CODEC.read(ReplicaTemplate, short, path), ask=rest.SerializeToString(deterministic=True))


def ask_to_wire(template: ReplicaTemplate, nodes: Iterable[str] = ()) -> allocator_api.Ask:
    """A replica's ask to the allocator, on some nodes by id; on any if there are none."""
    ask = allocator_api.Ask.FromString(template.ask or b"")
    ask.MergeFrom(
        allocator_api.Ask(
            gpu_count=template.gpu_count,
            min_memory_bytes=template.min_memory_bytes,
            max_utilization_percent=template.max_utilization_percent,
            nodes=map(names.node_name, nodes),
            models=(one.model for one in template.models),
        )
    )
    return ask


def template_to_wire(template: ReplicaTemplate) -> api.ReplicaTemplate:
    """The message of a template."""
    wire = to_wire(api.ReplicaTemplate(), replace(template, ask=None))
    if template.ask is not None:
        for name in _SHORT:
            wire.ClearField(name)
        wire.ask.CopyFrom(ask_to_wire(replace(template, models=())))
    return wire


def _amounts(wire: Mapping[str, int], path: str) -> dict[str, int]:
    for name, amount in wire.items():
        if any(letter in ",=" or letter.isspace() for letter in name):
            text = "must name capabilities without commas, equals signs and spaces"
            raise InvalidArgumentError(f"{path} {text}", field=path)
        if amount < ANY:
            field = f"{path}[{name}]"
            raise InvalidArgumentError(f"{field} must be at least 0, or -1 for any amount", field=field)
    return dict(sorted(wire.items()))


def set_state_from_wire(wire: autoscaler_internal.DecisionInputs.CapabilitySet) -> SetState:
    """The state of a capability set from its message."""
    reported = dict(wire.reported.capabilities) if wire.HasField("reported") else None
    groups = tuple(from_wire(WorkerGroup, one, "groups") for one in wire.groups)
    return SetState(wire.before, groups, reported)


def set_state_to_wire(set_id: str, state: SetState) -> autoscaler_internal.DecisionInputs.CapabilitySet:
    """The message of a capability set's state."""
    return autoscaler_internal.DecisionInputs.CapabilitySet(
        id=set_id,
        before=state.before,
        groups=[to_wire(api.WorkerGroup(), one) for one in state.groups],
        reported=None if state.reported is None else api.WorkerGroup(capabilities=state.reported),
    )


def _minutes(text: str, path: str) -> int:
    """Minutes after midnight of a time as HH:MM; 24:00 is the end of the day."""
    if not _TIME.fullmatch(text):
        raise InvalidArgumentError(f"{path} must be a time as HH:MM", field=path)
    return int(text[:2]) * 60 + int(text[3:])


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


CODEC = Codec(
    members=(*KINDS, *get_args(Source)),
    messages={
        ReplicaTemplate: (template_from_wire, lambda value, wire: wire.CopyFrom(template_to_wire(value)))
    },
    scalars={
        "capabilities": (_amounts, dict),
        "parameters": (lambda values, _: dict(sorted(values.items())), dict),
        "replica": _AS_IT_IS,
        "reservation": _AS_IT_IS,
        "start": (_minutes, _clock),
        "end": (_minutes, _clock),
    },
)
