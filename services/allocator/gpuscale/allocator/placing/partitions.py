"""MIG: how to repartition idle GPUs so that an ask fits. Pure; it changes nothing.

An instance `3g.40gb` takes as many eighths of a GPU's memory as 40 GB are of it, and starts where NVIDIA allows one of its size
(MIG User Guide, "Supported MIG Profiles"). A repartitioned GPU keeps as many of its instances as fit beside the new ones. The
placer decides whether the ask then fits on the changed nodes.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from gpuscale.allocator.domain.model import Ask, GangStrategy, Gpu, Node, NodeState, Pick
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import RefusalKind

TRIES = 300
"""Placements that are tried for an ask: some 0.2 ms each."""
DIVIDED = "DIVIDED"
_PROFILE = re.compile(r"([1-7])g\.(\d{1,4})gb")
_GIB = 1 << 30
_EIGHTHS = 8


@dataclass(frozen=True, slots=True)
class Partition:
    """A GPU, and the profiles that its instances should have instead."""

    node: str
    gpu: Gpu
    profiles: tuple[str, ...]


def partitions_for(
    placer: Placer, nodes: Iterable[Node], ask: Ask, now: float, *, ever: bool = False
) -> tuple[Partition, ...]:
    """The fewest idle GPUs of one node to repartition for an ask that finds no room; empty if no way is known.

    With `ever`, those that would do if everything were idle.
    """
    spread = ask.member_count > 1 and ask.gang_strategy is not GangStrategy.STRICT_PACK
    if ask.gpus or spread or not _PROFILE.fullmatch(ask.mig_profile.lower()):
        return ()
    choices: list[tuple[Node, list[list[Partition]]]] = []
    for node in nodes:
        if not ask.nodes or node.id in ask.nodes:
            idle = _idle(placer, node, ask, now, ever=ever)
            layouts = [found for gpu in idle if (found := _layouts(gpu, node, ask))]
            choices.append((node, sorted(layouts, key=len, reverse=True)))
    tries = 0
    for count in range(max((len(layouts) for _, layouts in choices), default=0)):
        for node, layouts in choices:
            for last in layouts[count] if count < len(layouts) else ():
                made = (*(one[-1] for one in layouts[:count]), last)
                if (tries := tries + 1) > TRIES:
                    return ()
                if _fits(placer, node, made, ask, now, ever=ever):
                    return made
    return ()


def _idle(placer: Placer, node: Node, ask: Ask, now: float, *, ever: bool) -> Iterator[Gpu]:
    """The divided GPUs of which no part is known to be held, used or promised; `ever`: all divided ones."""
    if not ever and (node.state is not NodeState.ONLINE or not node.names_gpus):
        return
    for gpu in node.gpus:
        parts = [gpu, *(one for one in node.gpus if one.parent == gpu.uuid)]
        idle = ever or all(
            one.processes_known
            and not (one.processes or one.quarantine or placer.use.on(one).milli)
            and one.fresh_until >= now
            and one.uuid.lower() not in ask.excluded_gpus
            for one in parts
        )
        if gpu.trouble == DIVIDED and idle:
            yield gpu


def _layouts(gpu: Gpu, node: Node, ask: Ask) -> list[Partition]:
    """The possible partitions, each with one more instance of the profile."""
    wanted = ask.mig_profile.lower()
    before = [one.mig_profile.lower() for one in node.gpus if one.parent == gpu.uuid]
    others = sorted((one for one in before if one != wanted), key=lambda one: _shape(gpu, one), reverse=True)
    found: list[Partition] = []
    for more in range(1, _EIGHTHS):
        made = [wanted] * (before.count(wanted) + more)
        if not _has_room(gpu, made):
            break
        for one in others:
            if _has_room(gpu, [*made, one]):
                made.append(one)
        found.append(Partition(node.id, gpu, tuple(made)))
    return found


_Shape: TypeAlias = tuple[int, tuple[int, ...]]
"""The eighths of an instance, and where it may start."""


def _shape(gpu: Gpu, profile: str) -> _Shape:
    """The shape of a profile; an unknown one fits nowhere."""
    named = _PROFILE.fullmatch(profile)
    if named is None or not gpu.memory_total_bytes:
        return 0, ()
    compute, gigabytes = map(int, named.groups())
    size = round(gigabytes * _GIB * _EIGHTHS / gpu.memory_total_bytes)
    starts = {
        1: range(7),
        2: range(0, 8 if compute == 1 else 6, 2),
        4: range(0, 1 if compute == 4 else 8, 4),
        8: (0,),
    }
    return size, tuple(starts.get(size, ()))


def _has_room(gpu: Gpu, profiles: Iterable[str]) -> bool:
    return _room(tuple(sorted((_shape(gpu, one) for one in profiles), reverse=True)), 0)


@lru_cache(10_000)
def _room(shapes: tuple[_Shape, ...], taken: int) -> bool:
    """Whether all of them fit; `taken` has a bit for each eighth."""
    if not shapes:
        return True
    (size, starts), *others = shapes
    places = [((1 << size) - 1) << start for start in starts]
    return any(not taken & place and _room(tuple(others), taken | place) for place in places)


def _fits(
    placer: Placer, node: Node, made: Collection[Partition], ask: Ask, now: float, *, ever: bool
) -> bool:
    """Whether an ask fits on a node with these partitions, or `ever` could."""
    gpus = [gpu for gpu in node.gpus if all(gpu.parent != one.gpu.uuid for one in made)]
    for one in made:
        for number, profile in enumerate(one.profiles):
            memory = (one.gpu.memory_total_bytes or 0) * _shape(one.gpu, profile)[0] // _EIGHTHS
            new = replace(
                one.gpu,
                uuid=f"{one.gpu.uuid} {number}",
                model=f"{one.gpu.model} MIG {profile}",
                trouble="",
                memory_total_bytes=memory,
                memory_free_bytes=memory,
                memory_used_bytes=0,
                utilization_percent=None,
                mig_profile=profile,
                parent=one.gpu.uuid,
            )
            gpus.append(new)
    alone, there = placer.alone(replace(node, gpus=tuple(gpus))), replace(ask, nodes=frozenset((node.id,)))
    found = alone.place_after(there, now, (), told=ever)
    return isinstance(found, Pick) or (ever and found.kind is not RefusalKind.UNSATISFIABLE)
