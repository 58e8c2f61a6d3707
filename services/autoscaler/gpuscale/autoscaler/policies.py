"""What one rule makes of the count: its vote, and the step that explains it.

The step rule is the one of Backend.AI pull request 3277 (compare a signal with a threshold, add a signed step, rest for
a cooldown), with its known faults mended: a step that would cross a bound is clamped and not skipped, a signal that is
unknown is never "idle", and a change that did not take effect does not start the cooldown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from gpuscale.autoscaler.model import Code, Observation, ObservationStatus, Rule, Stage, Step


class Vote(Enum):
    """What a rule asks of the combination."""

    NONE = "none"
    UP = "up"
    HOLD = "hold"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """A rule's vote with the count it leads to (`step.after`); `limited`: something kept it from having its way."""

    rule: str
    vote: Vote
    step: Step
    limited: bool = False


_UNKNOWN = {
    ObservationStatus.MISSING: Code.SIGNAL_MISSING,
    ObservationStatus.STALE: Code.SIGNAL_STALE,
    ObservationStatus.INVALID: Code.SIGNAL_INVALID,
}


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    """Rules by priority, then id, whatever the order they were written in."""
    return sorted(rules, key=lambda rule: (rule.priority, rule.id))


def apply_rule(
    rule: Rule, before: int, observation: Observation | None, last_change: float | None, now: float
) -> RuleOutcome:
    """Read one rule.

    `last_change` is when this rule last changed the count, on the clock of `now`; None if it never did. A rule whose
    signal is unknown holds. So does a rule that wants more but rests: what is short of replicas is not scaled in.
    """
    if rule.disabled:
        return _outcome(rule, Vote.NONE, Code.DISABLED, before, before, "the rule is disabled")
    if observation is None or observation.value is None or observation.status is not ObservationStatus.OK:
        return _unknown(rule, before, observation)
    kind, value = rule.kind, observation.value
    compared = f"{rule.signal} = {value:g} {kind.comparator.value} {kind.threshold:g}"
    if not kind.comparator.holds(value, kind.threshold):
        return _outcome(rule, Vote.NONE, Code.NOT_MET, before, before, f"not {compared}")
    left = 0.0 if last_change is None else last_change + rule.rest - now
    if left > 0:
        vote = Vote.HOLD if kind.step > 0 else Vote.NONE
        text = f"{compared}, but the rule rests for {left:.1f} s more"
        return _outcome(rule, vote, Code.COOLDOWN, before, before, text, limited=True)
    return _fire(rule, before, compared)


def _unknown(rule: Rule, before: int, observation: Observation | None) -> RuleOutcome:
    status = ObservationStatus.MISSING if observation is None else observation.status
    code = _UNKNOWN.get(status, Code.SIGNAL_MISSING)
    detail = observation.detail if observation is not None and observation.detail else "no value"
    return _outcome(rule, Vote.HOLD, code, before, before, f"{rule.signal}: {detail}", limited=True)


def _fire(rule: Rule, before: int, compared: str) -> RuleOutcome:
    """Step, clamp to the rule's own bounds, and never against the direction of the step."""
    step, asked = rule.kind.step, before + rule.kind.step
    least = asked if rule.min_replicas is None else max(asked, rule.min_replicas)
    bounded = least if rule.max_replicas is None else min(least, rule.max_replicas)
    after = max(before, bounded) if step > 0 else min(before, bounded)
    text, code = f"{compared}: {step:+d}", Code.FIRED
    if after < asked:
        code = Code.CLAMPED_TO_RULE_MAX
        text += f", bounded by the rule's max_replicas {rule.max_replicas}"
    elif after > asked:
        code = Code.CLAMPED_TO_RULE_MIN
        text += f", bounded by the rule's min_replicas {rule.min_replicas}"
    vote = (
        Vote.UP if after > before else Vote.DOWN if after < before else Vote.HOLD if step > 0 else Vote.NONE
    )
    return _outcome(rule, vote, code, before, after, text, limited=code is not Code.FIRED)


def _outcome(
    rule: Rule, vote: Vote, code: Code, before: int, after: int, text: str, *, limited: bool = False
) -> RuleOutcome:
    return RuleOutcome(rule.id, vote, Step(Stage.RULE, code, before, after, text, rule.id), limited)
