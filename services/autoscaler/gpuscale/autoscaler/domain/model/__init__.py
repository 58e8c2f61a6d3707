"""What the autoscaler reasons about: specs, signals, observations, evaluations and decisions, as immutable values.

Durations and ages are seconds. Moments that deadlines are counted from are readings of `Clock.now()` (seconds since
boot); moments that are shown to people are aware `datetime`s. `None` means "not stated" in a spec and "unknown" in a
reading: neither is ever zero.
"""

from gpuscale.autoscaler.domain.model.decisions import (
    Code,
    Decision,
    Evaluation,
    Stage,
    Step,
)
from gpuscale.autoscaler.domain.model.observations import (
    Observation,
    ObservationStatus,
)
from gpuscale.autoscaler.domain.model.signals import (
    DEFAULT_LAST_TTL,
    DEFAULT_MAX_AGE,
    GpuSignal,
    HostSignal,
    OnMissing,
    PrometheusSignal,
    PushedSignal,
    QueueCount,
    QueueSignal,
    ReplicaSignal,
    Signal,
    Source,
    WaitingSignal,
)
from gpuscale.autoscaler.domain.model.spec import (
    ASKS_FOR_ROOM,
    DEFAULT_LEASE_TTL,
    DEFAULT_TICK,
    AdapterTier,
    Endpoint,
    EndpointSpec,
    GpuGate,
    ReplicaTemplate,
)

__all__ = [
    "ASKS_FOR_ROOM",
    "DEFAULT_LAST_TTL",
    "DEFAULT_LEASE_TTL",
    "DEFAULT_MAX_AGE",
    "DEFAULT_TICK",
    "AdapterTier",
    "Code",
    "Decision",
    "Endpoint",
    "EndpointSpec",
    "Evaluation",
    "GpuGate",
    "GpuSignal",
    "HostSignal",
    "Observation",
    "ObservationStatus",
    "OnMissing",
    "PrometheusSignal",
    "PushedSignal",
    "QueueCount",
    "QueueSignal",
    "ReplicaSignal",
    "ReplicaTemplate",
    "Signal",
    "Source",
    "Stage",
    "Step",
    "WaitingSignal",
]
