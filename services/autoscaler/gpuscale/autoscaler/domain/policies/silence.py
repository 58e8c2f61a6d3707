"""What a rule may ask for while some of the replicas, GPUs or hosts that it reads say nothing. Pure.

More replicas it asks for by those that tell. Fewer it may not: a target holds that those that are silent are at the
target, as the HorizontalPodAutoscaler does with pods without metrics (kubernetes: replica_calculator.go), and asks for no
fewer than that; every other kind of rule holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpuscale.autoscaler.domain.model import Code, Observation
from gpuscale.autoscaler.domain.policies import formula, targets
from gpuscale.autoscaler.domain.policies.outcome import Inputs, Proposal
from gpuscale.autoscaler.domain.rules import DrainRule, FormulaRule, Rule, TargetRule


def mind_silence(rule: Rule, proposal: Proposal, inputs: Inputs) -> Proposal:
    """The proposal as far as the silence of some sources allows it."""
    before = inputs.before
    if proposal.count >= before:
        return proposal
    silent = [seen for seen in _read(rule, inputs) if seen.silent_count]
    if not silent:
        return proposal
    if isinstance(rule.kind, TargetRule):
        [seen] = silent
        filled = targets.target(rule.kind, rule.signal, seen.with_silent_at(rule.kind.value), inputs)
        if filled.count <= proposal.count:
            return proposal
        if filled.count < before:
            return replace(filled, text=f"{filled.text} with {seen.silent_count} silent ones at the target")
    said = ", ".join(f"{one.signal}: {one.silent_count}" for one in silent)
    text = f"{proposal.text}, but some say nothing ({said})"
    return replace(proposal, count=before, text=text, code=Code.SOURCES_SILENT)


def _read(rule: Rule, inputs: Inputs) -> Iterator[Observation]:
    """What the signals show that a rule goes by."""
    names = {rule.signal}
    match rule.kind:
        case DrainRule(busy_signal=busy, rate_signal=rate):
            names |= {busy, rate}
        case FormulaRule(expression):
            used = formula.names(expression)
            names |= {signal for signal in inputs.observations if formula.name_of(signal) in used}
        case _:
            pass
    return (seen for name, seen in inputs.observations.items() if name in names)
