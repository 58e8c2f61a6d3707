"""What the fleet knows of a node, and the order in which it believes what it is told. Pure.

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


class Sample(NamedTuple):
    """A snapshot in short: whose it is, its number, when it was read, and how often its agent takes one."""

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


def refuse_sample(last: Sample | None, incoming: Sample) -> str:
    """Why a snapshot may not follow the last one that was taken in; empty if it may."""
    if incoming.period <= 0.0:
        return "its period is not above 0"
    if last is not None and last.epoch == incoming.epoch and incoming.seq <= last.seq:
        return f"its seq {incoming.seq} is not above {last.seq}"
    return ""
