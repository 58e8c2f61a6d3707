"""A scaling rule: what every kind has in common, and how its proposal becomes a vote. Pure.

A proposal is held against the rule's cooldown, direction and bounds. The known faults of the systems that rules come from
are mended: an unknown signal is never "idle" (the rule holds), a change that did not take effect does not start the
cooldown, a step that would cross a bound is clamped unless the rule is to skip it, and nothing happens in silence.

Durations are seconds. None means "not stated": the property beside it says what holds then.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from gpuscale.autoscaler.domain.decisions import Code, Stage, Step
from gpuscale.autoscaler.domain.inputs import Aggregation, Inputs, Observation, ObservationStatus, Remembered

STEP_COOLDOWN = 300.0
"""Cooldown of a rule that steps, where it states none; a proportional one has none."""
LARGEST_COUNT = 1e9
"""More replicas than anybody has: whatever is beyond it is as good as this, and a decision has room for it."""
EXACT = 1e-9
"""Quotients this close to a whole number are that number: 0.3 / 0.1 is 3 replicas, not 4."""
_UNKNOWN = {
    ObservationStatus.MISSING: Code.SIGNAL_MISSING,
    ObservationStatus.STALE: Code.SIGNAL_STALE,
    ObservationStatus.INVALID: Code.SIGNAL_INVALID,
}


def ceiling(value: float) -> int:
    """The least whole number that is not below the value, but for what floating point adds; at most `LARGEST_COUNT`."""
    if abs(value) >= LARGEST_COUNT:
        return round(math.copysign(LARGEST_COUNT, value))
    return math.ceil(value - EXACT * max(1.0, abs(value)))


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a kind of rule leads to, before the rule's cooldown, direction and bounds."""

    count: int  # replicas that it asks for
    text: str  # how it came to that
    fired: bool = True  # whether it asks for a change at all; a threshold that is not met does not
    code: Code | None = None  # why it holds, where it may not say: its count is then the count before
    floor: int = 0  # the rule also forbids fewer than this, whatever others say
    burst: Remembered | None = None  # what it remembers from now on
    lasting: int | None = None  # what it would ask for if nothing waited; None where that is all of it


class Kind(ABC):
    """What a rule does with its signal: its settings, what they come to, and what can be wrong with them."""

    __slots__ = ()

    steps: ClassVar[bool] = False
    """Whether it says how many replicas more or fewer, and not how many there should be."""
    proportional: ClassVar[bool] = False
    """Whether it says how many replicas there should be, fewer too."""
    learns: ClassVar[bool] = False
    """Whether what it remembers is worth keeping when the autoscaler restarts."""
    reads_signal: ClassVar[bool] = True
    """Whether the rule has to name a signal."""

    @classmethod
    def field(cls) -> str:
        """Its name in the contract."""
        return cls.__name__.removesuffix("Rule").lower()

    @abstractmethod
    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """What it leads to where the rule's signal shows `value` (0 where it reads none)."""

    @property
    def metrics(self) -> Mapping[str, tuple[str, Aggregation]]:
        """Metrics of the replicas that it reads by itself: each is a signal of its own, called RULE.NAME by its name here."""
        return {}

    def also_reads(self, signals: Iterable[str]) -> frozenset[str]:
        """Those of the signals that it reads beside the rule's own."""
        return frozenset()

    @property
    def past(self) -> float:
        """Seconds of its signal's past that it looks at."""
        return 0.0

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """Fields at fault, each with what is wrong; `signals`: ids of those that the endpoint has."""
        return iter(())

    def with_silent(self, rule: Rule, seen: Observation, inputs: Inputs) -> Proposal | None:
        """What it leads to with a guess at what silent sources would show; None where it can make none."""
        return None


class Direction(Enum):
    """Which way a rule may change the count."""

    BOTH = "both"
    UP = "up"
    DOWN = "down"


class BoundMode(Enum):
    """What happens to a count beyond a bound: it goes as far as the bound, or nothing happens."""

    CLAMP = "clamp"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Rule:
    """One scaling rule. Its own bounds hold for what this rule leads to, and for nothing else."""

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
    """What a rule asks of the combination."""

    NONE = "none"
    UP = "up"
    HOLD = "hold"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """A rule's vote with the count it leads to (`step.after`).

    `limited`: something kept it from having its way. `floor`: fewer replicas than this are forbidden. `lasting`: what it
    would lead to if nothing waited.
    """

    rule: str
    vote: Vote
    step: Step
    limited: bool = False
    floor: int = 0
    burst: Remembered | None = None
    lasting: int | None = None


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
    proposal = _heed_silence(rule, rule.kind.propose(rule, value, inputs), inputs)
    outcome = judged(rule, proposal, inputs)
    return replace(outcome, floor=proposal.floor, burst=proposal.burst, lasting=proposal.lasting)


def unread(rule: Rule, inputs: Inputs) -> RuleOutcome | None:
    """Why a rule is not read: it is disabled, or its signal is unknown; None where it is."""
    before = inputs.before
    if rule.disabled:
        return _outcome(rule, Vote.NONE, Code.DISABLED, before, before, "the rule is disabled")
    if not rule.kind.reads_signal:
        return None
    seen = inputs.observations.get(rule.signal)
    if seen is not None and seen.ignored:
        text = f"{rule.signal}: {seen.detail or 'no value'}; it is to be left out then"
        return _outcome(rule, Vote.NONE, Code.SIGNAL_IGNORED, before, before, text)
    if seen is not None and seen.value is not None and seen.status is ObservationStatus.OK:
        return None
    status = ObservationStatus.MISSING if seen is None else seen.status
    code = _UNKNOWN.get(status, Code.SIGNAL_MISSING)
    detail = seen.detail if seen is not None and seen.detail else "no value"
    return _outcome(rule, Vote.HOLD, code, before, before, f"{rule.signal}: {detail}", limited=True)


def _heed_silence(rule: Rule, proposal: Proposal, inputs: Inputs) -> Proposal:
    """The proposal as far as the silence of some replicas, GPUs or hosts allows it.

    More replicas it asks for by those that tell. Fewer it may not: a target assumes that the silent ones are at the target,
    as the HorizontalPodAutoscaler does with pods without metrics (kubernetes: replica_calculator.go), and asks for no fewer
    than that; every other kind of rule holds.
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
    """The proposal as far as the rule itself lets it pass."""
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
        text += f", but the rule rests for {left:.1f} s more"
        vote = Vote.HOLD if up else Vote.NONE
        return _outcome(rule, vote, Code.COOLDOWN, before, before, text, limited=True)
    return _bounded(rule, before, proposal.count, text)


def _bounded(rule: Rule, before: int, asked: int, text: str) -> RuleOutcome:
    """Held against the rule's own bounds, and never against its direction."""
    least = asked if rule.min_replicas is None else max(asked, rule.min_replicas)
    bounded = least if rule.max_replicas is None else min(least, rule.max_replicas)
    up = asked > before
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
