"""What a rule goes by, and what it says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

from gpuscale.autoscaler.domain.model import NO_SETS, Code, Observation, SetState, Stage, Step
from gpuscale.autoscaler.domain.rules import Rule
from gpuscale.autoscaler.domain.series import Series


class Vote(Enum):
    """What a rule asks of the combination."""

    NONE = "none"
    UP = "up"
    HOLD = "hold"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Burst:
    """What a panic rule remembers of a burst: when the short window was last over, and the most it asked for."""

    over_at: float
    peak: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """What rules go by.

    Attributes:
        before: replicas aimed at until now.
        ready: replicas that work.
        now: seconds on a clock that only grows.
        wall: the time of day, aware.
        observations: what the signals show, by id; one that is absent is missing.
        series: what they showed before, by id, the newest value included.
        last_changes: when each rule last changed the count, by id.
        bursts: what panic rules remember, by id.
        startup: seconds that replicas took to get ready lately; None where none has.
        sets: what is known of each capability set, by id.
        gpu_limit: most replicas that there are GPUs for, those that hold some included; None where nobody knows.
    """

    before: int
    ready: int
    now: float
    wall: datetime
    observations: Mapping[str, Observation] = field(default_factory=dict[str, Observation])
    series: Mapping[str, Series] = field(default_factory=dict[str, Series])
    last_changes: Mapping[str, float] = field(default_factory=dict[str, float])
    bursts: Mapping[str, Burst] = field(default_factory=dict[str, Burst])
    startup: float | None = None
    gpu_limit: int | None = None
    sets: Mapping[str, SetState] = field(default_factory=lambda: NO_SETS)

    def history(self, signal: str) -> Series:
        """The series of a signal; an empty one where nothing was seen of it."""
        return self.series.get(signal, Series())


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a kind of rule leads to, before the rule's cooldown, direction and bounds.

    Attributes:
        count: replicas that it asks for.
        text: how it came to that.
        fired: whether it asks for a change at all; a threshold that is not met does not.
        code: why it holds, where it may not say: its count is then the count before.
        floor: the rule also forbids fewer than this, whatever others say.
        burst: what it remembers from now on.
    """

    count: int
    text: str
    fired: bool = True
    code: Code | None = None
    floor: int = 0
    burst: Burst | None = None


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """A rule's vote with the count it leads to (`step.after`).

    `limited`: something kept it from having its way. `floor`: fewer replicas than this are forbidden.
    """

    rule: str
    vote: Vote
    step: Step
    limited: bool = False
    floor: int = 0
    burst: Burst | None = None


def outcome(
    rule: Rule, vote: Vote, code: Code, before: int, after: int, text: str, *, limited: bool = False
) -> RuleOutcome:
    """The outcome of a rule, with the step that explains it."""
    return RuleOutcome(rule.id, vote, Step(Stage.RULE, code, before, after, text, rule.id), limited)
