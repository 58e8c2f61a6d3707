"""Use cases of the allocator: reserve, renew, release, look up and list reservations.

From the first look at the ledger to the hold there is no await, so no other call can come between: two callers never
get one GPU. The answer leaves only when the change is on disk.
"""

import secrets

from gpuscale.allocator.commits import Commits
from gpuscale.allocator.ledger import Ledger
from gpuscale.allocator.model import Order, Reservation
from gpuscale.allocator.placement import place
from gpuscale.allocator.refusal import Refusal, RefusalKind
from gpuscale.allocator.store import AllocatorStore
from gpuscale.allocator.telemetry import FleetFollower
from gpuscale.allocator.view import FleetView
from gpuscale.common import failpoints
from gpuscale.common.clock import Clock
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from gpuscale.common.paging import page
from gpuscale.common.principal import Principal, Role

_SUFFIX_BYTES = 2
_RETRY_TELEMETRY = 1.0
_RETRY_EMPTY = 5.0
_RETRY_LIMITS = (1.0, 30.0)


class Allocator:
    """The allocator's use cases. Every method raises errors of `gpuscale.common.errors`, as the contract says."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        view: FleetView,
        follower: FleetFollower,
        store: AllocatorStore,
        commits: Commits,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._view = view
        self._follower = follower
        self._store = store
        self._commits = commits
        self._clock = clock
        self._suffix = secrets.token_hex(_SUFFIX_BYTES)

    async def reserve(self, order: Order) -> Reservation:
        """Grant GPUs, or return what the same request was granted before.

        Raises:
            AlreadyExistsError: the request id was used with other arguments.
            NotFoundError: a chosen node does not exist.
            FailedPreconditionError: UNSATISFIABLE or NODE_NOT_ONLINE.
            ResourceExhaustedError: NO_CAPACITY, with the time after which a retry makes sense.
            UnavailableError: NO_TELEMETRY, or the state cannot be written; nothing was granted then.
        """
        known = self._ledger.replay(order.request_id, order.fingerprint)
        if known is None:
            known = self._grant(order)
            self._commits.grant(known)
        error = await self._commits.wait(known.id)
        if error is not None:
            raise error
        await failpoints.hit_async("allocator.reserve.before_reply")
        return self._ledger.get(known.id)

    async def renew(
        self, reservation_id: str, fence: int, ttl: float | None, caller: Principal
    ) -> Reservation:
        """Start a lease anew, with another ttl if one is given.

        Raises:
            NotFoundError: no such reservation.
            PermissionDeniedError: it is another caller's.
            FailedPreconditionError: it has ended, or the fence is not its own.
            UnavailableError: the state cannot be written; the lease runs on as before.
        """
        before = self._owned(reservation_id, caller)
        after = self._ledger.renew(reservation_id, fence, ttl, self._clock.now())
        try:
            await self._store.change([after])
        except UnavailableError:
            self._ledger.undo_renewal(before, after)
            raise
        return after

    async def release(self, reservation_id: str, fence: int, caller: Principal) -> Reservation:
        """Give the GPUs back; one that has ended is returned unchanged.

        Raises:
            NotFoundError: no such reservation.
            PermissionDeniedError: it is another caller's.
            FailedPreconditionError: the fence is not its own.
            UnavailableError: the state cannot be written; the reservation lives on.
        """
        self._owned(reservation_id, caller)
        await self._commits.wait(reservation_id)
        wall = self._clock.wall()
        closed = self._ledger.release(reservation_id, fence, now=self._clock.now(), wall=wall)
        if self._ledger.get(reservation_id).live:
            self._commits.end([closed])
            error = await self._commits.wait(reservation_id)
            if error is not None:
                raise error
        return closed

    def get(self, reservation_id: str) -> Reservation:
        """Look up a reservation.

        Raises:
            NotFoundError: no such reservation.
        """
        return self._ledger.get(reservation_id)

    def list_reservations(
        self, *, holder: str, ended: bool, page_size: int, page_token: str
    ) -> tuple[list[Reservation], str]:
        """A page of reservations, oldest first, and the token of the next page; all holders' if `holder` is empty.

        Raises:
            InvalidArgumentError: the token is not one of this list.
        """
        kept = self._ledger.reservations(ended=ended)
        wanted = [one for one in kept if not holder or one.holder == holder]
        return page(wanted, key=_age_key, page_size=page_size, page_token=page_token)

    def _grant(self, order: Order) -> Reservation:
        now = self._clock.now()
        if not self._view.complete:
            raise self._no_telemetry()
        found = place(self._view.nodes, self._ledger.held, order.ask, now)
        if isinstance(found, Refusal):
            raise self._refused(found, now)
        return self._ledger.grant(order, found.gpus, suffix=self._suffix, now=now, wall=self._clock.wall())

    def _no_telemetry(self) -> UnavailableError:
        problem = self._follower.problem or "no agent has reported to the fleet yet"
        return UnavailableError(
            f"it is not known yet which GPUs there are: {problem}",
            reason="NO_TELEMETRY",
            retry_after=_RETRY_TELEMETRY,
        )

    def _refused(self, refusal: Refusal, now: float) -> GpuscaleError:
        message = refusal.message
        if self._follower.problem:
            message += f" The fleet cannot be followed at the moment: {self._follower.problem}."
        if refusal.kind is RefusalKind.NODE_NOT_FOUND:
            return NotFoundError(message, reason=refusal.kind, metadata=refusal.metadata)
        if refusal.kind is RefusalKind.NO_CAPACITY:
            return ResourceExhaustedError(
                message, reason=refusal.kind, metadata=refusal.metadata, retry_after=self._retry_after(now)
            )
        return FailedPreconditionError(message, reason=refusal.kind, metadata=refusal.metadata)

    def _retry_after(self, now: float) -> float:
        """Seconds until the next lease runs out, within reason."""
        live = self._ledger.reservations(ended=False)
        left = min((one.deadline - now for one in live), default=_RETRY_EMPTY)
        least, most = _RETRY_LIMITS
        return min(max(left, least), most)

    def _owned(self, reservation_id: str, caller: Principal) -> Reservation:
        found = self._ledger.get(reservation_id)
        if found.owner != caller.name and caller.role < Role.ADMIN:
            raise PermissionDeniedError(
                f"reservation {reservation_id} was made by another caller: only it, or an admin, may change it",
                reason="NOT_OWNER",
                metadata={"reservation": reservation_id},
            )
        return found


def _age_key(reservation: Reservation) -> str:
    """Sorts as the fence, which grows with every grant."""
    return f"{reservation.fence:020d}"
