"""Endpoint specs between the wire and the model. What is absent on one side is absent, or the default, on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.domain.inputs import ANY, Aggregation, SetState, TaskDemand, TaskReport, WorkerGroup
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import BoundMode, Direction, Kind, Rule
from gpuscale.autoscaler.domain.rules.steps import BandRule, Comparator, RatioRule, StepRule, ThresholdRule
from gpuscale.autoscaler.domain.rules.targets import DrainRule, PanicRule, TargetRule, TargetType
from gpuscale.autoscaler.domain.rules.timed import ForecastModel, ForecastRule, Period, ScheduleRule
from gpuscale.autoscaler.domain.spec import (
    DEFAULT_LAST_TTL,
    UNPACED,
    AdapterTier,
    CapabilitySet,
    Combine,
    EndpointSpec,
    GpuGate,
    GpuSignal,
    HostSignal,
    OnMissing,
    Pace,
    PrometheusSignal,
    PushedSignal,
    QueueCount,
    QueueSignal,
    RateLimit,
    ReplicaSignal,
    ReplicaTemplate,
    ScaleInOrder,
    ScalingMode,
    Signal,
    Source,
    TaskSignal,
    WaitingSignal,
)
from gpuscale.autoscaler.domain.validate import SPEC
from gpuscale.common.errors import FieldViolation, InvalidArgumentError
from gpuscale.common.names import ADAPTER, NODE, WATCHER, adapter_name, node_name, parse, watcher_name
from gpuscale.common.rpc import validation
from gpuscale.common.wire import optional_seconds, seconds, to_duration


def amounts_from_wire(wire: Mapping[str, int], path: str) -> dict[str, int]:
    """Capabilities by name, sorted.

    Raises:
        InvalidArgumentError: an amount is below -1, or a name would not stand in a list of them.
    """
    for name, amount in wire.items():
        if any(letter in ",=" or letter.isspace() for letter in name):
            text = "must name capabilities without commas, equals signs and spaces"
            raise InvalidArgumentError(f"{path} {text}", field=path)
        if amount < ANY:
            field = f"{path}[{name}]"
            raise InvalidArgumentError(f"{field} must be at least 0, or -1 for any amount", field=field)
    return dict(sorted(wire.items()))


def tasks_from_wire(wire: api.TaskReport, path: str) -> TaskReport:
    """The tasks of a message and the workers beside them, without their age.

    Raises:
        InvalidArgumentError: an amount is below -1.
    """
    return TaskReport(
        tuple(
            TaskDemand(amounts_from_wire(one.capabilities, f"{path}.demands[{i}].capabilities"), one.tasks)
            for i, one in enumerate(wire.demands)
        ),
        groups_from_wire(wire.unmanaged_workers, f"{path}.unmanaged_workers"),
    )


def tasks_to_wire(tasks: TaskReport) -> api.TaskReport:
    """The message of tasks."""
    return api.TaskReport(
        demands=[api.TaskDemand(capabilities=one.capabilities, tasks=one.tasks) for one in tasks.demands],
        unmanaged_workers=[group_to_wire(one) for one in tasks.unmanaged],
    )


def group_from_wire(wire: api.WorkerGroup, path: str) -> WorkerGroup:
    """Workers that can do the same.

    Raises:
        InvalidArgumentError: an amount is below -1.
    """
    return WorkerGroup(amounts_from_wire(wire.capabilities, f"{path}.capabilities"), wire.workers)


def groups_from_wire(wire: Iterable[api.WorkerGroup], path: str) -> tuple[WorkerGroup, ...]:
    """Several groups.

    Raises:
        InvalidArgumentError: an amount is below -1.
    """
    return tuple(group_from_wire(one, f"{path}[{i}]") for i, one in enumerate(wire))


def group_to_wire(group: WorkerGroup) -> api.WorkerGroup:
    """The message of a group."""
    return api.WorkerGroup(capabilities=group.capabilities, workers=group.workers)


def set_state_from_wire(wire: api.DecisionInputs.CapabilitySet) -> SetState:
    """What was known of a capability set."""
    reported = dict(wire.reported.capabilities) if wire.HasField("reported") else None
    return SetState(wire.before, groups_from_wire(wire.groups, "groups"), reported)


def set_state_to_wire(set_id: str, state: SetState) -> api.DecisionInputs.CapabilitySet:
    """The message of what is known of a capability set."""
    return api.DecisionInputs.CapabilitySet(
        id=set_id,
        before=state.before,
        groups=[group_to_wire(one) for one in state.groups],
        reported=None if state.reported is None else api.WorkerGroup(capabilities=state.reported),
    )


QUEUE_COUNTS = {api.QueueCount.Value(f"QUEUE_COUNT_{one.name}"): one for one in QueueCount}
_AGGREGATIONS = {api.Aggregation.Value(f"AGGREGATION_{one.name}"): one for one in Aggregation}
_ON_MISSING = {api.OnMissing.Value(f"ON_MISSING_{one.name}"): one for one in OnMissing}


def signal_from_wire(wire: api.Signal, path: str) -> Signal:
    """The signal of a message that has a source.

    Raises:
        InvalidArgumentError: the name of a watcher or node is none.
    """
    ttl = optional_seconds(wire, "last_ttl")
    return Signal(
        wire.id,
        _source_from_wire(wire, path),
        optional_seconds(wire, "max_age"),
        across=_AGGREGATIONS.get(wire.across, Aggregation.AVG),
        window=optional_seconds(wire, "window"),
        over_window=_AGGREGATIONS.get(wire.over_window, Aggregation.AVG),
        on_missing=_ON_MISSING.get(wire.on_missing, OnMissing.HOLD),
        last_ttl=DEFAULT_LAST_TTL if ttl is None else ttl,
        activation_threshold=wire.activation_threshold,
        counts_work=wire.counts_work,
    )


def signal_to_wire(signal: Signal) -> api.Signal:
    """The message of a signal; defaults are left out."""
    wire = api.Signal(id=signal.id, counts_work=signal.counts_work)
    if signal.max_age is not None:
        wire.max_age.CopyFrom(to_duration(signal.max_age))
    if signal.across is not Aggregation.AVG:
        wire.across = api.Aggregation.Value(f"AGGREGATION_{signal.across.name}")
    if signal.window is not None:
        wire.window.CopyFrom(to_duration(signal.window))
    if signal.over_window is not Aggregation.AVG:
        wire.over_window = api.Aggregation.Value(f"AGGREGATION_{signal.over_window.name}")
    if signal.on_missing is not OnMissing.HOLD:
        wire.on_missing = api.OnMissing.Value(f"ON_MISSING_{signal.on_missing.name}")
    if signal.last_ttl != DEFAULT_LAST_TTL:
        wire.last_ttl.CopyFrom(to_duration(signal.last_ttl))
    if signal.activation_threshold:
        wire.activation_threshold = signal.activation_threshold
    _source_to_wire(signal.source, wire)
    return wire


def _source_from_wire(wire: api.Signal, path: str) -> Source:
    match wire.WhichOneof("source"):
        case "gpu":
            return GpuSignal(wire.gpu.metric, _nodes(wire.gpu, f"{path}.gpu"), wire.gpu.own_replicas)
        case "host":
            return HostSignal(wire.host.metric, _nodes(wire.host, f"{path}.host"))
        case "pushed":
            return PushedSignal(wire.pushed.metric)
        case "replicas":
            return ReplicaSignal(wire.replicas.metric)
        case "prometheus":
            return PrometheusSignal(wire.prometheus.server, wire.prometheus.query)
        case "tasks":
            return TaskSignal()
        case "waiting":
            return WaitingSignal(wire.waiting.tenant)
        case _:
            watcher = parse(WATCHER, wire.queue.watcher, field=f"{path}.queue.watcher")["watcher"]
            return QueueSignal(watcher, QUEUE_COUNTS[wire.queue.count])


def _nodes(wire: api.GpuSignal | api.HostSignal, path: str) -> frozenset[str]:
    found = (parse(NODE, name, field=f"{path}.nodes[{i}]")["node"] for i, name in enumerate(wire.nodes))
    return frozenset(found)


def _source_to_wire(source: Source, wire: api.Signal) -> None:
    """Set the source of a message."""
    match source:
        case QueueSignal(watcher, count):
            counted = api.QueueCount.Value(f"QUEUE_COUNT_{count.name}")
            wire.queue.CopyFrom(api.QueueSignal(watcher=watcher_name(watcher), count=counted))
        case GpuSignal(metric, nodes, own):
            names = [node_name(node) for node in sorted(nodes)]
            wire.gpu.CopyFrom(api.GpuSignal(metric=metric, nodes=names, own_replicas=own))
        case HostSignal(metric, nodes):
            names = [node_name(node) for node in sorted(nodes)]
            wire.host.CopyFrom(api.HostSignal(metric=metric, nodes=names))
        case PushedSignal(metric):
            wire.pushed.CopyFrom(api.PushedSignal(metric=metric))
        case ReplicaSignal(metric):
            wire.replicas.CopyFrom(api.ReplicaSignal(metric=metric))
        case PrometheusSignal(server, query):
            wire.prometheus.CopyFrom(api.PrometheusSignal(server=server, query=query))
        case TaskSignal():
            wire.tasks.SetInParent()
        case WaitingSignal(tenant):
            wire.waiting.CopyFrom(api.WaitingSignal(tenant=tenant))


COMPARATORS = {api.Comparator.Value(f"COMPARATOR_{one.name}"): one for one in Comparator}
COMBINES = {api.Combine.Value(f"COMBINE_{one.name}"): one for one in Combine}
BOUND_MODES = {api.BoundMode.Value(f"BOUND_MODE_{one.name}"): one for one in BoundMode}
MODES = {api.ScalingMode.Value(f"SCALING_MODE_{one.name}"): one for one in ScalingMode}
_DIRECTIONS = {api.Direction.DIRECTION_UP: Direction.UP, api.Direction.DIRECTION_DOWN: Direction.DOWN}
_MINUTES_A_DAY = 24 * 60


def rule_from_wire(wire: api.Rule, path: str) -> Rule:
    """The rule of a message that has a kind.

    Raises:
        InvalidArgumentError: a time of day is none.
    """
    return Rule(
        id=wire.id,
        signal=wire.signal,
        kind=_kind_from_wire(wire, path),
        disabled=wire.disabled,
        priority=wire.priority,
        cooldown=optional_seconds(wire, "cooldown"),
        min_replicas=wire.min_replicas if wire.HasField("min_replicas") else None,
        max_replicas=wire.max_replicas if wire.HasField("max_replicas") else None,
        direction=_DIRECTIONS.get(wire.direction, Direction.BOTH),
        bound_mode=BOUND_MODES.get(wire.bound_mode, BoundMode.CLAMP),
    )


def rule_to_wire(rule: Rule) -> api.Rule:
    """The message of a rule."""
    wire = api.Rule(
        id=rule.id,
        signal=rule.signal,
        disabled=rule.disabled,
        priority=rule.priority,
        cooldown=None if rule.cooldown is None else to_duration(rule.cooldown),
        min_replicas=rule.min_replicas,
        max_replicas=rule.max_replicas,
    )
    if rule.direction is not Direction.BOTH:
        wire.direction = api.Direction.Value(f"DIRECTION_{rule.direction.name}")
    if rule.bound_mode is not BoundMode.CLAMP:
        wire.bound_mode = api.BoundMode.Value(f"BOUND_MODE_{rule.bound_mode.name}")
    _kind_to_wire(rule.kind, wire)
    return wire


def pace_from_wire(wire: api.Pace) -> Pace:
    """The pace of a message."""
    return Pace(
        stabilization=optional_seconds(wire, "stabilization"),
        limits=tuple(_limit_from_wire(limit) for limit in wire.limits),
        strictest=wire.strictest,
        disabled=wire.disabled,
        cooldown=seconds(wire.cooldown),
        startups=wire.startups,
    )


def pace_to_wire(pace: Pace) -> api.Pace | None:
    """The message of a pace; None for one that says nothing."""
    if pace == UNPACED:
        return None
    return api.Pace(
        stabilization=None if pace.stabilization is None else to_duration(pace.stabilization),
        limits=[_limit_to_wire(limit) for limit in pace.limits],
        strictest=pace.strictest,
        disabled=pace.disabled,
        cooldown=to_duration(pace.cooldown) if pace.cooldown else None,
        startups=pace.startups,
    )


def _limit_to_wire(limit: RateLimit) -> api.RateLimit:
    period = to_duration(limit.period)
    if limit.replicas is not None:
        return api.RateLimit(replicas=limit.replicas, period=period)
    return api.RateLimit(percent=limit.percent or 0.0, period=period)


def _limit_from_wire(wire: api.RateLimit) -> RateLimit:
    amount = wire.WhichOneof("amount")
    return RateLimit(
        seconds(wire.period),
        wire.replicas if amount == "replicas" else None,
        wire.percent if amount == "percent" else None,
    )


def _kind_from_wire(wire: api.Rule, path: str) -> Kind:
    match wire.WhichOneof("kind"):
        case "band":
            return _band(wire.band)
        case "ratio":
            return _ratio(wire.ratio)
        case "threshold":
            down = wire.threshold
            return ThresholdRule(down.up_above, down.down_at, down.step if down.HasField("step") else 1)
        case "target":
            return _target(wire.target)
        case "panic":
            return _panic(wire.panic)
        case "drain":
            return _drain(wire.drain)
        case "schedule":
            return _schedule(wire.schedule, f"{path}.schedule")
        case "forecast":
            return _forecast(wire.forecast)
        case "formula":
            return FormulaRule(wire.formula.expression)
        case _:
            return StepRule(COMPARATORS[wire.step.comparator], wire.step.threshold, wire.step.step)


def _band(wire: api.BandRule) -> BandRule:
    return BandRule(
        wire.low if wire.HasField("low") else None,
        wire.high if wire.HasField("high") else None,
        wire.step_up if wire.HasField("step_up") else 1,
        wire.step_down if wire.HasField("step_down") else 1,
    )


def _ratio(wire: api.RatioRule) -> RatioRule:
    default = RatioRule()
    return RatioRule(
        wire.up_above if wire.HasField("up_above") else default.up_above,
        wire.down_below if wire.HasField("down_below") else default.down_below,
        wire.proportional_down,
        wire.guarded,
    )


def _target(wire: api.TargetRule) -> TargetRule:
    default = TargetRule(wire.value)
    level = wire.type == api.TargetType.TARGET_TYPE_VALUE
    return TargetRule(
        wire.value,
        TargetType.VALUE if level else TargetType.AVERAGE_VALUE,
        wire.tolerance_up if wire.HasField("tolerance_up") else default.tolerance_up,
        wire.tolerance_down if wire.HasField("tolerance_down") else default.tolerance_down,
    )


def _panic(wire: api.PanicRule) -> PanicRule:
    default = PanicRule(wire.capacity)
    stable = optional_seconds(wire, "stable_window")
    return PanicRule(
        wire.capacity,
        wire.utilization if wire.HasField("utilization") else default.utilization,
        default.stable_window if stable is None else stable,
        optional_seconds(wire, "panic_window"),
        wire.panic_threshold if wire.HasField("panic_threshold") else default.panic_threshold,
        wire.max_up_rate if wire.HasField("max_up_rate") else default.max_up_rate,
        wire.max_down_rate if wire.HasField("max_down_rate") else default.max_down_rate,
    )


def _drain(wire: api.DrainRule) -> DrainRule:
    default = DrainRule(1.0)
    window = optional_seconds(wire, "window")
    return DrainRule(
        seconds(wire.deadline),
        optional_seconds(wire, "service_time"),
        wire.slots if wire.HasField("slots") else default.slots,
        wire.utilization if wire.HasField("utilization") else default.utilization,
        wire.busy_signal,
        wire.rate_signal,
        default.window if window is None else window,
        wire.tolerance if wire.HasField("tolerance") else default.tolerance,
    )


def _forecast(wire: api.ForecastRule) -> ForecastRule:
    season = optional_seconds(wire, "season")
    naive = wire.model == api.ForecastModel.FORECAST_MODEL_SEASONAL_NAIVE
    default = ForecastRule(wire.target)
    return ForecastRule(
        wire.target,
        ForecastModel.SEASONAL_NAIVE if naive else ForecastModel.HOLT,
        optional_seconds(wire, "horizon"),
        default.season if season is None else season,
    )


def _schedule(wire: api.ScheduleRule, path: str) -> ScheduleRule:
    periods = tuple(
        Period(
            frozenset(one.weekdays),
            _minutes(one.start, f"{path}.periods[{index}].start"),
            _minutes(one.end, f"{path}.periods[{index}].end"),
            one.replicas,
        )
        for index, one in enumerate(wire.periods)
    )
    return ScheduleRule(periods, wire.time_zone or "UTC")


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


def _kind_to_wire(kind: Kind, wire: api.Rule) -> None:
    """Set the kind of a message; what a kind does not state is written as it holds."""
    match kind:
        case StepRule(comparator, threshold, step):
            named = api.Comparator.Value(f"COMPARATOR_{comparator.name}")
            wire.step.CopyFrom(api.StepRule(comparator=named, threshold=threshold, step=step))
        case BandRule(low, high, up, down):
            wire.band.CopyFrom(api.BandRule(low=low, high=high, step_up=up, step_down=down))
        case RatioRule(up_above, down_below, proportional, guarded):
            wire.ratio.CopyFrom(
                api.RatioRule(
                    up_above=up_above, down_below=down_below, proportional_down=proportional, guarded=guarded
                )
            )
        case ThresholdRule(up_above, down_at, step):
            wire.threshold.CopyFrom(api.ThresholdRule(up_above=up_above, down_at=down_at, step=step))
        case FormulaRule(expression):
            wire.formula.CopyFrom(api.FormulaRule(expression=expression))
        case TargetRule() | PanicRule() | DrainRule():
            _proportional_to_wire(kind, wire)
        case ScheduleRule() | ForecastRule():
            _timed_to_wire(kind, wire)


def _proportional_to_wire(kind: TargetRule | PanicRule | DrainRule, wire: api.Rule) -> None:
    match kind:
        case TargetRule(value, target_type, up, down):
            named = api.TargetType.Value(f"TARGET_TYPE_{target_type.name}")
            wire.target.CopyFrom(
                api.TargetRule(value=value, type=named, tolerance_up=up, tolerance_down=down)
            )
        case PanicRule():
            wire.panic.CopyFrom(
                api.PanicRule(
                    capacity=kind.capacity,
                    utilization=kind.utilization,
                    stable_window=to_duration(kind.stable_window),
                    panic_window=None if kind.panic_window is None else to_duration(kind.panic_window),
                    panic_threshold=kind.panic_threshold,
                    max_up_rate=kind.max_up_rate,
                    max_down_rate=kind.max_down_rate,
                )
            )
        case DrainRule():
            wire.drain.CopyFrom(
                api.DrainRule(
                    deadline=to_duration(kind.deadline),
                    service_time=None if kind.service_time is None else to_duration(kind.service_time),
                    slots=kind.slots,
                    utilization=kind.utilization,
                    busy_signal=kind.busy_signal,
                    rate_signal=kind.rate_signal,
                    window=to_duration(kind.window),
                    tolerance=kind.tolerance,
                )
            )


def _timed_to_wire(kind: ScheduleRule | ForecastRule, wire: api.Rule) -> None:
    if isinstance(kind, ScheduleRule):
        periods = [
            api.ScheduleRule.Period(
                weekdays=sorted(one.weekdays),
                start=_clock(one.start),
                end=_clock(one.end),
                replicas=one.replicas,
            )
            for one in kind.periods
        ]
        wire.schedule.CopyFrom(api.ScheduleRule(periods=periods, time_zone=kind.time_zone))
        return
    named = api.ForecastModel.Value(f"FORECAST_MODEL_{kind.model.name}")
    wire.forecast.CopyFrom(
        api.ForecastRule(
            target=kind.target,
            model=named,
            horizon=None if kind.horizon is None else to_duration(kind.horizon),
            season=to_duration(kind.season),
        )
    )


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
