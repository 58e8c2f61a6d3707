"""What an evaluation comes to, what it would come to if something were otherwise, and when that may change. Pure.

Every answer is the engine's own: it is asked again with the one thing changed, so no rule is written down twice. A stated
value becomes a sample of its signal, and is judged as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpuscale.autoscaler.domain.decisions import Code, Stage, Step
from gpuscale.autoscaler.domain.engine import Memory, Question, Result, asked, regrets
from gpuscale.autoscaler.domain.inputs import (
    LARGEST,
    NO_SETS,
    Inputs,
    InputSeries,
    ObservationStatus,
    SetState,
    TaskReport,
    series_of,
)
from gpuscale.autoscaler.domain.replicas import Moment
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.rules.timed import ForecastRule, ScheduleRule
from gpuscale.autoscaler.domain.signals import EndpointPast, Sample, kept_seconds, observe
from gpuscale.autoscaler.domain.spec import EndpointSpec, Pace, QueueCount, QueueSignal, ScalingMode, Signal

NO_BOUND = 100_000
"""More replicas than any endpoint may have."""
MOST_MOMENTS = 256
"""Moments that are tried for the next change."""
_ROUNDING = 1e-6
"""Seconds that a wait is taken to be longer, so that what is over exactly then is over."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """The count if what `code` tells of were not there."""

    code: Code
    text: str
    wanted: int


@dataclass(frozen=True, slots=True)
class NextChange:
    """The count after `wait` seconds, signals being as they are."""

    wait: float
    wanted: int


@dataclass(frozen=True, slots=True)
class Answer:
    """An evaluation, what it would be otherwise, and when it may change."""

    result: Result
    alternatives: tuple[Alternative, ...]
    next_change: NextChange | None


def answer(question: Question) -> Answer:
    """Evaluate, and ask further."""
    result = asked(question)
    return Answer(result, tuple(_alternatives(question, result)), _next_change(question, result))


def _alternatives(question: Question, result: Result) -> Iterator[Alternative]:
    """The count without each thing that held it back, where it is another."""
    seen: set[tuple[Code, str]] = set()
    for step in result.evaluation.steps:
        other = None if (step.code, step.rule) in seen else _without(question, step)
        seen.add((step.code, step.rule))
        if other is None:
            continue
        changed, text = other
        wanted = asked(changed).evaluation.wanted
        if wanted != result.evaluation.wanted:
            yield Alternative(step.code, text, wanted)
    yield from _with_none_holding(question, result)


def _with_none_holding(question: Question, result: Result) -> Iterator[Alternative]:
    """The count without any of several rules that hold: where one goes, the next still does."""
    holding = {step.rule for step in result.evaluation.steps if step.code in _HOLDING}
    if len(holding) < 2:
        return
    rules = tuple(replace(one, disabled=one.disabled or one.id in holding) for one in question.spec.rules)
    wanted = asked(replace(question, spec=replace(question.spec, rules=rules))).evaluation.wanted
    if wanted != result.evaluation.wanted:
        yield Alternative(Code.HELD, f"none of {', '.join(sorted(holding))} held", wanted)


def _without(question: Question, step: Step) -> tuple[Question, str] | None:
    """The question without what a step tells of, and that in words; None where it held nothing back."""
    spec = question.spec
    if step.stage is Stage.RULE:
        return _without_limit_of_rule(question, step)
    if step.stage in {Stage.BOUNDS, Stage.GPU}:
        return _without_bound(question, step.code)
    match step.code:
        case Code.PAUSED:
            return replace(question, spec=replace(spec, paused=False)), "it were not paused"
        case Code.INACTIVE:
            awake = tuple(replace(one, activation_threshold=0.0) for one in spec.signals)
            return replace(
                question, spec=replace(spec, signals=awake)
            ), "no signal had an activation threshold"
        case Code.REPLICAS_UNKNOWN:
            return replace(question, unknown_replicas=0), "every replica were heard of"
        case Code.FLOOR:
            return _without_rules(question, ScheduleRule, ForecastRule), "no schedule or forecast kept more"
        case _:
            return _without_pace(question, step.code)


def _without_bound(question: Question, code: Code) -> tuple[Question, str] | None:
    """The question without what bounds the count, at either end."""
    spec = question.spec
    match code:
        case Code.SHADOWED:
            active = replace(spec, mode=ScalingMode.ACTIVE)
            return replace(question, spec=active), "it were not in shadow mode"
        case Code.CAPPED_BY_GPUS | Code.GPUS_UNKNOWN:
            inputs = replace(question.inputs, gpu_limit=NO_BOUND)
            return replace(question, inputs=inputs), "there were GPUs for all of them"
        case Code.NOT_PROVEN_EMPTY:
            seen = question.inputs.observations
            empty = {name: replace(one, proven_empty=True) for name, one in seen.items()}
            inputs = replace(question.inputs, observations=empty)
            return replace(question, inputs=inputs), "it were proven that no work is left"
        case Code.CLAMPED_TO_MAX | Code.ABOVE_MAX | Code.SKIPPED_AT_MAX:
            text = f"max_replicas were not {spec.max_replicas}"
            text = "no max_replicas bounded it, of all sets or of one" if spec.capability_sets else text
            sets = tuple(replace(one, max_replicas=NO_BOUND) for one in spec.capability_sets)
            return replace(question, spec=replace(spec, max_replicas=NO_BOUND, capability_sets=sets)), text
        case Code.CLAMPED_TO_MIN | Code.BELOW_MIN | Code.SKIPPED_AT_MIN:
            sets = tuple(replace(one, min_replicas=0) for one in spec.capability_sets)
            text = f"min_replicas were not {spec.min_replicas}"
            text = "no min_replicas bounded it, of all sets or of one" if spec.capability_sets else text
            return replace(question, spec=replace(spec, min_replicas=0, capability_sets=sets)), text
        case _:
            return None


def _without_pace(question: Question, code: Code) -> tuple[Question, str] | None:
    """The question without one part of the pace; each code speaks of one direction, so both may lose it."""
    spec = question.spec
    match code:
        case Code.STABILIZED_UP | Code.STABILIZED_DOWN:
            text = "there were no stabilization window"
            up, down = (replace(one, stabilization=0.0, startups=0.0) for one in (spec.up, spec.pace_down))
        case Code.RATE_LIMITED_UP | Code.RATE_LIMITED_DOWN:
            text = "there were no rate limits"
            up, down = (replace(one, limits=()) for one in (spec.up, spec.pace_down))
        case Code.ENDPOINT_COOLDOWN:
            text = "the endpoint had no cooldown"
            up, down = (replace(one, cooldown=0.0) for one in (spec.up, spec.pace_down))
        case Code.DIRECTION_DISABLED:
            text = "this direction were not switched off"
            up, down = (replace(one, disabled=False) for one in (spec.up, spec.pace_down))
        case _:
            return None
    return replace(question, spec=replace(spec, up=up, down=down)), text


_HOLDING = frozenset(
    {Code.SIGNAL_MISSING, Code.SIGNAL_STALE, Code.SIGNAL_INVALID, Code.SOURCES_SILENT, Code.WINDOW_NOT_FULL}
)


def _without_limit_of_rule(question: Question, step: Step) -> tuple[Question, str] | None:
    [rule] = (one for one in question.spec.rules if one.id == step.rule)
    if step.code in _HOLDING:
        return _with_rule(question, replace(rule, disabled=True)), f"rule {rule.id} did not hold: {step.text}"
    if step.code is Code.COOLDOWN:
        return _with_rule(question, replace(rule, cooldown=0.0)), f"rule {rule.id} did not rest"
    if step.code in {Code.CLAMPED_TO_RULE_MIN, Code.CLAMPED_TO_RULE_MAX, Code.SKIPPED}:
        unbounded = replace(rule, min_replicas=None, max_replicas=None)
        return _with_rule(question, unbounded), f"rule {rule.id} had no bounds of its own"
    return None


def _with_rule(question: Question, rule: Rule) -> Question:
    rules = tuple(rule if one.id == rule.id else one for one in question.spec.rules)
    return replace(question, spec=replace(question.spec, rules=rules))


def _without_rules(question: Question, *kinds: type[ScheduleRule | ForecastRule]) -> Question:
    rules = tuple(one for one in question.spec.rules if not isinstance(one.kind, kinds))
    return replace(question, spec=replace(question.spec, rules=rules))


def _next_change(question: Question, result: Result) -> NextChange | None:
    """The first change after this evaluation; None where no wait is under way that would bring one."""
    now, evaluation = question.inputs.now, result.evaluation
    changes = {**question.inputs.last_changes, **dict.fromkeys(evaluation.effective, now)}
    inputs = replace(question.inputs, before=evaluation.wanted, last_changes=changes, bursts=result.bursts)
    sets = {
        one: replace(state, before=evaluation.sets[one].wanted if one in evaluation.sets else state.before)
        for one, state in inputs.sets.items()
    }
    after = replace(question, inputs=replace(inputs, sets=sets), memory=result.memory)
    for wait in _waits(after)[:MOST_MOMENTS]:
        wanted = asked(_aged(after, wait + _ROUNDING)).evaluation.wanted
        if wanted != evaluation.wanted:
            return NextChange(wait, wanted)
    return None


def _waits(question: Question) -> list[float]:
    """Seconds until something that holds the count back may be over: the next tick, and the end of each rest or window."""
    spec, now, memory = question.spec, question.inputs.now, question.memory
    last = question.inputs.last_changes
    ends = [now + spec.period, *(last[rule.id] + rule.rest for rule in spec.rules if rule.id in last)]
    for pace in (spec.up, spec.pace_down):
        window = pace.window(question.inputs.startup, regrets(memory, now))
        ends += _ends(pace, memory, window)
    return sorted({end - now for end in ends if end > now})


def _ends(pace: Pace, memory: Memory, window: float) -> Iterator[float]:
    yield memory.since + window
    yield memory.since + pace.cooldown
    yield from (at + window for at, _ in memory.asked)
    for at, _ in memory.changes:
        yield at + pace.cooldown
        yield from (at + limit.period for limit in pace.limits)


def _aged(question: Question, wait: float) -> Question:
    """The question after a while: all that is remembered is so much older, and signals are as they are."""
    memory = question.memory
    older = Memory(
        memory.since - wait,
        tuple((at - wait, count) for at, count in memory.asked),
        tuple((at - wait, change) for at, change in memory.changes),
    )
    changes = {rule: at - wait for rule, at in question.inputs.last_changes.items()}
    return replace(question, inputs=replace(question.inputs, last_changes=changes), memory=older)


ALWAYS = Memory(-math.inf)
"""Nothing has been asked for, and that has been known for ever."""


@dataclass(frozen=True, slots=True)
class StatedSignal:
    """What a signal is to show.

    Attributes:
        value: None where it is missing.
        age: of the value, in seconds.
        status: whether it can be had.
        points: earlier values with their ages; where there are none, it has always shown its value.
        silent_count: sources that said nothing.
        proven_empty: whether it shows that no work is left; None where that follows from the counts.
        tasks: of a signal of tasks, what they need.
    """

    value: float | None = None
    age: float = 0.0
    status: ObservationStatus = ObservationStatus.OK
    points: tuple[tuple[float, float], ...] = ()
    silent_count: int = 0
    proven_empty: bool | None = None
    tasks: TaskReport | None = None


@dataclass(frozen=True, slots=True)
class Stated:
    """What is stated of an evaluation; None, and a signal that is not there, is not."""

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


@dataclass(frozen=True, slots=True)
class Live:
    """What holds where nothing is stated: of a live endpoint, or of one that does not exist."""

    before: int
    ready: int
    unknown: int = 0
    samples: Mapping[str, Sample] = field(default_factory=dict[str, Sample])
    past: EndpointPast = field(default_factory=lambda: EndpointPast(memory=ALWAYS))
    last_changes: Mapping[str, float] = field(default_factory=dict[str, float])
    startup: float | None = None
    gpu_limit: int | None = None
    sets: Mapping[str, SetState] = field(default_factory=lambda: NO_SETS)


def question(spec: EndpointSpec, stated: Stated, live: Live, at: Moment) -> Question:
    """All that an evaluation of the spec goes by."""
    empty = _emptied(spec.signals, stated.signals)
    samples = dict(live.samples)
    series = {**live.past.series}
    for signal in spec.signals:
        if signal.id in stated.signals:
            one = stated.signals[signal.id]
            samples[signal.id] = _sample(signal, one, at.now, proven_empty=signal.id in empty)
            series[signal.id] = _series(one, at.now, kept_seconds(spec))
        elif signal.id not in samples:
            samples[signal.id] = Sample(problem="it is not stated")
    observations = {
        signal.id: observe(signal, samples[signal.id], at.now, series.get(signal.id))
        for signal in spec.signals
    }
    sets = {**live.sets, **stated.sets}
    before = live.before if stated.before is None else stated.before
    ready = live.ready if stated.before is None else before
    memory = live.past.memory if stated.memory is None else stated.memory
    inputs = Inputs(
        before=before,
        ready=ready if stated.ready is None else stated.ready,
        now=at.now,
        wall=stated.wall or at.wall,
        observations=observations,
        series=series,
        last_changes=live.last_changes if stated.last_changes is None else stated.last_changes,
        bursts=live.past.bursts,
        startup=live.startup if stated.startup is None else stated.startup,
        gpu_limit=live.gpu_limit if stated.gpu_limit is None else stated.gpu_limit,
        sets={one.id: found for one in spec.capability_sets if (found := sets.get(one.id)) is not None},
    )
    unknown = live.unknown if stated.unknown is None else stated.unknown
    return Question(spec, inputs, Memory(at.now) if memory is None else memory, unknown)


def _sample(signal: Signal, stated: StatedSignal, now: float, *, proven_empty: bool) -> Sample:
    at = now - stated.age
    match stated.status:
        case ObservationStatus.MISSING:
            return Sample(at=at, problem="it is stated to be missing")
        case ObservationStatus.INVALID:
            return Sample((math.nan,), at)
        case ObservationStatus.STALE:
            at = min(at, now - signal.oldest - 1.0)
        case ObservationStatus.OK:
            pass
    if stated.value is None:
        return Sample(problem="it is stated to be missing")
    empty = proven_empty or (stated.tasks is not None and not stated.tasks.total)
    return Sample(
        (stated.value,), at, silent_count=stated.silent_count, proven_empty=empty, tasks=stated.tasks
    )


def _series(stated: StatedSignal, now: float, keep: float) -> InputSeries:
    """Its points, one at a moment, or the one value as far back as anybody looks."""
    at = now - stated.age
    told = {now - age: value for age, value in stated.points if abs(value) <= LARGEST}
    past = sorted(told.items())
    if stated.value is not None and abs(stated.value) <= LARGEST:
        past = [*(one for one in past if one[0] < at), (at, stated.value)]
        if not stated.points:
            past = [(at - keep, stated.value), *past]
    return series_of(past)


def _emptied(signals: Sequence[Signal], stated: Mapping[str, StatedSignal]) -> set[str]:
    """Ids of the signals that show that no work is left: as stated, or since all that they count is stated as 0."""
    zero: dict[str, set[QueueCount]] = {}
    queues = {one.id: one.source for one in signals if isinstance(one.source, QueueSignal)}
    for name, source in queues.items():
        if name in stated and stated[name].value == 0:
            zero.setdefault(source.watcher, set()).add(source.count)
    whole = {QueueCount.READY, QueueCount.UNACKED}
    empty = {watcher for watcher, counts in zero.items() if QueueCount.TOTAL in counts or whole <= counts}
    found = {name for name, source in queues.items() if source.watcher in empty}
    counting = {one.id for one in signals if one.counts_work}
    found |= {
        name for name in counting & stated.keys() if stated[name].value == 0 and not stated[name].silent_count
    }
    return {name for name, one in stated.items() if _told(one.proven_empty, name in found)}


def _told(stated: bool | None, found: bool) -> bool:
    return found if stated is None else stated


def replaced_spec(own: EndpointSpec, spec: EndpointSpec, live: Live) -> Live:
    """What a live endpoint shows to another spec: signals that differ from its own are not read."""
    same = {one.id for one in spec.signals if one in own.signals}
    samples = {name: one for name, one in live.samples.items() if name in same}
    series = {name: one for name, one in live.past.series.items() if name in same}
    return replace(live, samples=samples, past=replace(live.past, series=series))
