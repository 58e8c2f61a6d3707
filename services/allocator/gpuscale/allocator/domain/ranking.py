"""Ranking: nodes by how many idle GPUs they have. Pure.

The rule is the one of the GPU tracking seed for Kubernetes (seeds/001): a GPU is idle below 30 % utilization and below
50 % memory, both strictly; nodes with enough idle GPUs come first, then those with most, then the least used. Unlike
there, thresholds are those of the caller, GPUs that are held or cordoned are not idle, and what was not measured is
never taken for idle: there a node without metrics counted all its GPUs as idle and won.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import fmean

from gpuscale.allocator.domain.model import Gpu, Node, NodeState

IDLE_UTILIZATION_PERCENT = 30.0
"""A GPU has room when it is used less than this: the seed's rule. When a holder's GPU is idle, `usage` says."""
IDLE_MEMORY_PERCENT = 50.0
"""And less than this share of its memory is in use."""


@dataclass(frozen=True, slots=True)
class Idleness:
    """When a GPU is idle, and how many are wanted; 0 ranks by one."""

    max_utilization_percent: float = IDLE_UTILIZATION_PERCENT
    max_memory_percent: float = IDLE_MEMORY_PERCENT
    gpu_count: int = 0

    def admits(self, gpu: Gpu) -> bool:
        """Whether the readings of a GPU are idle; unknown is not."""
        utilization, memory = gpu.utilization_percent, memory_percent(gpu)
        if utilization is None or memory is None:
            return False
        return utilization < self.max_utilization_percent and memory < self.max_memory_percent


class RankStanding(IntEnum):
    """How far a node can be counted on where the number of idle GPUs does not decide; less is better."""

    MEASURED = 0
    UNMEASURED = 1
    CORDONED = 2
    STALE = 3
    OFFLINE = 4


@dataclass(frozen=True, slots=True)
class RankedNode:
    """A node in the ranking, with what put it there; means are None where nothing is measured."""

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
    nodes: Iterable[Node],
    idleness: Idleness,
    *,
    held: Callable[[Gpu], bool],
    cordoned: Callable[[Node, Gpu | None], bool],
    now: float,
) -> Iterator[RankedNode]:
    """Look at the nodes that have at least `gpu_count` GPUs; `best_first` sorts them.

    `held` says whether there are reservations on a GPU, `cordoned` whether nothing new may go there; with None for the GPU
    it speaks of the node as a whole.
    """
    for node in nodes:
        if len(node.gpus) < idleness.gpu_count:
            continue
        online = node.state is NodeState.ONLINE
        fresh = [
            gpu
            for gpu in node.gpus
            if online and now <= gpu.fresh_until and not gpu.trouble and not gpu.quarantine
        ]
        idle = sum(1 for gpu in fresh if not held(gpu) and not cordoned(node, gpu) and idleness.admits(gpu))
        yield _ranked(node, fresh, idle, idleness, cordoned=cordoned(node, None), now=now)


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
    """The share of a GPU's memory that is in use; None where it is not known."""
    if not gpu.memory_total_bytes:
        return None
    used = gpu.memory_used_bytes
    if used is None:
        if gpu.memory_free_bytes is None:
            return None
        used = gpu.memory_total_bytes - gpu.memory_free_bytes
    return 100 * used / gpu.memory_total_bytes


def _standing(node: Node, fresh: Sequence[Gpu], *, cordoned: bool, now: float) -> RankStanding:
    if node.state is NodeState.OFFLINE:
        return RankStanding.OFFLINE
    if node.state is NodeState.STALE or (node.gpus and all(now > gpu.fresh_until for gpu in node.gpus)):
        return RankStanding.STALE
    if cordoned:
        return RankStanding.CORDONED
    measured = any(gpu.utilization_percent is not None and memory_percent(gpu) is not None for gpu in fresh)
    return RankStanding.MEASURED if measured else RankStanding.UNMEASURED


def _ranked(
    node: Node, fresh: Sequence[Gpu], idle: int, idleness: Idleness, *, cordoned: bool, now: float
) -> RankedNode:
    standing = _standing(node, fresh, cordoned=cordoned, now=now)
    wanted = max(idleness.gpu_count, 1)
    message = f"{idle} of {len(node.gpus)} GPUs idle" if idle else _WORDS[standing]
    if 0 < idle < wanted:
        message += f", {wanted} wanted"
    return RankedNode(
        node=node,
        idle_count=idle,
        sufficient=idle >= wanted,
        fallback=not idle,
        message=message,
        mean_utilization_percent=_mean(gpu.utilization_percent for gpu in fresh),
        mean_memory_percent=_mean(memory_percent(gpu) for gpu in fresh),
        standing=standing,
    )


def _or_worst(percent: float | None) -> float:
    return _WORST_PERCENT if percent is None else percent


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
