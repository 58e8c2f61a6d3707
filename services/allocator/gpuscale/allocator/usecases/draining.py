"""Use cases of cordons: cordon, uncordon and drain nodes and GPUs, and list cordons.

A cordon keeps new work away from the moment of the request, and is on disk before the answer. A drain then tells the affected
holders when they have to leave; at the deadline the sweeper ends what is left, like leases that run out. After an interruption,
`resume` completes it when the allocator starts again.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpuscale.allocator.domain.cordons import Cordon, Cordons, Spot, cordoned
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Node, Reservation, ReservedGpu
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.state.commits import Changes, Commits
from gpuscale.allocator.state.operators import CordonStore
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.allocator.usecases.leases import Leases
from gpuscale.common.errors import GpuscaleError, NotFoundError
from gpuscale.common.names import cordon_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, uninterrupted
from gpuscale.common.security.auth import Principal, Role, require

DEFAULT_GRACE = 600.0
"""Seconds that holders have to leave where a drain does not say."""

_log = get_logger(__name__)


@dataclass(eq=False)
class Maintenance:
    """Takes nodes and GPUs out of service and back. Methods raise errors of the tree, as in the contract."""

    ledger: Ledger
    view: FleetView
    placer: Placer
    store: CordonStore
    commits: Commits
    leases: Leases
    changes: Changes
    clock: Clock
    cordons: Cordons = field(default_factory=Cordons, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def resume(self) -> None:
        """Load what is on disk, and continue interrupted drains."""
        of_this_boot, earlier = await self.store.load(self.clock.now())
        self.cordons = Cordons([*of_this_boot, *earlier])
        self.placer.set_cordons(self.cordons.marks())
        for cordon in earlier:  # first, as a crash in between must not leave holders with the old deadlines
            there = [one.id for one in self._told(cordon)]
            await self.leases.revoke(there, None, "")
            await self.leases.revoke(there, cordon.deadline, cordon.why)
        draining = [cordon for cordon in self.cordons if cordon.deadline is not None]
        if draining:
            await self.store.save(draining)
        for cordon in draining:
            await self._tell(cordon)

    @uninterrupted
    async def cordon(self, spot: Spot, *, reason: str, author: str) -> Cordon:
        """Keep new work off a known node or GPU. A drain under way there goes on."""
        return await self._put(Cordon(spot, reason, author, self.clock.wall()))

    @uninterrupted
    async def drain(
        self, spot: Spot, *, reason: str, author: str, grace: float | None = None
    ) -> tuple[Cordon, list[Reservation]]:
        """Cordon, and have all reservations there leave within `grace` seconds; returns them, oldest first.

        A drain under way goes on; of two deadlines the earlier holds. If an UnavailableError comes after the cordon was
        written, repeating the call, or a restart, tells the holders.
        """
        seconds = DEFAULT_GRACE if grace is None else grace
        deadline = self.clock.now() + seconds
        cordon = await self._put(Cordon(spot, reason, author, self.clock.wall(), deadline, seconds))
        await self._tell(cordon)
        return cordon, self.reservations(spot)

    @uninterrupted
    async def uncordon(self, spot: Spot, caller: Principal) -> None:
        """Lift a cordon and its drain: reservations to be revoked may stay, unless something else drains them.

        After an UnavailableError the cordon still stands, but its holders may have been told that they can stay: repeat the
        call.
        """
        self.expect_liftable(spot, caller)
        async with self._turn:
            before = self.cordons.get(spot)
            if before is None:
                return
            self.expect_liftable(spot, caller)  # it may drain since
            # Holders first: after a crash in between, the whole drain goes on.
            if before.deadline is not None:
                await self.reprieve([one.id for one in self._told(before)], before)
            await self.store.remove(spot)
            self.cordons.remove(spot)
            self.placer.set_cordons(self.cordons.marks())
        self.changes.room()
        _log.info("uncordoned", spot=spot.name)

    def expect_known(self, spot: Spot) -> None:
        """NotFoundError unless the node or GPU was ever seen."""
        node = self._expect_node(spot)
        if self.cordons.get(spot) is not None or not (spot.gpu and node.reported):
            return  # a cordon may outlive its GPU, and a GPU of a node that has not reported may be there
        if not any(spot.holds(node.id, gpu.uuid, gpu.parent) for gpu in node.gpus):
            message = f"node {spot.node} has no GPU {spot.gpu}"
            raise NotFoundError(message, metadata={"name": spot.name})

    def expect_liftable(self, spot: Spot, caller: Principal) -> None:
        """Check that the spot is cordoned, or its node known, and that the caller may end its drain (ROLE_TOO_LOW)."""
        found = self.cordons.get(spot)
        if found is None:
            self._expect_node(spot)
        elif found.deadline is not None:  # what it takes a role to do, it takes that role to undo
            require(caller, Role.ADMIN, f"{spot.name} is drained by {found.author}: lifting that")

    def reservations(self, spot: Spot) -> list[Reservation]:
        """The reservations on a node or GPU, oldest first."""
        return self._on(spot, self.ledger.reservations(ended=False, node=spot.node))

    def holders(self, spot: Spot) -> list[Reservation]:
        """Like `reservations`, including those that are not on disk yet."""
        return self._on(spot, self.ledger.use.reservations(spot.node))

    def get(self, spot: Spot) -> Cordon:
        """The cordon of exactly this node or GPU. Raises NotFoundError if there is none."""
        found = self.cordons.get(spot)
        if found is None:
            raise NotFoundError(f"{spot.name} is not cordoned", metadata={"name": cordon_name(spot.name)})
        return found

    async def _put(self, asked: Cordon) -> Cordon:
        """Set a cordon in memory, at once, and on disk; undo it if the write fails."""
        async with self._turn:
            self.expect_known(asked.spot)
            before = self.cordons.get(asked.spot)
            after = cordoned(before, asked)
            self.cordons.put(after)
            self.placer.set_cordons(self.cordons.marks())
            try:
                await self.store.save([after])
            except GpuscaleError:
                if before is None:
                    self.cordons.remove(after.spot)
                else:
                    self.cordons.put(before)
                self.placer.set_cordons(self.cordons.marks())
                raise
        _log.info("cordoned", spot=after.spot.name, drains=after.deadline is not None)
        return after

    async def _tell(self, cordon: Cordon) -> None:
        """Tell the holders of what is on a drained spot when they have to be gone; on disk when this returns."""
        there = [one.id for one in self.holders(cordon.spot)]
        await self.commits.wait(*there)  # a grant that is being written counts
        await self.leases.revoke(there, cordon.deadline, cordon.why)

    def _on(self, spot: Spot, reservations: Iterable[Reservation]) -> list[Reservation]:
        """The reservations that are on a spot, or on a MIG instance of it: those of earlier versions do not record its GPU."""
        node = self.view.get(spot.node)
        parents = {gpu.uuid: gpu.parent for gpu in node.gpus} if node else {}

        def there(gpu: ReservedGpu) -> bool:
            return spot.holds(gpu.node, gpu.uuid, gpu.parent or parents.get(gpu.uuid, ""))

        return [one for one in reservations if any(map(there, one.gpus))]

    async def reprieve(self, told: Sequence[str], lifted: Cordon | None = None) -> None:
        """Take back revocations; a drain of the same GPUs, except the `lifted` one, sets its own again."""
        if not told:
            return
        await self.leases.revoke(told, None, "")
        live = self.ledger.live
        # The nodes of a gang may be several.
        nodes = {gpu.node for one in told if one in live for gpu in live[one].gpus}
        for cordon in self.cordons:
            if cordon.deadline is not None and cordon.spot.node in nodes and cordon != lifted:
                await self._tell(cordon)

    def _told(self, cordon: Cordon) -> list[Reservation]:
        return [one for one in self.ledger.reservations(ended=False) if cordon.told(one.end_reason)]

    def _expect_node(self, spot: Spot) -> Node:
        node = self.view.get(spot.node)
        if node is None:
            raise NotFoundError(f"no such node: {spot.node}", metadata={"name": spot.name})
        return node
