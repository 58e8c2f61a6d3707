"""The rule that works off what waits within a deadline. Pure; our own.

replicas = ceil(arrivals x S / (slots x utilization) + waiting x S / (slots x deadline)), where S is the time that one
piece of work takes. The first part keeps up with what arrives, the second works off what waits in time.

Arrivals are measured where a signal tells them. Else they are reckoned from what is seen: what is in hand leaves at
busy / S (Little's law), and what arrives is what leaves plus the growth of what is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuscale.autoscaler.domain.model import Code, ObservationStatus
from gpuscale.autoscaler.domain.policies.outcome import Inputs, Proposal
from gpuscale.autoscaler.domain.policies.targets import ceiling
from gpuscale.autoscaler.domain.rules import DrainRule


@dataclass(frozen=True, slots=True)
class _Load:
    """What there is to do: pieces waiting, pieces in hand (both now and on average), and growth a second of both."""

    waiting: float
    busy: float
    growth: float


def drain(kind: DrainRule, signal: str, value: float, inputs: Inputs) -> Proposal:
    """As many replicas as keep up and work off what waits within the deadline."""
    if missing := _missing(kind, inputs):
        return Proposal(inputs.before, f"{missing} cannot be had", code=Code.SIGNAL_MISSING)
    load = _load(kind, signal, value, inputs)
    rate = _rate(kind, inputs)
    service = _service_time(kind, load, rate)
    if service is None:
        text = f"{signal} = {value:g}: the time that one piece takes is not known yet"
        return Proposal(max(inputs.before, 1 if value > 0 else 0), text, code=Code.WINDOW_NOT_FULL)
    arrivals = max(0.0, load.busy / service + load.growth) if rate is None else max(0.0, rate)
    keep_up = arrivals * service / kind.slots / kind.utilization
    catch_up = load.waiting * service / kind.slots / kind.deadline
    needed = keep_up + catch_up
    count = ceiling(needed)
    text = (
        f"{signal} = {value:g}: {arrivals:.3g}/s of {service:.3g} s need {keep_up:.2f},"
        f" and {load.waiting:g} waiting within {kind.deadline:g} s {catch_up:.2f}: {count}"
    )
    if abs(needed - inputs.before) <= kind.tolerance * inputs.before:
        return Proposal(inputs.before, f"{text}, within the tolerance", fired=False)
    if count < inputs.before and not inputs.history(signal).covers(inputs.now - kind.window):
        return Proposal(inputs.before, f"{text}, but the window is not full yet", code=Code.WINDOW_NOT_FULL)
    return Proposal(count, text, fired=count != inputs.before)


def _missing(kind: DrainRule, inputs: Inputs) -> str:
    """The first of the further signals that cannot be had; empty where all can."""
    for signal in filter(None, (kind.busy_signal, kind.rate_signal)):
        seen = inputs.observations.get(signal)
        if seen is None or seen.value is None or seen.status is not ObservationStatus.OK:
            return signal
    return ""


def _load(kind: DrainRule, signal: str, value: float, inputs: Inputs) -> _Load:
    start = inputs.now - kind.window
    growth = inputs.history(signal).slope(start) or 0.0
    if kind.busy_signal:
        history = inputs.history(kind.busy_signal)
        growth += history.slope(start) or 0.0
        return _Load(value, history.mean(start) or 0.0, growth)
    # The signal counts what is in hand too, which is at most what the replicas have room for.
    room = inputs.ready * kind.slots
    part = inputs.history(signal).since(start).values or (value,)
    busy = sum(min(one, room) for one in part) / len(part)
    return _Load(max(0.0, value - room), busy, growth)


def _rate(kind: DrainRule, inputs: Inputs) -> float | None:
    if not kind.rate_signal:
        return None
    return inputs.history(kind.rate_signal).mean(inputs.now - kind.window)


def _service_time(kind: DrainRule, load: _Load, rate: float | None) -> float | None:
    """As stated; else what is in hand, divided by what leaves a second (Little's law)."""
    if kind.service_time is not None:
        return kind.service_time
    leaving = (rate or 0.0) - load.growth
    return load.busy / leaving if leaving > 0 and load.busy > 0 else None
