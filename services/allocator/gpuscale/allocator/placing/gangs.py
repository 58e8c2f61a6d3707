"""Gangs: how many members fit on each node, and the order in which nodes are filled. Pure.

PACK takes the nodes on which most members fit, and for the rest the best node that takes them all, so that there are
as few nodes as possible; SPREAD goes round the nodes, best first; the strict ones allow one node, or one member each.
"""

from collections.abc import Callable, Iterator

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Ask, GangStrategy
from gpuscale.allocator.placing.columns import UNKNOWN, Bools, Columns, Floats, Ints
from gpuscale.allocator.placing.shares import memory_floor, milli_of

Fill = Callable[[int, int], int]
"""Places up to so many members on a row, and tells how many."""


def capacities(ask: Ask, columns: Columns, free: Bools) -> Ints:
    """How many members fit on each node at most; `free` says which GPUs can serve."""
    rows = np.arange(len(free))
    total = columns.total[rows]
    milli = np.broadcast_to(milli_of(ask, total), total.shape)
    each = np.where(free, (WHOLE - columns.held[rows]) // np.maximum(milli, 1), 0)
    if not ask.exclusive:
        each = np.minimum(each, columns.available[rows] // np.maximum(memory_floor(ask, total), 1))
    room = _members(ask, np.maximum(each, 0))
    room = np.minimum(room, _times(columns.cpu_free[rows], ask.cpu_milli, ask.member_count))
    return np.minimum(room, _times(columns.memory_free[rows], ask.host_memory_bytes, ask.member_count))


def could_ever(ask: Ask, columns: Columns, fit: Bools) -> Ints:
    """How many members each node would take if all of it were free; `fit` are the GPUs that could serve then.

    What a node does not tell might be enough.
    """
    rows = np.arange(len(fit))
    total = columns.total[rows]
    milli = np.broadcast_to(milli_of(ask, _or_enough(total)), total.shape)
    each = np.where(fit, WHOLE // np.maximum(milli, 1), 0)
    if not ask.exclusive:
        by_memory = total // np.maximum(memory_floor(ask, total), 1)
        each = np.where(total == UNKNOWN, each, np.minimum(each, by_memory))
    room = _members(ask, each)
    cpu, memory = _or_enough(columns.cpu[rows]), _or_enough(columns.memory[rows])
    room = np.minimum(room, _times(cpu, ask.cpu_milli, ask.member_count))
    return np.minimum(room, _times(memory, ask.host_memory_bytes, ask.member_count))


def suffice(ask: Ask, room: Ints) -> bool:
    """Whether all members find a place where nodes take so many each."""
    if ask.gang_strategy is GangStrategy.STRICT_PACK:
        return bool((room >= ask.member_count).any())
    if ask.gang_strategy is GangStrategy.STRICT_SPREAD:
        return int((room > 0).sum()) >= ask.member_count
    return int(room.sum()) >= ask.member_count


def packed(room: Ints, value: Floats, members: int, fill: Fill) -> int:
    """Fill as few nodes as possible; how many members were placed."""
    room, placed = room.copy(), 0
    while placed < members and room.any():
        missing = members - placed
        most = min(missing, int(room.max()))
        row = int(np.argmax(np.where(room >= most, value, -np.inf)))
        room[row] = 0
        placed += fill(row, most)
    return placed


def on_one(room: Ints, value: Floats, members: int) -> Iterator[int]:
    """The rows that may take all members, best first."""
    return (int(row) for row in best_first(np.where(room >= members, value, -np.inf)))


def best_first(value: Floats) -> Ints:
    """The rows that fit, the best first, ties by rank."""
    order = np.argsort(-value, kind="stable")
    return order[np.isfinite(value[order])]


def _or_enough(amount: Ints) -> Ints:
    return np.where(amount == UNKNOWN, np.iinfo(np.int64).max, amount)


def _members(ask: Ask, each: Ints) -> Ints:
    """Members of a node whose GPUs take so many each: no member takes a GPU twice."""
    if ask.gpu_count <= 1:
        return each.sum(1) if ask.gpu_count else np.full(len(each), ask.member_count)
    room = np.zeros(len(each), np.int64)
    for members in range(1, ask.member_count + 1):
        fits = np.minimum(each, members).sum(1) >= members * ask.gpu_count
        if not fits.any():
            break
        room[fits] = members
    return room


def _times(free: Ints, each: int, members: int) -> Ints:
    if not each:
        return np.full(len(free), members, np.int64)
    return np.maximum(free, 0) // each
