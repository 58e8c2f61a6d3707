"""What one rule makes of the count: its proposal, held against its cooldown, direction and bounds. Pure.

The known faults of the systems that rules come from are mended: a signal that is unknown is never "idle" (it holds), a
change that did not take effect does not start the cooldown, a step that would cross a bound is clamped unless the rule
is to skip it, and nothing happens in silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gpuscale.autoscaler.domain.model import Code, Observation, ObservationStatus
from gpuscale.autoscaler.domain.policies import steps, targets, times
from gpuscale.autoscaler.domain.policies.drain import drain
from gpuscale.autoscaler.domain.policies.formula import formula
from gpuscale.autoscaler.domain.policies.outcome import Inputs, Proposal, RuleOutcome, Vote, outcome
from gpuscale.autoscaler.domain.policies.silence import mind_silence
from gpuscale.autoscaler.domain.rules import (
    WITHOUT_SIGNAL,
    BandRule,
    BoundMode,
    Direction,
    DrainRule,
    ForecastRule,
    FormulaRule,
    PanicRule,
    RatioRule,
    Rule,
    ScheduleRule,
    StepRule,
    TargetRule,
    ThresholdRule,
)

_UNKNOWN = {
    ObservationStatus.MISSING: Code.SIGNAL_MISSING,
    ObservationStatus.STALE: Code.SIGNAL_STALE,
    ObservationStatus.INVALID: Code.SIGNAL_INVALID,
}


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    """Rules by priority, then id, whatever the order they were written in."""
    return sorted(rules, key=lambda rule: (rule.priority, rule.id))


def apply_rule(rule: Rule, inputs: Inputs) -> RuleOutcome:
    """Read one rule.

    A rule whose signal is unknown holds. So does a rule that wants more but rests: what is short of replicas is not
    scaled in.
    """
    held = unread(rule, inputs)
    if held is not None:
        return held
    seen = inputs.observations.get(rule.signal)
    value = seen.value if seen is not None and seen.value is not None else 0.0
    proposal = mind_silence(rule, _propose(rule, value, inputs), inputs)
    return replace(judged(rule, proposal, inputs), floor=proposal.floor, burst=proposal.burst)


def unread(rule: Rule, inputs: Inputs) -> RuleOutcome | None:
    """Why a rule is not read: it is disabled, or its signal is unknown; None where it is."""
    before = inputs.before
    if rule.disabled:
        return outcome(rule, Vote.NONE, Code.DISABLED, before, before, "the rule is disabled")
    if isinstance(rule.kind, WITHOUT_SIGNAL):
        return None
    seen = inputs.observations.get(rule.signal)
    if seen is not None and seen.ignored:
        text = f"{rule.signal}: {seen.detail or 'no value'}; it is to be left out then"
        return outcome(rule, Vote.NONE, Code.SIGNAL_IGNORED, before, before, text)
    if seen is None or seen.value is None or seen.status is not ObservationStatus.OK:
        return _unknown(rule, before, seen)
    return None


def _propose(rule: Rule, value: float, inputs: Inputs) -> Proposal:
    """What the kind of the rule leads to."""
    signal = rule.signal
    match rule.kind:
        case StepRule() | BandRule() | RatioRule() | ThresholdRule() as kind:
            return steps.propose(kind, signal, value, inputs.before)
        case TargetRule() as kind:
            return targets.target(kind, signal, value, inputs)
        case PanicRule() as kind:
            return targets.panic(kind, rule.id, signal, inputs)
        case DrainRule() as kind:
            return drain(kind, signal, value, inputs)
        case ScheduleRule() as kind:
            return times.schedule(kind, inputs)
        case ForecastRule() as kind:
            return times.forecast(kind, signal, inputs)
        case FormulaRule() as kind:
            return formula(kind, inputs)


def _unknown(rule: Rule, before: int, seen: Observation | None) -> RuleOutcome:
    status = ObservationStatus.MISSING if seen is None else seen.status
    code = _UNKNOWN.get(status, Code.SIGNAL_MISSING)
    detail = seen.detail if seen is not None and seen.detail else "no value"
    return outcome(rule, Vote.HOLD, code, before, before, f"{rule.signal}: {detail}", limited=True)


def judged(rule: Rule, proposal: Proposal, inputs: Inputs) -> RuleOutcome:
    """The proposal as far as the rule itself lets it pass."""
    before, text = inputs.before, proposal.text
    up = proposal.count > before
    if proposal.code is not None and not up:
        return outcome(rule, Vote.HOLD, proposal.code, before, before, text, limited=True)
    if not proposal.fired:
        return outcome(rule, Vote.NONE, Code.NOT_MET, before, before, text)
    if (up and rule.direction is Direction.DOWN) or (not up and rule.direction is Direction.UP):
        return outcome(
            rule,
            Vote.NONE,
            Code.WRONG_WAY,
            before,
            before,
            f"{text}, but the rule only goes {rule.direction.value}",
        )
    last = inputs.last_changes.get(rule.id)
    left = 0.0 if last is None else last + rule.rest - inputs.now
    if left > 0:
        text += f", but the rule rests for {left:.1f} s more"
        vote = Vote.HOLD if up else Vote.NONE
        return outcome(rule, vote, Code.COOLDOWN, before, before, text, limited=True)
    return _bounded(rule, before, proposal.count, text)


def _bounded(rule: Rule, before: int, asked: int, text: str) -> RuleOutcome:
    """Held against the rule's own bounds, and never against its direction."""
    least = asked if rule.min_replicas is None else max(asked, rule.min_replicas)
    bounded = least if rule.max_replicas is None else min(least, rule.max_replicas)
    up = asked > before
    after = max(before, bounded) if up else min(before, bounded)
    code = Code.FIRED
    if after != asked and rule.bound_mode is BoundMode.SKIP:
        bound = f"max_replicas {rule.max_replicas}" if after < asked else f"min_replicas {rule.min_replicas}"
        text += f", which the rule's {bound} forbids: skipped"
        return outcome(rule, Vote.NONE, Code.SKIPPED, before, before, text, limited=True)
    if after < asked:
        code, text = (
            Code.CLAMPED_TO_RULE_MAX,
            f"{text}, bounded by the rule's max_replicas {rule.max_replicas}",
        )
    elif after > asked:
        code, text = (
            Code.CLAMPED_TO_RULE_MIN,
            f"{text}, bounded by the rule's min_replicas {rule.min_replicas}",
        )
    vote = Vote.UP if after > before else Vote.DOWN if after < before else Vote.HOLD if up else Vote.NONE
    return outcome(rule, vote, code, before, after, text, limited=code is not Code.FIRED)
