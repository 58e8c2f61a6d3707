"""Endpoint specs between the wire and the model. What is absent on one side is absent on the other."""

from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.model import AdapterTier, EndpointSpec, GpuGate, ReplicaTemplate
from gpuscale.autoscaler.domain.rules import BoundMode, Combine, ScalingMode
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
from gpuscale.autoscaler.domain.validate import SPEC
from gpuscale.common.rpc import validation
from gpuscale.common.errors import FieldViolation, InvalidArgumentError
from gpuscale.common.names import ADAPTER, adapter_name, parse
from gpuscale.common.wire import optional_seconds, to_duration

_GATES = {autoscaler_api.GpuGate.Value(f"GPU_GATE_{one.name}"): one for one in GpuGate}


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
    )
    if spec.combine is not Combine.SAFEST:
        wire.combine = autoscaler_api.Combine.Value(f"COMBINE_{spec.combine.name}")
    if spec.mode is not ScalingMode.ACTIVE:
        wire.mode = autoscaler_api.ScalingMode.Value(f"SCALING_MODE_{spec.mode.name}")
    if spec.bound_mode is not BoundMode.CLAMP:
        wire.bound_mode = autoscaler_api.BoundMode.Value(f"BOUND_MODE_{spec.bound_mode.name}")
    if spec.gpu_gate is not GpuGate.RESERVE:
        wire.gpu_gate = autoscaler_api.GpuGate.Value(f"GPU_GATE_{spec.gpu_gate.name}")
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


def template_from_wire(wire: autoscaler_api.ReplicaTemplate, path: str = SPEC) -> ReplicaTemplate:
    """The template of a message whose single fields have been validated; `path` is where its spec stands."""
    adapter = (
        parse(ADAPTER, wire.adapter, field=f"{path}.template.adapter")["adapter"] if wire.adapter else ""
    )
    return ReplicaTemplate(
        template=wire.template,
        adapter=adapter,
        parameters=dict(wire.parameters),
        gpu_count=wire.gpu_count,
        min_memory_bytes=wire.min_memory_bytes if wire.HasField("min_memory_bytes") else None,
        max_utilization_percent=(
            wire.max_utilization_percent if wire.HasField("max_utilization_percent") else None
        ),
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


def template_to_wire(template: ReplicaTemplate) -> autoscaler_api.ReplicaTemplate:
    """The message of a template."""
    return autoscaler_api.ReplicaTemplate(
        adapter=adapter_name(template.adapter) if template.adapter else "",
        template=template.template,
        parameters=template.parameters,
        gpu_count=template.gpu_count,
        min_memory_bytes=template.min_memory_bytes,
        max_utilization_percent=template.max_utilization_percent,
        lease_ttl=None if template.lease_ttl is None else to_duration(template.lease_ttl),
        drain_timeout=None if template.drain_timeout is None else to_duration(template.drain_timeout),
        tiers=[
            autoscaler_api.AdapterTier(adapter=adapter_name(one.adapter), max_replicas=one.max_replicas)
            for one in template.tiers
        ],
    )
