"""Restarting jobs: they give their GPUs back, and get others under the same name and lease token.

The job waits like one that never had GPUs. In the turn of the event loop in which its old GPUs are free on disk, it is granted
others: those kept for it, or its old ones if the move came to nothing. Otherwise it joins the queue. If the allocator is killed
in between, the job waits and holds nothing, and whoever starts it keeps asking.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from gpuscale.allocator.domain.jobs import JobMember
from gpuscale.allocator.domain.model import BOOKING_LABEL, MOVABLE_LABEL, MOVED_FOR, Ask, Pick, Reservation
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.queueing.model import Waiter
from gpuscale.allocator.queueing.queue import Queue
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.usecases.leases import LeaseClaim, Leases
from gpuscale.allocator.usecases.reserving import Waiting
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import hit
from gpuscale.common.security.auth import Principal

LONGEST_WAIT = 7 * 86_400.0
"""Seconds for which a restarted job may wait."""
_ABOVE_ALL = 1001
"""Priority of what is kept for a job that moves: nobody asks with a higher one."""
_log = get_logger(__name__)


def restarts(one: Reservation) -> bool:
    """Whether a reservation belongs to a job that restarts automatically."""
    return one.job is not None and one.member_count == 1 and MOVABLE_LABEL in one.labels


def only(ask: Ask, pick: Pick) -> Ask:
    """The ask, limited to what was picked."""
    gpus = frozenset(gpu.uuid.lower() for gpu in pick.gpus)
    return replace(ask, gpus=gpus, nodes=frozenset(gpu.node for gpu in pick.gpus))


@dataclass(eq=False)
class Restarting:
    """Restarts jobs, and keeps the places of those that move."""

    leases: Leases
    waiting: Waiting
    queue: Queue
    placer: Placer
    changes: Changes
    _kept: dict[str, tuple[Waiter, Pick]] = field(default_factory=dict[str, tuple[Waiter, Pick]], init=False)

    def keep(self, one: Reservation, pick: Pick, until: float) -> None:
        """Keep the place to which a job moves."""
        waiter = Waiter(replace(one.order(), priority=_ABOVE_ALL), 0, self.leases.clock.now(), until)
        self._kept[one.id] = waiter, pick
        self.queue.promise(waiter, pick, until, [one.id])

    def next_node(self, reservation_id: str) -> str:
        """The id of the node on which a place is kept for a job; empty if there is none."""
        kept = self._kept.get(reservation_id)
        return kept[1].gpus[0].node if kept else ""

    def give_up(self, moving: Collection[str]) -> None:
        """Give up the places of all jobs but those that are moving."""
        for one in [one for one in self._kept if one not in moving]:
            self.queue.remove(self._kept.pop(one)[0])

    async def restart(
        self, lease: LeaseClaim, ended: JobMember, attempt: int, caller: Principal
    ) -> Reservation:
        """Have a job whose attempt has ended wait for the next one; renew it if it does not restart.

        Repeating a call changes nothing. Raises like `Leases.renew`.
        """
        ledger, clock = self.leases.ledger, self.leases.clock
        before = await self.leases.owned(lease, caller)
        if before.job is not None and before.job.attempt > attempt:
            return before
        if not restarts(before) or before.wanted is None:
            return await self.leases.renew(lease, None, caller, ended)
        ledger.expect(lease.id, lease.fence)
        after = ledger.leave(lease.id, ended, LONGEST_WAIT, clock.now())
        kept = self._kept.pop(lease.id, None)
        written = self.leases.commits.change([before], [after])

        def settled(error: GpuscaleError | None) -> None:
            """Continue once the disk says that the job waits again, or the write failed."""
            if error is not None:
                if kept is not None:
                    self._kept[before.id] = kept
                return
            hit("allocator.restart.before_grant")
            order = after.order()
            ledger.use.free(before.id)
            # It continues at the place kept for it, or where it was unless it had to leave.
            pick = None
            if kept is not None:
                self.queue.remove(kept[0])
                found = self.placer.place(only(order.ask, kept[1]), clock.now(), again=True)
                pick = found if isinstance(found, Pick) else None
            if pick is None and (before.revoke_at is None or before.end_reason.startswith(MOVED_FOR)):
                pick = Pick(before.gpus)
            if pick is None or BOOKING_LABEL in before.labels:
                self.waiting.keep(after)
            else:
                self.waiting.grant(order, pick)
            nodes = {gpu.node for gpu in before.gpus}
            _log.info("a job restarts", reservation=before.id, left=sorted(nodes), waits=pick is None)
            self.changes.room(nodes)

        written.on_settled(settled)
        error = await written
        if error is not None:
            raise error
        return after
