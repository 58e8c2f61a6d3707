"""Use cases of whoever wants GPUs: reserve, one request or several.

From the first look at the ledger to the hold there is no await, so no other call can come between: two callers never
get one GPU. The answer leaves only when the change is on disk.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Order, Pick, Reservation
from gpuscale.allocator.placing.refusal import NOT_FOUND, Refusal, RefusalKind
from gpuscale.allocator.queueing.model import QueueObstacle, QueuePlace, Reason
from gpuscale.allocator.state.archive import Archive
from gpuscale.allocator.state.commits import Commits
from gpuscale.allocator.usecases.fleet import FleetFollower, FleetView
from gpuscale.allocator.usecases.waiting import Waiting
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.tasks import Clock

_RETRY_TELEMETRY = 1.0
_RETRY_EMPTY = 5.0
_RETRY_LIMITS = (1.0, 30.0)


@dataclass(frozen=True, slots=True)
class Reserving:
    """Grants. Every method raises errors of `gpuscale.common.errors`, as the contract says."""

    ledger: Ledger
    waiting: Waiting
    view: FleetView
    follower: FleetFollower
    commits: Commits
    archive: Archive
    clock: Clock

    async def reserve(self, order: Order, wait: float = 0.0) -> Reservation:
        """Grant GPUs, waiting for so many seconds, or return what the same request was granted before.

        Raises:
            AlreadyExistsError: the request id was used with other arguments.
            NotFoundError: a chosen node or GPU does not exist.
            FailedPreconditionError: UNSATISFIABLE or NODE_NOT_ONLINE.
            ResourceExhaustedError: NO_CAPACITY or QUOTA_EXCEEDED, with the time after which a retry makes sense; after a
                wait WAIT_TIMEOUT; QUEUE_FULL.
            UnavailableError: NO_TELEMETRY, or the state cannot be written; nothing was granted then.
        """
        granted = await self._begin(order, wait)
        if granted is None:
            granted = await self.waiting.wait(order, wait)
        return (await self._answers([granted], [order]))[0]

    async def reserve_and_watch(self, order: Order, wait: float) -> AsyncGenerator[QueuePlace | Reservation]:
        """As `reserve`, and tell the place in the queue meanwhile; the reservation is the last item.

        Raises:
            GpuscaleError: as `reserve`.
        """
        granted = await self._begin(order, wait)
        if granted is None:
            async with aclosing(self.waiting.watch(order, wait)) as news:
                async for one in news:
                    if isinstance(one, QueuePlace):
                        yield one
                    else:
                        granted = one
        if granted is not None:
            yield (await self._answers([granted], [order]))[0]

    async def reserve_all(self, orders: Sequence[Order]) -> Sequence[Reservation]:
        """Grant several orders, all or none, in one transaction; each sees what those before it were granted.

        Raises:
            GpuscaleError: as `reserve`, for the first order that is refused; nothing was granted then.
        """
        await self.archive.recall(requests=[order.request_id for order in orders])
        found: list[Reservation] = []
        granted: list[Reservation] = []
        try:
            for order in orders:
                known = self.ledger.replay(order.request_id, order.fingerprint)
                if known is None:
                    known = self.grant(order)
                    granted.append(known)
                found.append(known)
        except GpuscaleError:
            for one in reversed(granted):
                self.ledger.withdraw(one)
            raise
        if granted:
            self.commits.grant(granted)
        return await self._answers([one.id for one in found], orders)

    def grant(self, order: Order) -> Reservation:
        """Choose GPUs and hold them; PENDING until `Commits.grant` has brought it to disk.

        Raises:
            GpuscaleError: as `reserve`; nothing is held then.
        """
        self.waiting.knows(order)
        found = self._look(order)
        if not isinstance(found, Pick):
            raise self._refused(found)
        return self._hold(order, found)

    async def _begin(self, order: Order, wait: float) -> str | None:
        """The id of what is granted, or was before, at once; None if the request is to wait.

        Whether the archive has what was granted before is asked only where nothing is granted: a grant finds out when it
        is written.

        Raises:
            GpuscaleError: as `reserve`.
        """
        known = self.ledger.replay(order.request_id, order.fingerprint)
        if known is not None:
            return known.id
        if self.waiting.knows(order):
            return None
        found = self._look(order)
        if isinstance(found, Pick):
            granted = self._hold(order, found)
            self.commits.grant([granted])
            return granted.id
        await self.archive.recall(requests=[order.request_id])
        known = self.ledger.replay(order.request_id, order.fingerprint)
        if known is not None:
            return known.id
        if wait > 0 and _may_pass(found):
            return None
        raise self._refused(found)

    def _hold(self, order: Order, pick: Pick) -> Reservation:
        """Hold what was picked in this turn of the event loop, PENDING until `Commits.grant` has brought it to disk."""
        return self.ledger.grant(order, pick.gpus, now=self.clock.now(), wall=self.clock.wall())

    def _look(self, order: Order) -> Pick | Refusal | QueueObstacle:
        """Look once, now.

        Raises:
            UnavailableError: NO_TELEMETRY.
        """
        if not self.view.complete:
            raise self._no_telemetry()
        return self.waiting.look(order, self.clock.now())

    async def _answers(self, ids: Sequence[str], orders: Sequence[Order]) -> Sequence[Reservation]:
        """The reservations, once they are on disk; where what was granted for a request has ended, that.

        Raises:
            AlreadyExistsError: the request id was used with other arguments.
            UnavailableError: the state cannot be written; nothing was granted then.
        """
        error = await self.commits.wait(*ids)
        if error is not None and error.reason == "REQUEST_ENDED":
            await self.archive.recall(requests=[order.request_id for order in orders])
            known = [self.ledger.replay(order.request_id, order.fingerprint) for order in orders]
            ids = [one.id for one in known if one is not None]
            error = error if len(ids) < len(orders) else None
        if error is not None:
            raise error
        await tasks.hit_async("allocator.reserve.before_reply")
        return [self.ledger.get(one) for one in ids]

    def _no_telemetry(self) -> UnavailableError:
        problem = self.follower.problem or "no agent has reported to the fleet yet"
        return UnavailableError(
            f"it is not known yet which GPUs there are: {problem}",
            reason="NO_TELEMETRY",
            retry_after=_RETRY_TELEMETRY,
        )

    def _refused(self, found: Refusal | QueueObstacle) -> GpuscaleError:
        if isinstance(found, QueueObstacle):
            return self._held_up(found)
        message = found.message
        if self.follower.problem:
            message += f" The fleet cannot be followed at the moment: {self.follower.problem}."
        if found.kind in NOT_FOUND:
            return NotFoundError(message, reason=found.kind, metadata=found.metadata)
        if found.kind is RefusalKind.NO_CAPACITY:
            return ResourceExhaustedError(
                message, reason=found.kind, metadata=found.metadata, retry_after=self._retry_after()
            )
        return FailedPreconditionError(message, reason=found.kind, metadata=found.metadata)

    def _held_up(self, obstacle: QueueObstacle) -> GpuscaleError:
        """A quota stands in the way, or what is free is kept for others: to who does not wait, that is no capacity."""
        over = obstacle.reason is Reason.QUOTA_EXCEEDED
        return ResourceExhaustedError(
            obstacle.message,
            reason="QUOTA_EXCEEDED" if over else "NO_CAPACITY",
            metadata={} if over else {"behind_others": "true"},
            retry_after=None if obstacle.lasting else self._retry_after(),
        )

    def _retry_after(self) -> float:
        """Seconds until a lease may run out, within reason."""
        due = self.ledger.next_deadline()
        least, most = _RETRY_LIMITS
        return _RETRY_EMPTY if due is None else min(max(due - self.clock.now(), least), most)


def _may_pass(found: Refusal | QueueObstacle) -> bool:
    """Whether waiting may help."""
    if isinstance(found, QueueObstacle):
        return not found.lasting
    return found.kind is RefusalKind.NO_CAPACITY
