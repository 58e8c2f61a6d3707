"""How the outcomes of all rules become one. Pure.

SAFEST is the order of Nomad's checks and of the HPA: any that wants more wins, with the largest count; else one that
holds; else the least reduction. FIRST_MATCH is Backend.AI's, with an order that is stated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuscale.autoscaler.domain.model import Code, Stage, Step
from gpuscale.autoscaler.domain.policies.outcome import RuleOutcome, Vote
from gpuscale.autoscaler.domain.policies.targets import LARGEST_COUNT
from gpuscale.autoscaler.domain.rules import Combine


@dataclass(frozen=True, slots=True)
class Combined:
    """What all rules lead to, what held it back (None where nothing did), and the rules that had their way."""

    step: Step
    limited_by: Code | None = None
    taken: frozenset[str] = frozenset()


def combine(how: Combine, before: int, outcomes: Sequence[RuleOutcome], unknown_replicas: int) -> Combined:
    """The count that the rules, in their order, lead to; nothing is taken away while replicas are unknown."""
    found = _COMBINE[how](before, outcomes)
    floor = max((one.floor for one in outcomes), default=0)
    if found.step.after < 0:
        found = replace(found, step=replace(found.step, after=0))
    if found.step.after < before and unknown_replicas:
        text = f"no scale-in while {unknown_replicas} replicas have not been heard of"
        return _held(before, Code.REPLICAS_UNKNOWN, text)
    if found.step.after < min(before, floor):
        keeper = next(one.rule for one in outcomes if one.floor == floor)
        step = _step(Code.DOWN, before, min(before, floor), f"{found.step.text}, but {keeper} keeps {floor}")
        return Combined(step, Code.FLOOR, found.taken)
    return found


def _safest(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    up = [one for one in outcomes if one.vote is Vote.UP]
    if up:
        return _follow(before, max(up, key=_after), "wants the most", up)  # the first of equals
    if holding := _first(outcomes, Vote.HOLD):
        return _held(before, holding.step.code, f"{holding.rule} holds: {holding.step.text}")
    down = [one for one in outcomes if one.vote is Vote.DOWN]
    if down:
        return _follow(before, max(down, key=_after), "wants the least reduction", down)
    return _unchanged(before, outcomes)


def _first_match(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    for one in outcomes:
        if one.vote in {Vote.UP, Vote.DOWN}:
            return _follow(before, one, "is the first that wants a change", [one])
    return _unchanged(before, outcomes)


def _priority(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    for one in outcomes:
        if one.vote is Vote.HOLD:
            return _held(before, one.step.code, f"{one.rule} comes first and holds: {one.step.text}")
        if one.vote is not Vote.NONE:
            return _follow(before, one, "comes first", [one])
    return _unchanged(before, outcomes)


def _sum_steps(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    moving = [one for one in outcomes if one.vote in {Vote.UP, Vote.DOWN}]
    if not moving:
        return _safest(before, outcomes)
    asked = before + sum(one.step.after - before for one in moving)
    after = min(max(0, asked), round(LARGEST_COUNT))
    holding = _first(outcomes, Vote.HOLD)
    if after < before and holding:
        return _held(before, holding.step.code, f"{holding.rule} holds: {holding.step.text}")
    parts = ", ".join(f"{one.rule} {one.step.after - before:+d}" for one in moving)
    if after == before:
        return Combined(_step(Code.NO_CHANGE, before, before, f"{parts} add up to nothing"))
    way = Vote.UP if after > before else Vote.DOWN
    code = Code.UP if after > before else Code.DOWN
    taken = frozenset(one.rule for one in moving if one.vote is way)
    limited = next((one.step.code for one in moving if one.limited and one.vote is way), None)
    return Combined(_step(code, before, after, f"{parts} together"), limited, taken)


_COMBINE = {
    Combine.SAFEST: _safest,
    Combine.FIRST_MATCH: _first_match,
    Combine.PRIORITY: _priority,
    Combine.SUM_STEPS: _sum_steps,
}


def _after(one: RuleOutcome) -> int:
    return one.step.after


def _first(outcomes: Sequence[RuleOutcome], vote: Vote) -> RuleOutcome | None:
    return next((one for one in outcomes if one.vote is vote), None)


def _follow(before: int, best: RuleOutcome, why: str, agreeing: Sequence[RuleOutcome]) -> Combined:
    code = Code.UP if best.vote is Vote.UP else Code.DOWN
    taken = frozenset(one.rule for one in agreeing if one.step.after == best.step.after)
    limited = best.step.code if best.limited else None
    return Combined(_step(code, before, best.step.after, f"{best.rule} {why}"), limited, taken)


def _held(before: int, code: Code, text: str) -> Combined:
    kept = code if code is Code.REPLICAS_UNKNOWN else Code.HELD
    return Combined(_step(kept, before, before, text), code)


def _unchanged(before: int, outcomes: Sequence[RuleOutcome]) -> Combined:
    limited = next((one.step.code for one in outcomes if one.limited), None)
    return Combined(_step(Code.NO_CHANGE, before, before, "no rule wants a change"), limited)


def _step(code: Code, before: int, after: int, text: str) -> Step:
    return Step(Stage.COMBINE, code, before, after, text)
