"""Rules that step: how many replicas more or fewer. Pure.

The step is the one of Backend.AI (pull request 3277), the band its later form, the ratio that of OpenGRIS Scaler
(more than 10 tasks a worker: one more; fewer than 1: one fewer), the threshold that of DistributedFunSearch (up above a
depth, down where the queue is empty). All comparisons are strict as named.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from gpuscale.autoscaler.domain.inputs import Inputs
from gpuscale.autoscaler.domain.rules.rule import Kind, Proposal, Rule


class Comparator(Enum):
    """How to compare a signal with a threshold; strict as named."""

    LESS_THAN = "<"
    LESS_THAN_OR_EQUAL = "<="
    GREATER_THAN = ">"
    GREATER_THAN_OR_EQUAL = ">="

    def holds(self, value: float, threshold: float) -> bool:
        """Whether the comparison of `value` with `threshold` is true."""
        return _COMPARE[self](value, threshold)


_COMPARE: Mapping[Comparator, Callable[[float, float], bool]] = {
    Comparator.LESS_THAN: operator.lt,
    Comparator.LESS_THAN_OR_EQUAL: operator.le,
    Comparator.GREATER_THAN: operator.gt,
    Comparator.GREATER_THAN_OR_EQUAL: operator.ge,
}


@dataclass(frozen=True, slots=True)
class StepRule(Kind):
    """Adds `step` replicas (removes them if negative) while the signal compares true."""

    comparator: Comparator
    threshold: float
    step: int
    steps: ClassVar[bool] = True

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """`step` more while the value compares true."""
        compared = f"{rule.signal} = {value:g} {self.comparator.value} {self.threshold:g}"
        if not self.comparator.holds(value, self.threshold):
            return Proposal(inputs.before, f"not {compared}", fired=False)
        return Proposal(inputs.before + self.step, f"{compared}: {self.step:+d}")

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """A step of zero."""
        if self.step == 0:
            yield "step", "must not be 0"


@dataclass(frozen=True, slots=True)
class BandRule(Kind):
    """Adds `step_up` replicas above `high`, removes `step_down` below `low`."""

    low: float | None = None
    high: float | None = None
    step_up: int = 1
    step_down: int = 1
    steps: ClassVar[bool] = True

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """More above the band, fewer below it."""
        before, said = inputs.before, f"{rule.signal} = {value:g}"
        if self.high is not None and value > self.high:
            return Proposal(before + self.step_up, f"{said} > {self.high:g}: {self.step_up:+d}")
        if self.low is not None and value < self.low:
            return Proposal(before - self.step_down, f"{said} < {self.low:g}: {-self.step_down:+d}")
        low = "" if self.low is None else f"{self.low:g} <= "
        high = "" if self.high is None else f" <= {self.high:g}"
        return Proposal(before, f"{low}{said}{high}", fired=False)

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """A band without limits, or with crossed ones."""
        if self.low is None and self.high is None:
            yield "high", "must be set, or low"
        elif self.low is not None and self.high is not None and self.low > self.high:
            yield "high", "must be at least low"


@dataclass(frozen=True, slots=True)
class RatioRule(Kind):
    """Adds a replica if there is more than `up_above` work for each, removes one below `down_below`."""

    up_above: float = 10.0
    down_below: float = 1.0
    proportional_down: bool = False
    guarded: bool = False
    steps: ClassVar[bool] = True

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """One more if there is too much work for each, fewer if there is too little."""
        before = inputs.before
        if before <= 0:
            if value > 0:
                return Proposal(1, f"{rule.signal} = {value:g} and no replica: +1")
            return Proposal(before, f"{rule.signal} = {value:g} and no replica", fired=False)
        share = value / before
        said = f"{rule.signal} = {value:g} for {before} replicas is {share:g} each"
        if share > self.up_above:
            return Proposal(before + 1, f"{said}, more than {self.up_above:g}: +1")
        if share >= self.down_below:
            return Proposal(before, said, fired=False)
        said += f", less than {self.down_below:g}"
        after = before - 1
        if self.proportional_down:
            after = min(before, max(1, math.ceil(value / self.up_above)) if value > 0 else 0)
        if self.guarded and value > 0 and (after <= 0 or value / after > self.up_above):
            said += f", but with {max(after, 0)} there would be too much for each"
            return Proposal(before, said, fired=False)
        return Proposal(after, f"{said}: {after - before:+d}")

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """Crossed thresholds."""
        if self.down_below > self.up_above:
            yield "down_below", "must be at most up_above"


@dataclass(frozen=True, slots=True)
class ThresholdRule(Kind):
    """Adds `step` replicas above one depth, removes them at or below another."""

    up_above: float
    down_at: float = 0.0
    step: int = 1
    steps: ClassVar[bool] = True

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """More above one depth, fewer at or below another."""
        before, said = inputs.before, f"{rule.signal} = {value:g}"
        if value > self.up_above:
            return Proposal(before + self.step, f"{said} > {self.up_above:g}: {self.step:+d}")
        if value <= self.down_at:
            return Proposal(before - self.step, f"{said} <= {self.down_at:g}: {-self.step:+d}")
        return Proposal(before, f"{self.down_at:g} < {said} <= {self.up_above:g}", fired=False)

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """Crossed depths."""
        if self.down_at > self.up_above:
            yield "down_at", "must be at most up_above"
