"""Node states, the order of epochs and snapshots, and when a node is stale.

Times are seconds of the fleet's clock, except an epoch's start, which is of the agent's wall clock.
"""

from enum import Enum, auto
from typing import NamedTuple


class NodeState(Enum):
    """Whether a node reports: nothing on a node that is not ONLINE is free."""

    ONLINE = auto()
    STALE = auto()
    OFFLINE = auto()


class Epoch(NamedTuple):
    """One run of an agent; later runs compare greater, by id if they started at the same time."""

    started_at: float
    id: str


class NodeSample(NamedTuple):
    """A snapshot's epoch, number, time and period."""

    epoch: Epoch
    seq: int
    sampled_at: float
    period: float


def refuse_epoch(current: Epoch | None, incoming: Epoch, *, gone: bool) -> str:
    """Why a stream of `incoming` may not replace `current`; empty if it may.

    A node that is `gone` accepts any, since the agent's wall clock may have been set back.
    """
    if current is None or gone or incoming >= current:
        return ""
    return "an agent that started later reports for this node"


def refuse_sample(last: NodeSample | None, incoming: NodeSample) -> str:
    """Why a snapshot may not follow the last accepted one; empty if it may."""
    if incoming.period <= 0.0:
        return "its period is not above 0"
    if last is not None and last.epoch == incoming.epoch and incoming.seq <= last.seq:
        return f"its seq {incoming.seq} is not above {last.seq}"
    return ""


STALE_PERIODS = 3


def stale_at(sample: NodeSample) -> float:
    """When a snapshot turns stale: when it is three periods old."""
    return sample.sampled_at + STALE_PERIODS * sample.period


def is_stale(sample: NodeSample | None, now: float) -> bool:
    """Whether a snapshot is stale or missing."""
    return sample is None or now > stale_at(sample)


def node_state(sample: NodeSample | None, *, streaming: bool, now: float) -> NodeState:
    """The state of a node, given whether its agent is `streaming`."""
    if not streaming:
        return NodeState.OFFLINE
    return NodeState.STALE if is_stale(sample, now) else NodeState.ONLINE


def is_gone(sample: NodeSample | None, *, streaming: bool, now: float) -> bool:
    """Whether a node is gone: its stream is closed and its last snapshot stale.

    Then any agent may take its name, and another node, such as a renamed host, may report its GPUs.
    """
    return not streaming and is_stale(sample, now)
