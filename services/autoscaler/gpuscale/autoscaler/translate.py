"""Endpoint specs between the wire and the model. What is absent on one side is absent on the other."""

from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.model import (
    Comparator,
    EndpointSpec,
    QueueCount,
    QueueSignal,
    ReplicaTemplate,
    Rule,
    Signal,
    StepRule,
)
from gpuscale.autoscaler.validate import SPEC
from gpuscale.common import validation
from gpuscale.common.errors import FieldViolation, InvalidArgumentError
from gpuscale.common.names import ADAPTER, WATCHER, adapter_name, parse, watcher_name
from gpuscale.common.wire import optional_seconds, to_duration

COMPARATORS = {autoscaler_api.Comparator.Value(f"COMPARATOR_{one.name}"): one for one in Comparator}
QUEUE_COUNTS = {autoscaler_api.QueueCount.Value(f"QUEUE_COUNT_{one.name}"): one for one in QueueCount}


def spec_from_wire(wire: autoscaler_api.EndpointSpec) -> EndpointSpec:
    """The spec of a message whose single fields have been validated.

    Raises:
        InvalidArgumentError: a signal without a source, or a rule without a kind.
    """
    unset = [
        FieldViolation(f"{SPEC}.signals[{index}].queue", "one source must be set")
        for index, signal in enumerate(wire.signals)
        if signal.WhichOneof("source") is None
    ]
    unset += [
        FieldViolation(f"{SPEC}.rules[{index}].step", "one kind must be set")
        for index, rule in enumerate(wire.rules)
        if rule.WhichOneof("kind") is None
    ]
    if unset:
        raise InvalidArgumentError(f"{unset[0].field}: {unset[0].description}", violations=unset)
    return EndpointSpec(
        min_replicas=wire.min_replicas,
        max_replicas=wire.max_replicas,
        tick=optional_seconds(wire, "tick"),
        signals=tuple(_signal_from_wire(signal) for signal in wire.signals),
        rules=tuple(_rule_from_wire(rule) for rule in wire.rules),
        template=template_from_wire(wire.template),
        paused=wire.paused,
    )


def spec_to_wire(spec: EndpointSpec) -> autoscaler_api.EndpointSpec:
    """The message of a spec."""
    wire = autoscaler_api.EndpointSpec(
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        signals=[_signal_to_wire(signal) for signal in spec.signals],
        rules=[_rule_to_wire(rule) for rule in spec.rules],
        template=template_to_wire(spec.template),
        paused=spec.paused,
    )
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


def _signal_from_wire(wire: autoscaler_api.Signal) -> Signal:
    watcher = parse(WATCHER, wire.queue.watcher, field=f"{SPEC}.signals.queue.watcher")["watcher"]
    source = QueueSignal(watcher, QUEUE_COUNTS[wire.queue.count])
    return Signal(wire.id, source, optional_seconds(wire, "max_age"))


def _signal_to_wire(signal: Signal) -> autoscaler_api.Signal:
    queue = autoscaler_api.QueueSignal(
        watcher=watcher_name(signal.source.watcher),
        count=autoscaler_api.QueueCount.Value(f"QUEUE_COUNT_{signal.source.count.name}"),
    )
    max_age = None if signal.max_age is None else to_duration(signal.max_age)
    return autoscaler_api.Signal(id=signal.id, queue=queue, max_age=max_age)


def _rule_from_wire(wire: autoscaler_api.Rule) -> Rule:
    return Rule(
        id=wire.id,
        signal=wire.signal,
        kind=StepRule(COMPARATORS[wire.step.comparator], wire.step.threshold, wire.step.step),
        disabled=wire.disabled,
        priority=wire.priority,
        cooldown=optional_seconds(wire, "cooldown"),
        min_replicas=wire.min_replicas if wire.HasField("min_replicas") else None,
        max_replicas=wire.max_replicas if wire.HasField("max_replicas") else None,
    )


def _rule_to_wire(rule: Rule) -> autoscaler_api.Rule:
    step = autoscaler_api.StepRule(
        comparator=autoscaler_api.Comparator.Value(f"COMPARATOR_{rule.kind.comparator.name}"),
        threshold=rule.kind.threshold,
        step=rule.kind.step,
    )
    return autoscaler_api.Rule(
        id=rule.id,
        signal=rule.signal,
        step=step,
        disabled=rule.disabled,
        priority=rule.priority,
        cooldown=None if rule.cooldown is None else to_duration(rule.cooldown),
        min_replicas=rule.min_replicas,
        max_replicas=rule.max_replicas,
    )


def template_from_wire(wire: autoscaler_api.ReplicaTemplate) -> ReplicaTemplate:
    """The template of a message whose single fields have been validated."""
    adapter = (
        parse(ADAPTER, wire.adapter, field=f"{SPEC}.template.adapter")["adapter"] if wire.adapter else ""
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
    )
