"""Gangs: members of an ask are placed one after the other, all or none, without side effects. Pure.

PACK fills the nodes that take most members, then the best node that takes the rest, to use as few nodes as possible; SPREAD
goes round the nodes, best first; the strict variants allow one node, or one member per node.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import numpy as np

from gpuscale.allocator.domain.model import Ask, GangStrategy, Policy, Reservation, ReservedGpu, State, Use
from gpuscale.allocator.placing.columns import Floats, Ints
from gpuscale.allocator.placing.constraints import capacities
from gpuscale.allocator.placing.index import Index

Fill = Callable[[int, int], int]
"""Places up to so many members on a row, and tells how many."""


def suffice(ask: Ask, room: Ints) -> bool:
    """Whether all members fit if nodes take this many each."""
    if ask.gang_strategy is GangStrategy.STRICT_PACK:
        return bool((room >= ask.member_count).any())
    if ask.gang_strategy is GangStrategy.STRICT_SPREAD:
        return int((room > 0).sum()) >= ask.member_count
    return int(room.sum()) >= ask.member_count


def packed(room: Ints, value: Floats, members: int, fill: Fill) -> int:
    """Fill as few nodes as possible; returns how many members were placed."""
    room, placed = room.copy(), 0
    while placed < members and room.any():
        missing = members - placed
        most = min(missing, int(room.max()))
        row = int(np.argmax(np.where(room >= most, value, -np.inf)))
        room[row] = 0
        placed += fill(row, most)
    return placed


def best_first(value: Floats) -> Ints:
    """The rows that fit, best first, ties by rank."""
    order = np.argsort(-value, kind="stable")
    return order[np.isfinite(value[order])]


Member = tuple[str, tuple[ReservedGpu, ...]]
"""A node and the GPUs that a member gets there."""

_WALL = datetime.fromtimestamp(0, UTC)


def place_gang(index: Index, use: Use, ask: Ask, now: float) -> list[Member]:
    """The members of a gang; fewer than requested if they do not all fit. Nothing stays held.

    If members share several GPUs each, the preferred ones may run out early and leave the last members too few different GPUs:
    then the whole node, or the whole gang if it is spread, takes the GPUs with most room, which serves as many members as
    possible (the greedy construction of the Gale-Ryser theorem).
    """
    most: list[Member] = []
    again = ask.gang_strategy is GangStrategy.SPREAD and _shares_several(ask)
    for roomiest in (False, True) if again else (False,):
        scratch = _Scratch(index, use, ask, now, roomiest=roomiest)
        try:
            most = max(most, scratch.place(), key=len)
        finally:
            scratch.undo()
        if len(most) == ask.member_count:
            break
    return most


@contextmanager
def without(index: Index, use: Use, reservations: Sequence[Reservation]) -> Generator[None]:
    """Imagine reservations gone within the block: what they hold and their processes use is free. Blocks may nest."""
    before = index.columns.gone
    gone = {uuid: list(those) for uuid, those in before.items()}
    for reservation in reservations:
        for gpu in reservation.gpus:
            gone.setdefault(gpu.uuid, []).append(reservation)
    index.columns.gone = gone
    try:
        for reservation in reservations:
            use.free(reservation.id)
        yield
    finally:
        index.columns.gone = before
        for reservation in reservations:
            use.hold(reservation)


class _Scratch:
    """The members placed so far, held in `use` until undone."""

    def __init__(self, index: Index, use: Use, ask: Ask, now: float, *, roomiest: bool) -> None:
        self._index = index
        self._use = use
        self._ask = ask
        self._now = now
        self._roomiest = roomiest
        self._placed: list[Member] = []

    def place(self) -> list[Member]:
        """Place the members by the ask's strategy."""
        index, ask = self._index, self._ask
        shape = index.shape(ask, self._now)
        value = index.value(shape).copy()
        if ask.gang_strategy in (GangStrategy.SPREAD, GangStrategy.STRICT_SPREAD):
            return self._spread(value)
        room = capacities(ask, index.columns, shape.constraints, index.free(shape))
        room[~np.isfinite(value)] = 0
        if ask.gang_strategy is GangStrategy.PACK:
            packed(room, value, ask.member_count, self._fill)
            return self._placed
        most: list[Member] = []
        for row in best_first(np.where(room >= ask.member_count, value, -np.inf)).tolist():
            self._fill(row, ask.member_count)
            most = max(most, self._placed, key=len)
            if len(most) == ask.member_count:
                break
            self.undo()
        return most

    def undo(self, kept: int = 0) -> None:
        """Remove all members but the first `kept`."""
        for member in reversed(range(kept, len(self._placed))):
            self._use.free(_name(member))
        self._placed = self._placed[:kept]

    def _spread(self, value: Floats) -> list[Member]:
        """Round by round, one member per node, the best first; a single round if strict."""
        while len(self._placed) < self._ask.member_count:
            rows = best_first(value)[: self._ask.member_count - len(self._placed)]
            if not len(rows):
                break
            for row in rows.tolist():
                self._fill(row, 1)
            if self._ask.gang_strategy is GangStrategy.STRICT_SPREAD:
                break
            value = self._index.value(self._index.shape(self._ask, self._now))
        return self._placed

    def _fill(self, row: int, members: int) -> int:
        """Place up to `members` members on a row; returns how many fit."""
        kept = len(self._placed)
        placed = self._take_each(row, members, roomiest=self._roomiest)
        if 0 < placed < members and _shares_several(self._ask):
            self.undo(kept)
            placed = self._take_each(row, members, roomiest=True)
        return placed

    def _take_each(self, row: int, members: int, *, roomiest: bool) -> int:
        for placed in range(members):
            shape, member = self._index.shape(self._ask, self._now), len(self._placed)
            if shape.value[row] == -np.inf:
                return placed
            gpus = self._index.members.take(shape, row, member, roomiest=roomiest)
            self._use.hold(stand_in(_name(member), self._ask, gpus))
            self._placed.append((self._index.columns.nodes[row].id, gpus))
        return members


def _shares_several(ask: Ask) -> bool:
    return ask.gpu_count > 1 and not ask.exclusive


def _name(member: int) -> str:
    return f"scratch {member}"


def stand_in(name: str, ask: Ask, gpus: tuple[ReservedGpu, ...]) -> Reservation:
    """A reservation that holds the GPUs of one member temporarily."""
    return Reservation(
        id=name,
        fence=0,
        request_id="",
        fingerprint="",
        holder="",
        owner="",
        labels={},
        policy=Policy.FIRSTFIT,
        gpus=gpus,
        ttl=0.0,
        state=State.PENDING,
        deadline=0.0,
        created=_WALL,
        cpu_milli=ask.cpu_milli,
        host_memory_bytes=ask.host_memory_bytes,
    )
