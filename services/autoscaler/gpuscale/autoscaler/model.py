"""What the autoscaler reasons about: specs, observations, evaluations, replicas and decisions, as immutable values.

Durations and ages are seconds. Moments that deadlines are counted from are readings of `Clock.now()` (seconds since
boot); moments that are shown to people are aware `datetime`s. `None` means "not stated" in a spec and "unknown" in a
reading: neither is ever zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, StrEnum

DEFAULT_TICK = 15.0
DEFAULT_MAX_AGE = 15.0
DEFAULT_COOLDOWN = 300.0
DEFAULT_LEASE_TTL = 60.0


class Comparator(Enum):
    """How a signal is compared with a threshold; strict as named."""

    LESS_THAN = "<"
    LESS_THAN_OR_EQUAL = "<="
    GREATER_THAN = ">"
    GREATER_THAN_OR_EQUAL = ">="

    def holds(self, value: float, threshold: float) -> bool:
        """Whether `value` compares true with `threshold`."""
        return _COMPARE[self](value, threshold)


_COMPARE: Mapping[Comparator, Callable[[float, float], bool]] = {
    Comparator.LESS_THAN: operator.lt,
    Comparator.LESS_THAN_OR_EQUAL: operator.le,
    Comparator.GREATER_THAN: operator.gt,
    Comparator.GREATER_THAN_OR_EQUAL: operator.ge,
}


class QueueCount(Enum):
    """Which messages of a queue a signal counts."""

    READY = "ready"
    UNACKED = "unacked"
    TOTAL = "ready + unacked"


@dataclass(frozen=True, slots=True)
class QueueSignal:
    """The depth of a queue, read by a queue watcher (by id)."""

    watcher: str
    count: QueueCount


@dataclass(frozen=True, slots=True)
class Signal:
    """A measured input of an endpoint."""

    id: str
    source: QueueSignal
    max_age: float | None = None

    @property
    def oldest(self) -> float:
        """Oldest value that counts, in seconds."""
        return DEFAULT_MAX_AGE if self.max_age is None else self.max_age


@dataclass(frozen=True, slots=True)
class StepRule:
    """Adds `step` replicas (takes them away where it is negative) while the signal compares true."""

    comparator: Comparator
    threshold: float
    step: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One scaling rule. Its own bounds clamp what this rule leads to, and nothing else."""

    id: str
    signal: str
    kind: StepRule
    disabled: bool = False
    priority: int = 0
    cooldown: float | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None

    @property
    def rest(self) -> float:
        """Least seconds between two changes by this rule; over when exactly that much has passed."""
        return DEFAULT_COOLDOWN if self.cooldown is None else self.cooldown


@dataclass(frozen=True, slots=True)
class ReplicaTemplate:
    """What a replica is made of; `adapter` empty: any adapter that has the command template."""

    template: str
    adapter: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    gpu_count: int = 0
    min_memory_bytes: int | None = None
    max_utilization_percent: float | None = None
    lease_ttl: float | None = None
    drain_timeout: float | None = None

    @property
    def ttl(self) -> float:
        """Lease of a replica's reservation from each renewal, in seconds."""
        return DEFAULT_LEASE_TTL if self.lease_ttl is None else self.lease_ttl


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """What a user wants of an endpoint."""

    min_replicas: int
    max_replicas: int
    template: ReplicaTemplate
    signals: tuple[Signal, ...] = ()
    rules: tuple[Rule, ...] = ()
    tick: float | None = None
    paused: bool = False

    @property
    def period(self) -> float:
        """Seconds from one evaluation to the next."""
        return DEFAULT_TICK if self.tick is None else self.tick

    @property
    def watchers(self) -> frozenset[str]:
        """Ids of the queue watchers that its signals read."""
        return frozenset(signal.source.watcher for signal in self.signals)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint as it is stored. `desired` is what rules, or a person, set last."""

    id: str
    spec: EndpointSpec
    etag: str
    desired: int
    create_time: datetime
    update_time: datetime
    deleting: bool = False


class ObservationStatus(Enum):
    """Whether the value of a signal counts."""

    OK = "OK"
    MISSING = "MISSING"
    STALE = "STALE"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True)
class Observation:
    """What a signal showed. `proven_empty`: a fresh reading shows that no work is left, waiting or in hand."""

    signal: str
    status: ObservationStatus
    value: float | None = None
    age: float | None = None
    detail: str = ""
    proven_empty: bool = False


class Stage(Enum):
    """Part of an evaluation, in the order they run."""

    RULE = 1
    COMBINE = 2
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
    CLAMPED_TO_RULE_MIN = "CLAMPED_TO_RULE_MIN"
    CLAMPED_TO_RULE_MAX = "CLAMPED_TO_RULE_MAX"
    # Stage.COMBINE
    UP = "UP"
    DOWN = "DOWN"
    HELD = "HELD"
    NO_CHANGE = "NO_CHANGE"
    PAUSED = "PAUSED"
    REPLICAS_UNKNOWN = "REPLICAS_UNKNOWN"
    # Stage.BOUNDS
    WITHIN_BOUNDS = "WITHIN_BOUNDS"
    CLAMPED_TO_MIN = "CLAMPED_TO_MIN"
    CLAMPED_TO_MAX = "CLAMPED_TO_MAX"
    BELOW_MIN = "BELOW_MIN"
    ABOVE_MAX = "ABOVE_MAX"
    NOT_PROVEN_EMPTY = "NOT_PROVEN_EMPTY"
    # Stage.MANUAL
    SET = "SET"
    # Stage.GPU
    GRANTED = "GRANTED"
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
    """One step of a decision: what it made of the count, and why."""

    stage: Stage
    code: Code
    before: int
    after: int
    text: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What rules and bounds make of an endpoint.

    `effective` names the rules whose change took effect: their cooldown starts, and is saved with the new count.
    `limited_by` is the code of what held the count back; None where nothing did.
    """

    before: int
    wanted: int
    observations: tuple[Observation, ...]
    steps: tuple[Step, ...]
    effective: frozenset[str] = frozenset()
    limited_by: Code | None = None


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
