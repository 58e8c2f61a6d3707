"""Endpoint specs between the wire and the model. `codec` converts fields; this module adds what it cannot know.

An absent value on one side is absent, or the default, on the other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeVar, get_args

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.field_mask_pb2 import FieldMask
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
from gpuscale.autoscaler.wire.codec import Codec
from gpuscale.common.errors import FieldViolation, InvalidArgumentError
from gpuscale.common.names import node_name
from gpuscale.common.rpc import validation
from gpuscale.common.rpc.validation import contradictions
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

T = TypeVar("T")
M = TypeVar("M", bound=Message)
HasSpec = TypeVar("HasSpec", api.Endpoint, api.QueueWatcher)
_MINUTES_A_DAY = 24 * 60
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


def merged(current: HasSpec, changed: HasSpec, mask: FieldMask | None) -> HasSpec:
    """The message after an update: masked parts of spec come from `changed`, or are cleared; it must be valid."""
    if mask is None or not mask.paths:
        return changed
    if not mask.IsValidForDescriptor(changed.DESCRIPTOR) or not all(
        path == "spec" or path.startswith("spec.") for path in mask.paths
    ):
        raise InvalidArgumentError("update_mask must name spec or fields of it", field="update_mask")
    mask.MergeMessage(changed, current, replace_message_field=True, replace_repeated_field=True)
    validation.validate(current)
    return current


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
            nodes=map(node_name, nodes),
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
    """Capabilities by name, sorted."""
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
    hours, colon, minutes = text.partition(":")
    if (
        colon
        and len(hours) == len(minutes) == 2
        and (hours + minutes).isascii()
        and (hours + minutes).isdigit()
    ):
        found = int(hours) * 60 + int(minutes)
        if int(minutes) < 60 and found <= _MINUTES_A_DAY:
            return found
    raise InvalidArgumentError(f"{path} must be a time as HH:MM", field=path)


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
        "start": (_minutes, _clock),
        "end": (_minutes, _clock),
    },
)
