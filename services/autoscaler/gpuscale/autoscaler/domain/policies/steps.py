"""Rules that step: how many replicas more or fewer. Pure.

The step is the one of Backend.AI (pull request 3277), the band its later form, the ratio that of OpenGRIS Scaler
(more than 10 tasks a worker: one more; fewer than 1: one fewer), the threshold that of DistributedFunSearch (up above a
depth, down where the queue is empty). All comparisons are strict as named.
"""

from __future__ import annotations

import math

from gpuscale.autoscaler.domain.policies.outcome import Proposal
from gpuscale.autoscaler.domain.rules import BandRule, RatioRule, StepRule, ThresholdRule


def propose(
    kind: StepRule | BandRule | RatioRule | ThresholdRule, signal: str, value: float, before: int
) -> Proposal:
    """What the rule leads to when the signal shows `value`."""
    match kind:
        case StepRule():
            return _step(kind, signal, value, before)
        case BandRule():
            return _band(kind, signal, value, before)
        case RatioRule():
            return _ratio(kind, signal, value, before)
        case ThresholdRule():
            return _threshold(kind, signal, value, before)


def _step(kind: StepRule, signal: str, value: float, before: int) -> Proposal:
    """`step` more while the value compares true."""
    compared = f"{signal} = {value:g} {kind.comparator.value} {kind.threshold:g}"
    if not kind.comparator.holds(value, kind.threshold):
        return Proposal(before, f"not {compared}", fired=False)
    return Proposal(before + kind.step, f"{compared}: {kind.step:+d}")


def _band(kind: BandRule, signal: str, value: float, before: int) -> Proposal:
    """More above the band, fewer below it."""
    if kind.high is not None and value > kind.high:
        return Proposal(before + kind.step_up, f"{signal} = {value:g} > {kind.high:g}: {kind.step_up:+d}")
    if kind.low is not None and value < kind.low:
        return Proposal(before - kind.step_down, f"{signal} = {value:g} < {kind.low:g}: {-kind.step_down:+d}")
    low = "" if kind.low is None else f"{kind.low:g} <= "
    high = "" if kind.high is None else f" <= {kind.high:g}"
    return Proposal(before, f"{low}{signal} = {value:g}{high}", fired=False)


def _ratio(kind: RatioRule, signal: str, value: float, before: int) -> Proposal:
    """One more where there is too much work for each, fewer where there is too little."""
    if before <= 0:
        if value > 0:
            return Proposal(1, f"{signal} = {value:g} and no replica: +1")
        return Proposal(before, f"{signal} = {value:g} and no replica", fired=False)
    share = value / before
    said = f"{signal} = {value:g} for {before} replicas is {share:g} each"
    if share > kind.up_above:
        return Proposal(before + 1, f"{said}, more than {kind.up_above:g}: +1")
    if share >= kind.down_below:
        return Proposal(before, said, fired=False)
    said += f", less than {kind.down_below:g}"
    after = before - 1
    if kind.proportional_down:
        after = min(before, max(1, math.ceil(value / kind.up_above)) if value > 0 else 0)
    if kind.guarded and value > 0 and (after <= 0 or value / after > kind.up_above):
        return Proposal(
            before, f"{said}, but with {max(after, 0)} there would be too much for each", fired=False
        )
    return Proposal(after, f"{said}: {after - before:+d}")


def _threshold(kind: ThresholdRule, signal: str, value: float, before: int) -> Proposal:
    """More above one depth, fewer at another or below it."""
    if value > kind.up_above:
        return Proposal(before + kind.step, f"{signal} = {value:g} > {kind.up_above:g}: {kind.step:+d}")
    if value <= kind.down_at:
        return Proposal(before - kind.step, f"{signal} = {value:g} <= {kind.down_at:g}: {-kind.step:+d}")
    return Proposal(before, f"{kind.down_at:g} < {signal} = {value:g} <= {kind.up_above:g}", fired=False)
