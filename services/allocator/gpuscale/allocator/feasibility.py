"""Feasibility: whether one GPU can serve an ask, and the one reason why not.

Unknown is never free: a GPU whose memory is not reported, or whose readings are too old, serves nobody.
"""

from collections.abc import Container
from enum import StrEnum

from gpuscale.allocator.model import Ask, Gpu, Node, NodeState

ADMITS_ALL_PERCENT = 100.0
"""A utilization limit that admits a GPU however busy it is."""


class Obstacle(StrEnum):
    """Why a GPU cannot serve an ask; of several, the first in this order is named."""

    NODE_NOT_SELECTED = "NODE_NOT_SELECTED"
    NODE_NOT_ONLINE = "NODE_NOT_ONLINE"
    STALE = "STALE"
    GPU_NOT_OK = "GPU_NOT_OK"
    HELD = "HELD"
    MEMORY_UNKNOWN = "MEMORY_UNKNOWN"
    MEMORY_BELOW_MIN = "MEMORY_BELOW_MIN"
    UTILIZATION_UNKNOWN = "UTILIZATION_UNKNOWN"
    UTILIZATION_TOO_HIGH = "UTILIZATION_TOO_HIGH"


def obstacle(node: Node, gpu: Gpu, held: Container[str], ask: Ask, now: float) -> Obstacle | None:
    """Say why a GPU of a node cannot serve the ask; None when it can."""
    return node_obstacle(node, ask) or gpu_obstacle(gpu, held, ask, now)


def node_obstacle(node: Node, ask: Ask) -> Obstacle | None:
    """Say why no GPU of a node can serve the ask; None when one might."""
    if not selected(node, ask):
        return Obstacle.NODE_NOT_SELECTED
    if node.state is NodeState.OFFLINE:
        return Obstacle.NODE_NOT_ONLINE
    if node.state is NodeState.STALE:
        return Obstacle.STALE
    return None


def selected(node: Node, ask: Ask) -> bool:
    """Whether the ask admits the node."""
    return not ask.nodes or node.id in ask.nodes


def gpu_obstacle(gpu: Gpu, held: Container[str], ask: Ask, now: float) -> Obstacle | None:
    """Say why a GPU of a node that might serve cannot; None when it can.

    `held` holds the UUIDs of GPUs that live reservations hold. Free memory equal to the minimum is enough;
    utilization must be below the limit (the seeds' "< 50 %"), except that a limit of 100 admits any known value.
    """
    if now > gpu.fresh_until:
        return Obstacle.STALE
    if gpu.trouble:
        return Obstacle.GPU_NOT_OK
    if gpu.uuid in held:
        return Obstacle.HELD
    if gpu.memory_free_bytes is None or gpu.memory_total_bytes is None:
        return Obstacle.MEMORY_UNKNOWN
    if gpu.memory_free_bytes < ask.min_memory_bytes:
        return Obstacle.MEMORY_BELOW_MIN
    return _utilization_obstacle(gpu.utilization_percent, ask)


def _utilization_obstacle(utilization: float | None, ask: Ask) -> Obstacle | None:
    if utilization is None:
        return None if ask.allow_unknown_utilization else Obstacle.UTILIZATION_UNKNOWN
    limit = ask.max_utilization_percent
    if limit < ADMITS_ALL_PERCENT and utilization >= limit:
        return Obstacle.UTILIZATION_TOO_HIGH
    return None
