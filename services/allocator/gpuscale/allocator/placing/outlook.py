"""Outlook: what an ask would find, for people who ask why. Pure.

The same codes as those by which GPUs are found; nothing is decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuscale.allocator.domain.feasibility import ORDER, Obstacle
from gpuscale.allocator.domain.model import Ask, Gpu, Node, Score
from gpuscale.allocator.domain.placement import Pick
from gpuscale.allocator.domain.use import Use
from gpuscale.allocator.placing.columns import NO_GPU, Bools, listed
from gpuscale.allocator.placing.constraints import NODE_OBSTACLES
from gpuscale.allocator.placing.index import Index
from gpuscale.allocator.placing.memory import outsiders
from gpuscale.allocator.placing.refusal import Refusal
from gpuscale.allocator.placing.shapes import Shape
from gpuscale.allocator.placing.survey import Survey
from gpuscale.allocator.placing.wording import HELP, WORDS, extent, gpus, mib, names, sentence

MOST_NODES = 100


@dataclass(frozen=True, slots=True)
class Effect:
    """How many GPUs a constraint removes of those that the ones before it left, and if it were the only one."""

    obstacle: Obstacle
    removed_in_order: int
    removed_alone: int


@dataclass(frozen=True, slots=True)
class GpuOutlook:
    """A GPU as the ask sees it: what is in the way, in words too, or its score; and who is on it."""

    gpu: Gpu
    obstacle: Obstacle | None
    message: str
    score: Score | None
    reservations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeOutlook:
    """A node as the ask sees it; `obstacle` is what keeps all of it out."""

    node: Node
    obstacle: Obstacle | None
    message: str
    fitting: int
    gpus: tuple[GpuOutlook, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an ask would find: the answer itself, each constraint, the nearest nodes, and what would make room.

    `blockers` are the reservations on the nearest node; when they end is for whoever keeps their leases to say.
    """

    answer: Pick | Refusal
    effects: tuple[Effect, ...]
    nodes: tuple[NodeOutlook, ...]
    node_count: int
    remedies: tuple[str, ...]
    blockers: tuple[str, ...]


def outlook(
    answer: Pick | Refusal, index: Index, survey: Survey, shape: Shape, use: Use, now: float
) -> Outlook:
    """Put together what an ask would find."""
    rows = survey.nearest(MOST_NODES)
    views = tuple(_node(index, shape, use, row) for row in rows)
    effects, helped = _effects(index, shape, now)
    blockers = dict.fromkeys(one for view in views[:1] for gpu in view.gpus for one in gpu.reservations)
    remedies = [] if isinstance(answer, Pick) else _remedies(views[:1], helped, shape.ask)
    return Outlook(answer, effects, views, len(index.columns), tuple(remedies), tuple(blockers))


def _effects(index: Index, shape: Shape, now: float) -> tuple[tuple[Effect, ...], dict[Obstacle, int]]:
    """Each constraint; and on how many nodes the ask would fit were it not for that one."""
    columns = index.columns
    rows = np.arange(len(columns))
    exists = columns.kind[rows] != NO_GPU
    masks = [
        (one, np.broadcast_to(mask, exists.shape) & exists)
        for one, mask in shape.constraints.masks(rows, now)
    ]
    in_the_way = np.zeros(exists.shape, np.int64)
    effects: list[Effect] = []
    for obstacle, mask in masks:
        effects.append(Effect(obstacle, int((mask & (in_the_way == 0)).sum()), int(mask.sum())))
        in_the_way += mask
    free: Bools = exists & (in_the_way == 0)
    wanted = max(shape.ask.gpu_count, 1)
    short = free.sum(1) < wanted
    helped: dict[Obstacle, int] = {}
    for obstacle, mask in masks:
        fitting = (free | (mask & (in_the_way == 1))).sum(1)
        helped[obstacle] = int((short & (fitting >= wanted)).sum())
    return tuple(effects), helped


def _node(index: Index, shape: Shape, use: Use, row: int) -> NodeOutlook:
    node, found = index.columns.nodes[row], index.columns.gpus[row]
    scores = index.members.scores(shape, row)
    codes = listed(shape.gpu_codes[row])
    views = tuple(
        _gpu(gpu, ORDER[code - 1] if code else None, scores.get(gpu.uuid), use)
        for code, gpu in zip(codes, found, strict=False)
    )
    code = int(shape.node_codes[row])
    obstacle = ORDER[code - 1] if code else None
    if obstacle not in NODE_OBSTACLES and any(view.obstacle is not obstacle for view in views):
        obstacle = None
    message = "" if obstacle is None else sentence(f"its GPUs are {WORDS[obstacle]}")
    return NodeOutlook(node, obstacle, message, len(scores), views)


def _gpu(gpu: Gpu, obstacle: Obstacle | None, score: Score | None, use: Use) -> GpuOutlook:
    held = tuple(sorted(use.on(gpu).reservations, key=lambda one: use.fence(one) or 0))  # oldest first
    if obstacle is None:
        return GpuOutlook(gpu, None, "", score, held)
    message = f"one of those {WORDS[obstacle]}{extent(obstacle, [gpu])}"
    if obstacle is Obstacle.HELD:
        message = f"held by {names(held)}"
    elif obstacle is Obstacle.MEMORY_BELOW_MIN:
        strangers = outsiders(gpu, [use.live(one) for one in held])
        used = names([f"{who} uses {mib(size)}" for who, size in strangers])
        message += f"; processes of no reservation: {used}" if used else ""
    return GpuOutlook(gpu, obstacle, sentence(message), None, held)


def _remedies(nearest: Sequence[NodeOutlook], helped: dict[Obstacle, int], ask: Ask) -> list[str]:
    """What alone would make room, and on how many nodes; what the nearest node offers now."""
    found = [
        sentence(f"{HELP[obstacle]}: {count} node{' does' if count == 1 else 's do'} then")
        for obstacle, count in helped.items()
        if count and obstacle in HELP
    ]
    found += [
        sentence(f"ask for {gpus(view.fitting)}: {view.node.id} has so many now")
        for view in nearest
        if 0 < view.fitting < ask.gpu_count
    ]
    return found
