"""The moves that would make room for an ask, or for waiting requests; one request's moves run at a time.

The search runs in a thread on a copy of the state: for 10,000 nodes it takes up to a second.

The notice of a movable reservation is so long that its holder can get another place first; the reservation leaves once that
place works. For a job, the place is kept here. The notice is taken back if the reservation has not left after `LIMIT`, or if the
request that waited is served or gone, and when the allocator starts: no notice outlives the process that gave it, and nothing
ends because of one.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeAlias

from gpuscale.allocator.domain.model import (
    BOOKING_LABEL,
    MOVABLE_LABEL,
    MOVED_FOR,
    WHOLE,
    Ask,
    NodeState,
    Pick,
    Policy,
    Reservation,
    State,
)
from gpuscale.allocator.placing.partitions import Partition, partitions_for
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.rebalance import MovePlan, NoMoves, rebalance
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind, unpartitioned
from gpuscale.allocator.queueing.backfill import Kept, beside
from gpuscale.allocator.queueing.model import QueueWorld, Reason, Waiter
from gpuscale.allocator.queueing.queue import Queue
from gpuscale.allocator.usecases.capacity import Capacity
from gpuscale.allocator.usecases.leases import Leases
from gpuscale.allocator.usecases.partitioning import Partitioning
from gpuscale.allocator.usecases.powering import Powering
from gpuscale.allocator.usecases.restarting import Restarting, only, restarts
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.names import gpu_name, node_name, reservation_name
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import uninterrupted
from gpuscale.common.sizes import counted

MOST_WAITING = 10
"""Most waiting requests to find moves for at once."""
MOST_MOVES = 64
"""Most moves of a plan."""
MOST_LOOKED_AT = 60_000
"""Most reservations to look at for what is in the way of those who wait: some 10 us each."""
NOTICE = 8 * 86_400.0
"""Seconds of notice for movable reservations: longer than any drain timeout, so that replacements are ready first."""
LIMIT = 600.0
"""Seconds after which moves that were not made are cancelled."""
LOOK = 1.0
"""Seconds between two looks at moves under way."""
AGAIN = 15.0
"""Seconds between two searches for automatic moves."""
_HOUR = 3600.0
Staying: TypeAlias = Mapping[str, list[str]]
"""What does not move, by why."""
UNKNOWN = "its node does not report"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RoomProposal:
    """A proposal for an ask, or for a waiting request: moves, or `partitions` that an operator has to make."""

    ask: Ask
    found: MovePlan | NoMoves
    waiter: Waiter | None = None
    partitions: tuple[Partition, ...] = ()

    @property
    def message(self) -> str:
        """The same in words."""
        if self.partitions:
            idle = ", ".join(gpu_name(one.node, one.gpu.uuid) for one in self.partitions)
            return f"it would fit if {idle}, which nobody uses, had other MIG instances"
        if isinstance(self.found, NoMoves):
            return self.found.message
        moves, gpus = len(self.found.moves), len(self.found.pick.gpus)
        where = ", ".join(dict.fromkeys(map(node_name, self.found.pick.nodes)))
        if not moves:
            return f"it fits as things are, on {where}"
        return f"{counted(moves, 'move makes', 'moves make')} room for {counted(gpus, 'GPU')} on {where}"


@dataclass(eq=False)
class Rebalancing:
    """Plans moves, one call at a time, and starts them; `run` must run.

    Nothing moves that was granted less than `rest` seconds ago, so nothing moves again soon. Automatic moves are of movable
    reservations, at most `hourly` an hour; an admin can also move preemptible ones, with a `grace`. Raises UnavailableError
    (NO_TELEMETRY) while the fleet's GPUs are unknown.
    """

    capacity: Capacity
    world: QueueWorld
    queue: Queue
    leases: Leases
    restarting: Restarting
    powering: Powering
    rest: float
    grace: float
    hourly: int
    partitioning: Partitioning = field(init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _moving: set[str] = field(default_factory=set[str], init=False)
    _for: Waiter | None = field(default=None, init=False)
    _until: float = field(default=0.0, init=False)
    _again: float = field(default=0.0, init=False)
    _made: deque[float] = field(default_factory=deque[float], init=False)

    def __post_init__(self) -> None:
        self.partitioning = Partitioning(self.capacity.maintenance, self.powering)

    async def plan(self, ask: Ask | None) -> tuple[list[RoomProposal], list[str]]:
        """A proposal for an ask, or for each of the first waiting requests; and what was left out, in words.

        Raises NotFoundError: the ask names an unknown node.
        """
        async with self._turn:
            prices, left_out = self._movable()
            if ask is not None:
                await self.capacity.check(ask, "")  # raises for an unknown node
                return [await self._find(ask, None, prices, stay=left_out)], _notes(left_out)
            self.capacity.expect_telemetry()
            waiters = self.queue.line(MOST_WAITING)
            stay = left_out if len(waiters) * len(self.capacity.ledger.live) <= MOST_LOOKED_AT else None
            return [await self._propose(one, prices, stay=stay) for one in waiters], _notes(left_out)

    async def refusal(self, ask: Ask, found: Refusal) -> Refusal:
        """The refusal of an ask: not for ever if GPUs can be partitioned for it on hosts that allow it.

        They need not be idle now: they may be held, or be partitioned for somebody else at the moment.
        """
        if found.kind is not RefusalKind.UNSATISFIABLE or not ask.mig_profile:
            return found
        nodes = [one for one in self.capacity.view.nodes if self.partitioning.allows(one.id)]
        placer, now = self.capacity.placer, self.capacity.clock.now()
        if not nodes:
            return found
        if await asyncio.to_thread(partitions_for, placer.copy(), nodes, ask, now, ever=True):
            gpus = self.partitioning.under_way
            message = unpartitioned(ask) + (f"; being partitioned: {gpus}" if gpus else "")
            return replace(found, kind=RefusalKind.NO_CAPACITY, message=message)
        return found

    @uninterrupted
    async def apply(
        self, most: int = MOST_MOVES, *, itself: bool = False
    ) -> tuple[RoomProposal | None, list[str]]:
        """Start at most `most` moves for the first waiting request that they help; None if nobody is helped.

        If only other MIG instances help, order them. Automatic (`itself`) moves do not, and do not start while a node is
        silent. Raises FailedPreconditionError: MOVES_UNDER_WAY, NO_PARTITION_HELPER.
        """
        self.capacity.expect_telemetry()
        async with self._turn:
            if self._moving:
                raise FailedPreconditionError(
                    f"{len(self._moving)} moves are under way: wait for them", reason="MOVES_UNDER_WAY"
                )
            prices, left_out = self._movable()
            if itself:
                live = self.capacity.ledger.live
                prices = {one: price for one, price in prices.items() if MOVABLE_LABEL in live[one].labels}
            other: RoomProposal | None = None
            for waiter in () if itself and UNKNOWN in left_out else self.queue.line(MOST_WAITING):
                found = await self._propose(waiter, prices, most)
                plan = found.found
                if isinstance(plan, MovePlan) and plan.moves and await self._begin(waiter, plan):
                    return found, _notes(left_out)
                if other is None and found.partitions:
                    other = found
            if other is None or other.waiter is None or itself:
                return None, _notes(left_out)
            await self.partitioning.begin(other.partitions, _name(other.waiter))
            return other, _notes(left_out)

    async def run(self) -> NoReturn:
        """Supervise moves for ever."""
        live = self.capacity.ledger.live
        self._moving = {key for key, one in live.items() if one.end_reason.startswith(MOVED_FOR)}
        await self.partitioning.load()
        supervising = Attempts(_log, "cannot supervise moves", GpuscaleError)
        while True:
            await self.partitioning.look()
            with supervising:
                # Cancel moves that came to nothing or are no longer needed; start others if wanted.
                now, live = self.capacity.clock.now(), self.capacity.ledger.live
                self._moving = {
                    one for one in self._moving if one in live and live[one].end_reason.startswith(MOVED_FOR)
                }
                self.restarting.give_up(self._moving)
                if self._moving:
                    waits = self._for is not None and self.queue.get(self._for.order.request_id) is self._for
                    if not waits or now >= self._until:
                        told = sorted(one for one in self._moving if MOVABLE_LABEL in live[one].labels)
                        self.restarting.give_up(())
                        await self.leases.revoke(told, None, "")
                        self._moving.clear()
                        self.capacity.waiting.changed(())
                        _log.info("moves are cancelled", reservations=told, needed=waits)
                elif self.hourly and len(self.queue) and now >= self._again:
                    self._again = now + AGAIN
                    while self._made and self._made[0] <= now - _HOUR:
                        self._made.popleft()
                    if left := self.hourly - len(self._made):
                        await self.apply(min(left, MOST_MOVES), itself=True)
            await asyncio.sleep(LOOK)

    async def _begin(self, waiter: Waiter, plan: MovePlan) -> bool:
        """Notify the movers, and keep the GPUs for the waiter; False if things have changed since the plan was made."""
        now, live = self.capacity.clock.now(), self.capacity.ledger.live
        ids = [move.reservation.id for move in plan.moves]
        if self.queue.get(waiter.order.request_id) is not waiter:
            return False
        if any(one not in live or self._stays(live[one]) for one in ids):
            return False
        kept, places = self._kept(waiter), dict[str, Pick]()
        for move in plan.moves:
            if restarts(one := live[move.reservation.id]):
                places[one.id] = Pick(move.gpus)
                there = beside(only(_asked_by(one), places[one.id]), kept)
                if not isinstance(self.capacity.placer.place(there, now, again=True), Pick):
                    return False
        ask = beside(replace(waiter.order.ask, nodes=frozenset(plan.pick.nodes)), kept)
        taken = (gpu.uuid.lower() for one in places.values() for gpu in one.gpus)
        ask = replace(ask, excluded_gpus=ask.excluded_gpus.union(taken))
        pick = self.capacity.placer.place_after(ask, now, ids)
        if not isinstance(pick, Pick):
            return False
        self._moving, self._for, self._until = set(ids), waiter, now + LIMIT
        self._made.extend([now] * len(ids))
        self.queue.promise(waiter, pick, self._until, ids)
        for mover, place in places.items():
            self.restarting.keep(live[mover], place, self._until)
        why = f"{MOVED_FOR}{_name(waiter)}, which asks for {counted(len(pick.gpus), 'GPU')}"
        movable = [one for one in ids if MOVABLE_LABEL in live[one].labels]
        await self.leases.revoke(movable, now + NOTICE, why)
        await self.leases.revoke([one for one in ids if one not in movable], now + self.grace, why)
        _log.info("moves have started", reservations=ids, waits=_name(waiter))
        return True

    async def _propose(
        self, waiter: Waiter, prices: Mapping[str, float], most: int = MOST_MOVES, stay: Staying | None = None
    ) -> RoomProposal:
        """A proposal for a waiting request. Nothing with a higher priority moves for it."""
        ask, place, live = waiter.order.ask, waiter.place, self.capacity.ledger.live
        if place is not None and place.obstacle.reason is not Reason.NO_CAPACITY:
            return RoomProposal(ask, NoMoves(f"more room would not help: {place.obstacle.message}"), waiter)
        lower = {
            one: price
            for one, price in prices.items()
            if one in live and live[one].priority <= waiter.order.priority
        }
        return await self._find(ask, waiter, lower, most, stay)

    def _kept(self, waiter: Waiter | None) -> list[Kept]:
        """What is booked, or promised to others: a promise to the waiter itself is replaced by what moves free."""
        wall = self.capacity.clock.wall().timestamp()
        booked = self.world.bookings.in_the_way(0, wall, preemptible=False)
        return [*self.queue.promised(waiter), *booked]

    async def _find(
        self,
        ask: Ask,
        waiter: Waiter | None,
        prices: Mapping[str, float],
        most: int = MOST_MOVES,
        stay: Staying | None = None,
    ) -> RoomProposal:
        """The moves for an ask; `stay` is only used to say what is in the way."""
        kept, now = self._kept(waiter), self.capacity.clock.now()
        asked, placer = beside(ask, kept), self.capacity.placer.copy()
        nodes, live = list(self.capacity.view.nodes), self.capacity.ledger.live
        stay = stay and {why: [one for one in ids if one in live] for why, ids in stay.items()}
        leave = [] if stay is None else [one for one in prices if one in live]

        def again(one: Reservation) -> Ask:
            return beside(_asked_by(one), kept)

        def search() -> RoomProposal:
            found = rebalance(placer, asked, prices, again, now, most)
            if not isinstance(found, NoMoves):
                return RoomProposal(ask, found, waiter)
            why = "" if stay is None else _in_the_way(placer, ask, asked, leave, stay, now)
            return RoomProposal(
                ask, NoMoves(why or found.message), waiter, partitions_for(placer, nodes, asked, now)
            )

        return await asyncio.to_thread(search)

    def _movable(self) -> tuple[dict[str, float], Staying]:
        """The cost of moving each movable reservation, in GPU-seconds; those that may not move, by why."""
        now, prices, left_out = self.capacity.clock.now(), dict[str, float](), dict[str, list[str]]()
        for one in self.capacity.ledger.live.values():
            if one.waiting or not one.gpus:
                continue
            if why := self._stays(one):
                left_out.setdefault(why, []).append(one.id)
                continue
            gpus = sum(gpu.milli for gpu in one.gpus) / WHOLE
            start = one.labels.get(MOVABLE_LABEL)
            prices[one.id] = gpus * (float(start) if start else max(0.0, now - self.world.granted_at(one)))
        return prices, left_out

    def _stays(self, one: Reservation) -> str:
        """Why a reservation does not move; empty if it may."""
        node = self.capacity.view.get(one.gpus[0].node)
        if node is None or node.state is not NodeState.ONLINE or not node.names_gpus:
            return UNKNOWN
        if one.member_count > 1:
            return "a gang"
        if BOOKING_LABEL in one.labels:
            return "in a booking"
        if any(gpu.parent for gpu in one.gpus):
            return "a MIG instance"
        if MOVABLE_LABEL not in one.labels and not one.preemptible:
            return "neither preemptible nor movable"
        if one.state is State.PENDING or one.revoke_at is not None or self.capacity.ledger.closing(one.id):
            return "about to begin or to end"
        if self.capacity.clock.now() - self.world.granted_at(one) < self.rest:
            return f"granted less than {self.rest:g} s ago"
        return ""


def _notes(stay: Staying) -> list[str]:
    return [f"{counted(len(ids), 'reservation')}: {why}" for why, ids in stay.items()]


def _in_the_way(placer: Placer, ask: Ask, asked: Ask, leave: Sequence[str], stay: Staying, now: float) -> str:
    """The one thing that keeps an ask from fitting; empty if no single thing does, or what may move finds no other place.

    `asked` leaves out what is booked, or promised to others.
    """
    found = placer.place_after(ask, now, (), told=True)
    if isinstance(found, Refusal) and found.kind is RefusalKind.UNSATISFIABLE:
        return "" if ask.mig_profile else found.message  # GPUs may be partitioned for it
    if isinstance(placer.place_after(asked, now, leave), Pick):
        return ""
    tries = [(asked, ids, note) for ids, note in zip(stay.values(), _notes(stay), strict=True)]
    tries.append((ask, [], "what is booked, or promised to others"))
    alone = [
        note
        for wanted, ids, note in tries
        if isinstance(placer.place_after(wanted, now, [*leave, *ids]), Pick)
    ]
    return f"it would fit but for what does not move: {', or '.join(alone)}" if alone else ""


def _name(waiter: Waiter) -> str:
    order = waiter.order
    return reservation_name(order.reservation_id) if order.reservation_id else order.holder


def how(one: Reservation) -> str:
    """How a reservation moves."""
    if restarts(one):
        return "its command is told to save its work, ends, and starts again at the new place, which is kept for it"
    if MOVABLE_LABEL in one.labels:
        return "its holder gets the new place first, and leaves when that is ready"
    return "preemptible: it is told to leave, and loses its work unless it saves it"


def _asked_by(one: Reservation) -> Ask:
    """The ask of a reservation for another place: its original ask if known, else GPUs like those it has."""
    if one.wanted is not None:
        return one.wanted.ask
    gpu = one.gpus[0]
    return Ask(
        gpu_count=len(one.gpus),
        min_memory_bytes=(gpu.memory_bytes or 0) * 9 // 10,
        max_utilization_percent=100.0,
        policy=Policy.PACK,
        gpu_milli=gpu.milli,
        gpu_memory_bytes=None if gpu.milli >= WHOLE else gpu.memory_bytes,
        models=(gpu.model,) if gpu.model else (),
        cpu_milli=one.cpu_milli,
        host_memory_bytes=one.host_memory_bytes,
    )
