"""Ends that nobody requests: expired leases, vanished GPUs, nodes that are gone for good.

The sweeper wakes at the next deadline, at least every half second, to notice when the whole process stood still (SIGSTOP, a
suspended host, a slow disk): then renewals may be waiting in the socket, and it skips one round before it ends anything
(etcd#15247 and #12528 ended live leases for lack of that).

A node that is silent, or cannot read its GPUs, proves nothing about them. A GPU is lost if its node is ONLINE and omits it, or
reports it as LOST, for longer than a moment; if the fleet was told to forget the node; or if the node has split it into MIG
instances: the whole GPU no longer exists, and these are offered once it is lost.

Forgotten nodes are removed here, too, once nothing is held on them, unless they report again. A node that the fleet has not
named since the allocator started may have been forgotten while it was down: it is removed after a day.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Node, NodeState, Reservation, State
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.state.commits import Commits
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.allocator.usecases.leases import Leases
from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock

LOST = "LOST"
"""Trouble of a GPU that fell off its bus."""


TICK = 0.5
"""Longest sleep, in seconds."""
LATE = 0.5
"""A wake-up later than this, in seconds, is a stall."""
START_DELAY = 2.0
"""Seconds after the start in which nothing is ended, so that holders can renew leases that ran out meanwhile."""
BATCH = 256
"""Most reservations in one transaction."""
_SHORTEST = 0.02

_log = get_logger(__name__)


@dataclass(eq=False)
class Sweeper:
    """Ends and forgets what is due, for as long as it runs."""

    ledger: Ledger
    store: AllocatorStore
    commits: Commits
    clock: Clock
    _failing: bool = field(default=False, init=False)

    async def run(self) -> NoReturn:
        """Sweep for ever."""
        await asyncio.sleep(START_DELAY)
        stalled = False
        while True:
            pause, deadline = TICK, self.ledger.next_deadline()
            if deadline is not None and not (stalled or self._failing):
                pause = min(max(deadline - self.clock.now(), _SHORTEST), TICK)
            wake = self.clock.now() + pause
            await asyncio.sleep(pause)
            late = self.clock.now() - wake
            # Only one round: a process that is always late must still end leases that nobody renews.
            stalled = late > LATE and not stalled
            if stalled:
                _log.warning("the process was suspended, so renewals go first", seconds=round(late, 2))
                continue
            while await self.sweep() == BATCH:
                pass

    async def sweep(self) -> int:
        """End and forget what is due, at most one batch; returns how many records were due."""
        due = self.ledger.due(self.clock.now(), BATCH)
        expired = [one for one in due if one.live]
        forgotten = [one for one in due if not one.live]
        problem: UnavailableError | None = None
        if expired:
            now, wall = self.clock.now(), self.clock.wall()
            ends = [(one, State.EXPIRED if one.deadline <= now else State.CANCELLED) for one in expired]
            closed: list[Reservation] = []
            for one, state in ends:
                reason = ""  # what it says itself
                if one.waiting:
                    reason = "it was not served in time"
                elif one.until is not None and one.until <= now < one.deadline and not one.end_reason:
                    reason = "its time limit is over"
                closed.append(self.ledger.close(one, state, now=now, wall=wall, reason=reason))
            problem = await self.commits.end(closed)
            if problem is None:
                _log.info("reservations ended", states={one.id: state.value for one, state in ends})
        if forgotten:
            try:
                await self.store.forget(forgotten, self.ledger.fence)
            except UnavailableError as error:
                problem = error
                for one in forgotten:
                    self.ledger.postpone(one)
            else:
                for one in forgotten:
                    self.ledger.forget(one)
        if problem is not None and not self._failing:
            _log.warning("cannot write the end of leases", problem=problem.message)
        self._failing = problem is not None
        return 0 if self._failing else len(due)


PERIOD = 0.5
"""Seconds between two looks."""


@dataclass(eq=False)
class Losses:
    """Watches the nodes' reports for held GPUs; one that is missing for `after` seconds is lost. `run` must run."""

    ledger: Ledger
    leases: Leases
    clock: Clock
    after: float
    _missing: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]], init=False)
    """Since when GPUs are missing, by their nodes."""

    def seen(self, nodes: Iterable[Node]) -> None:
        """The view has taken in nodes."""
        now, use = self.clock.now(), self.ledger.use
        for node in nodes:
            since = self._missing.pop(node.id, {})
            if not node.forgotten and not (node.state is NodeState.ONLINE and node.names_gpus):
                continue
            there = {gpu.uuid for gpu in node.gpus if gpu.trouble != LOST} - {gpu.parent for gpu in node.gpus}
            held = {gpu.uuid for one in use.reservations(node.id) for gpu in one.gpus if gpu.node == node.id}
            if missing := held - there:
                self._missing[node.id] = {uuid: since.get(uuid, now) for uuid in missing}

    def lost(self) -> Mapping[str, set[str]]:
        """The lost GPUs, by the reservations that hold them."""
        found: dict[str, set[str]] = defaultdict(set)
        due = self.clock.now() - self.after
        for uuid in (uuid for of_node in self._missing.values() for uuid, at in of_node.items() if at <= due):
            for reservation in self.ledger.use.gpu(uuid).reservations:
                found[reservation].add(uuid)
        return found

    async def run(self, following: Callable[[], bool]) -> NoReturn:
        """End what is lost, for ever, while the fleet is followed."""
        while True:
            await asyncio.sleep(PERIOD)
            if not (following() and (lost := self.lost())):
                continue
            try:
                await self.leases.lose(lost)
            except UnavailableError as error:
                _log.warning("cannot write the end of lost reservations", problem=error.message)
            else:
                _log.warning(
                    "GPUs vanished under a lease", reservations={k: sorted(v) for k, v in lost.items()}
                )


UNNAMED_FOR = 24 * 3600.0
"""Seconds after which a node that the fleet has not named since the start is removed."""


@dataclass(eq=False)
class Forgetting:
    """Removes forgotten nodes. `run` must run."""

    ledger: Ledger
    view: FleetView
    placer: Placer
    store: AllocatorStore
    clock: Clock
    _due: dict[str, float] = field(default_factory=dict[str, float], init=False)

    def seen(self, nodes: Iterable[Node]) -> None:
        """The view has taken in nodes."""
        now = self.clock.now()
        for node in nodes:
            if node.forgotten:
                self._due[node.id] = now
            elif not node.reported:
                self._due.setdefault(node.id, now + UNNAMED_FOR)
            else:
                self._due.pop(node.id, None)

    async def run(self) -> NoReturn:
        """Remove what can go, for ever."""
        while True:
            await asyncio.sleep(PERIOD)
            now = self.clock.now()
            for node in [node for node, due in self._due.items() if due <= now]:
                if node not in self._due or self.ledger.use.node(node).reservations:
                    continue
                # Out of memory first: if the node reports during the write, it is a new node.
                del self._due[node]
                self.placer.remove_node(node)
                rank = self.view.drop(node)
                try:
                    await self.store.forget_rank(node, rank)
                except UnavailableError as error:
                    # Harmless: after a restart it appears as a node that has not reported.
                    _log.warning("cannot forget a node on disk", node=node, problem=error.message)
                else:
                    _log.info("forgot a node", node=node)
