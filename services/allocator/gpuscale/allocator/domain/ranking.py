"""Ranking: nodes by how many idle GPUs they have. Pure.

The rule comes from the GPU tracking seed for Kubernetes (seeds/001): a GPU is idle below 30 % utilization and below 50 %
memory, both strictly; nodes with enough idle GPUs come first, then those with the most, then the least used. Unlike the seed,
callers set the thresholds, held or cordoned GPUs are not idle, and an unmeasured GPU never counts as idle: in the seed, all
GPUs of a node without metrics counted as idle and it won.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean

from gpuscale.allocator.domain.cordons import Cordons
from gpuscale.allocator.domain.model import Gpu, Node, NodeState, Use
from gpuscale.common.sizes import counted

IDLE_UTILIZATION_PERCENT = 30.0
"""A GPU has room below this utilization: the seed's rule. `usage` defines when a held GPU is idle."""
IDLE_MEMORY_PERCENT = 50.0
"""And below this memory use."""


@dataclass(frozen=True, slots=True)
class Idleness:
    """When a GPU is idle, and how many to find; 0 ranks like 1."""

    max_utilization_percent: float = IDLE_UTILIZATION_PERCENT
    max_memory_percent: float = IDLE_MEMORY_PERCENT
    gpu_count: int = 0

    def admits(self, gpu: Gpu) -> bool:
        """Whether a GPU is idle by its readings; unknown is not."""
        utilization, memory = gpu.utilization_percent, memory_percent(gpu)
        if utilization is None or memory is None:
            return False
        return utilization < self.max_utilization_percent and memory < self.max_memory_percent


class RankStanding(IntEnum):
    """How reliable a node is, if idle GPUs do not decide; less is better."""

    MEASURED = 0
    UNMEASURED = 1
    CORDONED = 2
    STALE = 3
    OFFLINE = 4


@dataclass(frozen=True, slots=True)
class RankedNode:
    """A node in the ranking, with the reasons for its place; means are None if nothing is measured."""

    node: Node
    idle_count: int
    sufficient: bool
    fallback: bool
    message: str
    mean_utilization_percent: float | None
    mean_memory_percent: float | None
    standing: RankStanding


_WORDS = {
    RankStanding.MEASURED: "no GPU of it is idle",
    RankStanding.UNMEASURED: "its GPUs are not measured",
    RankStanding.CORDONED: "it is cordoned",
    RankStanding.STALE: "its last report is too old",
    RankStanding.OFFLINE: "its agent is not connected",
}
_WORST_PERCENT = 101.0


def rank(
    nodes: Iterable[Node], idleness: Idleness, use: Use, cordons: Cordons, now: float
) -> Iterator[RankedNode]:
    """Rank the nodes that have at least `gpu_count` GPUs; sort them with `best_first`."""
    for node in nodes:
        if len(node.gpus) < idleness.gpu_count:
            continue
        online = node.state is NodeState.ONLINE
        fresh = [
            gpu
            for gpu in node.gpus
            if online and now <= gpu.fresh_until and not gpu.trouble and not gpu.quarantine
        ]
        idle = sum(
            1
            for gpu in fresh
            if not use.on(gpu).milli
            and not cordons.covering(node.id, gpu.uuid, gpu.parent)
            and idleness.admits(gpu)
        )
        if node.state is NodeState.OFFLINE:
            standing = RankStanding.OFFLINE
        elif node.state is NodeState.STALE or (node.gpus and all(now > gpu.fresh_until for gpu in node.gpus)):
            standing = RankStanding.STALE
        elif cordons.covering(node.id) is not None:
            standing = RankStanding.CORDONED
        else:
            measured = any(
                gpu.utilization_percent is not None and memory_percent(gpu) is not None for gpu in fresh
            )
            standing = RankStanding.MEASURED if measured else RankStanding.UNMEASURED
        message = f"{idle} of {counted(len(node.gpus), 'GPU')} idle" if idle else _WORDS[standing]
        wanted = max(idleness.gpu_count, 1)
        if 0 < idle < wanted:
            message += f", {wanted} wanted"
        yield RankedNode(
            node=node,
            idle_count=idle,
            sufficient=idle >= wanted,
            fallback=not idle,
            message=message,
            mean_utilization_percent=_mean(gpu.utilization_percent for gpu in fresh),
            mean_memory_percent=_mean(memory_percent(gpu) for gpu in fresh),
            standing=standing,
        )


def best_first(ranked: RankedNode) -> tuple[float, ...]:
    """Sort key; ties go to the node that was seen first."""
    return (
        not ranked.sufficient,
        -ranked.idle_count,
        ranked.standing,
        _or_worst(ranked.mean_utilization_percent),
        _or_worst(ranked.mean_memory_percent),
        ranked.node.rank,
    )


def memory_percent(gpu: Gpu) -> float | None:
    """The share of a GPU's memory in use; None if unknown."""
    if not gpu.memory_total_bytes:
        return None
    used = gpu.memory_used_bytes
    if used is None:
        if gpu.memory_free_bytes is None:
            return None
        used = gpu.memory_total_bytes - gpu.memory_free_bytes
    return 100 * used / gpu.memory_total_bytes


def _or_worst(percent: float | None) -> float:
    return _WORST_PERCENT if percent is None else percent


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
