"""What the fleet knows of a node, the order in which it believes what it is told, and when a node counts as stale.

Times are seconds of the fleet's own clock, except an epoch's start, which the agent's wall clock tells.
"""

from enum import Enum, auto
from typing import NamedTuple


class NodeState(Enum):
    """Whether a node can be counted on: nothing on a node that is not ONLINE is free."""

    ONLINE = auto()
    STALE = auto()
    OFFLINE = auto()


class Epoch(NamedTuple):
    """One run of an agent; later ones compare greater, and of two that started at once the greater id."""

    started_at: float
    id: str


class NodeSample(NamedTuple):
    """The essentials of a snapshot: its run, its number, when it was read, and the agent's period."""

    epoch: Epoch
    seq: int
    sampled_at: float
    period: float


def refuse_epoch(current: Epoch | None, incoming: Epoch, *, gone: bool) -> str:
    """Why a stream of `incoming` may not report for a node that `current` reports for; empty if it may.

    For a node that is `gone` any may: the wall clock that told the starts may have been set back.
    """
    if current is None or gone or incoming >= current:
        return ""
    return "an agent that started later reports for this node"


def refuse_sample(last: NodeSample | None, incoming: NodeSample) -> str:
    """Why a snapshot may not follow the last one that was taken in; empty if it may."""
    if incoming.period <= 0.0:
        return "its period is not above 0"
    if last is not None and last.epoch == incoming.epoch and incoming.seq <= last.seq:
        return f"its seq {incoming.seq} is not above {last.seq}"
    return ""


STALE_PERIODS = 3


def stale_at(sample: NodeSample) -> float:
    """When a snapshot is three periods old: until then it counts."""
    return sample.sampled_at + STALE_PERIODS * sample.period


def is_stale(sample: NodeSample | None, now: float) -> bool:
    """Whether there is no snapshot that is at most three periods old."""
    return sample is None or now > stale_at(sample)


def node_state(sample: NodeSample | None, *, streaming: bool, now: float) -> NodeState:
    """The state of a node whose agent's stream is open or not."""
    if not streaming:
        return NodeState.OFFLINE
    return NodeState.STALE if is_stale(sample, now) else NodeState.ONLINE


def is_gone(sample: NodeSample | None, *, streaming: bool, now: float) -> bool:
    """Whether a node is gone: its stream is closed, and its last snapshot is stale.

    A node that is gone holds nothing: an agent that says it started earlier may take its name, and another node may
    report its GPUs (a host that was renamed).
    """
    return not streaming and is_stale(sample, now)
