"""Placer: finds GPUs for asks, follows the fleet and what is held, and explains refusals. Pure.

Filter, value by policy, then pick, over arrays (`placing.columns`) of which only changed rows are evaluated again
(`placing.index`). The answer depends only on what is known, never on the order in which it came: ties go to the node that was
seen first (`rank`), inside a node to the lower index. Imagining reservations gone, and placing the members of a gang in turn,
hold and free in `use` temporarily and undo it before they return.

Members of a gang are placed one after the other, all or none, without side effects. PACK fills the nodes that take most
members, then the best node that takes the rest, to use as few nodes as possible; SPREAD goes round the nodes, best first; the
strict variants allow one node, or one member per node.
"""

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice

import numpy as np

from gpuscale.allocator.domain.model import (
    Ask,
    GangStrategy,
    Node,
    Pick,
    Policy,
    Reservation,
    ReservedGpu,
    State,
    Use,
)
from gpuscale.allocator.domain.power import PowerRoom
from gpuscale.allocator.placing import refusal
from gpuscale.allocator.placing.columns import Floats, Ints
from gpuscale.allocator.placing.constraints import CODES, Obstacle, capacities
from gpuscale.allocator.placing.explanation import Outlook, outlook
from gpuscale.allocator.placing.index import Index
from gpuscale.allocator.placing.policies import Demand

Member = tuple[str, tuple[ReservedGpu, ...]]
"""A node and the GPUs that a member gets there."""
_NO_ROOM = refusal.Refusal(refusal.RefusalKind.NO_CAPACITY, "no room", {}, {})
_MOST_ONE_BY_ONE = 128
_OF_NODES_USE = [
    CODES[one] for one in (Obstacle.NOT_APART, Obstacle.CPU_BELOW_MIN, Obstacle.HOST_MEMORY_BELOW_MIN)
]
"""What is in the way of all GPUs of a node by what is held of it."""


class Placer:
    """The known fleet, arranged for finding GPUs.

    It notices holds and frees in `use` by itself. It learns what asks look like unless `demand` says.
    """

    def __init__(self, use: Use, demand: Demand | None = None) -> None:
        self.use = use
        self._demand = demand
        self._nodes: dict[str, Node] = {}
        self._cordons: frozenset[str] = frozenset()
        self._index: Index  # made by the first ask
        self._arranged = False
        self.power = PowerRoom()
        """What may start without going beyond power budgets."""

    def copy(self) -> "Placer":
        """A copy with what is held now, for another thread. It learns asks separately."""
        twin = Placer(self.use.copy())
        twin._nodes, twin._cordons, twin.power = self._nodes.copy(), self._cordons, self.power
        return twin

    def alone(self, node: Node) -> "Placer":
        """A placer of only this node, possibly changed, and all that is held; do not use the original afterwards."""
        twin = Placer(self.use)
        twin._nodes, twin._cordons, twin.power = {node.id: node}, self._cordons, self.power
        return twin

    def apply_node(self, node: Node) -> bool:
        """Take in a node's current state; returns whether an ask that did not fit before may fit now."""
        before = self._nodes.get(node.id)
        self._nodes[node.id] = node
        if not self._arranged:
            return True
        columns = self._index.columns
        if before is None and columns.has_room(node):
            columns.append(node)
        elif before is not None and before.rank == node.rank and len(node.gpus) <= columns.width:
            return columns.write(columns.row_of[node.id], node)
        else:
            self._arranged = False
        return True

    def renew_node(self, node_id: str) -> bool:
        """Extend the freshness of a node, as its GPUs say; returns whether an ask that did not fit before may fit now."""
        if not self._arranged:
            return True
        columns = self._index.columns
        return columns.renew(columns.row_of[node_id])

    def remove_node(self, node_id: str) -> None:
        """Forget a node, if it is known."""
        if self._nodes.pop(node_id, None):
            self._arranged = False

    def set_cordons(self, names: frozenset[str]) -> None:
        """Set what is cordoned: nodes as `nodes/{node}`, GPUs by UUID in lower case."""
        self._cordons = names
        if self._arranged:
            self._index.columns.set_cordons(names)

    def place(self, ask: Ask, now: float, *, again: bool = False) -> Pick | refusal.Refusal:
        """Find GPUs for an ask, all members or none; nothing is held.

        `again` marks an ask that was placed before, such as one that waits: it is not learned again.
        """
        return self._place(ask, now, again=again)[0]

    def _place(
        self, ask: Ask, now: float, *, again: bool, told: bool = True
    ) -> tuple[Pick | refusal.Refusal, refusal.Kept]:
        """The answer, and the nodes that power rules out: placement avoids nodes beyond a budget."""
        kept: dict[str, tuple[Obstacle, str]] = {}
        if ask.power_limit_watts is not None:
            chosen = sorted(ask.nodes) or self._nodes
            found = {node: self.power.keeps(node, ask.power_limit_watts) for node in chosen}
            kept = {node: (Obstacle.POWER_LIMIT, why) for node, why in found.items() if why}
        while True:
            answer = self._find(
                replace(ask, excluded_nodes=ask.excluded_nodes.union(kept)) if kept else ask,
                now,
                again=again,
                told=told,
            )
            if isinstance(answer, refusal.Refusal):
                base = self._find(ask, now, again=True, told=told) if kept else answer
                if isinstance(base, refusal.Refusal):
                    return base, kept
                return self._one_by_one(ask, now) or refusal.refuse_for_power(
                    ask, kept, answer, self._nodes
                ), kept
            if not self.power.sums:
                return answer, kept
            short = self.power.short({gpu.uuid: gpu.node for gpu in answer.gpus}, self.use.newly)
            if short is None:
                return answer, kept
            one, left, need = short
            why = f"budgets/{one.budget} leaves {one.name} {left:g} of {one.watts:g} W, and "
            why += f"this needs {need:g} W" if math.isfinite(need) else "the draw of a GPU is unknown"
            kept |= dict.fromkeys(one.nodes, (Obstacle.POWER_BUDGET, why))

    def _one_by_one(self, ask: Ask, now: float) -> Pick | None:
        """The members of a gang in turn, each where a power budget allows it; None if one finds no place."""
        if not 1 < ask.member_count <= _MOST_ONE_BY_ONE or ask.gang_strategy is GangStrategy.STRICT_PACK:
            return None
        member, picks = replace(ask, member_count=1, gang_strategy=GangStrategy.PACK), list[Pick]()
        with ExitStack() as imagined:
            for number in range(ask.member_count):
                found = self._place(member, now, again=True, told=False)[0]
                if isinstance(found, refusal.Refusal):
                    return None
                picks.append(found)
                held = stand_in(f"part {number}", member, found.gpus)
                imagined.enter_context(self.imagine(held=[held]))
                if ask.gang_strategy is GangStrategy.STRICT_SPREAD:
                    member = replace(member, excluded_nodes=member.excluded_nodes.union(found.nodes))
        return Pick(
            tuple(gpu for one in picks for gpu in one.gpus),
            tuple(node for one in picks for node in one.nodes),
        )

    def _find(self, ask: Ask, now: float, *, again: bool, told: bool) -> Pick | refusal.Refusal:
        index = self._arrange()
        shape = index.shape(ask, now, new=not again)
        named = ask.nodes or ask.gpus
        if named and (unknown := refusal.unknown_names(self._nodes, index.columns.nodes, ask)):
            return unknown
        if ask.member_count > 1:
            placed = place_gang(index, self.use, ask, now)
        else:
            row = int(shape.value.argmax())  # of rows that are no node's yet nothing is any good
            if shape.value.item(row) != -math.inf:
                return Pick(index.members.take(shape, row, 0), (index.columns.nodes[row].id,))
            placed = []
        if len(placed) == ask.member_count:
            gpus = tuple([gpu for _, member in placed for gpu in member])
            return Pick(gpus, tuple([node for node, _ in placed]))
        return refusal.refuse(self._survey(ask, now), len(placed)) if told else _NO_ROOM

    def place_after(
        self, ask: Ask, now: float, freed: Iterable[str], *, told: bool = False
    ) -> Pick | refusal.Refusal:
        """Find GPUs for an ask as if these reservations, all of which hold some, were free; nothing changes.

        A refusal has a message only if `told`, which costs more than finding that there is no room.
        """
        with self.imagine(freed):
            return self._place(ask, now, again=True, told=told)[0]

    @contextmanager
    def imagine(self, freed: Iterable[str] = (), held: Sequence[Reservation] = ()) -> Generator[None]:
        """Place within the block as if these reservations, which hold some, were gone, and stand-ins held theirs.

        What the reservations hold and their processes use is free. Blocks may nest.
        """
        columns, leaving = self._arrange().columns, [self.use.live(one) for one in freed]
        before = columns.gone
        gone = {uuid: list(those) for uuid, those in before.items()}
        for one in leaving:
            for gpu in one.gpus:
                gone.setdefault(gpu.uuid, []).append(one)
        columns.gone = gone
        try:
            for one in leaving:
                self.use.free(one.id)
            for one in held:
                self.use.hold(one)
            yield
        finally:
            for one in held:
                self.use.free(one.id)
            columns.gone = before
            for one in leaving:
                self.use.hold(one)

    def free_on(self, ask: Ask, now: float) -> dict[str, int]:
        """How many GPUs per node serve the ask, or would with more CPU, for nodes that ever could."""
        index = self._arrange()
        shape, columns = index.shape(ask, now), index.columns
        rows = np.flatnonzero(shape.room_ever()[: len(columns)] > 0)
        codes = shape.gpu_codes[rows]
        free = (codes == 0) | (np.isin(codes, _OF_NODES_USE) & (columns.held[rows] == 0))
        return {
            columns.nodes[row].id: many for row, many in zip(rows.tolist(), free.sum(1).tolist(), strict=True)
        }

    def places(self, ask: Ask, now: float, most: int) -> list[tuple[ReservedGpu, ...]]:
        """What one member would get, node by node, best first; for a single GPU, each of a node."""
        index = self._arrange()
        shape = index.shape(ask, now)
        rows = best_first(index.value(shape))[:most].tolist()
        if ask.gpu_count == 1:
            return [*islice(((gpu,) for row in rows for gpu in index.members.each(shape, row)), most)]
        return [index.members.take(shape, row, 0) for row in rows]

    def explain(self, ask: Ask, now: float) -> Outlook:
        """What an ask would find, node by node, and what each constraint removes; nothing changes."""
        answer, kept = self._place(ask, now, again=True)
        index = self._index
        found = outlook(answer, index, self._survey(ask, now), index.shape(ask, now), self.use, now)
        if isinstance(answer, Pick) or not kept:
            return found
        views = (
            replace(one, obstacle=kept[one.node.id][0], message=f"{kept[one.node.id][1]}.")
            if one.obstacle is None and one.node.id in kept
            else one
            for one in found.nodes
        )
        return replace(found, nodes=tuple(views))

    def fitting(self, ask: Ask, now: float) -> list[str]:
        """The ids of the nodes that would serve one member, in order of rank."""
        index = self._arrange()
        rows = np.flatnonzero(index.value(index.shape(ask, now)) > -np.inf).tolist()
        return [index.columns.nodes[row].id for row in rows]

    def _survey(self, ask: Ask, now: float) -> refusal.Survey:
        return refusal.Survey(self._index.columns, self._index.shape(ask, now), self.use, now)

    def _arrange(self) -> Index:
        """The index, rebuilt when nodes are out of order, were removed, or outgrew it."""
        if not self._arranged:
            nodes = sorted(self._nodes.values(), key=lambda node: (node.rank, node.id))
            self._demand = self._demand or Demand()
            self._index = Index(nodes, self.use, self._demand, self._cordons)
            self._arranged = True
        return self._index


def best_first(value: Floats) -> Ints:
    """The rows that fit, best first, ties by rank."""
    order = np.argsort(-value, kind="stable")
    return order[np.isfinite(value[order])]


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
        index, ask = self._index, self._ask
        shape = index.shape(ask, self._now)
        value = index.value(shape).copy()
        if ask.gang_strategy in (GangStrategy.SPREAD, GangStrategy.STRICT_SPREAD):
            # Round by round, one member per node, the best first; a single round if strict.
            while len(self._placed) < ask.member_count:
                rows = best_first(value)[: ask.member_count - len(self._placed)]
                for row in rows.tolist():
                    self._fill(row, 1)
                if not len(rows) or ask.gang_strategy is GangStrategy.STRICT_SPREAD:
                    break
                value = index.value(index.shape(ask, self._now))
            return self._placed
        room = capacities(ask, index.columns, shape.constraints, index.free(shape))
        room[~np.isfinite(value)] = 0
        if ask.gang_strategy is GangStrategy.PACK:
            # First the nodes that take most members, then the best one that takes the rest.
            while (missing := ask.member_count - len(self._placed)) and room.any():
                many = min(missing, int(room.max()))
                row = int(np.argmax(np.where(room >= many, value, -np.inf)))
                room[row] = 0
                self._fill(row, many)
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

    def _fill(self, row: int, members: int) -> None:
        """Place up to `members` members on a row."""
        kept = len(self._placed)
        placed = self._take_each(row, members, roomiest=self._roomiest)
        if 0 < placed < members and _shares_several(self._ask):
            self.undo(kept)
            self._take_each(row, members, roomiest=True)

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
