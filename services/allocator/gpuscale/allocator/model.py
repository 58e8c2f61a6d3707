"""Values the allocator reasons with: what is known of nodes and GPUs, what is asked for, what was granted.

Pure: no wire types, no clock. Times named `*_until`, `deadline` or `now` are seconds of CLOCK_BOOTTIME; memory is
in bytes, utilization in percent (0-100). None is a reading that was not obtained, never zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum


class NodeState(Enum):
    """Whether a node can be counted on, as the fleet sees it."""

    ONLINE = "online"
    STALE = "stale"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as last reported.

    `trouble` says why nothing can run on it (such as HUNG or LOST) and is empty while it answers; after
    `fresh_until` its readings are too old to count on.
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


@dataclass(frozen=True, slots=True)
class Node:
    """A node and its GPUs.

    `rank` is its place in the order in which nodes were first seen, kept for ever: ties are settled by it.
    `reported` is False for a node that is remembered but has not reported since the allocator started, so that
    its GPUs are not known.
    """

    id: str
    rank: int
    state: NodeState
    gpus: tuple[Gpu, ...]
    reported: bool = True


class Policy(StrEnum):
    """How GPUs are picked."""

    SPREAD = "spread"


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the spread score; the seeds' values by default."""

    memory: float = 0.6
    utilization: float = 0.4


@dataclass(frozen=True, slots=True)
class Ask:
    """What GPUs are wanted: `gpu_count` of one node, each with enough free memory and little enough use.

    `nodes` holds the ids of the only nodes that may serve; any may when it is empty.
    """

    gpu_count: int
    min_memory_bytes: int
    max_utilization_percent: float
    allow_unknown_utilization: bool = False
    policy: Policy = Policy.SPREAD
    weights: Weights = Weights()
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Order:
    """Who wants GPUs, for how long (`ttl` in seconds), and under which request id.

    `fingerprint` stands for all arguments and the caller: a repeated request id must come with the same one.
    """

    request_id: str
    fingerprint: str
    holder: str
    owner: str
    ttl: float
    labels: Mapping[str, str]
    ask: Ask


@dataclass(frozen=True, slots=True)
class ScorePart:
    """One part of a score: `value` 0-1, None where the GPU does not report what it needs."""

    name: str
    value: float | None
    weight: float


@dataclass(frozen=True, slots=True)
class Score:
    """Why a GPU was preferred: `total` is the sum of value x weight over the parts that have a value."""

    total: float
    parts: tuple[ScorePart, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReservedGpu:
    """A GPU of a reservation, as it was when it was chosen."""

    node: str
    uuid: str
    index: int
    model: str
    simulated: bool
    score: Score


class State(StrEnum):
    """Where a reservation stands."""

    PENDING = "pending"
    ACTIVE = "active"
    RELEASED = "released"
    EXPIRED = "expired"


LIVE = frozenset({State.PENDING, State.ACTIVE})
"""States in which a reservation holds its GPUs."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """GPUs held by a holder under a lease.

    `deadline` is when the lease runs out; once it has ended, when its record may be forgotten. `created` and `ended`
    are wall-clock times for display.
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

    @property
    def live(self) -> bool:
        """Whether it holds its GPUs."""
        return self.state in LIVE
