"""Endpoint specs between the wire and the model. What is absent on one side is absent on the other."""

from collections.abc import Iterable

from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.domain.model import (
    AdapterTier,
    CapabilitySet,
    EndpointSpec,
    GpuGate,
    ReplicaTemplate,
    ScaleInOrder,
)
from gpuscale.autoscaler.domain.rules import BoundMode, Combine, ScalingMode
from gpuscale.autoscaler.domain.validate import SPEC
from gpuscale.autoscaler.wire.translate_capabilities import amounts_from_wire
from gpuscale.autoscaler.wire.translate_rules import (
    BOUND_MODES,
    COMBINES,
    MODES,
    pace_from_wire,
    pace_to_wire,
    rule_from_wire,
    rule_to_wire,
)
from gpuscale.autoscaler.wire.translate_signals import signal_from_wire, signal_to_wire
from gpuscale.common.errors import FieldViolation, InvalidArgumentError
from gpuscale.common.names import ADAPTER, adapter_name, node_name, parse
from gpuscale.common.rpc import validation
from gpuscale.common.wire import optional_seconds, to_duration

_GATES = {autoscaler_api.GpuGate.Value(f"GPU_GATE_{one.name}"): one for one in GpuGate}
_NOT_ASKED = {
    "member_count": "each replica is one member",
    "gang_strategy": "each replica is one member",
    "nodes": "a replica runs on a node of its adapter (name the adapter, or use node_labels)",
    "gpus": "a replica runs on a node of its adapter (use models or excluded_gpus)",
    "excluded_nodes": "a replica runs on a node of its adapter (name the adapter, or use node_labels)",
}
"""Fields of an ask that a replica has no use for, and why."""
_SHORT = ("gpu_count", "min_memory_bytes", "max_utilization_percent")
"""Fields of an ask that a template may also name by themselves."""
_ORDERS = {autoscaler_api.ScaleInOrder.Value(f"SCALE_IN_ORDER_{one.name}"): one for one in ScaleInOrder}


def spec_from_wire(wire: autoscaler_api.EndpointSpec, path: str = SPEC) -> EndpointSpec:
    """The spec of a message whose single fields have been validated; `path` is where it stands in its request.

    Raises:
        InvalidArgumentError: a signal without a source, or a rule without a kind.
    """
    unset = [
        FieldViolation(f"{path}.signals[{index}].queue", "one source must be set")
        for index, signal in enumerate(wire.signals)
        if signal.WhichOneof("source") is None
    ]
    unset += [
        FieldViolation(f"{path}.rules[{index}].step", "one kind must be set")
        for index, rule in enumerate(wire.rules)
        if rule.WhichOneof("kind") is None
    ]
    if unset:
        raise InvalidArgumentError(f"{unset[0].field}: {unset[0].description}", violations=unset)
    return EndpointSpec(
        min_replicas=wire.min_replicas,
        max_replicas=wire.max_replicas,
        tick=optional_seconds(wire, "tick"),
        signals=tuple(
            signal_from_wire(signal, f"{path}.signals[{i}]") for i, signal in enumerate(wire.signals)
        ),
        rules=tuple(rule_from_wire(rule, f"{path}.rules[{i}]") for i, rule in enumerate(wire.rules)),
        template=template_from_wire(wire.template, path),
        paused=wire.paused,
        combine=COMBINES.get(wire.combine, Combine.SAFEST),
        up=pace_from_wire(wire.up),
        down=pace_from_wire(wire.down),
        mode=MODES.get(wire.mode, ScalingMode.ACTIVE),
        bound_mode=BOUND_MODES.get(wire.bound_mode, BoundMode.CLAMP),
        warm_spares=wire.warm_spares,
        gpu_gate=_GATES.get(wire.gpu_gate, GpuGate.RESERVE),
        busy_metric=wire.busy_metric,
        capability_sets=tuple(
            set_from_wire(one, f"{path}.capability_sets[{i}]") for i, one in enumerate(wire.capability_sets)
        ),
        scale_in_order=_ORDERS.get(wire.scale_in_order, ScaleInOrder.NEWEST_FIRST),
    )


def spec_to_wire(spec: EndpointSpec) -> autoscaler_api.EndpointSpec:
    """The message of a spec."""
    wire = autoscaler_api.EndpointSpec(
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        signals=[signal_to_wire(signal) for signal in spec.signals],
        rules=[rule_to_wire(rule) for rule in spec.rules],
        template=template_to_wire(spec.template),
        paused=spec.paused,
        up=pace_to_wire(spec.up),
        down=pace_to_wire(spec.down),
        warm_spares=spec.warm_spares,
        busy_metric=spec.busy_metric,
        capability_sets=[_set_to_wire(one) for one in spec.capability_sets],
    )
    if spec.combine is not Combine.SAFEST:
        wire.combine = autoscaler_api.Combine.Value(f"COMBINE_{spec.combine.name}")
    if spec.mode is not ScalingMode.ACTIVE:
        wire.mode = autoscaler_api.ScalingMode.Value(f"SCALING_MODE_{spec.mode.name}")
    if spec.bound_mode is not BoundMode.CLAMP:
        wire.bound_mode = autoscaler_api.BoundMode.Value(f"BOUND_MODE_{spec.bound_mode.name}")
    if spec.gpu_gate is not GpuGate.RESERVE:
        wire.gpu_gate = autoscaler_api.GpuGate.Value(f"GPU_GATE_{spec.gpu_gate.name}")
    if spec.scale_in_order is not ScaleInOrder.NEWEST_FIRST:
        wire.scale_in_order = autoscaler_api.ScaleInOrder.Value(f"SCALE_IN_ORDER_{spec.scale_in_order.name}")
    if spec.tick is not None:
        wire.tick.CopyFrom(to_duration(spec.tick))
    return wire


def merged(
    current: EndpointSpec, changed: autoscaler_api.Endpoint, mask: FieldMask | None
) -> autoscaler_api.EndpointSpec:
    """The spec after an update: what `mask` names is taken from `changed`, cleared where that does not set it.

    Raises:
        InvalidArgumentError: the mask names something that is not in spec, or the result breaks a rule.
    """
    if mask is None or not mask.paths:
        return changed.spec
    if not mask.IsValidForDescriptor(autoscaler_api.Endpoint.DESCRIPTOR) or not all(
        path == "spec" or path.startswith("spec.") for path in mask.paths
    ):
        raise InvalidArgumentError("update_mask must name spec or fields of it", field="update_mask")
    result = autoscaler_api.Endpoint(name=changed.name, spec=spec_to_wire(current))
    mask.MergeMessage(changed, result, replace_message_field=True, replace_repeated_field=True)
    validation.validate(result)
    return result.spec


def set_from_wire(wire: autoscaler_api.CapabilitySet, path: str) -> CapabilitySet:
    """The capability set of a message; `path` is where it stands.

    Raises:
        InvalidArgumentError: an amount is below -1, or the name of an adapter is none.
    """
    return CapabilitySet(
        wire.id,
        amounts_from_wire(wire.capabilities, f"{path}.capabilities"),
        wire.min_replicas,
        wire.max_replicas if wire.HasField("max_replicas") else None,
        wire.workers or 1,
        template_from_wire(wire.template, path) if wire.HasField("template") else None,
    )


def _set_to_wire(one: CapabilitySet) -> autoscaler_api.CapabilitySet:
    return autoscaler_api.CapabilitySet(
        id=one.id,
        capabilities=one.capabilities,
        min_replicas=one.min_replicas,
        max_replicas=one.max_replicas,
        workers=one.workers if one.workers > 1 else 0,
        template=None if one.template is None else template_to_wire(one.template),
    )


def template_from_wire(wire: autoscaler_api.ReplicaTemplate, path: str = SPEC) -> ReplicaTemplate:
    """The template of a message whose single fields have been validated; `path` is where its spec stands.

    Raises:
        InvalidArgumentError: an ask for what no replica can have, or beside fields that are short for it; or the name of an adapter is none.
    """
    adapter = (
        parse(ADAPTER, wire.adapter, field=f"{path}.template.adapter")["adapter"] if wire.adapter else ""
    )
    gpus = wire.ask if wire.HasField("ask") else wire
    return ReplicaTemplate(
        template=wire.template,
        adapter=adapter,
        parameters=dict(wire.parameters),
        gpu_count=gpus.gpu_count,
        min_memory_bytes=gpus.min_memory_bytes if gpus.HasField("min_memory_bytes") else None,
        max_utilization_percent=(
            gpus.max_utilization_percent if gpus.HasField("max_utilization_percent") else None
        ),
        ask=_rest_of_ask(wire, f"{path}.template") if wire.HasField("ask") else None,
        lease_ttl=optional_seconds(wire, "lease_ttl"),
        drain_timeout=optional_seconds(wire, "drain_timeout"),
        tiers=tuple(
            AdapterTier(
                parse(ADAPTER, tier.adapter, f"{path}.template.tiers[{place}].adapter")["adapter"],
                tier.max_replicas,
            )
            for place, tier in enumerate(wire.tiers)
        ),
    )


def _rest_of_ask(wire: autoscaler_api.ReplicaTemplate, path: str) -> bytes:
    """What the ask of a template says beyond the fields that the model knows by name."""
    said = {field.name for field, _ in wire.ListFields()}
    for name in _SHORT:
        if name in said:
            raise InvalidArgumentError(
                f"{path}.{name} cannot stand beside ask: set {path}.ask.{name}", field=f"{path}.{name}"
            )
    rest = allocator_api.Ask()
    rest.CopyFrom(wire.ask)
    for field, _ in wire.ask.ListFields():
        if why := _NOT_ASKED.get(field.name):
            raise InvalidArgumentError(
                f"{path}.ask.{field.name} must be absent: {why}",
                field=f"{path}.ask.{field.name}",
            )
    rest.ClearField("gpu_count")
    rest.ClearField("min_memory_bytes")
    rest.ClearField("max_utilization_percent")
    return rest.SerializeToString(deterministic=True)


def ask_to_wire(template: ReplicaTemplate, nodes: Iterable[str] = ()) -> allocator_api.Ask:
    """What a replica of a template asks of the allocator, on some nodes by id; on any where there are none."""
    ask = allocator_api.Ask.FromString(template.ask or b"")
    ask.MergeFrom(
        allocator_api.Ask(
            gpu_count=template.gpu_count,
            min_memory_bytes=template.min_memory_bytes,
            max_utilization_percent=template.max_utilization_percent,
            nodes=map(node_name, nodes),
        )
    )
    return ask


def template_to_wire(template: ReplicaTemplate) -> autoscaler_api.ReplicaTemplate:
    """The message of a template."""
    wire = autoscaler_api.ReplicaTemplate(
        adapter=adapter_name(template.adapter) if template.adapter else "",
        template=template.template,
        parameters=template.parameters,
        lease_ttl=None if template.lease_ttl is None else to_duration(template.lease_ttl),
        drain_timeout=None if template.drain_timeout is None else to_duration(template.drain_timeout),
        tiers=[
            autoscaler_api.AdapterTier(adapter=adapter_name(one.adapter), max_replicas=one.max_replicas)
            for one in template.tiers
        ],
    )
    if template.ask is not None:
        wire.ask.CopyFrom(ask_to_wire(template))
        return wire
    wire.MergeFrom(
        autoscaler_api.ReplicaTemplate(
            gpu_count=template.gpu_count,
            min_memory_bytes=template.min_memory_bytes,
            max_utilization_percent=template.max_utilization_percent,
        )
    )
    return wire
