"""Scaling rules: what every kind shares, how its proposal becomes a vote, and the kinds that step. Pure.

A proposal is checked against the rule's cooldown, direction and bounds. Known faults of the original systems are fixed: an
unknown signal is never "idle" (the rule holds), a change that did not take effect does not start the cooldown, a step that
would cross a bound is clamped unless the rule is to skip it, and everything is logged.

The kinds that step are here too: how many replicas more or fewer. The step is the one of Backend.AI (pull request 3277), the band
its later form, the ratio that of OpenGRIS Scaler (more than 10 tasks a worker: one more; fewer than 1: one fewer), the threshold
that of DistributedFunSearch (up above a depth, down where the queue is empty). All comparisons are strict as named.

Durations are seconds. None means "not set": the property beside it has the default.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from gpuscale.autoscaler.domain.decisions import Code, Stage, Step
from gpuscale.autoscaler.domain.inputs import Aggregation, Inputs, Observation, ObservationStatus, Remembered
from gpuscale.common.sizes import counted

STEP_COOLDOWN = 300.0
"""Default cooldown of a rule that steps; a proportional one has none."""
LARGEST_COUNT = 1e9
"""More replicas than anybody has: anything beyond is equivalent, and a decision has room for it."""
EXACT = 1e-9
"""Quotients this close to a whole number are that number: 0.3 / 0.1 is 3 replicas, not 4."""
_UNKNOWN = {
    ObservationStatus.MISSING: Code.SIGNAL_MISSING,
    ObservationStatus.STALE: Code.SIGNAL_STALE,
    ObservationStatus.INVALID: Code.SIGNAL_INVALID,
}


def ceiling(value: float) -> int:
    """The ceiling of a value, ignoring floating-point error; at most `LARGEST_COUNT`."""
    if abs(value) >= LARGEST_COUNT:
        return round(math.copysign(LARGEST_COUNT, value))
    return math.ceil(value - EXACT * max(1.0, abs(value)))


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a kind of rule wants, before the rule's cooldown, direction and bounds."""

    count: int  # replicas that it asks for
    text: str  # the explanation
    fired: bool = True  # whether it wants a change at all; a threshold that is not met does not
    code: Code | None = None  # why it holds, if it must not say: its count is then the count before
    floor: int = 0  # the rule also forbids fewer than this, whatever others want
    burst: Remembered | None = None  # its memory for the next evaluation
    lasting: int | None = None  # what it would want if nothing waited; None if that is the same


class Kind(ABC):
    """The behaviour of a kind of rule: its settings, its proposal, and its validation."""

    __slots__ = ()

    steps: ClassVar[bool] = False
    """Whether it proposes a change, rather than a count."""
    proportional: ClassVar[bool] = False
    """Whether it proposes a count, possibly a lower one."""
    learns: ClassVar[bool] = False
    """Whether its memory is kept across restarts of the autoscaler."""
    reads_signal: ClassVar[bool] = True
    """Whether the rule needs a signal."""

    @classmethod
    def field(cls) -> str:
        """Its field name in the contract."""
        return cls.__name__.removesuffix("Rule").lower()

    @abstractmethod
    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """Its proposal when the rule's signal has `value` (0 if it reads none)."""

    @property
    def metrics(self) -> Mapping[str, tuple[str, Aggregation]]:
        """Replica metrics that it reads itself: each is a signal of its own, called RULE.NAME by its name here."""
        return {}

    def also_reads(self, signals: Iterable[str]) -> frozenset[str]:
        """The signals that it reads beside the rule's own."""
        return frozenset()

    @property
    def past(self) -> float:
        """The seconds of its signal's past that it reads."""
        return 0.0

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """Invalid fields, each with the problem; `signals`: the endpoint's signal ids."""
        return iter(())

    def with_silent(self, rule: Rule, seen: Observation, inputs: Inputs) -> Proposal | None:
        """Its proposal with a guess for silent sources; None if it cannot make one."""
        return None


class Direction(Enum):
    """The direction in which a rule may change the count."""

    BOTH = "both"
    UP = "up"
    DOWN = "down"


class BoundMode(Enum):
    """What happens to a count beyond a bound: it is clamped, or the change is skipped."""

    CLAMP = "clamp"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Rule:
    """A scaling rule. Its own bounds only limit what this rule wants."""

    id: str
    signal: str
    kind: Kind
    disabled: bool = False
    priority: int = 0
    cooldown: float | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    direction: Direction = Direction.BOTH
    bound_mode: BoundMode = BoundMode.CLAMP

    @property
    def rest(self) -> float:
        """Least seconds between two changes by this rule; over when exactly that much has passed."""
        if self.cooldown is not None:
            return self.cooldown
        return STEP_COOLDOWN if self.kind.steps else 0.0


class Vote(Enum):
    """A rule's vote in the combination."""

    NONE = "none"
    UP = "up"
    HOLD = "hold"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """A rule's vote and the count it wants (`step.after`).

    `limited`: something limited what it wanted. `floor`: fewer replicas than this are forbidden. `lasting`: what it would want
    if nothing waited.
    """

    rule: str
    vote: Vote
    step: Step
    limited: bool = False
    floor: int = 0
    burst: Remembered | None = None
    lasting: int | None = None


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    """Rules by priority, then id, however they were written."""
    return sorted(rules, key=lambda rule: (rule.priority, rule.id))


def apply_rule(rule: Rule, inputs: Inputs) -> RuleOutcome:
    """Evaluate one rule.

    A rule whose signal is unknown holds. So does a rule that wants more during its cooldown: when replicas are short, nothing
    scales in.
    """
    held = unread(rule, inputs)
    if held is not None:
        return held
    proposal = rule.kind.propose(rule, inputs.value(rule.signal) or 0.0, inputs)
    proposal = _heed_silence(rule, proposal, inputs)
    outcome = judged(rule, proposal, inputs)
    return replace(outcome, floor=proposal.floor, burst=proposal.burst, lasting=proposal.lasting)


def unread(rule: Rule, inputs: Inputs) -> RuleOutcome | None:
    """Why a rule is not evaluated: it is disabled, or its signal is unknown; None if it is."""
    before = inputs.before
    if rule.disabled:
        return _outcome(rule, Vote.NONE, Code.DISABLED, before, before, "the rule is disabled")
    if not rule.kind.reads_signal:
        return None
    seen = inputs.observations.get(rule.signal)
    if seen is not None and seen.ignored:
        text = f"{rule.signal}: {seen.detail or 'no value'}; the rule is left out"
        return _outcome(rule, Vote.NONE, Code.SIGNAL_IGNORED, before, before, text)
    if inputs.value(rule.signal) is not None:
        return None
    status = ObservationStatus.MISSING if seen is None else seen.status
    code = _UNKNOWN.get(status, Code.SIGNAL_MISSING)
    detail = seen.detail if seen is not None and seen.detail else "no value"
    return _outcome(rule, Vote.HOLD, code, before, before, f"{rule.signal}: {detail}", limited=True)


def _heed_silence(rule: Rule, proposal: Proposal, inputs: Inputs) -> Proposal:
    """The proposal as far as silent replicas, GPUs or hosts allow it.

    It may want more by those that report. It may not want fewer: a target assumes that the silent ones are at the target, as
    the HorizontalPodAutoscaler does with pods without metrics (kubernetes: replica_calculator.go), and wants no fewer than
    that; every other kind of rule holds.
    """
    before = inputs.before
    if proposal.count >= before:
        return proposal
    names = {rule.signal, *rule.kind.also_reads(inputs.observations)}
    silent = [seen for name, seen in inputs.observations.items() if name in names and seen.silent_count]
    if not silent:
        return proposal
    filled = rule.kind.with_silent(rule, silent[0], inputs)
    if filled is not None:
        if filled.count <= proposal.count:
            return proposal
        if filled.count < before:
            return replace(
                filled, text=f"{filled.text} with {silent[0].silent_count} silent ones at the target"
            )
    said = ", ".join(f"{seen.signal}: {seen.silent_count}" for seen in silent)
    text = f"{proposal.text}, but some say nothing ({said})"
    return replace(proposal, count=before, text=text, code=Code.SOURCES_SILENT)


def judged(rule: Rule, proposal: Proposal, inputs: Inputs) -> RuleOutcome:
    """The proposal as far as the rule's own limits allow it."""
    before, text = inputs.before, proposal.text
    up = proposal.count > before
    if proposal.code is not None and not up:
        return _outcome(rule, Vote.HOLD, proposal.code, before, before, text, limited=True)
    if not proposal.fired:
        return _outcome(rule, Vote.NONE, Code.NOT_MET, before, before, text)
    if rule.direction is (Direction.DOWN if up else Direction.UP):
        text += f", but the rule only goes {rule.direction.value}"
        return _outcome(rule, Vote.NONE, Code.WRONG_WAY, before, before, text)
    last = inputs.last_changes.get(rule.id)
    left = 0.0 if last is None else last + rule.rest - inputs.now
    if left > 0:
        text += f", but its cooldown lasts {left:.1f} s more"
        vote = Vote.HOLD if up else Vote.NONE
        return _outcome(rule, vote, Code.COOLDOWN, before, before, text, limited=True)
    # The rule's own bounds, but never against its direction.
    asked = proposal.count
    least = asked if rule.min_replicas is None else max(asked, rule.min_replicas)
    bounded = least if rule.max_replicas is None else min(least, rule.max_replicas)
    after = max(before, bounded) if up else min(before, bounded)
    lowered = after < asked
    bound = f"max_replicas {rule.max_replicas}" if lowered else f"min_replicas {rule.min_replicas}"
    code = Code.FIRED
    if after != asked:
        if rule.bound_mode is BoundMode.SKIP:
            text += f", which the rule's {bound} forbids: skipped"
            return _outcome(rule, Vote.NONE, Code.SKIPPED, before, before, text, limited=True)
        code = Code.CLAMPED_TO_RULE_MAX if lowered else Code.CLAMPED_TO_RULE_MIN
        text += f", bounded by the rule's {bound}"
    vote = Vote.UP if after > before else Vote.DOWN if after < before else Vote.HOLD if up else Vote.NONE
    return _outcome(rule, vote, code, before, after, text, limited=code is not Code.FIRED)


def _outcome(
    rule: Rule, vote: Vote, code: Code, before: int, after: int, text: str, *, limited: bool = False
) -> RuleOutcome:
    return RuleOutcome(rule.id, vote, Step(Stage.RULE, code, before, after, text, rule.id), limited)


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
        said = f"{rule.signal} = {value:g} for {counted(before, 'replica')} is {share:g} each"
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
