"""Rules that keep a signal at a target. Pure.

`target` is the algorithm of the HorizontalPodAutoscaler (kubernetes: replica_calculator.go) with its tolerance, for the
total of all replicas (KEDA, Ray Serve) or for a level; `panic` that of Knative's pod autoscaler (knative/serving:
pkg/autoscaler/scaling/autoscaler.go).
"""

from __future__ import annotations

import math

from gpuscale.autoscaler.domain.model import Code
from gpuscale.autoscaler.domain.policies.outcome import Burst, Inputs, Proposal
from gpuscale.autoscaler.domain.rules import PanicRule, TargetRule, TargetType

_EXACT = 1e-9
"""Quotients this close to a whole number are that number: 0.3 / 0.1 is 3 replicas, not 4."""


LARGEST_COUNT = 1e9
"""More replicas than anybody has: whatever is beyond it is as good as this, and a decision has room for it."""


def ceiling(value: float) -> int:
    """The least whole number that is not below the value, but for what floating point adds; at most `LARGEST_COUNT`."""
    if abs(value) >= LARGEST_COUNT:
        return round(math.copysign(LARGEST_COUNT, value))
    return math.ceil(value - _EXACT * max(1.0, abs(value)))


def target(kind: TargetRule, signal: str, value: float, inputs: Inputs) -> Proposal:
    """As many replicas as bring the signal to its target; within the tolerance, as many as there are."""
    before = inputs.before
    total = kind.type is TargetType.AVERAGE_VALUE
    # A level says something of the replicas that work; where none does it stands for one.
    base = before if total else max(1, inputs.ready)
    count = ceiling(value / kind.value) if total else ceiling(base * value / kind.value)
    said = f"{signal} = {value:g} with a target of {kind.value:g}{' each' if total else ''}"
    if base > 0:
        share = value / (kind.value * base) if total else value / kind.value
        if -kind.tolerance_down - _EXACT <= share - 1 <= kind.tolerance_up + _EXACT:
            return Proposal(before, f"{said} is within the tolerance", fired=False)
        if not total and (count > before) != (share > 1) and count != before:
            # Replicas on their way up are not ready yet, so the level asks for fewer than are aimed at already.
            return Proposal(before, f"{said} asks for {count}, and {before} are on their way", fired=False)
    return Proposal(count, f"{said} asks for {count}", fired=count != before)


def panic(kind: PanicRule, rule: str, signal: str, inputs: Inputs) -> Proposal:
    """As many replicas as the mean of the long window asks for; in a burst, the most that the short one asked for."""
    history, now, before = inputs.history(signal), inputs.now, inputs.before
    stable, short = history.mean(now - kind.stable_window), history.mean(now - kind.short)
    if stable is None or short is None:
        return Proposal(before, f"{signal}: nothing in its windows", code=Code.WINDOW_NOT_FULL)
    wanted, rushed = (ceiling(one / kind.capacity / kind.utilization) for one in (stable, short))
    ready = max(1, inputs.ready)
    known = inputs.bursts.get(rule)
    burst = known if known is not None and now - known.over_at < kind.stable_window else None
    most, least = math.ceil(kind.max_up_rate * ready), math.floor(ready / kind.max_down_rate)
    if rushed / ready >= kind.panic_threshold:
        burst = Burst(now, burst.peak if burst else before)
    if burst is not None:
        burst = Burst(burst.over_at, max(burst.peak, min(max(rushed, wanted), most)))
        count = max(burst.peak, before)
        text = (
            f"{signal} bursts: {short:g} over {kind.short:g} s asks for {rushed}; never fewer while it does"
        )
        return Proposal(count, text, fired=count != before, burst=burst)
    count = min(max(wanted, least), most)
    text = f"{signal} = {stable:g} over {kind.stable_window:g} s asks for {wanted}"
    if count < before and not history.covers(now - kind.stable_window):
        return Proposal(before, f"{text}, but the window is not full yet", code=Code.WINDOW_NOT_FULL)
    return Proposal(count, text, fired=count != before)
