"""Specs of endpoints: what a user wants, and what a replica is made of.

Durations are seconds. `None` means "not stated": the property beside it says what holds then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum

from gpuscale.autoscaler.domain.model.capabilities import Amounts
from gpuscale.autoscaler.domain.model.signals import PrometheusSignal, QueueSignal, Signal
from gpuscale.autoscaler.domain.rules import (
    PROPORTIONAL,
    PROPORTIONAL_STABILIZATION,
    UNPACED,
    BoundMode,
    Combine,
    Pace,
    Rule,
    ScalingMode,
)

DEFAULT_TICK = 15.0
DEFAULT_LEASE_TTL = 60.0


class GpuGate(Enum):
    """What GPUs there are has to say about the number of replicas."""

    RESERVE = "reserve"
    CAP = "cap"
    ADVISE = "advise"
    OFF = "off"


class ScaleInOrder(Enum):
    """Which of several replicas that are equally busy is stopped first."""

    NEWEST_FIRST = "newest first"
    OLDEST_FIRST = "oldest first"


ASKS_FOR_ROOM = frozenset({GpuGate.CAP, GpuGate.ADVISE})
"""Gates for which the allocator is asked how many replicas there are GPUs for."""


@dataclass(frozen=True, slots=True)
class AdapterTier:
    """An adapter that is used up to so many replicas (0: without bound) before the next one is."""

    adapter: str
    max_replicas: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaTemplate:
    """What a replica is made of; `adapter` empty: any adapter that has the command template, or those of `tiers`.

    `ask` is what else it wants of its GPUs, as the contract encodes it; None where the spec names no ask.
    """

    template: str
    adapter: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    gpu_count: int = 0
    min_memory_bytes: int | None = None
    max_utilization_percent: float | None = None
    lease_ttl: float | None = None
    drain_timeout: float | None = None
    tiers: tuple[AdapterTier, ...] = ()
    ask: bytes | None = None

    def tier(self, adapter: str) -> int | None:
        """The place of an adapter among the tiers: 0 for every one it may use where there are none; None: not to use."""
        if not self.tiers:
            return 0 if self.adapter in {"", adapter} else None
        return next((place for place, one in enumerate(self.tiers) if one.adapter == adapter), None)

    @property
    def ttl(self) -> float:
        """Lease of a replica's reservation from each renewal, in seconds."""
        return DEFAULT_LEASE_TTL if self.lease_ttl is None else self.lease_ttl


@dataclass(frozen=True, slots=True)
class CapabilitySet:
    """Worker groups that can do the same: each replica is a group of so many `workers`.

    `max_replicas` and `template` are the endpoint's where they are None.
    """

    id: str
    capabilities: Amounts
    min_replicas: int = 0
    max_replicas: int | None = None
    workers: int = 1
    template: ReplicaTemplate | None = None


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
    warm_spares: int = 0
    gpu_gate: GpuGate = GpuGate.RESERVE
    busy_metric: str = ""
    scale_in_order: ScaleInOrder = ScaleInOrder.NEWEST_FIRST
    capability_sets: tuple[CapabilitySet, ...] = ()

    def of_set(self, set_id: str) -> EndpointSpec:
        """The spec of the replicas of one capability set; of one that is not there (any more) none is wanted."""
        if not set_id and not self.capability_sets:
            return self
        found = next((one for one in self.capability_sets if one.id == set_id), None)
        if found is None:
            return replace(self, min_replicas=0, max_replicas=0, capability_sets=())
        most = self.max_replicas if found.max_replicas is None else found.max_replicas
        template = self.template if found.template is None else found.template
        return replace(
            self, min_replicas=found.min_replicas, max_replicas=most, template=template, capability_sets=()
        )

    @property
    def started_from(self) -> ReplicaTemplate:
        """What its replicas are started from: without GPUs of ours where those are somebody else's matter."""
        return replace(self.template, gpu_count=0) if self.gpu_gate is GpuGate.OFF else self.template

    @property
    def least(self) -> int:
        """Replicas that a new endpoint aims at."""
        return max(self.min_replicas, sum(one.min_replicas for one in self.capability_sets))

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
    """An endpoint as it is stored. `desired` is what rules, or a person, set last; `sets` is that of each capability set."""

    id: str
    spec: EndpointSpec
    etag: str
    desired: int
    create_time: datetime
    update_time: datetime
    deleting: bool = False
    sets: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def targets(self) -> Mapping[str, int]:
        """Groups aimed at, by capability set; all replicas under an empty id where there are no sets."""
        sets = self.spec.capability_sets
        if not sets:
            return {"": self.desired}
        return {one.id: 0 if self.deleting else self.sets.get(one.id, one.min_replicas) for one in sets}
