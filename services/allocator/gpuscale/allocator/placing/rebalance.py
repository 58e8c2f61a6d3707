"""Rebalance: which reservations to move so that an ask fits, at the lowest price. Pure.

A move takes no capacity away: its new place is free while the old one is still held, so a plan's moves run in order, each
completed before the next. One member lands on one node, so a heap holds the sets that could be cleared on each node, cheapest
first: initially by a bound (the price of a reservation spread over its GPUs), then as exact sets. Places for what leaves are
searched among those available. The first set for which all find one is the cheapest; when `steps` run out, nothing is promised.
Gang members are served in turn, each at its lowest price.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations, count

from gpuscale.allocator.domain.model import WHOLE, Ask, GangStrategy, Pick, Reservation, ReservedGpu
from gpuscale.allocator.placing.placer import Placer, stand_in

STEPS = 2000
"""Placements that are tried for a plan: some 0.2 ms each on 10,000 nodes."""
PLACES = 24
"""Places that are tried for one reservation that moves."""
MOST_CLEARED = 12
"""Of so many GPUs of a node, those that are cheapest to clear, all sets are compared."""


@dataclass(frozen=True, slots=True)
class Move:
    """A reservation that leaves its GPUs for others, at a price in GPU-seconds."""

    reservation: Reservation
    gpus: tuple[ReservedGpu, ...]
    price: float

    @property
    def after(self) -> Reservation:
        """The holder of the new place, beside the old one."""
        return replace(self.reservation, id=f"moved {self.reservation.id}", gpus=self.gpus)


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What an ask gets after these moves, in this order; without moves it fits as things are."""

    pick: Pick
    moves: tuple[Move, ...] = ()

    @property
    def price(self) -> float:
        """The cost of the moves in GPU-seconds."""
        return sum(move.price for move in self.moves)


@dataclass(frozen=True, slots=True)
class NoMoves:
    """Why no moves make room."""

    message: str


@dataclass(slots=True)
class _Search:
    """The search for one ask. `prices` has what may move, `again` what a reservation asks for elsewhere."""

    placer: Placer
    prices: Mapping[str, float]
    again: Callable[[Reservation], Ask]
    now: float
    most: int
    steps: int = field(default_factory=lambda: STEPS)
    _homes: dict[Ask, bool] = field(default_factory=dict[Ask, bool])

    def one(self, ask: Ask) -> MovePlan | NoMoves:
        """The cheapest moves after which all of a one-node ask fits."""
        found = self._place(ask, ())
        if found:
            return MovePlan(found)
        self._homes.clear()
        free, order = self.placer.free_on(ask, self.now), count()
        heap: list[tuple[float, int, int, str, frozenset[str]]] = []
        for node, room in free.items():
            there = [one for one in self.placer.use.reservations(node) if one.id in self.prices]
            bound = self._bound(ask, there, room) if there else None
            if bound is not None:
                heap.append((bound, 0, next(order), node, frozenset()))
        if not heap:
            return NoMoves("no node that could serve it has enough that may move")
        heapq.heapify(heap)
        seen = set[frozenset[str]]()
        while heap and self.steps > 0:
            _, _, _, node, leaving = heapq.heappop(heap)
            if leaving:
                plan = self._with(ask, leaving)
                if plan:
                    return plan
                others = sorted(self._those(node) - leaving)
                more: Iterable[frozenset[str]] = (leaving | {one} for one in others)
            else:
                more = self._first(ask, node, free[node])
            for those in more:
                if those not in seen and len(those) <= self.most:
                    seen.add(those)
                    price = sum(self.prices[one] for one in those)
                    heapq.heappush(heap, (price, len(those), next(order), node, those))
        if heap:
            return NoMoves(f"none was found in {STEPS} tries")
        return NoMoves("what would have to leave has no free place elsewhere")

    def _bound(self, ask: Ask, there: Sequence[Reservation], free: int) -> float | None:
        """A lower bound for clearing enough of a node; None if it cannot be cleared."""
        missing = _needed(ask) - free
        if missing <= 0 or not ask.exclusive:
            return min(self.prices[one.id] for one in there)
        clearing = self._clearing(there)
        if len(clearing) < missing:
            return None
        return sum(sorted(clearing.values())[:missing])

    def _clearing(self, there: Sequence[Reservation]) -> dict[str, float]:
        costs, moving = dict[str, float](), dict[str, int]()
        for one in there:
            price = self.prices[one.id] / len(one.gpus)
            for gpu in one.gpus:
                costs[gpu.uuid] = costs.get(gpu.uuid, 0.0) + price
                moving[gpu.uuid] = moving.get(gpu.uuid, 0) + 1
        return {
            uuid: cost
            for uuid, cost in costs.items()
            if moving[uuid] == len(self.placer.use.gpu(uuid).reservations)
        }

    def _those(self, node: str) -> frozenset[str]:
        """What may move away from a node, and would find a place alone."""
        found: list[str] = []
        for one in self.placer.use.reservations(node):
            if one.id in self.prices:
                ask = self.again(one)
                if ask not in self._homes:
                    self.steps -= 1
                    self._homes[ask] = bool(self.placer.places(ask, self.now, 1))
                if self._homes[ask]:
                    found.append(one.id)
        return frozenset(found)

    def _first(self, ask: Ask, node: str, free: int) -> Iterator[frozenset[str]]:
        """The smallest sets whose move may make room on a node; all others contain one of them."""
        those = self._those(node)
        if not those or not self._place(ask, those):
            return
        missing = _needed(ask) - free
        if missing <= 0 or not ask.exclusive:
            yield from (frozenset((one,)) for one in sorted(those))
            return
        clearing = self._clearing([self.placer.use.live(one) for one in those])
        cheapest = sorted(clearing, key=lambda uuid: (clearing[uuid], uuid))[:MOST_CLEARED]
        for gpus in combinations(cheapest, missing):
            yield frozenset(one for uuid in gpus for one in self.placer.use.gpu(uuid).reservations)

    def _place(self, ask: Ask, freed: Iterable[str]) -> Pick | None:
        self.steps -= 1
        found = self.placer.place_after(ask, self.now, freed)
        return found if isinstance(found, Pick) else None

    def _with(self, ask: Ask, leaving: frozenset[str]) -> MovePlan | None:
        """The plan that moves exactly these, the largest first; None if one finds no place."""
        aim = self._place(ask, leaving)
        if aim is None:
            return None
        movers = sorted(
            map(self.placer.use.live, leaving), key=lambda one: (-sum(gpu.milli for gpu in one.gpus), one.id)
        )
        free = [
            replace(gpu, milli=WHOLE - self.placer.use.gpu(gpu.uuid).milli, memory_bytes=0)
            for gpu in aim.gpus
            if self.placer.use.gpu(gpu.uuid).milli < WHOLE
        ]
        blocker = stand_in("aim", Ask(len(free), 0, 100.0), tuple(free))
        with self.placer.imagine(held=[blocker] if free else ()):
            return self._settle(ask, movers, (), (*leaving, blocker.id) if free else tuple(leaving))

    def _settle(
        self, ask: Ask, movers: Sequence[Reservation], moves: tuple[Move, ...], freed: tuple[str, ...]
    ) -> MovePlan | None:
        """The plan that moves each of the others too, if all find a place and the ask fits where these were `freed`."""
        if len(moves) == len(movers):
            pick = self._place(ask, freed)
            return MovePlan(pick, moves) if pick else None
        one = movers[len(moves)]
        for gpus in self.placer.places(self.again(one), self.now, PLACES):
            if self.steps <= 0:
                return None
            self.steps -= 1
            move = Move(one, gpus, self.prices[one.id])
            with self.placer.imagine(held=[move.after]):
                found = self._settle(ask, movers, (*moves, move), freed)
            if found is not None:
                return found
        return None


def rebalance(
    placer: Placer,
    ask: Ask,
    prices: Mapping[str, float],
    again: Callable[[Reservation], Ask],
    now: float,
    most: int,
) -> MovePlan | NoMoves:
    """The cheapest moves, at most `most`, after which an ask fits, or why there are none; nothing changes.

    `prices` has the reservations that may move, each on one node; `again` says what a reservation asks for elsewhere.
    """
    found = placer.place_after(ask, now, ())
    if isinstance(found, Pick):
        return MovePlan(found)
    search = _Search(placer, prices, again, now, most)
    if ask.member_count == 1 or ask.gang_strategy is GangStrategy.STRICT_PACK:
        return search.one(ask)
    member, moves = replace(ask, member_count=1, gang_strategy=GangStrategy.PACK), list[Move]()
    with ExitStack() as imagined:
        for number in range(ask.member_count):
            step = search.one(member)
            if isinstance(step, NoMoves):
                which = f"member {number + 1} of {ask.member_count}"
                return NoMoves(f"there is no room for {which}: {step.message}")
            moves += step.moves
            search.most -= len(step.moves)
            held = [move.after for move in step.moves]
            held.append(stand_in(f"member {number}", member, step.pick.gpus))
            imagined.enter_context(placer.imagine([move.reservation.id for move in step.moves], held))
            if ask.gang_strategy is GangStrategy.STRICT_SPREAD:
                member = replace(member, excluded_nodes=member.excluded_nodes.union(step.pick.nodes))
    with placer.imagine([move.reservation.id for move in moves], [move.after for move in moves]):
        found = placer.place_after(ask, now, (), told=True)
    return MovePlan(found, tuple(moves)) if isinstance(found, Pick) else NoMoves(found.message)


def _needed(ask: Ask) -> int:
    return ask.gpu_count * ask.member_count
