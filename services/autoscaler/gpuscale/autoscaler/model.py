"""What the autoscaler reasons about: specs, observations, evaluations, replicas and decisions, as immutable values.

Durations and ages are seconds. Moments that deadlines are counted from are readings of `Clock.now()` (seconds since
boot); moments that are shown to people are aware `datetime`s. `None` means "not stated" in a spec and "unknown" in a
reading: neither is ever zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, StrEnum

from gpuscale.autoscaler.rules import (
    PROPORTIONAL,
    PROPORTIONAL_STABILIZATION,
    UNPACED,
    BoundMode,
    Combine,
    Pace,
    Rule,
    ScalingMode,
)
from gpuscale.autoscaler.series import Aggregation

DEFAULT_TICK = 15.0
DEFAULT_MAX_AGE = 15.0
DEFAULT_LAST_TTL = 300.0
DEFAULT_LEASE_TTL = 60.0


class QueueCount(Enum):
    """What of a queue a signal counts: messages, or messages a second."""

    READY = "ready"
    UNACKED = "unacked"
    TOTAL = "ready + unacked"
    RATE_IN = "published a second"
    RATE_OUT = "delivered a second"


@dataclass(frozen=True, slots=True)
class QueueSignal:
    """The depth of a queue, read by a queue watcher (by id)."""

    watcher: str
    count: QueueCount


class OnMissing(Enum):
    """What a signal counts as while it cannot be had."""

    HOLD = "hold"
    LAST = "last"
    ZERO = "zero"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class GpuSignal:
    """A reading of GPUs: of some nodes by id, of all, or of those that the endpoint's own ready replicas hold."""

    metric: str
    nodes: frozenset[str] = frozenset()
    own_replicas: bool = False


@dataclass(frozen=True, slots=True)
class HostSignal:
    """A reading of hosts: of some nodes by id, or of all."""

    metric: str
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PushedSignal:
    """A metric that was reported for the endpoint as a whole."""

    metric: str


@dataclass(frozen=True, slots=True)
class ReplicaSignal:
    """A metric that each replica reports."""

    metric: str


@dataclass(frozen=True, slots=True)
class PrometheusSignal:
    """A query to a Prometheus server, by its name in the settings."""

    server: str
    query: str


@dataclass(frozen=True, slots=True)
class WaitingSignal:
    """Requests that wait for GPUs at the allocator: of one tenant, or of all where it is empty."""

    tenant: str = ""


Source = (
    QueueSignal | GpuSignal | HostSignal | PushedSignal | ReplicaSignal | PrometheusSignal | WaitingSignal
)


@dataclass(frozen=True, slots=True)
class Signal:
    """A measured input of an endpoint."""

    id: str
    source: Source
    max_age: float | None = None
    across: Aggregation = Aggregation.AVG
    window: float | None = None
    over_window: Aggregation = Aggregation.AVG
    on_missing: OnMissing = OnMissing.HOLD
    last_ttl: float = DEFAULT_LAST_TTL
    activation_threshold: float = 0.0

    @property
    def oldest(self) -> float:
        """Oldest value that counts, in seconds."""
        return DEFAULT_MAX_AGE if self.max_age is None else self.max_age


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
    combine: Combine = Combine.SAFEST
    up: Pace = UNPACED
    down: Pace = UNPACED
    mode: ScalingMode = ScalingMode.ACTIVE
    bound_mode: BoundMode = BoundMode.CLAMP

    @property
    def pace_down(self) -> Pace:
        """How fast the count may shrink, with the stabilization that holds where none is stated."""
        if self.down.stabilization is not None:
            return self.down
        proportional = any(isinstance(rule.kind, PROPORTIONAL) and not rule.disabled for rule in self.rules)
        return replace(self.down, stabilization=PROPORTIONAL_STABILIZATION if proportional else 0.0)

    @property
    def period(self) -> float:
        """Seconds from one evaluation to the next."""
        return DEFAULT_TICK if self.tick is None else self.tick

    @property
    def watchers(self) -> frozenset[str]:
        """Ids of the queue watchers that its signals read."""
        sources = (signal.source for signal in self.signals)
        return frozenset(source.watcher for source in sources if isinstance(source, QueueSignal))

    @property
    def prometheus_servers(self) -> frozenset[str]:
        """Names of the Prometheus servers that its signals query."""
        sources = (signal.source for signal in self.signals)
        return frozenset(source.server for source in sources if isinstance(source, PrometheusSignal))


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
    """What a signal showed.

    `proven_empty`: a fresh reading shows that no work is left, waiting or in hand. `ignored`: it cannot be had, and is to
    be left out then. `silent_count`: sources, such as replicas, that said nothing and are not to be left out;
    `told_count`: those that did. `across`: how their values became one.
    """

    signal: str
    status: ObservationStatus
    value: float | None = None
    age: float | None = None
    detail: str = ""
    proven_empty: bool = False
    ignored: bool = False
    silent_count: int = 0
    told_count: int = 0
    across: Aggregation = Aggregation.AVG

    def with_silent_at(self, value: float) -> float:
        """What it would show if the silent ones said `value`; of a 95th percentile, the most that could be."""
        own = 0.0 if self.value is None else self.value
        silent, told = self.silent_count, self.told_count
        match self.across:
            case Aggregation.AVG:
                return (own * told + value * silent) / (told + silent)
            case Aggregation.SUM:
                return own + value * silent
            case Aggregation.MIN:
                return min(own, value)
            case Aggregation.MAX | Aggregation.P95:
                return max(own, value)


class Stage(Enum):
    """Part of an evaluation, in the order they run."""

    ACTIVATE = 8
    RULE = 1
    COMBINE = 2
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
    `limited_by` is the code of what held the count back; None where nothing did. `asked` is what the rules came to,
    before pace and bounds.
    """

    before: int
    wanted: int
    observations: tuple[Observation, ...]
    steps: tuple[Step, ...]
    effective: frozenset[str] = frozenset()
    limited_by: Code | None = None
    asked: int | None = None


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
