"""A cluster that serves asks with the allocator's own placer, for replays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count

from bench._traces import GPU_MEMORY, WATTS, Trace
from gpuscale.allocator.domain.model import (
    WHOLE,
    Ask,
    Node,
    NodeUse,
    Pick,
    Policy,
    Reservation,
    ReservedGpu,
    Score,
    State,
    Use,
)
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.policies import Demand
from gpuscale.allocator.placing.rebalance import Move, MovePlan, NoMoves, rebalance

NOW = 0.0
POLICIES = ("random", *Policy)
_WALL = datetime.fromtimestamp(0, UTC)
_UNSCORED = Score(0.0, ())


class HostUse(Use):
    """What reservations hold, and what asks without GPUs take of their nodes.

    `in_use` is how many GPUs there are of which something is held, MIG instances included, `watts` what they may draw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_use = self.watts = 0
        self._parts = Counter[str]()
        self._taken: dict[str, tuple[int, int]] = {}

    def node(self, node: str) -> NodeUse:
        """What is held of a node."""
        held = super().node(node)
        if node not in self._taken:
            return held
        cpu, memory = self._taken[node]
        return replace(held, cpu_milli=held.cpu_milli + cpu, memory_bytes=held.memory_bytes + memory)

    def hold(self, reservation: Reservation) -> None:
        """Add what a reservation holds."""
        super().hold(reservation)
        self._count(reservation, 1)

    def free(self, reservation_id: str) -> None:
        """Take away what a reservation holds."""
        self._count(self.live(reservation_id), -1)
        super().free(reservation_id)

    def _count(self, reservation: Reservation, sign: int) -> None:
        for gpu in reservation.gpus:
            whole = gpu.parent or gpu.uuid
            before = bool(self._parts[whole])
            self._parts[whole] += sign
            change = bool(self._parts[whole]) - before
            self.in_use += change
            self.watts += change * WATTS.get(gpu.model, 0)

    def take(self, node: str, ask: Ask, sign: int) -> None:
        """Take what an ask without GPUs asks for, or give it back."""
        cpu, memory = self._taken.get(node, (0, 0))
        self._taken[node] = (cpu + sign * ask.cpu_milli, memory + sign * ask.host_memory_bytes)
        self._changed[node].update(())


class Cluster:
    """Takes asks and holds what was picked; asks without GPUs take CPU and memory off their node.

    `fgd` is told what asks are typical, as in the published simulator; `pack` learns what it needs as it goes.
    """

    def __init__(self, trace: Trace, policy: str, seed: int) -> None:
        self._use = HostUse()
        self._placer = Placer(self._use, Demand(trace.classes()) if policy == Policy.FGD else None)
        self._nodes = {node.id: node for node in trace.nodes}
        self._chance = random.Random(seed) if policy == "random" else None
        self._ids = count()
        for node in trace.nodes:
            self._placer.apply_node(node)

    @property
    def in_use(self) -> int:
        """How many GPUs there are of which something is held."""
        return self._use.in_use

    @property
    def watts(self) -> int:
        """What they may draw."""
        return self._use.watts

    def take(self, ask: Ask) -> str | None:
        """Serve an ask; its id, or None if it is turned away."""
        found = self._by_chance(ask) if self._chance else self._placer.place(ask, NOW)
        if not isinstance(found, Pick):
            return None
        name = f"{next(self._ids)} {found.nodes[0]}"
        if ask.gpu_count:
            self._use.hold(_reservation(name, ask, found.gpus))
        else:
            self._use.take(found.nodes[0], ask, 1)
        return name

    def give_back(self, name: str, ask: Ask) -> None:
        """Free what an ask was given."""
        if ask.gpu_count:
            self._use.free(name)
        else:
            self._use.take(name.split(" ", 1)[1], ask, -1)

    def rebalance(
        self, ask: Ask, prices: Mapping[str, float], asks: Mapping[str, Ask], most: int
    ) -> MovePlan | NoMoves:
        """The moves of what has a price after which an ask fits; `asks` are those that were served."""
        return rebalance(self._placer, ask, prices, lambda one: asks[one.id], NOW, most)

    def move(self, move: Move) -> None:
        """Make a move; what moves keeps its id."""
        self._use.hold(move.after)
        self._use.free(move.reservation.id)
        self._use.free(move.after.id)
        self._use.hold(replace(move.after, id=move.reservation.id))

    def _by_chance(self, ask: Ask) -> Pick | None:
        """Any node that fits, and any GPUs of it."""
        assert self._chance is not None
        fitting = self._placer.fitting(ask, NOW)
        if not fitting:
            return None
        node = self._nodes[self._chance.choice(fitting)]
        gpus = [gpu for gpu in node.gpus if self._use.gpu(gpu.uuid).milli + ask.gpu_milli <= WHOLE]
        chosen = self._chance.sample(gpus, ask.gpu_count)
        return Pick(tuple(_taken(node, ask, gpu.uuid) for gpu in chosen), (node.id,))


def _taken(node: Node, ask: Ask, uuid: str) -> ReservedGpu:
    memory = GPU_MEMORY * ask.gpu_milli // WHOLE
    return ReservedGpu(
        node.id, uuid, 0, "", simulated=True, score=_UNSCORED, milli=ask.gpu_milli, memory_bytes=memory
    )


def _reservation(name: str, ask: Ask, gpus: tuple[ReservedGpu, ...]) -> Reservation:
    return Reservation(
        id=name,
        fence=1,
        request_id="",
        fingerprint="",
        holder="",
        owner="",
        labels={},
        policy=ask.policy,
        gpus=gpus,
        ttl=0.0,
        state=State.ACTIVE,
        deadline=0.0,
        created=_WALL,
        cpu_milli=ask.cpu_milli,
        host_memory_bytes=ask.host_memory_bytes,
    )
