"""What all rules together, a person's order and the endpoint's bounds make of the count. Pure: time is an argument.

Rules are combined to the safest: any that wants more wins, with the largest count; else one that holds wins over those
that want less; else the least reduction (the order of Nomad's checks and of the HPA: up, hold, down). Bounds come last
and clamp, whoever asked. An unknown signal, or a replica that nobody has heard of, never lowers the count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuscale.autoscaler.model import Code, EndpointSpec, Evaluation, Observation, Stage, Step
from gpuscale.autoscaler.policies import RuleOutcome, Vote, apply_rule, in_order

Limited = tuple[Step, Code | None]


def evaluate(
    spec: EndpointSpec,
    before: int,
    observations: Mapping[str, Observation],
    last_changes: Mapping[str, float],
    now: float,
    unknown_replicas: int = 0,
) -> Evaluation:
    """One evaluation.

    Args:
        spec: what is wanted of the endpoint.
        before: replicas aimed at until now.
        observations: what the signals showed, by signal id; one that is absent is missing.
        last_changes: when each rule last changed the count, by rule id, on the clock of `now`.
        now: seconds on a clock that only grows.
        unknown_replicas: live replicas whose adapter has not been heard of.
    """
    outcomes: list[RuleOutcome] = []
    if not spec.paused:
        outcomes = [
            apply_rule(rule, before, observations.get(rule.signal), last_changes.get(rule.id), now)
            for rule in in_order(spec.rules)
        ]
    combined, held_by = _combine(spec, before, outcomes, unknown_replicas)
    floor, not_empty = _zero_gate(spec, before, combined.after, observations)
    bounds, clamped_by = _bound(spec, before, floor)
    wanted = bounds.after
    return Evaluation(
        before=before,
        wanted=wanted,
        observations=tuple(observations[signal.id] for signal in spec.signals if signal.id in observations),
        steps=(
            *(outcome.step for outcome in outcomes),
            combined,
            *([not_empty] if not_empty else []),
            bounds,
        ),
        effective=_effective(outcomes, combined, wanted),
        limited_by=clamped_by or (not_empty.code if not_empty else held_by),
    )


def order(before: int, replicas: int, who: str) -> Evaluation:
    """A person's order of `replicas`, which the caller has checked against min and max."""
    step = Step(Stage.MANUAL, Code.SET, before, replicas, f"set to {replicas} by {who}")
    return Evaluation(before, replicas, (), (step,))


def _combine(
    spec: EndpointSpec, before: int, outcomes: Sequence[RuleOutcome], unknown_replicas: int
) -> Limited:
    def step(code: Code, after: int, text: str) -> Step:
        return Step(Stage.COMBINE, code, before, after, text)

    if spec.paused:
        return step(Code.PAUSED, before, "paused: rules change nothing"), Code.PAUSED
    limited = next((outcome for outcome in outcomes if outcome.limited), None)
    limited_by = limited.step.code if limited else None
    up = [outcome for outcome in outcomes if outcome.vote is Vote.UP]
    if up:
        best = max(up, key=lambda outcome: outcome.step.after)  # the first of equals
        own_limit = best.step.code if best.limited else None
        return step(Code.UP, best.step.after, f"{best.rule} wants the most"), own_limit
    holding = next((outcome for outcome in outcomes if outcome.vote is Vote.HOLD), None)
    if holding:
        return step(Code.HELD, before, f"{holding.rule} holds: {holding.step.text}"), holding.step.code
    down = [outcome for outcome in outcomes if outcome.vote is Vote.DOWN]
    if down and unknown_replicas:
        text = f"no scale-in while {unknown_replicas} replicas have not been heard of"
        return step(Code.REPLICAS_UNKNOWN, before, text), Code.REPLICAS_UNKNOWN
    if down:
        best = max(down, key=lambda outcome: outcome.step.after)
        own_limit = best.step.code if best.limited else None
        return step(Code.DOWN, best.step.after, f"{best.rule} wants the least reduction"), own_limit
    return step(Code.NO_CHANGE, before, "no rule wants a change"), limited_by


def _zero_gate(
    spec: EndpointSpec, before: int, after: int, observations: Mapping[str, Observation]
) -> tuple[int, Step | None]:
    """Rules lead to zero only where every queue is freshly proven empty: nothing waiting, nothing in hand."""
    if after > 0 or before <= 0 or spec.min_replicas > 0:
        return after, None
    doubtful = [s.id for s in spec.signals if s.id not in observations or not observations[s.id].proven_empty]
    if not doubtful:
        return after, None
    text = f"kept at 1: not proven that no work is left ({', '.join(doubtful)})"
    return 1, Step(Stage.BOUNDS, Code.NOT_PROVEN_EMPTY, after, 1, text)


def _bound(spec: EndpointSpec, before: int, asked: int) -> Limited:
    """Clamp to the endpoint's min and max; max wins where a stored spec has them crossed."""
    after = min(max(asked, spec.min_replicas), spec.max_replicas)
    within = f"{spec.min_replicas}-{spec.max_replicas}"

    def step(code: Code, text: str) -> Step:
        return Step(Stage.BOUNDS, code, asked, after, text)

    if after == asked:
        return step(Code.WITHIN_BOUNDS, f"within {within}"), None
    if after < asked:
        code = Code.ABOVE_MAX if before > spec.max_replicas else Code.CLAMPED_TO_MAX
        return step(code, f"max_replicas is {spec.max_replicas}"), code
    code = Code.BELOW_MIN if before < spec.min_replicas else Code.CLAMPED_TO_MIN
    return step(code, f"min_replicas is {spec.min_replicas}"), code


def _effective(outcomes: Sequence[RuleOutcome], combined: Step, wanted: int) -> frozenset[str]:
    """Rules that asked for what the combination took, if the count moved their way at all."""
    before = combined.before
    if combined.code is Code.UP and wanted > before:
        vote = Vote.UP
    elif combined.code is Code.DOWN and wanted < before:
        vote = Vote.DOWN
    else:
        return frozenset()
    return frozenset(o.rule for o in outcomes if o.vote is vote and o.step.after == combined.after)
