"""The effect of all rules, manual orders and bounds on the count. Pure: time is an argument.

    activate -> rules -> combine -> warm spares -> pace -> weights of GPU models -> zero gate -> bounds -> GPU gate

Bounds clamp, whoever asks. An unknown signal, or a replica that has not been heard of, never lowers the count. A count outside
its bounds is repaired whatever the rules and their signals say.

Rules combine by SAFEST like Nomad's checks and the HorizontalPodAutoscaler: any that wants more wins, with the largest count;
else one that holds; else the least reduction. FIRST_MATCH is Backend.AI's, with an explicit order. Stabilization and rate
limits are the HPA's (kubernetes: horizontal.go): up, the count follows the least that was wanted within its window; down, the
most. Limits apply to the count at the beginning of their period. A window may learn (our own): it grows while stopped replicas
are needed again. After a restart nothing is reduced until the window has filled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpuscale.autoscaler.domain.capability_engine import evaluate_sets
from gpuscale.autoscaler.domain.decisions import Code, Evaluation, Stage, Step
from gpuscale.autoscaler.domain.inputs import Inputs, Learnt, Observation, Remembered
from gpuscale.autoscaler.domain.rules.rule import (
    LARGEST_COUNT,
    BoundMode,
    RuleOutcome,
    Vote,
    apply_rule,
    in_order,
)
from gpuscale.autoscaler.domain.spec import (
    ASKS_FOR_ROOM,
    LONGEST_LEARNT,
    Combine,
    EndpointSpec,
    GpuGate,
    Pace,
    RateLimit,
    ScalingMode,
)
from gpuscale.common.sizes import counted


@dataclass(frozen=True, slots=True)
class Combined:
    """The result of all rules, what limited it (None if nothing did), in which rule, and the rules that determined it."""

    step: Step
    limited_by: Code | None = None
    limiter: str = ""
    taken: frozenset[str] = frozenset()


def combine(how: Combine, before: int, outcomes: Sequence[RuleOutcome], unknown_replicas: int) -> Combined:
    """The count wanted by the rules, in their order; nothing is reduced while replicas are unknown."""
    found = _COMBINE[how](before, outcomes)
    floor = max((one.floor for one in outcomes), default=0)
    if found.step.after < 0:
        found = replace(found, step=replace(found.step, after=0))
    if found.step.after < before and unknown_replicas:
        text = (
            f"no scale-in while {counted(unknown_replicas, 'replica has', 'replicas have')} not been heard of"
        )
        return Combined(_step(Code.REPLICAS_UNKNOWN, before, before, text), Code.REPLICAS_UNKNOWN)
    if found.step.after < min(before, floor):
        keeper = next(one.rule for one in outcomes if one.floor == floor)
        step = _step(Code.DOWN, before, min(before, floor), f"{found.step.text}, but {keeper} keeps {floor}")
        return Combined(step, Code.FLOOR, taken=found.taken)
    return found


def _safest(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    if up := _voting(outcomes, Vote.UP):
        most = max(up, key=lambda one: one.step.after)  # the first of equals
        return _follow(before, most, "wants the most", up)
    if holding := _voting(outcomes, Vote.HOLD):
        return _held(before, holding[0], "holds")
    if down := _voting(outcomes, Vote.DOWN):
        return _follow(before, max(down, key=lambda one: one.step.after), "wants the least reduction", down)
    return _unchanged(before, outcomes)


def _first_match(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    for one in _voting(outcomes, Vote.UP, Vote.DOWN):
        return _follow(before, one, "is the first that wants a change", [one])
    return _unchanged(before, outcomes)


def _priority(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    for one in _voting(outcomes, Vote.UP, Vote.HOLD, Vote.DOWN):
        if one.vote is Vote.HOLD:
            return _held(before, one, "comes first and holds")
        return _follow(before, one, "comes first", [one])
    return _unchanged(before, outcomes)


def _sum_steps(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    moving = _voting(outcomes, Vote.UP, Vote.DOWN)
    if not moving:
        return _safest(before, outcomes)
    after = before + sum(one.step.after - before for one in moving)
    after = min(max(0, after), round(LARGEST_COUNT))
    holding = _voting(outcomes, Vote.HOLD)
    if after < before and holding:
        return _held(before, holding[0], "holds")
    parts = ", ".join(f"{one.rule} {one.step.after - before:+d}" for one in moving)
    if after == before:
        return Combined(_step(Code.NO_CHANGE, before, before, f"{parts} add up to no change"))
    way, code = (Vote.UP, Code.UP) if after > before else (Vote.DOWN, Code.DOWN)
    agreeing = _voting(moving, way)
    taken = frozenset(one.rule for one in agreeing)
    return Combined(_step(code, before, after, f"{parts} together"), *_limit(agreeing), taken)


_COMBINE = {
    Combine.SAFEST: _safest,
    Combine.FIRST_MATCH: _first_match,
    Combine.PRIORITY: _priority,
    Combine.SUM_STEPS: _sum_steps,
}


def _voting(outcomes: Sequence[RuleOutcome], *votes: Vote) -> list[RuleOutcome]:
    return [one for one in outcomes if one.vote in votes]


def _limit(outcomes: Sequence[RuleOutcome]) -> tuple[Code | None, str]:
    return next(((one.step.code, one.rule) for one in outcomes if one.limited), (None, ""))


def _follow(before: int, best: RuleOutcome, why: str, agreeing: Sequence[RuleOutcome]) -> Combined:
    code = Code.UP if best.vote is Vote.UP else Code.DOWN
    taken = frozenset(one.rule for one in agreeing if one.step.after == best.step.after)
    return Combined(_step(code, before, best.step.after, f"{best.rule} {why}"), *_limit([best]), taken)


def _held(before: int, holding: RuleOutcome, why: str) -> Combined:
    step = _step(Code.HELD, before, before, f"{holding.rule} {why}: {holding.step.text}")
    return Combined(step, holding.step.code, holding.rule)


def _unchanged(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    return Combined(_step(Code.NO_CHANGE, before, before, "no rule wants a change"), *_limit(outcomes))


def _step(code: Code, before: int, after: int, text: str) -> Step:
    return Step(Stage.COMBINE, code, before, after, text)


REGRET_SECONDS = 1800.0
"""Seconds for which an early reduction is remembered."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of an endpoint between evaluations."""

    since: float  # when remembering began
    asked: tuple[tuple[float, int], ...] = ()  # how many replicas rules wanted at which time, oldest first
    changes: tuple[tuple[float, int], ...] = ()  # by how much the count changed at which time, oldest first

    def noted(self, now: float, asked: int, before: int, after: int, keep: float) -> Memory:
        """Add an evaluation; entries older than `keep` seconds are dropped."""
        oldest = now - keep
        changes = self.changes if after == before else (*self.changes, (now, after - before))
        return Memory(
            self.since,
            tuple(one for one in (*self.asked, (now, asked)) if one[0] >= oldest),
            tuple(one for one in changes if one[0] >= oldest),
        )


@dataclass(frozen=True, slots=True)
class Paced:
    """The count after pace, the steps that explain it, and what limited it."""

    count: int
    steps: tuple[Step, ...] = ()
    limited_by: Code | None = None


def paced(
    up: Pace, down: Pace, before: int, asked: int, memory: Memory, now: float, startup: float | None = None
) -> Paced:
    """How far the count moves towards `asked`; `startup`: seconds that replicas take to be ready."""
    if asked == before:
        return Paced(before)
    pace, way = (up, "up") if asked > before else (down, "down")
    if pace.disabled:
        return _paced_to(asked, before, Code.DIRECTION_DISABLED, f"scaling {way} is switched off")
    known = [at for at, change in memory.changes if (change > 0) == (asked > before)]
    # A reduction may have happened before a restart: a new one waits as if it had.
    last = max(known, default=-math.inf if asked > before else memory.since)
    left = last + pace.cooldown - now
    if left > 0:
        what = f"the last change {way} was" if known else f"not yet known whether a change {way} was"
        return _paced_to(asked, before, Code.ENDPOINT_COOLDOWN, f"{what} too recent: {left:.1f} s more")
    stable = _stabilized(pace.window(startup, regrets(memory, now)), before, asked, memory, now)
    limit = _rate_limited(pace, before, stable.count, memory, now)
    return Paced(limit.count, (*stable.steps, *limit.steps), limit.limited_by or stable.limited_by)


def longest(up: Pace, down: Pace) -> float:
    """The longest past, in seconds, that the paces look at."""
    periods = [limit.period for pace in (up, down) for limit in pace.limits]
    learnt = REGRET_SECONDS if up.startups or down.startups else 0.0
    windows = [pace.stabilization or 0.0 for pace in (up, down)]
    return max(learnt, *windows, up.cooldown, down.cooldown, *periods, 0.0)


def regrets(memory: Memory, now: float) -> int:
    """How often replicas were recently wanted that had been given up shortly before."""
    recent = [one for one in memory.changes if one[0] > now - REGRET_SECONDS]
    return sum(
        earlier < 0 < later and at - since <= LONGEST_LEARNT
        for (since, earlier), (at, later) in pairwise(recent)
    )


def _stabilized(window: float, before: int, asked: int, memory: Memory, now: float) -> Paced:
    recent = [count for at, count in memory.asked if at > now - window]
    if asked > before:
        count = max(before, min((asked, *recent)))
        code, text = Code.STABILIZED_UP, f"{count} wanted throughout the last {window:g} s"
    else:
        count = min(before, max((asked, *recent)))
        code, text = Code.STABILIZED_DOWN, f"{count} wanted within the last {window:g} s"
        if window and now - memory.since < window:
            left = window - (now - memory.since)
            count, text = (
                before,
                f"the counts wanted in the last {window:g} s are not yet known: {left:.1f} s more",
            )
    return Paced(asked) if count == asked else _paced_to(asked, count, code, text)


def _rate_limited(pace: Pace, before: int, asked: int, memory: Memory, now: float) -> Paced:
    if not pace.limits or asked == before:
        return Paced(asked)
    allowed = [_allowed(limit, before, asked > before, memory, now) for limit in pace.limits]
    loosest, tightest = (max(allowed), min(allowed)) if asked > before else (min(allowed), max(allowed))
    bound = tightest if pace.strictest else loosest
    count = max(before, min(asked, bound)) if asked > before else min(before, max(asked, bound))
    if count == asked:
        return Paced(asked)
    code = Code.RATE_LIMITED_UP if asked > before else Code.RATE_LIMITED_DOWN
    return _paced_to(asked, count, code, f"at most {bound} now, by its rate limits")


def _allowed(limit: RateLimit, before: int, up: bool, memory: Memory, now: float) -> int:
    start = before - sum(change for at, change in memory.changes if at > now - limit.period)
    if limit.replicas is not None:
        return start + limit.replicas if up else max(0, start - limit.replicas)
    share = (limit.percent or 0.0) / 100
    # Any share of zero is zero: the first replica is let through, or nothing ever would be.
    return max(1, math.ceil(start * (1 + share))) if up else math.floor(start * max(0.0, 1 - share))


def _paced_to(asked: int, count: int, code: Code, text: str) -> Paced:
    return Paced(count, (Step(Stage.PACE, code, asked, count, text),), code if count != asked else None)


@dataclass(frozen=True, slots=True)
class Result:
    """An evaluation, and what to remember for the next."""

    evaluation: Evaluation
    memory: Memory
    bursts: Mapping[str, Remembered]


@dataclass(frozen=True, slots=True)
class Question:
    """All inputs of an evaluation."""

    spec: EndpointSpec
    inputs: Inputs
    memory: Memory
    unknown_replicas: int = 0


def asked(question: Question) -> Result:
    """Evaluate a question."""
    return evaluate(question.spec, question.inputs, question.memory, question.unknown_replicas)


def evaluate(
    spec: EndpointSpec, inputs: Inputs, memory: Memory | None = None, unknown_replicas: int = 0
) -> Result:
    """Evaluate inputs; without `memory` it starts to remember."""
    memory = Memory(inputs.now) if memory is None else memory
    if spec.capability_sets:
        return Result(evaluate_sets(spec, inputs, unknown_replicas), memory, inputs.bursts)
    before = inputs.before
    # The units that the replicas count for, which rules act on: see `ReplicaWeights`.
    known = (before,) if inputs.capacity is None else inputs.capacity.units(before)
    found = [(units, *_by_rules(spec, inputs, units, unknown_replicas)) for units in known]
    grows = (one for one in found if one[2].step.after > one[2].step.before)
    units, outcomes, combined = next(grows, found[-1])
    own, asked_for = combined.step.before, combined.step.after
    steps = [*(one.step for one in outcomes), combined.step]
    if spec.warm_spares and not spec.paused:
        text, working = f"{spec.warm_spares} warm spares on top", asked_for
        asked_for += spec.warm_spares
        steps.append(Step(Stage.SPARES, Code.WARM_SPARES, working, asked_for, text))
    bounded = list(_held_back(spec, inputs, units, asked_for, memory))
    wanted = bounded[-1].after
    held = (one for one in reversed(bounded) if one.code is not Code.WEIGHED)
    limits = (one.code for one in held if one.after != one.before)
    # The rules that won the combination took effect if the count moved their way at all.
    moved = (combined.step.after - own) * (wanted - before) > 0
    evaluation = Evaluation(
        before=before,
        wanted=wanted,
        observations=inputs.observed(signal.id for signal in spec.measured),
        steps=(*steps, *bounded),
        effective=combined.taken if moved else frozenset(),
        limited_by=next(limits, combined.limited_by),
        limiter=combined.limiter,
        asked=asked_for,
    )
    # What the rules would want if nothing waited, which a window down keeps; the full count if there is a window up.
    lasting = round(LARGEST_COUNT)
    if not spec.up.stabilization and any(one.lasting is not None for one in outcomes):
        lasting = max(
            one.step.after if one.lasting is None else one.lasting
            for one in outcomes
            if one.lasting is not None or one.vote is not Vote.NONE
        )
    remembered = asked_for - max(0, combined.step.after - lasting)
    after = units + wanted - before
    if inputs.capacity is not None and wanted != before:  # a change is one of at least one unit
        whole = math.floor(inputs.capacity.of(wanted))
        after = max(whole, units + 1) if wanted > before else min(whole, units - 1)
    kept = memory.noted(inputs.now, remembered, units, after, longest(spec.up, spec.pace_down))
    learnt = {rule: one for rule, one in inputs.bursts.items() if isinstance(one, Learnt)}
    bursts = learnt | {one.rule: one.burst for one in outcomes if one.burst is not None}
    return Result(evaluation, kept, {rule.id: bursts[rule.id] for rule in spec.rules if rule.id in bursts})


def _by_rules(
    spec: EndpointSpec, inputs: Inputs, units: int, unknown_replicas: int
) -> tuple[Sequence[RuleOutcome], Combined]:
    """What each rule wants for so many `units`, and their combination; warm spares are not counted."""
    if spec.paused:
        step = Step(Stage.COMBINE, Code.PAUSED, units, units, "paused: rules change nothing")
        return (), Combined(step, Code.PAUSED)
    before = max(0, units - spec.warm_spares)
    working = inputs if before == inputs.before else replace(inputs, before=before)
    if not working.before and (signals := spec.sleeps_until(inputs)):
        return (), Combined(Step(Stage.ACTIVATE, Code.INACTIVE, 0, 0, f"waits for {signals}"), Code.INACTIVE)
    outcomes = [apply_rule(rule, working) for rule in in_order(spec.rules)]
    return outcomes, combine(spec.combine, working.before, outcomes, unknown_replicas)


def _held_back(
    spec: EndpointSpec, inputs: Inputs, units: int, asked_for: int, memory: Memory
) -> Iterator[Step]:
    """The limits between the wanted count and the final one: pace, zero gate, bounds, GPUs, shadow.

    `units`: what rules took the replicas to count for.
    """
    before = inputs.before
    pace = paced(spec.up, spec.pace_down, units, asked_for, memory, inputs.now, inputs.startup)
    yield from pace.steps
    count = pace.count
    if inputs.capacity is not None:
        weights = inputs.capacity
        after = before if count == units else weights.replicas(count)
        there = min(after, len(weights.weights))
        text = f"{weights.of(there):g} by weight of {there}"
        if after > there:
            text += f", and {after - there} more of {weights.next:g} each"
        yield Step(Stage.GPU, Code.WEIGHED, count, after, text)
        count = after
    if floor := _zero_gate(spec, before, count, inputs.observations):
        yield floor
        count = floor.after
    bounds = _bound(spec, before, count)
    yield bounds
    count = bounds.after
    way = inputs.gives_way if spec.gives_way else None
    if way is not None and count > (most := max(way.most, spec.min_replicas)):
        text = f"gives way to {way.to}: {most} at most until then"
        yield Step(Stage.GPU, Code.GIVES_WAY, count, most, text)
        count = most
    if gate := _gpu_gate(spec, before, count, inputs.gpu_limit):
        yield gate
        count = gate.after
    kept = min(max(before, spec.min_replicas), spec.max_replicas)
    if spec.mode is ScalingMode.SHADOW and count not in {before, kept}:
        yield Step(Stage.BOUNDS, Code.SHADOWED, count, kept, f"in shadow mode: {count} would be wanted")


def order(before: int, replicas: int, who: str, capability_set: str = "") -> Evaluation:
    """A manual order of `replicas`, already checked against min and max."""
    what = f"{capability_set} set" if capability_set else "set"
    text = f"{what} to {replicas} by {who}"
    step = Step(Stage.MANUAL, Code.SET, before, replicas, text, capability_set=capability_set)
    return Evaluation(before, replicas, (), (step,))


def tuned(count: int, why: str) -> Evaluation:
    """A policy change, which does not change the count yet."""
    return Evaluation(count, count, (), (Step(Stage.MANUAL, Code.TUNED, count, count, f"policy {why}"),))


def _gpu_gate(spec: EndpointSpec, before: int, asked: int, limit: int | None) -> Step | None:
    """Limit growth to the available GPUs. It never reduces: existing replicas have their GPUs.

    Replicas below min_replicas are not limited: they wait for their GPUs.
    """
    if asked <= max(before, spec.min_replicas) or spec.gpu_gate not in ASKS_FOR_ROOM:
        return None
    if not spec.template.gpu_count or (limit is not None and limit >= asked):
        return None
    caps = spec.gpu_gate is GpuGate.CAP
    code = Code.CAPPED_BY_GPUS if caps else Code.GPUS_SHORT
    text = f"there are GPUs for {limit}"
    if limit is None:
        code, text = Code.GPUS_UNKNOWN, "the number of free GPUs is unknown"
    if not caps:
        return Step(Stage.GPU, code, asked, asked, f"{text}; the rest would wait")
    return Step(Stage.GPU, code, asked, max(before, spec.min_replicas, limit or 0), text)


def _zero_gate(
    spec: EndpointSpec, before: int, after: int, observations: Mapping[str, Observation]
) -> Step | None:
    """Scale to zero only while every signal that counts work is freshly 0: nothing waits, nothing is in hand.

    Signals that count no work, such as a temperature, do not matter.
    """
    if after > 0 or before <= 0 or spec.min_replicas > 0:
        return None
    counting = [signal.id for signal in spec.signals if signal.proves]
    doubtful = [name for name in counting if name not in observations or not observations[name].proven_empty]
    if not doubtful:
        return None
    text = f"kept at 1: not proven that no work is left ({', '.join(doubtful)})"
    return Step(Stage.BOUNDS, Code.NOT_PROVEN_EMPTY, after, 1, text)


def _bound(spec: EndpointSpec, before: int, asked: int) -> Step:
    """Clamp the count to the endpoint's min and max; max wins if a stored spec has them crossed."""
    least, most = spec.min_replicas, spec.max_replicas
    after = min(max(asked, least), most)
    within = f"{least}-{most}"
    if after == asked:
        return Step(Stage.BOUNDS, Code.WITHIN_BOUNDS, asked, after, f"within {within}")
    lowered = after < asked
    if spec.bound_mode is BoundMode.SKIP and least <= before <= most and asked != before:
        code = Code.SKIPPED_AT_MAX if lowered else Code.SKIPPED_AT_MIN
        return Step(Stage.BOUNDS, code, asked, before, f"{asked} is not within {within}: skipped")
    if lowered:
        code, text = Code.ABOVE_MAX if before > most else Code.CLAMPED_TO_MAX, f"max_replicas is {most}"
    else:
        code, text = Code.BELOW_MIN if before < least else Code.CLAMPED_TO_MIN, f"min_replicas is {least}"
    return Step(Stage.BOUNDS, code, asked, after, text)
