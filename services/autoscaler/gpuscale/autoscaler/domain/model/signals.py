"""Signals: the measured inputs of an endpoint, and where each comes from. Durations are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gpuscale.autoscaler.domain.series import Aggregation

DEFAULT_MAX_AGE = 15.0
DEFAULT_LAST_TTL = 300.0


class QueueCount(Enum):
    """What of a queue a signal counts: messages, messages a second, or seconds."""

    READY = "ready"
    UNACKED = "unacked"
    TOTAL = "ready + unacked"
    RATE_IN = "published a second"
    RATE_OUT = "delivered a second"
    OLDEST_AGE = "seconds that the oldest message has waited"


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


@dataclass(frozen=True, slots=True)
class TaskSignal:
    """Tasks that were reported for the endpoint, by the capabilities that they need."""


Source = (
    QueueSignal
    | GpuSignal
    | HostSignal
    | PushedSignal
    | ReplicaSignal
    | PrometheusSignal
    | WaitingSignal
    | TaskSignal
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
    counts_work: bool = False

    @property
    def proves(self) -> bool:
        """Whether the last replica goes only while it is freshly 0."""
        return self.counts_work or isinstance(self.source, QueueSignal | TaskSignal)

    @property
    def oldest(self) -> float:
        """Oldest value that counts, in seconds."""
        return DEFAULT_MAX_AGE if self.max_age is None else self.max_age
