"""What an evaluation gives, what it would give under other conditions, and when that may change. Pure.

Every answer comes from the engine itself, with one thing changed, so no rule is duplicated. A given value becomes a sample of
its signal, and is judged like any other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

from gpuscale.autoscaler.domain.decisions import Code, Stage, Step
from gpuscale.autoscaler.domain.engine import Memory, Question, Result, asked, regrets
from gpuscale.autoscaler.domain.inputs import (
    LARGEST,
    NO_SETS,
    Inputs,
    ObservationStatus,
    SetState,
    TaskReport,
    series_of,
)
from gpuscale.autoscaler.domain.planning import capacity_of
from gpuscale.autoscaler.domain.replicas import Moment
from gpuscale.autoscaler.domain.rules.targets import ForecastRule, ScheduleRule
from gpuscale.autoscaler.domain.signals import Sample, kept_seconds, observe
from gpuscale.autoscaler.domain.spec import EndpointSpec, QueueCount, QueueSignal, ScalingMode, Signal

T = TypeVar("T")

NO_BOUND = 100_000
"""More replicas than any endpoint may have."""
MOST_MOMENTS = 256
"""Most moments to try for the next change."""
_ROUNDING = 1e-6
"""Seconds added to each wait, so that what ends exactly then has ended."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The count without what `code` refers to."""

    code: Code
    text: str
    wanted: int


@dataclass(frozen=True, slots=True)
class NextChange:
    """The count after `wait` seconds with unchanged signals."""

    wait: float
    wanted: int


@dataclass(frozen=True, slots=True)
class Answer:
    """An evaluation, its alternatives, and when it may change."""

    result: Result
    alternatives: tuple[Alternative, ...]
    next_change: NextChange | None


def answer(question: Question) -> Answer:
    """Evaluate, with alternatives and the next change."""
    result = asked(question)
    now, steps = result.evaluation.wanted, result.evaluation.steps
    # The count without each thing that limited it, if that differs.
    found: list[Alternative] = []
    seen: set[tuple[Code, str]] = set()
    for step in steps:
        other = None if (step.code, step.rule) in seen else _without(question, step)
        seen.add((step.code, step.rule))
        if other is not None and (wanted := asked(other[0]).evaluation.wanted) != now:
            found.append(Alternative(step.code, other[1], wanted))
    # If one of several rules that hold is dropped, the next still does.
    holding = {step.rule for step in steps if step.code in _HOLDING}
    rules = [replace(one, disabled=one.disabled or one.id in holding) for one in question.spec.rules]
    wanted = asked(_respecified(question, rules=tuple(rules))).evaluation.wanted if len(holding) > 1 else now
    if wanted != now:
        found.append(Alternative(Code.HELD, f"none of {', '.join(sorted(holding))} held", wanted))
    return Answer(result, tuple(found), _next_change(question, result))


_HOLDING = frozenset(
    {Code.SIGNAL_MISSING, Code.SIGNAL_STALE, Code.SIGNAL_INVALID, Code.SOURCES_SILENT, Code.WINDOW_NOT_FULL}
)
_AT_MAX = frozenset({Code.CLAMPED_TO_MAX, Code.ABOVE_MAX, Code.SKIPPED_AT_MAX})
_AT_MIN = frozenset({Code.CLAMPED_TO_MIN, Code.BELOW_MIN, Code.SKIPPED_AT_MIN})
_WINDOW = ({"stabilization": 0.0, "startups": 0.0}, "there were no stabilization window")
_RATE = ({"limits": ()}, "there were no rate limits")
_PACES: Mapping[Code, tuple[Mapping[str, Any], str]] = {
    Code.STABILIZED_UP: _WINDOW,
    Code.STABILIZED_DOWN: _WINDOW,
    Code.RATE_LIMITED_UP: _RATE,
    Code.RATE_LIMITED_DOWN: _RATE,
    Code.ENDPOINT_COOLDOWN: ({"cooldown": 0.0}, "the endpoint had no cooldown"),
    Code.DIRECTION_DISABLED: ({"disabled": False}, "this direction were not switched off"),
}
"""The parts of the pace that each code refers to, and the wording of their absence."""


def _respecified(question: Question, **fields: Any) -> Question:
    return replace(question, spec=replace(question.spec, **fields))


def _without(question: Question, step: Step) -> tuple[Question, str] | None:
    """The question without what a step refers to, and the wording; None if the step limited nothing."""
    if step.stage is Stage.RULE:
        [rule] = (one for one in question.spec.rules if one.id == step.rule)
        if step.code in _HOLDING:
            changed, text = replace(rule, disabled=True), f"rule {rule.id} did not hold: {step.text}"
        elif step.code is Code.COOLDOWN:
            changed, text = replace(rule, cooldown=0.0), f"rule {rule.id} had no cooldown"
        elif step.code in {Code.CLAMPED_TO_RULE_MIN, Code.CLAMPED_TO_RULE_MAX, Code.SKIPPED}:
            changed = replace(rule, min_replicas=None, max_replicas=None)
            text = f"rule {rule.id} had no bounds of its own"
        else:
            return None
        rules = tuple(changed if one is rule else one for one in question.spec.rules)
        return _respecified(question, rules=rules), text
    if step.code in _AT_MAX:
        return _without_bound(question, "max_replicas", NO_BOUND)
    if step.code in _AT_MIN:
        return _without_bound(question, "min_replicas", 0)
    if step.code in _PACES:  # each code refers to one direction, so both may lose it
        fields, text = _PACES[step.code]
        up, down = (replace(one, **fields) for one in (question.spec.up, question.spec.pace_down))
        return _respecified(question, up=up, down=down), text
    return _without_state(question, step.code)


def _without_state(question: Question, code: Code) -> tuple[Question, str] | None:
    spec, inputs = question.spec, question.inputs
    match code:
        case Code.PAUSED:
            return _respecified(question, paused=False), "it were not paused"
        case Code.SHADOWED:
            return _respecified(question, mode=ScalingMode.ACTIVE), "it were not in shadow mode"
        case Code.INACTIVE:
            awake = tuple(replace(one, activation_threshold=0.0) for one in spec.signals)
            return _respecified(question, signals=awake), "no signal had an activation threshold"
        case Code.REPLICAS_UNKNOWN:
            return replace(question, unknown_replicas=0), "every replica were heard of"
        case Code.FLOOR:
            kept = tuple(one for one in spec.rules if not isinstance(one.kind, ScheduleRule | ForecastRule))
            return _respecified(question, rules=kept), "no schedule or forecast kept more"
        case Code.CAPPED_BY_GPUS | Code.GPUS_UNKNOWN:
            limitless = replace(inputs, gpu_limit=NO_BOUND)
            return replace(question, inputs=limitless), "there were GPUs for all of them"
        case Code.GIVES_WAY:
            free = replace(inputs, gives_way=None)
            return replace(question, inputs=free), "nobody of higher priority lacked GPUs"
        case Code.NOT_PROVEN_EMPTY:
            empty = {name: replace(one, proven_empty=True) for name, one in inputs.observations.items()}
            proven = replace(inputs, observations=empty)
            return replace(question, inputs=proven), "it were proven that no work is left"
        case _:
            return None


def _without_bound(question: Question, name: str, bound: int) -> tuple[Question, str]:
    spec = question.spec
    fields: dict[str, Any] = {name: bound}
    sets = tuple(replace(one, **fields) for one in spec.capability_sets)
    text = (
        f"no {name} bounded it, of all sets or of one" if sets else f"{name} were not {getattr(spec, name)}"
    )
    return _respecified(question, capability_sets=sets, **fields), text


def _next_change(question: Question, result: Result) -> NextChange | None:
    """The first later change; None if no pending wait would bring one."""
    now, evaluation = question.inputs.now, result.evaluation
    changes = {**question.inputs.last_changes, **dict.fromkeys(evaluation.effective, now)}
    inputs = replace(question.inputs, before=evaluation.wanted, last_changes=changes, bursts=result.bursts)
    sets = {
        one: replace(state, before=evaluation.sets[one].wanted if one in evaluation.sets else state.before)
        for one, state in inputs.sets.items()
    }
    after = replace(question, inputs=replace(inputs, sets=sets), memory=result.memory)
    spec, memory = after.spec, after.memory
    # Each limit may end: at the next tick, and at the end of each cooldown or window.
    ends = [now + spec.period, *(changes[rule.id] + rule.rest for rule in spec.rules if rule.id in changes)]
    for pace in (spec.up, spec.pace_down):
        window = pace.window(inputs.startup, regrets(memory, now))
        ends += [memory.since + window, memory.since + pace.cooldown]
        ends += [at + window for at, _ in memory.asked]
        periods = (pace.cooldown, *(limit.period for limit in pace.limits))
        ends += [at + period for at, _ in memory.changes for period in periods]
    for wait in sorted({end - now for end in ends if end > now})[:MOST_MOMENTS]:
        # All memory is that much older, and signals are unchanged.
        age = wait + _ROUNDING
        older = Memory(
            memory.since - age,
            tuple((at - age, count) for at, count in memory.asked),
            tuple((at - age, change) for at, change in memory.changes),
        )
        earlier = {rule: at - age for rule, at in changes.items()}
        aged = replace(after, inputs=replace(after.inputs, last_changes=earlier), memory=older)
        wanted = asked(aged).evaluation.wanted
        if wanted != evaluation.wanted:
            return NextChange(wait, wanted)
    return None


ALWAYS = Memory(-math.inf)
"""As if nothing had been wanted for ever."""


@dataclass(frozen=True, slots=True)
class StatedSignal:
    """A given signal value."""

    value: float | None = None  # None if it is missing
    age: float = 0.0  # its age in seconds
    status: ObservationStatus = ObservationStatus.OK  # whether it is available
    # earlier values with their ages; without any, it has always had its value
    points: tuple[tuple[float, float], ...] = ()
    silent_count: int = 0  # sources that said nothing
    # whether it shows that no work is left; None if that follows from the counts
    proven_empty: bool | None = None
    tasks: TaskReport | None = None  # for a signal of tasks, what they need


@dataclass(frozen=True, slots=True)
class Stated:
    """Given inputs of an evaluation; None, and absent signals and capability sets, are not given."""

    signals: Mapping[str, StatedSignal] = field(default_factory=dict[str, StatedSignal])
    before: int | None = None
    ready: int | None = None
    unknown: int | None = None
    memory: Memory | None = None
    last_changes: Mapping[str, float] | None = None
    startup: float | None = None
    wall: datetime | None = None
    gpu_limit: int | None = None
    sets: Mapping[str, SetState] = field(default_factory=lambda: NO_SETS)


def hypothetical(spec: EndpointSpec, at: Moment) -> Question:
    """The question of an endpoint that does not exist: at its min, without signals and limits."""
    inputs = Inputs(spec.min_replicas, spec.min_replicas, at.now, at.wall, capacity=capacity_of(spec, (), {}))
    return Question(spec, inputs, ALWAYS)


def question(live: Question, spec: EndpointSpec, stated: Stated) -> Question:
    """All inputs of an evaluation of the spec: what is not given is `live`, except signals of another source."""
    now, same = live.inputs.now, {one.id for one in spec.measured if one in live.spec.measured}
    observations = {name: one for name, one in live.inputs.observations.items() if name in same}
    series = {name: one for name, one in live.inputs.series.items() if name in same}
    zero: dict[str, set[QueueCount]] = {}  # by watcher, to find those whose counts are all given as 0
    for signal in spec.signals:
        one = stated.signals.get(signal.id)
        if isinstance(signal.source, QueueSignal) and one is not None and one.value == 0:
            zero.setdefault(signal.source.watcher, set()).add(signal.source.count)
    whole = {QueueCount.READY, QueueCount.UNACKED}
    drained = {watcher for watcher, counts in zero.items() if QueueCount.TOTAL in counts or whole <= counts}
    for signal in spec.measured:
        sample = Sample(problem="it is not stated")
        if (one := stated.signals.get(signal.id)) is not None:
            sample = _sample(signal, one, now, drained)
            # Its points, one per moment, or its single value as far back as anybody looks.
            past = sorted({now - age: known for age, known in one.points if abs(known) <= LARGEST}.items())
            if one.value is not None and abs(one.value) <= LARGEST:
                at = now - one.age
                past = [*(point for point in past if point[0] < at), (at, one.value)]
                if not one.points:
                    past = [(at - kept_seconds(spec), one.value), *past]
            series[signal.id] = series_of(past)
        if one is not None or signal.id not in observations:
            observations[signal.id] = observe(signal, sample, now, series.get(signal.id))
    known, sets = live.inputs, {**live.inputs.sets, **stated.sets}
    inputs = replace(
        known,
        before=_or(stated.before, known.before),
        ready=_or(stated.ready, _or(stated.before, known.ready)),
        wall=_or(stated.wall, known.wall),
        observations=observations,
        series=series,
        last_changes=_or(stated.last_changes, known.last_changes),
        startup=_or(stated.startup, known.startup),
        gpu_limit=_or(stated.gpu_limit, known.gpu_limit),
        sets={one.id: sets[one.id] for one in spec.capability_sets if one.id in sets},
    )
    return Question(spec, inputs, stated.memory or live.memory, _or(stated.unknown, live.unknown_replicas))


def _or(stated: T | None, otherwise: T) -> T:
    return otherwise if stated is None else stated


def _sample(signal: Signal, stated: StatedSignal, now: float, drained: Collection[str]) -> Sample:
    at = now - stated.age
    match stated.status:
        case ObservationStatus.MISSING:
            return Sample(at=at, problem="it is given as missing")
        case ObservationStatus.INVALID:
            return Sample((math.nan,), at)
        case ObservationStatus.STALE:
            at = min(at, now - signal.oldest - 1.0)
        case ObservationStatus.OK:
            pass
    if stated.value is None:
        return Sample(problem="it is given as missing")
    none_left = stated.value == 0 and not stated.silent_count and signal.counts_work
    none_left |= isinstance(signal.source, QueueSignal) and signal.source.watcher in drained
    none_left = _or(stated.proven_empty, none_left)
    none_left |= stated.tasks is not None and not stated.tasks.total
    return Sample((stated.value,), at, "", stated.silent_count, none_left, stated.tasks)
