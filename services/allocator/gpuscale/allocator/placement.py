"""Placement: which GPUs of which node serve an ask, or why none do.

Feasible, then score, then pick. The answer depends on the values alone, never on the order in which nodes or GPUs
are given: ties go to the node that was seen first (`rank`), inside a node to the lower index.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

from gpuscale.allocator.feasibility import gpu_obstacle, node_obstacle
from gpuscale.allocator.model import Ask, Gpu, Node, ReservedGpu
from gpuscale.allocator.refusal import Refusal, refuse, unknown_nodes
from gpuscale.allocator.scoring import explained, spread


@dataclass(frozen=True, slots=True)
class Pick:
    """The GPUs that serve an ask, best first, and the mean of their scores."""

    gpus: tuple[ReservedGpu, ...]
    mean_score: float


def place(nodes: Sequence[Node], held: Container[str], ask: Ask, now: float) -> Pick | Refusal:
    """Pick the GPUs that serve the ask: all of one node, all or none.

    A node is as good as the mean score of its best `gpu_count` GPUs. `held` holds the UUIDs that live reservations
    hold.
    """
    if unknown := unknown_nodes(nodes, ask):
        return unknown
    best: tuple[float, int, Node, list[Gpu]] | None = None
    for node in nodes:
        if len(node.gpus) < ask.gpu_count or node_obstacle(node, ask):
            continue
        fitting = [gpu for gpu in node.gpus if gpu_obstacle(gpu, held, ask, now) is None]
        if len(fitting) < ask.gpu_count:
            continue
        mean, gpus = _best(fitting, ask)
        if best is None or (mean, -node.rank) > best[:2]:
            best = (mean, -node.rank, node, gpus)
    if best is None:
        return refuse(nodes, held, ask, now)
    mean, _, node, gpus = best
    return Pick(tuple(_reserved(node, gpu, ask) for gpu in gpus), mean)


def _best(fitting: list[Gpu], ask: Ask) -> tuple[float, list[Gpu]]:
    """The best `gpu_count` of the GPUs that fit, and the mean of their scores."""
    ordered = sorted((-spread(gpu, ask.weights), gpu.index, gpu.uuid, gpu) for gpu in fitting)[
        : ask.gpu_count
    ]
    return math.fsum(-score for score, _, _, _ in ordered) / ask.gpu_count, [gpu for _, _, _, gpu in ordered]


def _reserved(node: Node, gpu: Gpu, ask: Ask) -> ReservedGpu:
    return ReservedGpu(node.id, gpu.uuid, gpu.index, gpu.model, gpu.simulated, explained(gpu, ask.weights))
