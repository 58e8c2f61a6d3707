"""Values of the allocator: nodes and GPUs as known, asks, picks, reservations, and what they hold.

Pure: no wire types, no clock. Times named `*_until`, `deadline` or `now` are seconds of CLOCK_BOOTTIME; memory is in bytes,
utilization in percent (0-100). None is a reading that was not obtained, never zero.

Values are replaced, never changed. Those made for each grant or reading are plain dataclasses all the same: a frozen
reservation, with its 22 fields, takes 3.3 us to make instead of 0.5, and a grant makes two. Keys are frozen.

`Use` adds up what live reservations hold of each GPU and node: the ledger maintains it, placement reads it. A GPU that is held
whole admits nobody else; shares of a GPU and their memory add up.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import Enum, StrEnum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, Unpack

from gpuscale.allocator.domain.jobs import ReservedJob
from gpuscale.common.topology import NOWHERE, PciPlace


class NodeState(Enum):
    """Whether the fleet can reach a node and read it."""

    ONLINE = "online"
    STALE = "stale"
    OFFLINE = "offline"


WHOLE = 1000
"""A whole GPU, in thousandths; also a whole core."""


@dataclass(slots=True)
class GpuProcess:
    """A process on a GPU. `reservation` is the id of the one it works for; None for an outsider, or if `unknown`.

    `start_ticks` is its start time as its host counts it; None if unknown.
    """

    pid: int
    memory_bytes: int | None
    command: str
    reservation: str | None
    unknown: bool = False
    start_ticks: int | None = None


class HardwareLook(NamedTuple):
    """A GPU's clock, what throttled it by NVML's names, and its ECC error counters; None is unknown."""

    sm_clock_mhz: float | None = None
    throttled_by: tuple[str, ...] = ()
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None


UNSEEN = HardwareLook()


@dataclass(slots=True)
class Gpu:
    """A GPU as last reported.

    `trouble` says why nothing can run on it (such as HUNG or LOST) and is empty while it answers; `quarantine` says why,
    and since when, the health checks want nothing new on one that does. After `fresh_until` its readings are too old to count on. `mig_profile` is empty for a whole GPU; a MIG instance has the
    UUID of its GPU as `parent`. `processes_known` says whether its processes could be read.
    `place` says where it hangs on PCIe, `nvlinks` counts the NVLink connections to other GPUs by their UUIDs.
    `rated_watts` is its power limit of the factory; where that is not told, the one in force. `energy_joules` counts since
    the driver was loaded. It was read at `read_at`.
    """

    uuid: str
    index: int
    model: str
    simulated: bool
    trouble: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    utilization_percent: float | None
    fresh_until: float
    memory_used_bytes: int | None = None
    mig_profile: str = ""
    parent: str = ""
    place: PciPlace = NOWHERE
    nvlinks: Mapping[str, int] = field(default_factory=dict[str, int])
    processes: tuple[GpuProcess, ...] = ()
    quarantine: str = ""
    processes_known: bool = True
    power_watts: float | None = None
    power_limit_watts: float | None = None
    rated_watts: float | None = None
    energy_joules: float | None = None
    hardware: HardwareLook = UNSEEN
    read_at: float | None = None


@dataclass(slots=True)
class Node:
    """A node and its GPUs.

    `rank` is its place in the order in which nodes were first seen; it never changes and breaks ties. `reported` is False for a
    known node that has not reported since the allocator started, so that its GPUs are unknown; `gpu_problem` says why a
    reporting node cannot read them. `cpu_milli` is its CPU in thousandths of a core. A `forgotten` node is gone for good and
    only kept for what is still held on it. Its readings are fresh for `fresh_for` seconds.
    """

    id: str
    rank: int
    state: NodeState
    gpus: tuple[Gpu, ...]
    reported: bool = True
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    cpu_milli: int | None = None
    memory_total_bytes: int | None = None
    gpu_problem: str = ""
    forgotten: bool = False
    fresh_for: float = 3.0

    @property
    def names_gpus(self) -> bool:
        """Whether its GPUs are known."""
        return self.reported and not self.gpu_problem


class Policy(StrEnum):
    """How GPUs are picked."""

    SPREAD = "spread"
    PACK = "pack"
    BESTFIT = "bestfit"
    FIRSTFIT = "firstfit"
    FGD = "fgd"


class GangStrategy(StrEnum):
    """How the members of a gang are spread over nodes."""

    PACK = "pack"
    STRICT_PACK = "strict_pack"
    SPREAD = "spread"
    STRICT_SPREAD = "strict_spread"


class GpuSet(StrEnum):
    """Which set of a node's GPUs to prefer if a member takes more than one."""

    BEST = "best"
    NVLINK = "nvlink"
    MEMORY_BALANCED = "memory_balanced"


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the spread score; defaults are the seeds' values."""

    memory: float = 0.6
    utilization: float = 0.4

    def score(self, free: Any, idle: Any) -> Any:
        """The spread score of a GPU, or of each in arrays, given its free share of memory and its idle share (0-1)."""
        return self.memory * free + self.utilization * idle


@dataclass(frozen=True, slots=True)
class Ask:
    """The GPUs to reserve: `member_count` members, each with `gpu_count` GPUs of one node, all or none.

    `gpu_milli` is the share of each GPU in thousandths: WHOLE is exclusive. `gpu_memory_bytes` is the memory of each GPU that a
    share takes; None means the same share of its memory, and all of it for a whole GPU. `nodes`, `gpus` (UUIDs in lower case)
    and `models` limit the choice; empty ones do not. A `gpu_count` of 0 asks for CPU and main memory alone.
    """

    gpu_count: int
    min_memory_bytes: int
    max_utilization_percent: float
    allow_unknown_utilization: bool = False
    policy: Policy = Policy.SPREAD
    weights: Weights = Weights()
    nodes: frozenset[str] = frozenset()
    gpu_milli: int = WHOLE
    gpu_memory_bytes: int | None = None
    mig_profile: str = ""
    models: tuple[str, ...] = ()
    cpu_milli: int = 0
    host_memory_bytes: int = 0
    excluded_nodes: frozenset[str] = frozenset()
    gpus: frozenset[str] = frozenset()
    excluded_gpus: frozenset[str] = frozenset()
    node_labels: tuple[tuple[str, str], ...] = ()
    apart_from: tuple[tuple[str, str], ...] = ()
    gpu_set: GpuSet = GpuSet.BEST
    member_count: int = 1
    gang_strategy: GangStrategy = GangStrategy.PACK
    power_limit_watts: float | None = None

    @property
    def exclusive(self) -> bool:
        """Whether each GPU is taken whole."""
        return self.gpu_milli >= WHOLE and self.gpu_memory_bytes is None


@dataclass(slots=True)
class Order:
    """A request for GPUs: who, for how long (`ttl` in seconds), and its request id.

    `fingerprint` covers all arguments and the caller: a repeated request id must have the same one. `made_by` is who asks on
    behalf of the owner, empty if that is the owner. An order to `keep` has its place in the queue by a reservation,
    `reservation_id`, and needs no waiting caller. It ends after `limit` seconds in any case; 0 for no limit. It may only take
    GPUs of the `booking` with this id, if set, which has `booked` seconds left.
    """

    request_id: str
    fingerprint: str
    holder: str
    owner: str
    ttl: float
    labels: Mapping[str, str]
    ask: Ask
    tenant: str = ""
    priority: int = 0
    preemptible: bool = False
    may_preempt: bool = False
    made_by: str = ""
    job: ReservedJob | None = None
    keep: bool = False
    reservation_id: str = ""
    limit: float = 0.0
    booking: str = ""
    booked: float = 0.0

    @property
    def lasts(self) -> float:
        """Seconds after which it ends at the latest, by its own limit and its booking; 0 for no limit."""
        return min(self.limit, self.booked) if self.limit and self.booked else self.limit or self.booked


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a waiting job gets or got: its ask, and for how long. `fence` is the one under which it waits.

    It is 0 where what may move is granted at once: its ask is what it needs elsewhere. `first` is the first fence of one that
    was started again; else it is 0. `granted` is when it was first granted, by the wall clock; None before, and in older records.
    """

    ask: Ask
    ttl: float
    may_preempt: bool
    fence: int
    limit: float = 0.0
    first: int = 0
    granted: datetime | None = None


@dataclass(slots=True)
class ScorePart:
    """One part of a score: its `value` (0-1 for spread), None if the GPU does not report it."""

    name: str
    value: float | None
    weight: float


@dataclass(slots=True)
class Score:
    """Why a GPU was preferred: `total` is the sum of value x weight over the parts with a value."""

    total: float
    parts: tuple[ScorePart, ...]
    note: str = ""


@dataclass(slots=True)
class ReservedGpu:
    """A GPU of a reservation, as it was when chosen.

    A `milli` of WHOLE is exclusive. `memory_bytes` is how much of its memory is held, None for a whole GPU that does not report
    its size. `lost` says that it has vanished since. A MIG instance has the UUID of its GPU as `parent`, which no other record
    keeps once the GPU is whole again.
    """

    node: str
    uuid: str
    index: int
    model: str
    simulated: bool
    score: Score
    milli: int = WHOLE
    memory_bytes: int | None = None
    member: int = 0
    lost: bool = False
    parent: str = ""


class State(StrEnum):
    """The state of a reservation."""

    PENDING = "pending"
    ACTIVE = "active"
    RELEASED = "released"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    LOST = "lost"


class EndCause(StrEnum):
    """Why a reservation ended, or is about to."""

    RELEASED = "released"
    EXPIRED = "expired"
    DRAINED = "drained"
    PREEMPTED = "preempted"
    GPU_LOST = "gpu_lost"
    CANCELLED = "cancelled"


BOOKING_LABEL, POWER_LABEL, MOVABLE_LABEL = "gpuscale-booking", "gpuscale-power-limit", "gpuscale-movable"
"""The labels of a reservation that claims a booking, by its id, of one whose GPUs may draw so many watts, and of one that may move,
which takes so many seconds. Holders cannot set them."""
OWN_LABELS = frozenset({BOOKING_LABEL, POWER_LABEL, MOVABLE_LABEL})
MOVED_FOR = "moved for "
"""Prefix of the reason for moving a reservation to another place; it usually stays if there is none."""
PREEMPTED_FOR = "preempted for "
"""Prefix of the reason of a preemption."""
IS_DRAINED = " is drained"
"""Marks a drained node or GPU in a reason; the drain's own reason may follow after a colon."""
_CAUSES = {State.RELEASED: EndCause.RELEASED, State.EXPIRED: EndCause.EXPIRED, State.LOST: EndCause.GPU_LOST}

LIVE = frozenset({State.PENDING, State.ACTIVE})
"""States in which a reservation holds its GPUs."""


@dataclass(slots=True)
class Reservation:
    """GPUs held by a holder under a lease.

    `deadline` is when the lease runs out; after its end, when its record may be forgotten. `created` and `ended` are wall-clock
    times for display. `cpu_milli` and `host_memory_bytes` are what each member takes of its node; `revoke_at` is when it will
    be revoked (drain, preemption), `end_reason` why, or why it ended. `made_by` is who made it on behalf of the owner, empty if
    that was the owner. It ends at `until`, however often it is renewed.

    A `waiting` reservation holds nothing yet: it is a place in the queue, its lease is the wait, and it gets `wanted`.
    """

    id: str
    fence: int
    request_id: str
    fingerprint: str
    holder: str
    owner: str
    labels: Mapping[str, str]
    policy: Policy
    gpus: tuple[ReservedGpu, ...]
    ttl: float
    state: State
    deadline: float
    created: datetime
    ended: datetime | None = None
    tenant: str = ""
    priority: int = 0
    preemptible: bool = False
    cpu_milli: int = 0
    host_memory_bytes: int = 0
    member_count: int = 1
    revoke_at: float | None = None
    end_reason: str = ""
    made_by: str = ""
    job: ReservedJob | None = None
    wanted: Wanted | None = None
    until: float | None = None

    @property
    def first_fence(self) -> int:
        """The fence under which it waited, or else was granted."""
        return (self.wanted.first or self.wanted.fence if self.wanted else 0) or self.fence

    @property
    def waiting(self) -> bool:
        """Whether it holds nothing yet, or ended before it did."""
        return self.wanted is not None and self.wanted.fence == self.fence

    def order(self) -> Order:
        """The order of a waiting reservation."""
        if self.wanted is None:
            raise ValueError(f"reservation {self.id} waits for nothing")
        return Order(
            **{name: getattr(self, name) for name in _AS_ORDERED},
            ttl=self.wanted.ttl,
            ask=self.wanted.ask,
            may_preempt=self.wanted.may_preempt,
            keep=True,
            reservation_id=self.id,
            limit=self.wanted.limit,
            booking=self.labels.get(BOOKING_LABEL, ""),
        )

    def is_of(self, name: str) -> bool:
        """Whether a caller may change it: its owner, or whoever made it on the owner's behalf."""
        return name in (self.owner, self.made_by or self.owner)

    @property
    def live(self) -> bool:
        """Whether it holds its GPUs."""
        return self.state in LIVE

    @property
    def end_cause(self) -> EndCause | None:
        """Why it ended, or is about to; None otherwise. What revoked it is read from its reason, as on disk."""
        if cause := _CAUSES.get(self.state):
            return cause
        if not self.end_reason:
            return None if self.live else EndCause.CANCELLED
        if self.end_reason.startswith(PREEMPTED_FOR):
            return EndCause.PREEMPTED
        drained = self.end_reason.partition(": ")[0].endswith(IS_DRAINED)
        return EndCause.DRAINED if drained else EndCause.CANCELLED


class Life(TypedDict, total=False):
    """The fields of a reservation that may change during its life."""

    gpus: tuple[ReservedGpu, ...]
    ttl: float
    state: State
    deadline: float
    ended: datetime | None
    revoke_at: float | None
    until: float | None
    end_reason: str
    job: ReservedJob | None


_AS_ORDERED = {one.name for one in fields(Order)} & {one.name for one in fields(Reservation)} - {"ttl"}
_FIELDS = attrgetter(*(one.name for one in fields(Reservation)))


def moved(one: Reservation, **life: Unpack[Life]) -> Reservation:
    """The reservation with some of its `Life` changed: `dataclasses.replace` at a third of the cost."""
    after = Reservation(*_FIELDS(one))
    for name, value in life.items():
        setattr(after, name, value)
    return after


@dataclass(slots=True)
class Pick:
    """The GPUs that serve an ask, per member, best first, and the node of each member."""

    gpus: tuple[ReservedGpu, ...]
    nodes: tuple[str, ...] = ()


@dataclass(slots=True)
class GpuUse:
    """What is held of a GPU: thousandths, bytes of memory, and by which reservations.

    `unsized` counts parts of reservations without a known memory size: each holds all of it. A GPU held whole has a `milli` of
    WHOLE.
    """

    milli: int = 0
    claimed_bytes: int = 0
    unsized: int = 0
    reservations: tuple[str, ...] = ()


@dataclass(slots=True)
class NodeUse:
    """What is held of a node: CPU in thousandths of a core, bytes of main memory, and by which reservations."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    reservations: tuple[str, ...] = ()


FREE_GPU = GpuUse()
FREE_NODE = NodeUse()


class Use:
    """What all live reservations hold.

    A MIG instance and its whole GPU never exist at once, but a lease may outlive either: until it ends, `on` counts the other
    as held. Each change records what it touched, for an index that follows (`changed`). `newly` has the GPUs, with their nodes,
    that became held since its reader last took them.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, GpuUse] = {}
        self._nodes: dict[str, NodeUse] = {}
        self._live: dict[str, Reservation] = {}
        self._instances: dict[str, set[str]] = {}
        self._tenants: dict[str, int] = {}
        self.tenants: Mapping[str, int] = MappingProxyType(self._tenants)
        """Thousandths of GPUs per tenant that holds any."""
        self._changed: defaultdict[str, set[str]] = defaultdict(set)
        self.newly: dict[str, str] = {}

    def __len__(self) -> int:
        """The number of GPUs of which any part is held."""
        return len(self._gpus)

    def copy(self) -> "Use":
        """A copy, for what-if changes."""
        twin = Use()
        twin._gpus, twin._nodes, twin._live = self._gpus.copy(), self._nodes.copy(), self._live.copy()
        twin._instances = {parent: held.copy() for parent, held in self._instances.items()}
        twin._tenants.update(self._tenants)
        twin.newly = self.newly.copy()
        return twin

    def gpu(self, uuid: str) -> GpuUse:
        """What is held of a GPU."""
        return self._gpus.get(uuid, FREE_GPU)

    def holders(self, uuid: str) -> Collection[str]:
        """The reservations that hold something of a GPU, or of an instance of it."""
        there = (uuid, *self._instances.get(uuid, ()))
        return dict.fromkeys(name for one in there for name in self.gpu(one).reservations)

    def on(self, gpu: Gpu) -> GpuUse:
        """What is held of a GPU, all of it if its parent GPU, or an instance of it, is held."""
        use = self._gpus.get(gpu.uuid, FREE_GPU)
        if not gpu.parent and gpu.uuid not in self._instances:
            return use
        kin = [self.gpu(one) for one in (gpu.parent, *sorted(self._instances.get(gpu.uuid, ())))]
        if not any(one.milli for one in kin):
            return use
        names = [name for one in (use, *kin) for name in one.reservations]
        return GpuUse(WHOLE, use.claimed_bytes, use.unsized, tuple(dict.fromkeys(names)))

    def node(self, node: str) -> NodeUse:
        """What is held of a node."""
        return self._nodes.get(node, FREE_NODE)

    def live(self, reservation_id: str) -> Reservation:
        """The reservation with this id, as it was when it was held. Raises KeyError if it holds nothing."""
        return self._live[reservation_id]

    def reservations(self, node: str) -> Iterator[Reservation]:
        """The live reservations on a node."""
        return (self._live[reservation] for reservation in self.node(node).reservations)

    def changed(self) -> Mapping[str, Collection[str]]:
        """The nodes whose use has changed since the last call, and their changed GPUs; an instance counts with its GPU."""
        changed, self._changed = self._changed, defaultdict(set)
        return changed

    def hold(self, reservation: Reservation) -> None:
        """Add what a reservation holds; ValueError if a GPU is not free for it, or its shares exceed it."""
        asked: dict[str, int] = {}
        for gpu in reservation.gpus:
            held = asked.get(gpu.uuid, self._gpus.get(gpu.uuid, FREE_GPU).milli)
            asked[gpu.uuid] = milli = held + gpu.milli
            if milli > WHOLE:
                raise ValueError(
                    f"GPU {gpu.uuid} is held already by {', '.join(self.gpu(gpu.uuid).reservations)}"
                )
        self._live[reservation.id] = reservation
        self._add(reservation, 1)

    def free(self, reservation_id: str) -> None:
        """Remove what a reservation holds, if anything."""
        reservation = self._live.pop(reservation_id, None)
        if reservation is not None:
            self._add(reservation, -1)

    def _add(self, reservation: Reservation, sign: int) -> None:
        milli = 0
        members: set[tuple[str, int]] = set()
        for gpu in reservation.gpus:
            milli += gpu.milli
            members.add((gpu.node, gpu.member))
            self._changed[gpu.node].add(gpu.uuid)
            use, claimed = self._gpus.get(gpu.uuid, FREE_GPU), gpu.memory_bytes or 0
            if names := _names(use.reservations, reservation.id, sign):
                if not use.reservations:
                    self.newly[gpu.uuid] = gpu.node
                self._gpus[gpu.uuid] = GpuUse(
                    use.milli + sign * gpu.milli,
                    use.claimed_bytes + sign * claimed,
                    use.unsized + (0 if claimed else sign),
                    names,
                )
            else:
                self._gpus.pop(gpu.uuid, None)
                self.newly.pop(gpu.uuid, None)
            if gpu.parent:
                self._changed[gpu.node].add(gpu.parent)
                instances = self._instances.setdefault(gpu.parent, set())
                if gpu.uuid in self._gpus:
                    instances.add(gpu.uuid)
                else:
                    instances.discard(gpu.uuid)
                    if not instances:
                        del self._instances[gpu.parent]
        for node, _ in members:
            of_node = self._nodes.get(node, FREE_NODE)
            if names := _names(of_node.reservations, reservation.id, sign):
                self._nodes[node] = NodeUse(
                    of_node.cpu_milli + sign * reservation.cpu_milli,
                    of_node.memory_bytes + sign * reservation.host_memory_bytes,
                    names,
                )
            else:
                self._nodes.pop(node, None)
        held = self._tenants.get(reservation.tenant, 0) + sign * milli
        self._tenants[reservation.tenant] = held
        if not held:
            del self._tenants[reservation.tenant]


def _names(names: tuple[str, ...], name: str, sign: int) -> tuple[str, ...]:
    """The names with one added or removed, each once; the newest is last."""
    if sign > 0:
        return names if names and names[-1] == name else (*names, name)
    if name not in names:
        return names
    at = names.index(name)
    return names[:at] + names[at + 1 :]
