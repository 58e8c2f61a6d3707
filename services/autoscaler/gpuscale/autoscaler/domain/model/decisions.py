"""What became of an evaluation: its steps with their codes, and the record that is kept of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from gpuscale.autoscaler.domain.model.observations import Observation


class Stage(Enum):
    """Part of an evaluation, in the order they run."""

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
    """Why a step left the count as it did."""

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
    # Stage.GPU
    GRANTED = "GRANTED"
    GPUS_SHORT = "GPUS_SHORT"
    CAPPED_BY_GPUS = "CAPPED_BY_GPUS"
    GPUS_UNKNOWN = "GPUS_UNKNOWN"
    NO_CAPACITY = "NO_CAPACITY"
    UNSATISFIABLE = "UNSATISFIABLE"
    REFUSED = "REFUSED"
    ALLOCATOR_UNAVAILABLE = "ALLOCATOR_UNAVAILABLE"
    # Stage.ACT
    START = "START"
    STOP = "STOP"
    NO_ADAPTER = "NO_ADAPTER"
    BACK_OFF = "BACK_OFF"
    ADAPTER_LOST = "ADAPTER_LOST"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a decision: what it made of the count, of all replicas or of one capability set, and why."""

    stage: Stage
    code: Code
    before: int
    after: int
    text: str
    rule: str = ""
    capability_set: str = ""


class SetCount(NamedTuple):
    """Groups of a capability set that are aimed at, before and after."""

    before: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What rules and bounds make of an endpoint.

    `effective` names the rules whose change took effect: their cooldown starts, and is saved with the new count.
    `limited_by` is the code of what held the count back; None where nothing did. `asked` is what the rules came to,
    before pace and bounds. `sets`: what becomes of each capability set, by its id.
    """

    before: int
    wanted: int
    observations: tuple[Observation, ...]
    steps: tuple[Step, ...]
    effective: frozenset[str] = frozenset()
    limited_by: Code | None = None
    asked: int | None = None
    sets: Mapping[str, SetCount] = field(default_factory=dict[str, SetCount])


@dataclass(frozen=True, slots=True)
class Decision:
    """What an evaluation came to, with what was then done about it. The store adds its id, times and count."""

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
