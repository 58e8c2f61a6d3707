"""Outlook: what an ask would find, and what would make room for it, for people who ask why. Pure.

It uses the codes that placement uses; nothing is decided here.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpuscale.allocator.domain.cordons import Cordon, Cordons
from gpuscale.allocator.domain.ledger import due_at
from gpuscale.allocator.domain.model import Gpu, Node, Pick, Reservation, Score, Use
from gpuscale.allocator.placing import refusal
from gpuscale.allocator.placing.columns import NO_GPU, Bools, listed, outsiders
from gpuscale.allocator.placing.constraints import NODE_OBSTACLES, ORDER, Obstacle
from gpuscale.allocator.placing.index import Index, Shape
from gpuscale.common.sizes import counted

MOST_NODES = 100


@dataclass(frozen=True, slots=True)
class Effect:
    """How many GPUs a constraint removes of those that earlier constraints left, and on its own."""

    obstacle: Obstacle
    removed_in_order: int
    removed_alone: int


@dataclass(frozen=True, slots=True)
class GpuOutlook:
    """A GPU as the ask sees it: its obstacle, in words too, or its score; and who is on it."""

    gpu: Gpu
    obstacle: Obstacle | None
    message: str
    score: Score | None
    reservations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeOutlook:
    """A node as the ask sees it; `obstacle` is what rules out all of it."""

    node: Node
    obstacle: Obstacle | None
    message: str
    fitting: int
    gpus: tuple[GpuOutlook, ...]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What an ask would find: the answer itself, each constraint, the nearest nodes, and what would make room."""

    answer: Pick | refusal.Refusal
    effects: tuple[Effect, ...]
    nodes: tuple[NodeOutlook, ...]
    node_count: int
    remedies: tuple[str, ...]


def outlook(
    answer: Pick | refusal.Refusal, index: Index, survey: refusal.Survey, shape: Shape, use: Use, now: float
) -> Outlook:
    """Collect what an ask would find."""
    views = tuple(_node(index, shape, use, row) for row in survey.nearest(MOST_NODES))
    rows = np.arange(len(index.columns))
    exists = index.columns.kind[rows] != NO_GPU
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
    helped: dict[Obstacle, int] = {}  # on how many nodes the ask would fit without each constraint
    for obstacle, mask in masks:
        fits = (free | (mask & (in_the_way == 1))).sum(1) >= wanted
        helped[obstacle] = int((short & fits).sum())
    remedies: list[str] = []  # the changes that alone make room, and on how many nodes
    if not isinstance(answer, Pick):
        useful = (
            refusal.FIRST_HELP if answer.kind is refusal.RefusalKind.UNSATISFIABLE else refusal.HELP.keys()
        )
        for obstacle, count in helped.items():
            if count and obstacle in useful:
                does = "node does" if count == 1 else "nodes do"
                remedies.append(refusal.sentence(f"{refusal.HELP[obstacle]}: {count} {does} then"))
        if views and 0 < (fitting := views[0].fitting) < shape.ask.gpu_count:
            remedies.append(
                refusal.sentence(f"ask for {counted(fitting, 'GPU')}: {views[0].node.id} has so many now")
            )
    return Outlook(answer, tuple(effects), views, len(index.columns), tuple(remedies))


def _node(index: Index, shape: Shape, use: Use, row: int) -> NodeOutlook:
    node, found = index.columns.nodes[row], index.columns.gpus[row]
    scores = index.members.scores(shape, row)
    codes = listed(shape.gpu_codes[row])
    views = tuple(
        _gpu(node, gpu, ORDER[code - 1] if code else None, scores.get(gpu.uuid), use)
        for code, gpu in zip(codes, found, strict=False)
    )
    code = int(shape.node_codes[row])
    obstacle = ORDER[code - 1] if code else None
    if obstacle not in NODE_OBSTACLES and any(view.obstacle is not obstacle for view in views):
        obstacle = None
    message = "" if obstacle is None else refusal.sentence(f"its GPUs are {refusal.WORDS[obstacle]}")
    return NodeOutlook(node, obstacle, message, len(scores), views)


def _gpu(node: Node, gpu: Gpu, obstacle: Obstacle | None, score: Score | None, use: Use) -> GpuOutlook:
    held = tuple(sorted(use.on(gpu).reservations, key=lambda one: use.live(one).fence))  # oldest first
    if obstacle is None:
        return GpuOutlook(gpu, None, "", score, held)
    message = f"{refusal.WORDS[obstacle]}{refusal.extent(obstacle, [gpu])}"
    if obstacle is Obstacle.HELD:
        message = f"held by {refusal.names(held)}"
    elif obstacle is Obstacle.QUARANTINED:
        message = f"quarantined by the health checks ({gpu.quarantine}); once well: {refusal.lifting(node.id, [gpu])}"
    elif obstacle is Obstacle.MEMORY_BELOW_MIN:
        strangers = outsiders(gpu, [use.live(one) for one in held])
        used = refusal.names([f"{who} uses {refusal.mib(size)}" for who, size in strangers])
        message += f"; processes of no reservation: {used}" if used else ""
    return GpuOutlook(gpu, obstacle, refusal.sentence(message), None, held)


def remedies(
    outlook: Outlook,
    *,
    room_after: Callable[[Sequence[str]], bool],
    live: Sequence[Reservation],
    cordons: Cordons,
    now: float,
) -> list[str]:
    """What would make room, in words, the surest first; empty for an ask that can be granted.

    For one that never can, these are other asks alone. `room_after` says whether the ask could be granted if some reservations ended.
    """
    if isinstance(outlook.answer, Pick) or outlook.answer.kind is refusal.RefusalKind.UNSATISFIABLE:
        return list(outlook.remedies)
    return [
        *_leases(room_after, live, now),
        *_cordons(outlook, cordons),
        *_on_the_nearest(outlook.nodes[:1], live),
        *outlook.remedies,
    ]


def _leases(
    room_after: Callable[[Sequence[str]], bool], live: Sequence[Reservation], now: float
) -> Iterator[str]:
    """When there is room at the latest if nobody renews: after the fewest leases, in the order in which they end."""
    ending = sorted(live, key=due_at)
    ids = [one.id for one in ending]
    if not ids or not room_after(ids):
        return
    count = 1 + bisect_left(range(1, len(ids)), x=True, key=lambda some: room_after(ids[:some]))
    last = ending[count - 1]
    left = f"{max(0.0, due_at(last) - now):.0f} s"
    if last.revoke_at is not None and last.revoke_at <= last.deadline:
        yield refusal.sentence(
            f"reservation {last.id} of {last.holder} will be revoked in {left}: then there is room"
        )
    else:
        yield refusal.sentence(
            f"reservation {last.id} of {last.holder} ends in {left} at the latest, unless it is renewed:"
            " then there is room"
        )


def _cordons(outlook: Outlook, cordons: Cordons) -> Iterator[str]:
    """The cordons that block the ask, of the nearest nodes first."""
    found: dict[str, Cordon] = {}
    for view in outlook.nodes:
        for gpu in view.gpus:
            cordon = cordons.covering(view.node.id, gpu.gpu.uuid, gpu.gpu.parent)
            if gpu.obstacle is Obstacle.CORDONED and cordon is not None:
                found.setdefault(cordon.spot.name, cordon)
    for name, cordon in list(found.items())[: refusal.MOST_NAMES]:
        why = f" ({cordon.reason})" if cordon.reason else ""
        yield f"{name} is cordoned by {cordon.author}{why}: gpuscalectl uncordon {name}"


def _on_the_nearest(nearest: Sequence[NodeOutlook], live: Sequence[Reservation]) -> Iterator[str]:
    """The quarantined GPUs of the nearest node, and outsiders that use the memory missing there."""
    for view in nearest:
        found = [one.gpu for one in view.gpus if one.obstacle is Obstacle.QUARANTINED]
        for gpu in found[: refusal.MOST_NAMES]:
            yield f"{view.node.id}/{gpu.uuid} is quarantined ({gpu.quarantine}): {refusal.lifting(view.node.id, [gpu])}"
        for one in view.gpus:
            if one.obstacle in {Obstacle.MEMORY_BELOW_MIN, Obstacle.UTILIZATION_TOO_HIGH}:
                strangers = outsiders(one.gpu, [held for held in live if held.id in one.reservations])
                size = refusal.mib(sum(size for _, size in strangers))
                who = refusal.names([name for name, _ in strangers])
                if strangers:
                    yield refusal.sentence(
                        f"processes of no reservation hold {size} of {one.gpu.uuid}: {who}"
                    )
