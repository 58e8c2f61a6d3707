"""What is wrong with an endpoint's spec that no single field shows. Pure.

Single fields (bounds, formats, finite numbers) are checked by the server against the rules in the contract.
"""

import difflib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gpuscale.autoscaler.domain.metric_names import GPU_METRICS, HOST_METRICS
from gpuscale.autoscaler.domain.model import (
    ASKS_FOR_ROOM,
    EndpointSpec,
    GpuSignal,
    HostSignal,
    ReplicaTemplate,
    Signal,
    TaskSignal,
)
from gpuscale.autoscaler.domain.policies import formula
from gpuscale.autoscaler.domain.rules import (
    UNPACED,
    WITHOUT_SIGNAL,
    BandRule,
    Comparator,
    DrainRule,
    FormulaRule,
    Pace,
    PanicRule,
    RatioRule,
    Rule,
    ScheduleRule,
    StepRule,
    ThresholdRule,
)
from gpuscale.common.errors import FieldViolation

SPEC = "endpoint.spec"


def violations(spec: EndpointSpec, path: str = SPEC) -> list[FieldViolation]:
    """The fields at fault, by paths that begin with `path`; empty when the spec is sound."""
    found = list(_crossed(path, spec.min_replicas, spec.max_replicas))
    if not spec.template.template and not (
        spec.capability_sets and all(one.template for one in spec.capability_sets)
    ):
        found.append(FieldViolation(f"{path}.template.template", "must be set"))
    found += _tiers(f"{path}.template", spec.template)
    if spec.warm_spares > spec.max_replicas:
        found.append(FieldViolation(f"{path}.warm_spares", "must be at most max_replicas"))
    found += _repeated(f"{path}.signals", [signal.id for signal in spec.signals])
    found += _repeated(f"{path}.rules", [rule.id for rule in spec.rules])
    for index, signal in enumerate(spec.signals):
        found += _metric(f"{path}.signals[{index}]", signal)
    signals = {signal.id for signal in spec.signals}
    for index, rule in enumerate(spec.rules):
        found += _rule(f"{path}.rules[{index}]", rule, signals)
    found += _contradictions(f"{path}.rules", spec.rules)
    if spec.capability_sets:
        found += _sets(path, spec)
    found += [*_pace(f"{path}.up", spec.up), *_pace(f"{path}.down", spec.down)]
    return found


def _crossed(path: str, least: int | None, most: int | None) -> Iterator[FieldViolation]:
    if least is not None and most is not None and least > most:
        yield FieldViolation(f"{path}.max_replicas", "must be at least min_replicas")


def _sets(path: str, spec: EndpointSpec) -> Iterator[FieldViolation]:
    """What is wrong with capability sets: only a ratio of tasks to workers is reckoned for each set by itself."""
    sets = spec.capability_sets
    yield from _repeated(f"{path}.capability_sets", [one.id for one in sets])
    for index, one in enumerate(sets):
        where = f"{path}.capability_sets[{index}]"
        yield from _crossed(where, one.min_replicas, one.max_replicas)
        if one.template is not None:
            if not one.template.template:
                yield FieldViolation(f"{where}.template.template", "must be set")
            yield from _tiers(f"{where}.template", one.template)
    if sum(one.min_replicas for one in sets) > spec.max_replicas:
        yield FieldViolation(
            f"{path}.max_replicas", "must be at least the min_replicas of all capability_sets"
        )
    tasks = {one.id for one in spec.signals if isinstance(one.source, TaskSignal)}
    for index, rule in enumerate(spec.rules):
        if not isinstance(rule.kind, RatioRule) or rule.kind.proportional_down or rule.signal not in tasks:
            text = "must be a ratio on a signal of tasks, one step at a time, beside capability_sets"
            yield FieldViolation(f"{path}.rules[{index}].ratio", text)
    if len(spec.rules) > 1:
        yield FieldViolation(f"{path}.rules[1]", "must be left out: beside capability_sets there is one rule")
    unused = (
        ("warm_spares", spec.warm_spares),
        ("up", spec.up != UNPACED),
        ("down", spec.down != UNPACED),
        ("gpu_gate", spec.gpu_gate in ASKS_FOR_ROOM),
    )
    for name, stated in unused:
        if stated:
            yield FieldViolation(f"{path}.{name}", "must be left out beside capability_sets")


def _tiers(path: str, template: ReplicaTemplate) -> Iterator[FieldViolation]:
    if template.tiers and template.adapter:
        yield FieldViolation(f"{path}.tiers", "must be left out where adapter is set")
    adapters = [tier.adapter for tier in template.tiers]
    for place, adapter in enumerate(adapters):
        if adapter in adapters[:place]:
            text = "must differ from the adapters before it"
            yield FieldViolation(f"{path}.tiers[{place}].adapter", text)


def _repeated(path: str, ids: Sequence[str]) -> Iterator[FieldViolation]:
    counts = Counter(ids)
    for index, one in enumerate(ids):
        if counts[one] > 1 and one in ids[:index]:
            yield FieldViolation(f"{path}[{index}].id", "must differ from the ids before it")


def _metric(path: str, signal: Signal) -> Iterator[FieldViolation]:
    if signal.counts_work and isinstance(signal.source, GpuSignal | HostSignal):
        yield FieldViolation(
            f"{path}.counts_work", "must be left out: readings of GPUs and hosts count no work"
        )
    match signal.source:
        case GpuSignal(metric) if metric not in GPU_METRICS:
            yield FieldViolation(f"{path}.gpu.metric", _unknown_metric("GPUs", metric, GPU_METRICS))
        case GpuSignal(nodes=nodes, own_replicas=True) if nodes:
            yield FieldViolation(f"{path}.gpu.nodes", "must be left out where own_replicas is set")
        case HostSignal(metric) if metric not in HOST_METRICS:
            yield FieldViolation(f"{path}.host.metric", _unknown_metric("hosts", metric, HOST_METRICS))
        case _:
            return


def _unknown_metric(what: str, metric: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(metric, sorted(known), n=1)
    return f"must be a reading of {what}" + (f"; did you mean {near[0]}?" if near else "")


def _rule(path: str, rule: Rule, signals: set[str]) -> Iterator[FieldViolation]:
    needed = not isinstance(rule.kind, WITHOUT_SIGNAL)
    if (needed or rule.signal) and rule.signal not in signals:
        yield FieldViolation(f"{path}.signal", "must be the id of a signal of this endpoint")
    yield from _kind(path, rule, signals)
    yield from _crossed(path, rule.min_replicas, rule.max_replicas)


def _kind(path: str, rule: Rule, signals: set[str]) -> Iterator[FieldViolation]:
    """What is wrong with the kind of a rule."""
    match rule.kind:
        case StepRule(step=0):
            yield FieldViolation(f"{path}.step.step", "must not be 0")
        case BandRule(low=None, high=None):
            yield FieldViolation(f"{path}.band.high", "must be set, or low")
        case BandRule(low=low, high=high) if low is not None and high is not None and low > high:
            yield FieldViolation(f"{path}.band.high", "must be at least low")
        case RatioRule(up_above=up, down_below=down) if down > up:
            yield FieldViolation(f"{path}.ratio.down_below", "must be at most up_above")
        case ThresholdRule(up_above=up, down_at=down) if down > up:
            yield FieldViolation(f"{path}.threshold.down_at", "must be at most up_above")
        case PanicRule() as kind if kind.short > kind.stable_window:
            yield FieldViolation(f"{path}.panic.panic_window", "must be at most stable_window")
        case DrainRule() as kind:
            yield from _drain(f"{path}.drain", kind, signals)
        case ScheduleRule() as kind:
            yield from _schedule(f"{path}.schedule", kind)
        case FormulaRule() as kind:
            yield from _formula(f"{path}.formula.expression", kind, signals)
        case _:
            return


def _drain(path: str, kind: DrainRule, signals: set[str]) -> Iterator[FieldViolation]:
    for name, signal in (("busy_signal", kind.busy_signal), ("rate_signal", kind.rate_signal)):
        if signal and signal not in signals:
            yield FieldViolation(f"{path}.{name}", "must be the id of a signal of this endpoint")
    if kind.service_time is None and not (kind.busy_signal and kind.rate_signal):
        yield FieldViolation(f"{path}.service_time", "must be set, or busy_signal and rate_signal")


def _schedule(path: str, kind: ScheduleRule) -> Iterator[FieldViolation]:
    try:
        ZoneInfo(kind.time_zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        yield FieldViolation(f"{path}.time_zone", "must be the name of a time zone, such as Europe/Berlin")
    for index, period in enumerate(kind.periods):
        if period.start == period.end:
            yield FieldViolation(f"{path}.periods[{index}].end", "must differ from start")


def _formula(path: str, kind: FormulaRule, signals: set[str]) -> Iterator[FieldViolation]:
    if wrong := formula.problem(kind.expression):
        yield FieldViolation(path, wrong)
        return
    known = {formula.name_of(signal) for signal in signals} | formula.OWN_NAMES
    if unknown := sorted(formula.names(kind.expression) - known):
        yield FieldViolation(path, f"names {', '.join(unknown)}, which is no signal of this endpoint")
    meant = Counter(formula.name_of(signal) for signal in signals)
    if unclear := sorted(name for name in formula.names(kind.expression) if meant[name] > 1):
        yield FieldViolation(path, f"names {', '.join(unclear)}, which may be one of several signals")


def _pace(path: str, pace: Pace) -> Iterator[FieldViolation]:
    for index, limit in enumerate(pace.limits):
        if limit.replicas is None and limit.percent is None:
            yield FieldViolation(f"{path}.limits[{index}].replicas", "must be set, or percent")


def _contradictions(path: str, rules: Sequence[Rule]) -> Iterator[FieldViolation]:
    """Pairs that read one signal, step in opposite directions and can be true at once (up at > 5, down at < 8)."""
    steps = [
        (index, rule, rule.kind)
        for index, rule in enumerate(rules)
        if isinstance(rule.kind, StepRule) and not rule.disabled
    ]
    for (first, one, kind), (second, other, opposite) in combinations(steps, 2):
        if one.signal != other.signal or kind.step * opposite.step >= 0:
            continue
        if _region(kind).meets(_region(opposite)):
            text = f"can be true together with rules[{first}], which steps the other way"
            yield FieldViolation(f"{path}[{second}].step.threshold", text)


@dataclass(frozen=True, slots=True)
class _Region:
    """The values for which a rule is true: an interval that may include its ends."""

    low: float
    high: float
    closed: bool

    def meets(self, other: "_Region") -> bool:
        low, high = max(self.low, other.low), min(self.high, other.high)
        return low < high or (low == high and self.closed and other.closed)


def _region(kind: StepRule) -> _Region:
    comparator, threshold = kind.comparator, kind.threshold
    closed = comparator in {Comparator.LESS_THAN_OR_EQUAL, Comparator.GREATER_THAN_OR_EQUAL}
    if comparator in {Comparator.LESS_THAN, Comparator.LESS_THAN_OR_EQUAL}:
        return _Region(-math.inf, threshold, closed)
    return _Region(threshold, math.inf, closed)
