"""Rules and paces between the wire and the model. What is absent on one side is the default on the other."""

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.rules import (
    UNPACED,
    BandRule,
    BoundMode,
    Combine,
    Comparator,
    Direction,
    DrainRule,
    ForecastModel,
    ForecastRule,
    FormulaRule,
    Kind,
    Pace,
    PanicRule,
    Period,
    RateLimit,
    RatioRule,
    Rule,
    ScalingMode,
    ScheduleRule,
    StepRule,
    TargetRule,
    TargetType,
    ThresholdRule,
)
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.wire import optional_seconds, seconds, to_duration

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
