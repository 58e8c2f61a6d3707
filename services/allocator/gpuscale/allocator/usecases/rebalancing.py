"""What would have to move for an ask, or for who waits, to fit. It looks, and changes nothing.

The search runs in a thread on a copy of what is known: of 10,000 nodes it takes up to a second.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from gpuscale.allocator.domain.model import (
    MOVABLE_LABEL,
    WHOLE,
    Ask,
    NodeState,
    Policy,
    Reservation,
    State,
)
from gpuscale.allocator.placing.rebalance import MovePlan, NoMoves, rebalance
from gpuscale.allocator.queueing.backfill import beside
from gpuscale.allocator.queueing.model import Kept, Reason, Waiter
from gpuscale.allocator.queueing.queue import Queue
from gpuscale.allocator.usecases.capacity import Capacity
from gpuscale.allocator.usecases.reserving import AllocatorWorld
from gpuscale.common.names import node_name

MOST_WAITING = 10
"""Requests that wait for which moves are looked for at once."""
MOST_MOVES = 64
"""Moves of one plan."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is proposed for an ask, or for one who waits."""

    ask: Ask
    found: MovePlan | NoMoves
    waiter: Waiter | None = None

    @property
    def message(self) -> str:
        """The same in words."""
        if isinstance(self.found, NoMoves):
            return self.found.message
        moves, gpus = len(self.found.moves), len(self.found.pick.gpus)
        where = ", ".join(dict.fromkeys(map(node_name, self.found.pick.nodes)))
        if not moves:
            return f"it fits as things are, on {where}"
        return f"{moves} {'move makes' if moves == 1 else 'moves make'} room for {gpus} GPUs on {where}"


@dataclass(eq=False)
class Rebalancing:
    """Plans moves, one call at a time. Raises UnavailableError (NO_TELEMETRY) while it is not known which GPUs there are."""

    capacity: Capacity
    world: AllocatorWorld
    queue: Queue
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def plan(self, ask: Ask | None) -> tuple[list[Proposal], list[str]]:
        """A proposal for an ask, or for each of the first who wait; and what was left out, in words.

        Raises:
            NotFoundError: the ask names a node that was never seen.
        """
        async with self._turn:
            prices, left_out = self._movable()
            notes = [
                f"{count} {'reservation' if count == 1 else 'reservations'}: {why}"
                for why, count in left_out.items()
            ]
            if ask is not None:
                self.capacity.check(ask, "")  # raises where a node was never seen
                return [Proposal(ask, await self._plan(ask, None, prices))], notes
            self.capacity.expect_telemetry()
            found: list[Proposal] = []
            for waiter in self.queue.line(MOST_WAITING):
                place = waiter.place
                if place is not None and place.obstacle.reason is not Reason.NO_CAPACITY:
                    no = NoMoves(f"more room would not help: {place.obstacle.message}")
                    found.append(Proposal(waiter.order.ask, no, waiter))
                else:
                    plan = await self._plan(waiter.order.ask, waiter, prices)
                    found.append(Proposal(waiter.order.ask, plan, waiter))
            return found, notes

    async def _plan(self, ask: Ask, waiter: Waiter | None, prices: dict[str, float]) -> MovePlan | NoMoves:
        now, wall = self.capacity.clock.now(), self.capacity.clock.wall().timestamp()
        booked = self.world.bookings.in_the_way(0, wall, preemptible=False)
        kept: list[Kept] = [*self.queue.promised(None), *booked]
        asked = beside(ask, [*self.queue.promised(waiter), *booked])
        placer = self.capacity.placer.copy()

        def again(one: Reservation) -> Ask:
            return beside(_asked_by(one), kept)

        return await asyncio.to_thread(rebalance, placer, asked, prices, again, now, MOST_MOVES)

    def _movable(self) -> tuple[dict[str, float], Counter[str]]:
        """What it costs to move each reservation that may, in GPU-seconds, and how many may not, and why."""
        now, prices, left_out = self.capacity.clock.now(), dict[str, float](), Counter[str]()
        for one in self.capacity.ledger.live.values():
            if one.waiting or not one.gpus:
                continue
            if why := self._stays(one):
                left_out[why] += 1
                continue
            gpus = sum(gpu.milli for gpu in one.gpus) / WHOLE
            start = one.labels.get(MOVABLE_LABEL)
            prices[one.id] = gpus * (float(start) if start else max(0.0, now - self.world.granted_at(one)))
        return prices, left_out

    def _stays(self, one: Reservation) -> str:
        """Why a reservation is not moved; empty where it may be."""
        if MOVABLE_LABEL not in one.labels and not one.preemptible:
            return "neither preemptible nor movable"
        if one.state is State.PENDING or one.revoke_at is not None or self.capacity.ledger.closing(one.id):
            return "about to begin or to end"
        if one.member_count > 1:
            return "a gang"
        if any(gpu.parent for gpu in one.gpus):
            return "a MIG instance"
        node = self.capacity.view.get(one.gpus[0].node)
        if node is None or node.state is not NodeState.ONLINE or not node.names_gpus:
            return "its node does not report"
        return ""


def how(one: Reservation) -> str:
    """How a reservation moves."""
    if MOVABLE_LABEL in one.labels:
        return "its holder gets the new place first, and leaves when that is ready"
    return "preemptible: it is told to leave, and loses its work unless it saves it"


def _asked_by(one: Reservation) -> Ask:
    """What a reservation asks for elsewhere: as it asked, where that is known, else for GPUs like those that it has."""
    if one.wanted is not None:
        return one.wanted.ask
    gpu = one.gpus[0]
    whole = gpu.milli >= WHOLE
    return Ask(
        gpu_count=len(one.gpus),
        min_memory_bytes=(gpu.memory_bytes or 0) * 9 // 10,
        max_utilization_percent=100.0,
        policy=Policy.PACK,
        gpu_milli=gpu.milli,
        gpu_memory_bytes=None if whole else gpu.memory_bytes,
        models=(gpu.model,) if gpu.model else (),
        cpu_milli=one.cpu_milli,
        host_memory_bytes=one.host_memory_bytes,
    )
