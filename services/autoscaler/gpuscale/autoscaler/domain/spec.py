"""Specs of endpoints: their signals, the template of replicas, and how the count may change.

Durations are seconds. `None` means "not set": the property beside it has the default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from functools import cached_property
from typing import Any

from gpuscale.autoscaler.domain.inputs import Aggregation, Amounts, Inputs
from gpuscale.autoscaler.domain.rules.rule import BoundMode, Rule
from gpuscale.client.tuning import POLICY_FIELDS, TuningGoal, parse_goal

DEFAULT_MAX_AGE = 15.0
DEFAULT_SCRAPED_AGE = 90.0
"""For Prometheus samples, by default scraped once a minute."""
DEFAULT_LAST_TTL = 300.0


class QueueCount(Enum):
    """What a signal counts of a queue: messages, messages per second, or seconds."""

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
    """The substitute for an unavailable signal."""

    HOLD = "hold"
    LAST = "last"
    ZERO = "zero"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class GpuSignal:
    """A GPU reading: of some nodes by id, of all, or of those held by the endpoint's own ready replicas."""

    metric: str
    nodes: frozenset[str] = frozenset()
    own_replicas: bool = False


@dataclass(frozen=True, slots=True)
class HostSignal:
    """A host reading: of some nodes by id, or of all."""

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
    """Requests waiting for GPUs at the allocator: of one tenant, or of all if empty."""

    tenant: str = ""


@dataclass(frozen=True, slots=True)
class EndpointSignal:
    """The wanted replicas of another endpoint (by id)."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class TaskSignal:
    """Tasks reported for the endpoint, by the capabilities that they need."""


Source = (
    QueueSignal
    | GpuSignal
    | HostSignal
    | PushedSignal
    | ReplicaSignal
    | PrometheusSignal
    | WaitingSignal
    | EndpointSignal
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
        """Whether the last replica only stops while it is freshly 0."""
        return self.counts_work or isinstance(self.source, QueueSignal | TaskSignal)

    @property
    def oldest(self) -> float:
        """Greatest age of a usable value, in seconds."""
        if self.max_age is not None:
            return self.max_age
        return DEFAULT_SCRAPED_AGE if isinstance(self.source, PrometheusSignal) else DEFAULT_MAX_AGE


LONGEST_LEARNT = 600.0
"""Most seconds that a stabilization window grows to."""
PROPORTIONAL_STABILIZATION = 60.0
"""Default stabilization down of an endpoint with a proportional rule."""
DEFAULT_TICK = 15.0
DEFAULT_LOOKS = 6 * 3600.0
DEFAULT_LEASE_TTL = 60.0


class Combine(Enum):
    """How the outcomes of rules are combined."""

    SAFEST = "safest"
    FIRST_MATCH = "first match"
    PRIORITY = "priority"
    SUM_STEPS = "sum of steps"


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Most change in a period: in replicas, or in percent of the count at its beginning."""

    period: float
    replicas: int | None = None
    percent: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the count may go one way.

    `startups`: the window of a reduction grows fourfold each time that stopped replicas are soon needed again (`engine.regrets`),
    up to so many start-up times, or `LONGEST_LEARNT`: replicas that are needed repeatedly, and start slowly, are kept.
    """

    stabilization: float | None = None
    limits: tuple[RateLimit, ...] = ()
    strictest: bool = False
    disabled: bool = False
    cooldown: float = 0.0
    startups: float = 0.0

    def window(self, startup: float | None, regrets: int) -> float:
        """Its stabilization window in seconds, given that replicas take `startup` seconds to be ready."""
        stated = self.stabilization or 0.0
        longest = min(LONGEST_LEARNT, self.startups * (startup or 0.0))
        return max(stated, min(longest, stated * 4.0**regrets))


UNPACED = Pace()
"""As fast as rules want."""


class ScalingMode(Enum):
    """Whether decisions are carried out."""

    ACTIVE = "active"
    SHADOW = "shadow"


class GpuGate(Enum):
    """How available GPUs limit the number of replicas."""

    RESERVE = "reserve"
    CAP = "cap"
    ADVISE = "advise"
    OFF = "off"


class ScaleInOrder(Enum):
    """Which of several equally busy replicas is stopped first."""

    NEWEST_FIRST = "newest first"
    OLDEST_FIRST = "oldest first"


ASKS_FOR_ROOM = frozenset({GpuGate.CAP, GpuGate.ADVISE})
"""Gates that ask the allocator for how many replicas there are GPUs."""


@dataclass(frozen=True, slots=True)
class AdapterTier:
    """An adapter that is used up to so many replicas (0: unlimited) before the next one is."""

    adapter: str
    max_replicas: int = 0


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A GPU model, and the weight of a replica on it."""

    model: str
    weight: float


@dataclass(frozen=True, slots=True)
class ReplicaTemplate:
    """The template of replicas; empty `adapter`: any adapter that has the command template, or those of `tiers`.

    `ask` has its other GPU requirements, encoded as in the contract; None without. `models`: in order of preference, or the one
    that is requested, or that it got.
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
    movable: float | None = None
    models: tuple[ModelWeight, ...] = ()

    def of_each_model(self) -> list[ReplicaTemplate]:
        """It with each of its models alone, in order; unchanged if it has none."""
        return [replace(self, models=(one,)) for one in self.models] or [self]

    def on(self, products: Iterable[str]) -> ReplicaTemplate:
        """It with the model of these GPUs alone, by product name; of several, the least preferred."""
        models = list(enumerate(self.models))
        fits = [
            [place for place, one in models if one.model.casefold() in name.casefold()] for name in products
        ]
        places = [one[0] for one in fits if one]
        return replace(self, models=(self.models[max(places)],)) if places else self

    @property
    def models_in_words(self) -> str:
        """Such as `A100 (0.5)`."""
        return ", ".join(f"{one.model} ({one.weight:g})" for one in self.models)

    def is_of(self, whole: ReplicaTemplate) -> bool:
        """Whether it is that template, or one of its models alone."""
        return replace(self, models=whole.models) == whole and set(self.models) <= set(whole.models)

    def place(self, one: ReplicaTemplate) -> int:
        """The index of a replica's model among these; beyond the last for other or unknown models."""
        names = [each.model for each in self.models]
        known = len(one.models) == 1 and one.models[0].model in names
        return names.index(one.models[0].model) if known else len(names)

    def weight(self, one: ReplicaTemplate) -> float:
        """The weight of a replica; for other or unknown models the least of all."""
        if not self.models:
            return 1.0
        place = self.place(one)
        weights = [each.weight for each in self.models]
        return weights[place] if place < len(weights) else min(weights)

    def tier(self, adapter: str) -> int | None:
        """An adapter's index among the tiers: 0 for all if there are none; None: not to be used."""
        if not self.tiers:
            return 0 if self.adapter in {"", adapter} else None
        return next((place for place, one in enumerate(self.tiers) if one.adapter == adapter), None)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that it names; empty if any will do."""
        return (self.adapter,) if self.adapter else tuple(one.adapter for one in self.tiers)

    @property
    def ttl(self) -> float:
        """Lease of a replica's reservation from each renewal, in seconds."""
        return DEFAULT_LEASE_TTL if self.lease_ttl is None else self.lease_ttl


@dataclass(frozen=True, slots=True)
class CapabilitySet:
    """Worker groups with the same capabilities: each replica is a group of so many `workers`.

    `max_replicas` and `template` are the endpoint's if None.
    """

    id: str
    capabilities: Amounts
    min_replicas: int = 0
    max_replicas: int | None = None
    workers: int = 1
    template: ReplicaTemplate | None = None


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The goal by which an endpoint's policy is chosen, for requests that may wait so many seconds; and how often."""

    goal: str = ""
    wait: float | None = None
    slots: int = 0
    every: float | None = None

    @property
    def chosen_by(self) -> TuningGoal:
        """The goal; ValueError for an unknown one."""
        return parse_goal(self.goal) if self.goal else TuningGoal()

    @property
    def period(self) -> float:
        """Least seconds between looks."""
        return DEFAULT_LOOKS if self.every is None else self.every


@dataclass(frozen=True)
class EndpointSpec:
    """A user's specification of an endpoint; values derived for each evaluation are cached."""

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
    priority: int | None = None
    preempt_after: float = 0.0
    adaptive: Adaptive | None = None

    def scaled_as(self, other: EndpointSpec) -> EndpointSpec:
        """The same endpoint, with the policy of another, within its own bounds."""
        policy: dict[str, Any] = {name: getattr(other, name) for name in POLICY_FIELDS}
        return replace(self, **policy)

    def sleeps_until(self, inputs: Inputs) -> str:
        """What wakes an endpoint without replicas, such as `depth > 5`: until then no rule is evaluated; empty if awake."""
        guarded = [one for one in self.signals if one.activation_threshold > 0]
        if any((inputs.value(one.id) or 0.0) > one.activation_threshold for one in guarded):
            return ""
        return ", ".join(f"{one.id} > {one.activation_threshold:g}" for one in guarded)

    def of_set(self, set_id: str) -> EndpointSpec:
        """The spec of one capability set's replicas; with 0 replicas if there is no such set (any more)."""
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

    @cached_property
    def measured(self) -> tuple[Signal, ...]:
        """Its signals, and those that rules read themselves; of two with the same id, the former."""
        stated = {one.id for one in self.signals}
        own = (
            Signal(f"{rule.id}.{name}", ReplicaSignal(metric), across=across)
            for rule in self.rules
            for name, (metric, across) in rule.kind.metrics.items()
        )
        return (*self.signals, *(one for one in own if one.id not in stated))

    @property
    def started_from(self) -> ReplicaTemplate:
        """The template that replicas are started from: without our GPUs if an engine assigns them."""
        return replace(self.template, gpu_count=0) if self.gpu_gate is GpuGate.OFF else self.template

    @property
    def least(self) -> int:
        """The initial number of replicas."""
        return max(self.min_replicas, sum(one.min_replicas for one in self.capability_sets))

    @property
    def gives_way(self) -> bool:
        """Whether it may give way; its min holds in any case, and a manual count is not changed."""
        by_hand = self.paused or self.mode is ScalingMode.SHADOW or all(rule.disabled for rule in self.rules)
        return not (by_hand or self.capability_sets)

    @cached_property
    def pace_down(self) -> Pace:
        """How fast the count may shrink, with the default stabilization."""
        if self.down.stabilization is not None:
            return self.down
        proportional = any(rule.kind.proportional and not rule.disabled for rule in self.rules)
        return replace(self.down, stabilization=PROPORTIONAL_STABILIZATION if proportional else 0.0)

    @property
    def period(self) -> float:
        """Seconds between evaluations."""
        return DEFAULT_TICK if self.tick is None else self.tick

    @cached_property
    def watchers(self) -> frozenset[str]:
        """Ids of the queue watchers that its signals read."""
        sources = (signal.source for signal in self.signals)
        return frozenset(source.watcher for source in sources if isinstance(source, QueueSignal))

    @property
    def follows(self) -> Mapping[str, int]:
        """Ids of the endpoints whose replicas its signals read, each with the index of such a signal."""
        sources = ((one.source, index) for index, one in enumerate(self.signals))
        return {source.endpoint: index for source, index in sources if isinstance(source, EndpointSignal)}

    @property
    def prometheus_servers(self) -> frozenset[str]:
        """Names of the Prometheus servers that its signals query."""
        sources = (signal.source for signal in self.signals)
        return frozenset(source.server for source in sources if isinstance(source, PrometheusSignal))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint as stored. `desired` is the count last set by rules or a person; `sets` has those of capability sets.

    `tenant`: whose quota its GPUs count against, `creator`: whose reservations they are; the autoscaler's own if empty.
    `delete_time`: when it was deleted, if known.
    """

    id: str
    spec: EndpointSpec
    etag: str
    desired: int
    create_time: datetime
    update_time: datetime
    deleting: bool = False
    sets: Mapping[str, int] = field(default_factory=dict[str, int])
    tenant: str = ""
    creator: str = ""
    delete_time: datetime | None = None

    @property
    def targets(self) -> Mapping[str, int]:
        """Groups wanted by capability set; all replicas under an empty id without sets."""
        sets = self.spec.capability_sets
        if not sets:
            return {"": self.desired}
        return {one.id: 0 if self.deleting else self.sets.get(one.id, one.min_replicas) for one in sets}
