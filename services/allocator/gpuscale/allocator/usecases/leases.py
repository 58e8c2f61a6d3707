"""Use cases of reservations that exist: renew, keep alive, release, revoke, lose; get and list, with their use."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from gpuscale.allocator.domain.jobs import JobMember
from gpuscale.allocator.domain.ledger import AT_ONCE, Ledger, Tokens
from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.domain.usage import ReservationUsage, UsageJudge
from gpuscale.allocator.state.archive import Archive, RecordFilter
from gpuscale.allocator.state.commits import Commits, Outcome
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.common import errors
from gpuscale.common.runtime.tasks import Clock, in_slices
from gpuscale.common.security.auth import Principal, Role
from gpuscale.common.wire import MAX_PAGE_SIZE, page_limit


class LeaseClaim(NamedTuple):
    """A reservation by its id, with the fence that proves the holder."""

    id: str
    fence: int


@dataclass(slots=True)
class Renewal:
    """The result of a renewal: the reservation, if it is known, and why it was not renewed."""

    lease: LeaseClaim
    reservation: Reservation | None
    error: errors.GpuscaleError | None


@dataclass(frozen=True, slots=True)
class Leases:
    """Every method raises errors of `gpuscale.common.errors`, as in the contract."""

    ledger: Ledger
    commits: Commits
    archive: Archive
    clock: Clock
    tokens: Tokens

    async def renew(
        self, lease: LeaseClaim, ttl: float | None, caller: Principal, member: JobMember | None = None
    ) -> Reservation:
        """Restart a lease, with a new ttl if given; `member` is the state of one member of its job."""
        before = await self.owned(lease, caller)
        after = self.ledger.renew(lease.id, lease.fence, ttl, self.clock.now(), member)
        if after is before:  # it waits, and its wait stays as long as it is
            return after
        await _written(self.commits.change([before], [after]))
        return after

    async def keep_alive(
        self, leases: Iterable[LeaseClaim], holder: str, caller: Principal
    ) -> Sequence[Renewal]:
        """Renew these leases, and all live ones of a holder that belong to the caller, in one transaction.

        A lease that cannot be renewed does not affect the others.
        """
        live = self.ledger.reservations(ended=False, holder=holder) if holder else ()
        own = [one for one in live if one.is_of(caller.name)]
        wanted = dict.fromkeys((*leases, *(LeaseClaim(one.id, one.fence) for one in own)))
        await self._recall(wanted)
        before: list[Reservation] = []
        after: list[Reservation] = []
        refused: dict[LeaseClaim, errors.GpuscaleError] = {}
        now = self.clock.now()
        for lease in wanted:
            try:
                found = self._owned(lease.id, caller)
                after.append(self.ledger.renew(lease.id, lease.fence, None, now))
                before.append(found)
            except (
                errors.NotFoundError,
                errors.PermissionDeniedError,
                errors.FailedPreconditionError,
            ) as error:
                refused[lease] = error
        failure = await self.commits.change(before, after) if after else None
        renewals: list[Renewal] = []
        for lease in wanted:
            problem = refused.get(lease) or failure
            unseen = isinstance(problem, (errors.NotFoundError, errors.PermissionDeniedError))
            renewals.append(Renewal(lease, None if unseen else self.ledger.get(lease.id), problem))
        return renewals

    def check(
        self, lease: LeaseClaim, node: str, uuids: Iterable[str], token: str, caller: Principal
    ) -> list[int]:
        """For each of these GPUs of a node, the lowest fence of its current reservations: several may hold shares.

        FailedPreconditionError unless the lease holds them all, PermissionDeniedError if `token` is for another.
        """
        if caller.role is Role.AGENT and caller.name != node:
            raise errors.PermissionDeniedError(
                f"agent {caller.name} may only ask about the node of that name, not {node}",
                reason="OTHER_NODE",
            )
        found = self.ledger.expect_open(self.ledger.expect(lease.id, lease.fence))
        if token:
            self._expect_token(token, found)
        held = {gpu.uuid for gpu in found.gpus if gpu.node == node and not gpu.lost}
        asked, use = list(uuids), self.ledger.use
        for uuid in asked:
            if uuid not in held:
                raise errors.FailedPreconditionError(
                    f"reservation {lease.id} does not hold GPU {uuid} of nodes/{node}",
                    reason="GPU_NOT_HELD",
                    metadata={"reservation": lease.id, "gpu": uuid},
                )
        return [min(use.live(one).fence for one in use.gpu(uuid).reservations) for uuid in asked]

    async def release(self, leases: Sequence[LeaseClaim], caller: Principal) -> Sequence[Reservation]:
        """Give the GPUs of all or none back; ended reservations are returned unchanged."""
        await self._recall(leases)
        for lease in leases:
            self._owned(lease.id, caller)
        await self.commits.wait(*(lease.id for lease in leases))
        found = {lease.id: self.ledger.expect(lease.id, lease.fence) for lease in leases}
        live = [one for one in found.values() if one.live]
        now, wall = self.clock.now(), self.clock.wall()
        closed = [self.ledger.close(one, State.RELEASED, now=now, wall=wall) for one in live]
        if closed:
            await _written(self.commits.end(closed))
        return [self.ledger.get(lease.id) for lease in leases]

    async def revoke(self, reservation_ids: Iterable[str], at: float | None, reason: str) -> None:
        """Schedule the revocation of live reservations, or take it back (None); on disk, or not at all."""
        before: list[Reservation] = []
        after: list[Reservation] = []
        for reservation_id in reservation_ids:
            try:
                found = self.ledger.get(reservation_id)
                after.append(self.ledger.revoke(reservation_id, at, reason))
                before.append(found)
            except (errors.NotFoundError, errors.FailedPreconditionError):
                continue
        if after:
            await _written(self.commits.change(before, after))

    async def lose(self, lost: Mapping[str, Iterable[str]]) -> None:
        """End reservations as LOST whose GPUs have vanished; their other GPUs become free."""
        closed: list[Reservation] = []
        now, wall = self.clock.now(), self.clock.wall()
        for reservation_id, gpus in lost.items():
            try:
                found = self.ledger.expect_open(self.ledger.get(reservation_id))
            except (errors.NotFoundError, errors.FailedPreconditionError):
                continue
            gone = frozenset(gpus)
            reason = f"GPU {', '.join(sorted(gone))} vanished from its node"
            closed.append(self.ledger.close(found, State.LOST, now=now, wall=wall, reason=reason, lost=gone))
        if closed:
            await _written(self.commits.end(closed))

    async def end(self, reservation_id: str, state: State, reason: str) -> None:
        """End a reservation now, whatever its lease says; one that has ended stays as it is."""
        found = self.ledger.get(reservation_id)
        if not found.live or self.ledger.closing(reservation_id):
            return
        now, wall = self.clock.now(), self.clock.wall()
        closed = self.ledger.close(found, state, now=now, wall=wall, reason=reason)
        await _written(self.commits.end([closed]))

    async def _recall(self, leases: Iterable[LeaseClaim]) -> None:
        if unknown := [lease.id for lease in leases if not self.ledger.knows(lease.id)]:
            await self.archive.recall(ids=unknown)

    async def owned(self, lease: LeaseClaim, caller: Principal) -> Reservation:
        """A reservation that the caller may change."""
        await self._recall([lease])
        return self._owned(lease.id, caller)

    def _owned(self, reservation_id: str, caller: Principal) -> Reservation:
        found = self.ledger.get(reservation_id)
        if caller.kind == "lease":
            self._expect_token(caller.lease_token, found)
        elif not found.is_of(caller.name) and caller.role < Role.ADMIN:
            raise errors.PermissionDeniedError(
                f"reservation {reservation_id} belongs to {found.owner}, and only its owner or an admin may change it:"
                f" ask {found.owner} or an admin",
                reason="NOT_OWNER",
                metadata={"reservation": reservation_id, "owner": found.owner},
            )
        return found

    def _expect_token(self, token: str, found: Reservation) -> None:
        if not self.tokens.proves(token, found):
            raise errors.PermissionDeniedError(
                f"that is not the lease token of reservation {found.id}",
                reason="LEASE_TOKEN_INVALID",
                metadata={"reservation": found.id},
            )


async def _written(outcome: Outcome) -> None:
    """Wait for a write; raises UnavailableError if it failed and was undone."""
    error = await outcome
    if error is not None:
        raise error


@dataclass(slots=True, eq=False)
class Records:
    """The known reservations. Errors are those of `gpuscale.common.errors`, as in the contract."""

    ledger: Ledger
    archive: Archive
    view: FleetView
    clock: Clock
    tokens: Tokens
    _judge: UsageJudge = field(init=False)

    def __post_init__(self) -> None:
        self._judge = UsageJudge(self.view.get, self.ledger.use)

    async def get(self, reservation_id: str) -> Reservation:
        """Look up a reservation. Raises NotFoundError if there is none."""
        await self.archive.recall(ids=[reservation_id])
        return self.ledger.get(reservation_id)

    async def list_reservations(
        self,
        wanted: RecordFilter,
        *,
        ended: bool,
        page_size: int,
        page_token: str,
        keep: Callable[[Reservation], bool] | None = None,
    ) -> tuple[list[Reservation], str]:
        """A page of reservations, oldest first, and the token of the next page.

        Of matching ones on disk, `keep` filters the first 1,000: a page may be short without being the last. One that
        begins or starts again meanwhile gets a new fence, so that it comes again on a later page, in its new state.
        """
        most, last = page_limit(page_size), 0
        after = self.tokens.fence_of_page(page_token) if page_token else 0
        chosen: dict[str, Reservation] = {}
        known = self.ledger.reservations(
            ended=ended, after=after, holder=wanted.holder, gpu=wanted.gpu_uuid, node=wanted.node
        )
        async with aclosing(in_slices(known, AT_ONCE)) as rest:
            async for one in rest:
                if one in wanted and (keep is None or keep(one)):
                    chosen[one.id] = one
                    if len(chosen) > most:
                        break
        if ended:  # read after memory: what leaves it meanwhile is in both
            looked_at = most + 1 if keep is None else MAX_PAGE_SIZE
            old, last = await self.archive.page(wanted, after=after, most=looked_at)
            if keep is not None and len(old) == looked_at:
                last = old[-1].fence
            chosen = {one.id: one for one in old if keep is None or keep(one)} | chosen
        found = sorted(chosen.values(), key=lambda one: one.fence)  # it grows with every grant
        if last:
            found = [one for one in found if one.fence <= last]
        if len(found) > most:
            last = found[most - 1].fence
        return found[:most], self.tokens.of_page(last) if last else ""

    async def kept_since(self) -> datetime | None:
        """When the youngest forgotten reservation ended; None if none was forgotten."""
        forgotten = await self.archive.store.forgotten()
        return datetime.fromtimestamp(forgotten, UTC) if forgotten else None

    def usage(self, reservation: Reservation) -> ReservationUsage | None:
        """The use of a reservation by its holder; None if it has ended."""
        return self._judge.of(reservation, self.clock.now()) if reservation.live else None


async def every(list_page: Callable[..., Awaitable[tuple[list[Reservation], str]]]) -> list[Reservation]:
    """The reservations of all pages: another order shows the last first. Of one that comes twice, the newer state."""
    found, token = await list_page(page_size=MAX_PAGE_SIZE, page_token="")
    by_id = {one.id: one for one in found}
    while token:
        found, token = await list_page(page_size=MAX_PAGE_SIZE, page_token=token)
        by_id |= {one.id: one for one in found}
    return list(by_id.values())
