"""Decisions: the steps of an evaluation with their codes, its outcome, and the stored record. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from gpuscale.autoscaler.domain.inputs import Observation

if TYPE_CHECKING:
    from gpuscale.autoscaler.domain.spec import Endpoint  # whose rules are made of steps


class Stage(Enum):
    """A stage of an evaluation, in order of execution."""

    ACTIVATE = 8
    RULE = 1
    COMBINE = 2
    SPARES = 9
    PACE = 7
    BOUNDS = 3
    MANUAL = 4
    GPU = 5
    ACT = 6


class Code(StrEnum):
    """Why a step set the count as it did."""

    # Stage.RULE
    FIRED = "FIRED"
    NOT_MET = "NOT_MET"
    DISABLED = "DISABLED"
    COOLDOWN = "COOLDOWN"
    SIGNAL_MISSING = "SIGNAL_MISSING"
    SIGNAL_STALE = "SIGNAL_STALE"
    SIGNAL_INVALID = "SIGNAL_INVALID"
    SOURCES_SILENT = "SOURCES_SILENT"
    CLAMPED_TO_RULE_MIN = "CLAMPED_TO_RULE_MIN"
    CLAMPED_TO_RULE_MAX = "CLAMPED_TO_RULE_MAX"
    SIGNAL_IGNORED = "SIGNAL_IGNORED"
    WINDOW_NOT_FULL = "WINDOW_NOT_FULL"
    WRONG_WAY = "WRONG_WAY"
    SKIPPED = "SKIPPED"
    # Stage.ACTIVATE
    INACTIVE = "INACTIVE"
    # Stage.COMBINE
    FLOOR = "FLOOR"
    UP = "UP"
    DOWN = "DOWN"
    HELD = "HELD"
    NO_CHANGE = "NO_CHANGE"
    PAUSED = "PAUSED"
    REPLICAS_UNKNOWN = "REPLICAS_UNKNOWN"
    NO_CAPABLE_SET = "NO_CAPABLE_SET"
    # Stage.SPARES
    WARM_SPARES = "WARM_SPARES"
    # Stage.PACE
    STABILIZED_UP = "STABILIZED_UP"
    STABILIZED_DOWN = "STABILIZED_DOWN"
    RATE_LIMITED_UP = "RATE_LIMITED_UP"
    RATE_LIMITED_DOWN = "RATE_LIMITED_DOWN"
    ENDPOINT_COOLDOWN = "ENDPOINT_COOLDOWN"
    DIRECTION_DISABLED = "DIRECTION_DISABLED"
    # Stage.BOUNDS
    WITHIN_BOUNDS = "WITHIN_BOUNDS"
    CLAMPED_TO_MIN = "CLAMPED_TO_MIN"
    CLAMPED_TO_MAX = "CLAMPED_TO_MAX"
    BELOW_MIN = "BELOW_MIN"
    ABOVE_MAX = "ABOVE_MAX"
    NOT_PROVEN_EMPTY = "NOT_PROVEN_EMPTY"
    SKIPPED_AT_MIN = "SKIPPED_AT_MIN"
    SKIPPED_AT_MAX = "SKIPPED_AT_MAX"
    SHADOWED = "SHADOWED"
    # Stage.MANUAL
    SET = "SET"
    TUNED = "TUNED"
    # Stage.GPU
    GRANTED = "GRANTED"
    GPUS_SHORT = "GPUS_SHORT"
    CAPPED_BY_GPUS = "CAPPED_BY_GPUS"
    GPUS_UNKNOWN = "GPUS_UNKNOWN"
    NO_CAPACITY = "NO_CAPACITY"
    UNSATISFIABLE = "UNSATISFIABLE"
    REFUSED = "REFUSED"
    ALLOCATOR_UNAVAILABLE = "ALLOCATOR_UNAVAILABLE"
    GIVES_WAY = "GIVES_WAY"
    PREEMPTS = "PREEMPTS"
    WEIGHED = "WEIGHED"
    SPILLED = "SPILLED"
    # Stage.ACT
    START = "START"
    STOP = "STOP"
    NO_ADAPTER = "NO_ADAPTER"
    BACK_OFF = "BACK_OFF"
    ADAPTER_LOST = "ADAPTER_LOST"
    REVOKED = "REVOKED"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a decision: its effect on the count, of all replicas or of one capability set, and why."""

    stage: Stage
    code: Code
    before: int
    after: int
    text: str
    rule: str = ""
    capability_set: str = ""

    @property
    def said(self) -> str:
        """What it says, without its text."""
        group = f"/{self.capability_set}" if self.capability_set else ""
        return f"{self.stage.name}:{self.rule}{group}:{self.code}:{self.before}>{self.after}"


class SetCount(NamedTuple):
    """Groups wanted of a capability set, before and after."""

    before: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The effect of rules and bounds on an endpoint.

    `effective` names the rules whose change took effect: their cooldown starts, and is saved with the new count. `limited_by`
    is the code of what limited the count, None if nothing did; `limiter` the rule, if it was a limit of its own. `asked` is what the
    rules wanted, before pace and bounds. `sets`: the counts of each capability set, by its id.
    """

    before: int
    wanted: int
    observations: tuple[Observation, ...]
    steps: tuple[Step, ...]
    effective: frozenset[str] = frozenset()
    limited_by: Code | None = None
    limiter: str = ""
    asked: int | None = None
    sets: Mapping[str, SetCount] = field(default_factory=dict[str, SetCount])


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of an evaluation, and what was then done. The store adds its id, times and count."""

    endpoint: str
    etag: str
    before: int
    wanted: int
    granted: int
    observations: tuple[Observation, ...]
    steps: tuple[Step, ...]
    limited_by: Code | None
    summary: str
    sets: Mapping[str, SetCount] = field(default_factory=dict[str, SetCount])


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """What was done about the wanted count: steps of the stages GPU and ACT, and the replicas that have their GPUs."""

    granted: int
    steps: tuple[Step, ...] = ()

    @property
    def said(self) -> str:
        """What it says, without the texts of its steps."""
        return "\n".join([str(self.granted), *(step.said for step in self.steps)])


LIMITING = frozenset(
    {
        Code.NO_CAPACITY,
        Code.UNSATISFIABLE,
        Code.REFUSED,
        Code.ALLOCATOR_UNAVAILABLE,
        Code.NO_ADAPTER,
        Code.BACK_OFF,
        Code.ADAPTER_LOST,
    }
)
"""Codes of outcome steps that limit the count."""
_TELLING = (Stage.COMBINE, Stage.MANUAL, Stage.ACT, Stage.GPU)


def compose(endpoint: Endpoint, evaluation: Evaluation, outcome: DecisionOutcome) -> Decision:
    """The record of an evaluation of `endpoint` and its outcome."""
    steps = (*evaluation.steps, *outcome.steps)
    limit = next((step.code for step in outcome.steps if step.code in LIMITING), evaluation.limited_by)
    before, wanted, granted = evaluation.before, evaluation.wanted, outcome.granted
    # The most informative step if nothing limited the count: who changed it, who has to leave, or why nobody did.
    rules = next((one for one in steps if one.stage is Stage.COMBINE and not evaluation.sets), None)
    spared = rules is not None and rules.before == rules.after and before != wanted
    asked = None if rules is None or spared else rules.after
    moving = (step for step in steps if step.stage is (Stage.SPARES if spared else Stage.RULE))
    fired = (step for step in moving if step.before != step.after and asked in {None, step.after})
    revoked = (step for step in steps if step.code is Code.REVOKED)
    deciding = next(chain(fired, revoked, (step for step in steps if step.stage in _TELLING)), None)
    line = f"stays at {wanted}" if wanted == before else f"from {before} to {wanted}"
    if moved := [one for one in evaluation.sets.items() if one[1].before != one[1].wanted]:
        line = ", ".join(f"{name} from {count.before} to {count.wanted}" for name, count in moved)
        line += f" ({deciding.text})" if limit is not None and deciding else ""
    if granted < wanted and limit in LIMITING:
        line += f", {granted} granted"
    others = {
        step for step in steps if step.stage is Stage.RULE and evaluation.limiter not in {"", step.rule}
    }
    bound = (step for step in reversed(steps) if step.code is limit and step not in others)
    reason = next(bound, deciding)
    weighed = (f"; {step.text}" for step in steps if step.code is Code.WEIGHED and step.before != step.after)
    return Decision(
        endpoint=endpoint.id,
        etag=endpoint.etag,
        before=before,
        wanted=wanted,
        granted=granted,
        observations=evaluation.observations,
        steps=steps,
        limited_by=limit,
        summary=f"{line}: {reason.text}{next(weighed, '')}" if reason else line,
        sets=evaluation.sets,
    )


def afterwards(endpoint: Endpoint, outcome: DecisionOutcome) -> Decision:
    """The record of what was done about the wanted count between two evaluations."""
    return compose(endpoint, Evaluation(endpoint.desired, endpoint.desired, (), ()), outcome)


def sameness(decision: Decision) -> str:
    """Equal for consecutive decisions that say the same: values and ages of signals may differ, codes may not."""
    parts = [
        decision.etag,
        f"{decision.before}>{decision.wanted}>{decision.granted}",
        *(f"{one.signal}={one.status.value}" for one in decision.observations),
        *(step.said for step in decision.steps),
    ]
    return "\n".join(parts)
