"""Validation of an endpoint's spec across fields. Pure.

Single fields (bounds, formats, finite numbers) are checked by the server against the contract's rules; names of readings, and
GPU asks, by `wire.specs.spec_violations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from gpuscale.autoscaler.domain.rules.rule import BoundMode, Comparator, RatioRule, StepRule
from gpuscale.autoscaler.domain.spec import (
    ASKS_FOR_ROOM,
    UNPACED,
    EndpointSpec,
    GpuSignal,
    HostSignal,
    ReplicaTemplate,
    TaskSignal,
)
from gpuscale.common.errors import FieldViolation

SPEC = "endpoint.spec"
_BELOW = frozenset({Comparator.LESS_THAN, Comparator.LESS_THAN_OR_EQUAL})


def violations(spec: EndpointSpec, path: str = SPEC) -> list[FieldViolation]:
    """Invalid fields, by paths that begin with `path`; empty for a valid spec."""
    checks = [_replicas, _signals, _rules]
    checks += [_sets] if spec.capability_sets else []
    checks += [_adaptive] if spec.adaptive is not None else []
    return [found for check in checks for found in check(path, spec)]


def _replicas(path: str, spec: EndpointSpec) -> Iterator[FieldViolation]:
    yield from _crossed(path, spec.min_replicas, spec.max_replicas)
    models = [one.model.casefold() for one in spec.template.models]
    yield from _repeated(f"{path}.template.models", models, "model")
    if models and not spec.started_from.gpu_count:
        yield FieldViolation(f"{path}.template.models", "must be left out where replicas reserve no GPUs")
    if models and spec.capability_sets:
        text = "must be left out beside capability_sets: use ask.models"
        yield FieldViolation(f"{path}.template.models", text)
    unused = bool(spec.capability_sets) and all(one.template for one in spec.capability_sets)
    yield from _template(f"{path}.template", spec.template, unused=unused)
    if spec.warm_spares > spec.max_replicas:
        yield FieldViolation(f"{path}.warm_spares", "must be at most max_replicas")
    for way, pace in (("up", spec.up), ("down", spec.down)):
        for index, limit in enumerate(pace.limits):
            if limit.replicas is None and limit.percent is None:
                yield FieldViolation(f"{path}.{way}.limits[{index}].replicas", "must be set, or percent")


def _crossed(path: str, least: int | None, most: int | None) -> Iterator[FieldViolation]:
    if least is not None and most is not None and least > most:
        yield FieldViolation(f"{path}.max_replicas", "must be at least min_replicas")


def _template(path: str, template: ReplicaTemplate, *, unused: bool = False) -> Iterator[FieldViolation]:
    if not template.template and not unused:
        yield FieldViolation(f"{path}.template", "must be set")
    if template.tiers and template.adapter:
        yield FieldViolation(f"{path}.tiers", "must be left out where adapter is set")
    yield from _repeated(f"{path}.tiers", [tier.adapter for tier in template.tiers], "adapter")


def _repeated(path: str, names: Iterable[str], field: str = "id") -> Iterator[FieldViolation]:
    seen: set[str] = set()
    for index, one in enumerate(names):
        if one in seen:
            yield FieldViolation(f"{path}[{index}].{field}", f"must differ from the {field}s before it")
        seen.add(one)


def _signals(path: str, spec: EndpointSpec) -> Iterator[FieldViolation]:
    yield from _repeated(f"{path}.signals", [signal.id for signal in spec.signals])
    for index, signal in enumerate(spec.signals):
        where, source = f"{path}.signals[{index}]", signal.source
        if signal.counts_work and isinstance(source, GpuSignal | HostSignal):
            text = "must be left out: readings of GPUs and hosts count no work"
            yield FieldViolation(f"{where}.counts_work", text)
        if isinstance(source, GpuSignal) and source.nodes and source.own_replicas:
            yield FieldViolation(f"{where}.gpu.nodes", "must be left out where own_replicas is set")


def _rules(path: str, spec: EndpointSpec) -> Iterator[FieldViolation]:
    yield from _repeated(f"{path}.rules", [rule.id for rule in spec.rules])
    signals = {signal.id for signal in spec.signals}
    for index, rule in enumerate(spec.rules):
        where = f"{path}.rules[{index}]"
        if (rule.kind.reads_signal or rule.signal) and rule.signal not in signals:
            yield FieldViolation(f"{where}.signal", "must be the id of a signal of this endpoint")
        for field, problem in rule.kind.problems(signals):
            yield FieldViolation(f"{where}.{rule.kind.field()}.{field}", problem)
        yield from _crossed(where, rule.min_replicas, rule.max_replicas)
    # Pairs that read one signal, step in opposite directions and can be true at once (up at > 5, down at < 8).
    steps = [
        (index, rule.signal, rule.kind)
        for index, rule in enumerate(spec.rules)
        if isinstance(rule.kind, StepRule) and not rule.disabled
    ]
    for (first, one, kind), (second, other, opposite) in combinations(steps, 2):
        if one == other and kind.step * opposite.step < 0 and _meet(kind, opposite):
            text = f"can be true together with rules[{first}], which steps the other way"
            yield FieldViolation(f"{path}.rules[{second}].step.threshold", text)


def _sets(path: str, spec: EndpointSpec) -> Iterator[FieldViolation]:
    sets = spec.capability_sets
    yield from _repeated(f"{path}.capability_sets", [one.id for one in sets])
    for index, one in enumerate(sets):
        where = f"{path}.capability_sets[{index}]"
        yield from _crossed(where, one.min_replicas, one.max_replicas)
        if one.template is not None:
            yield from _template(f"{where}.template", one.template)
            if one.template.models:
                yield FieldViolation(f"{where}.template.models", "must be left out: use ask.models")
    if sum(one.min_replicas for one in sets) > spec.max_replicas:
        text = "must be at least the min_replicas of all capability_sets"
        yield FieldViolation(f"{path}.max_replicas", text)
    # Fields without effect beside them: only a ratio of tasks to workers is evaluated for each set.
    tasks = {one.id for one in spec.signals if isinstance(one.source, TaskSignal)}
    for index, rule in enumerate(spec.rules):
        if not isinstance(rule.kind, RatioRule) or rule.kind.proportional_down or rule.signal not in tasks:
            text = "must be a ratio on a signal of tasks, one step at a time, beside capability_sets"
            yield FieldViolation(f"{path}.rules[{index}].ratio", text)
    if len(spec.rules) > 1:
        yield FieldViolation(f"{path}.rules[1]", "must be left out: beside capability_sets there is one rule")
    unused = (
        ("warm_spares", spec.warm_spares, "give sets min_replicas"),
        ("up", spec.up != UNPACED, "give the rule a cooldown"),
        ("down", spec.down != UNPACED, "give the rule a cooldown"),
        ("gpu_gate", spec.gpu_gate in ASKS_FOR_ROOM, "give sets max_replicas"),
        ("bound_mode", spec.bound_mode is not BoundMode.CLAMP, "sets keep to their bounds one by one"),
    )
    for name, stated, instead in unused:
        if stated:
            yield FieldViolation(f"{path}.{name}", f"must be left out beside capability_sets: {instead}")


def _adaptive(path: str, spec: EndpointSpec) -> Iterator[FieldViolation]:
    if spec.capability_sets or len(spec.watchers) != 1:
        text = (
            "needs one queue watcher among the signals, whose history it is chosen by, and no capability_sets"
        )
        yield FieldViolation(f"{path}.adaptive", text)
    try:
        _ = spec.adaptive and spec.adaptive.chosen_by
    except ValueError as error:
        yield FieldViolation(f"{path}.adaptive.goal", f"cannot be read: {error}")


def _meet(one: StepRule, other: StepRule) -> bool:
    """Whether both can be true of one value."""
    if (one.comparator in _BELOW) == (other.comparator in _BELOW):
        return True
    low, high = (other, one) if one.comparator in _BELOW else (one, other)
    if low.threshold != high.threshold:
        return low.threshold < high.threshold
    return all(kind.comparator.holds(kind.threshold, kind.threshold) for kind in (low, high))
