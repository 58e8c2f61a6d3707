"""The ledger: the state machine of reservations, their leases, fences, request ids and lease tokens. Pure.

    PENDING ──confirm──> ACTIVE ──close/settle──> RELEASED | EXPIRED | CANCELLED | LOST ──forget──> gone
       └──withdraw──> gone (never acknowledged)

Every change that must be on disk before anybody learns of it has two halves. `grant` and `close` come before the
write: a granted GPU is held at once, a closed reservation still holds its GPUs but takes no more renewals. `confirm`
and `settle` come after the write, `withdraw` and `reopen` after one that failed. So a GPU is free only when it is
free on disk as well, and nobody can look up or list what is not on disk yet. Times are seconds of CLOCK_BOOTTIME,
`wall` is for display.

Tokens of a key that the state keeps prove leases and name places in a list: the key stays the same for a call that is
repeated, after a restart and on a standby that took over, and nothing is stored for each grant or page.
"""

import binascii
import heapq
import hmac
import secrets
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from types import MappingProxyType

from gpuscale.allocator.domain.jobs import JobMember
from gpuscale.allocator.domain.model import (
    MOVABLE_LABEL,
    Order,
    Reservation,
    ReservedGpu,
    State,
    Use,
    Wanted,
    moved,
)
from gpuscale.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from gpuscale.common.names import reservation_name


class Deadlines:
    """Keys by the time at which they are to be looked at.

    A deadline that moves later leaves its entry where it is: the key is then looked at too early, and whoever looks
    adds it again. So a lease that is renewed each second for a week still has one entry.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, key: str, deadline: float) -> None:
        """Look at the key at `deadline`, or earlier where it is queued earlier."""
        if deadline < self._queued.get(key, float("inf")):
            self._queued[key] = deadline
            heapq.heappush(self._heap, (deadline, key))

    def earliest(self) -> float | None:
        """When the next key is to be looked at; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> str | None:
        """Take out a key whose time has come; None when there is none."""
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heapq.heappop(self._heap)
            if self._queued.get(key) == deadline:
                del self._queued[key]
                return key
        return None


RETENTION = 14 * 86_400.0
"""Seconds for which an ended reservation is kept: so that a late repetition still meets its request id, and to be looked up."""


_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
_PAIRS = [one + other for one in _LETTERS for other in _LETTERS]


def random_id() -> str:
    """A new id of a reservation: 60 random bits, so that it tells nothing of the fence and is never given twice."""
    bits = secrets.randbits(60)
    return "r" + "".join([_PAIRS[bits >> at & 1023] for at in range(0, 60, 10)])


class Ledger:
    """All reservations that are kept, live and ended, and the highest fence ever given; only higher ones than `fence` are."""

    def __init__(self, fence: int = 0, new_id: Callable[[], str] = random_id) -> None:
        self._fence = fence
        self._new_id = new_id
        self._reservations: dict[str, Reservation] = {}
        self._live: dict[str, Reservation] = {}
        self._by_request: dict[str, str] = {}
        self._ended: dict[str, None] = {}
        self._use = Use()
        self._closing: dict[str, str] = {}  # why each ends
        self._granted_at: dict[str, float] = {}
        self._deadlines = Deadlines()

    @property
    def fence(self) -> int:
        """The highest fence given so far."""
        return self._fence

    @property
    def use(self) -> Use:
        """What live reservations hold of GPUs and nodes; it follows the ledger."""
        return self._use

    @property
    def live(self) -> Mapping[str, Reservation]:
        """The reservations that hold GPUs, by their ids; those too that are not on disk yet."""
        return MappingProxyType(self._live)

    def get(self, reservation_id: str) -> Reservation:
        """Look up a reservation; NotFoundError if there is none, none yet, or none any more."""
        found = self._reservations.get(reservation_id)
        if found is None or found.state is State.PENDING:
            raise NotFoundError(
                f"no reservation {reservation_id}: it never was, or ended so long ago that it is forgotten",
                metadata={"name": reservation_name(reservation_id)},
            )
        return found

    def reservations(self, *, ended: bool) -> Iterator[Reservation]:
        """The reservations that are on disk, oldest first; ended ones only if asked for."""
        kept = self._reservations if ended else self._live
        return (reservation for reservation in kept.values() if reservation.state is not State.PENDING)

    def held_on(self, node: str) -> list[Reservation]:
        """Of `reservations` those that hold something of a node, without a look at all the others."""
        there = (self._live.get(one.id) for one in self.use.reservations(node))
        found = [one for one in there if one is not None and one.state is not State.PENDING]
        return sorted(found, key=lambda one: one.fence)

    def knows(self, reservation_id: str = "", request_id: str = "") -> bool:
        """Whether a reservation is here, by its id or by the request that it was granted for."""
        return reservation_id in self._reservations or request_id in self._by_request

    @property
    def ended_count(self) -> int:
        """How many reservations are here that have ended."""
        return len(self._ended)

    def first_ended(self, limit: int) -> list[Reservation]:
        """At most `limit` of those that have ended, beginning with those that ended first."""
        return [self._reservations[key] for key in islice(self._ended, limit)]

    def granted_at(self, reservation_id: str) -> float | None:
        """When a live reservation was granted; None of one that the disk held, or that is none."""
        return self._granted_at.get(reservation_id)

    def next_deadline(self) -> float | None:
        """When something will be due at the earliest; None while nothing is kept."""
        return self._deadlines.earliest()

    def replay(self, request_id: str, fingerprint: str) -> Reservation | None:
        """What an earlier call with the same request id was granted, if any; AlreadyExistsError if it was another."""
        known = self._by_request.get(request_id)
        if known is None:
            return None
        found = self._reservations[known]
        if found.fingerprint != fingerprint:
            raise AlreadyExistsError(
                f"request_id {request_id} was used before with other arguments or by another caller;"
                " choose a new UUID for each grant that is wanted",
                reason="REQUEST_ID_REUSED",
                metadata={"request_id": request_id},
            )
        return found

    def grant(
        self,
        order: Order,
        gpus: Iterable[ReservedGpu],
        *,
        now: float,
        wall: datetime,
        wait: float | None = None,
    ) -> Reservation:
        """Hold free GPUs under a new fence, PENDING until it is on disk; with `wait`, keep a place for these seconds."""
        fence = self._fence + 1
        lease = order.ttl if wait is None else wait
        granted = Reservation(
            id=self._new_id(),
            fence=fence,
            request_id=order.request_id,
            fingerprint=order.fingerprint,
            holder=order.holder,
            owner=order.owner,
            made_by=order.made_by,
            labels=order.labels,
            policy=order.ask.policy,
            gpus=tuple(gpus),
            ttl=lease,
            state=State.PENDING,
            deadline=now + lease,
            created=wall,
            tenant=order.tenant,
            priority=order.priority,
            preemptible=order.preemptible,
            cpu_milli=order.ask.cpu_milli,
            host_memory_bytes=order.ask.host_memory_bytes,
            member_count=order.ask.member_count,
            job=order.job,
            wanted=Wanted(order.ask, order.ttl, order.may_preempt, 0 if wait is None else fence, order.limit)
            if wait is not None or MOVABLE_LABEL in order.labels
            else None,
            until=now + lasts if wait is None and (lasts := order.lasts) else None,
        )
        self._add(granted)
        self._fence = fence  # a refused one spends none
        self._granted_at[granted.id] = now
        return granted

    def begin(
        self, reservation_id: str, gpus: Iterable[ReservedGpu], now: float, limit: float = 0.0
    ) -> Reservation:
        """Have a reservation that waits hold free GPUs under a new fence, with a lease that starts now, for `limit` at most.

        It is seen at once; a call that changes it is answered once that is on disk. FailedPreconditionError if it has
        ended.
        """
        before = self.expect_open(self.get(reservation_id))
        if not before.waiting or before.wanted is None:
            raise ValueError(f"reservation {reservation_id} does not wait")
        ttl = before.wanted.ttl
        after = replace(before, fence=self._fence + 1, gpus=tuple(gpus), ttl=ttl, deadline=now + ttl)
        after.until = now + limit if limit else None
        self._hold_instead(after)
        self._fence, self._granted_at[after.id] = after.fence, now
        return after

    def _hold_instead(self, after: Reservation) -> None:
        """Put a reservation in place of what it was, as the newest: they are kept by fence."""
        self._use.free(after.id)
        self._use.hold(after)
        del self._reservations[after.id], self._live[after.id]
        self._put(after)

    def confirm(self, granted: Reservation) -> Reservation:
        """Make a granted reservation ACTIVE: it is on disk."""
        return self._put(activated(granted))

    def withdraw(self, granted: Reservation) -> None:
        """Take back a granted reservation whose write failed: nobody was told of it. Its fence stays used."""
        self._drop(granted.id)

    def renew(
        self, reservation_id: str, fence: int, ttl: float | None, now: float, member: JobMember | None = None
    ) -> Reservation:
        """Start the lease anew from now, with another ttl if one is given; `member` is what is known of one of its job.

        A lease that ran out but was not ended yet is renewed like any other: its GPUs are still its own.
        FailedPreconditionError if it has ended or the fence is another's.
        """
        found = self.get(reservation_id)
        found = self.expect_open(found if fence == found.first_fence else self.expect(reservation_id, fence))
        job = found.job
        if member is not None:
            if job is None or member.member >= found.member_count:
                raise InvalidArgumentError(
                    f"reservation {reservation_id} has no job with a member {member.member}", field="member"
                )
            nodes = {gpu.member: gpu.node for gpu in found.gpus}
            job = job.with_member(member, nodes, now, found.ttl)
        if found.waiting:
            return found if member is None else self._put(moved(found, job=job))
        lease = found.ttl if ttl is None else ttl
        return self._put(moved(found, ttl=lease, deadline=now + lease, job=job))

    def revoke(self, reservation_id: str, at: float | None, reason: str) -> Reservation:
        """Say that a reservation will be taken away at a time, and why; None takes that back.

        It is due then, whatever its lease; until then it is renewed like any other. A time that was set before and is
        earlier stays. FailedPreconditionError if it has ended or is ending.
        """
        found = self.expect_open(self.get(reservation_id))
        if at is not None and found.revoke_at is not None and found.revoke_at <= at:
            return found
        return self._put(moved(found, revoke_at=at, end_reason="" if at is None else reason))

    def undo(self, before: Reservation, after: Reservation) -> None:
        """Take back a renewal or revocation whose write failed, unless the reservation has changed since."""
        if self._live.get(after.id) is not after:
            return
        if before.fence == after.fence:
            self._put(before)
        else:
            self._hold_instead(before)

    def release(self, reservation_id: str, fence: int, *, now: float, wall: datetime) -> Reservation:
        """`close` with RELEASED; what has ended is returned as it is. FailedPreconditionError if the fence is another's."""
        found = self.expect(reservation_id, fence)
        return self.close(found, State.RELEASED, now=now, wall=wall) if found.live else found

    def close(
        self,
        reservation: Reservation,
        state: State,
        *,
        now: float,
        wall: datetime,
        reason: str = "",
        lost: Collection[str] = (),
    ) -> Reservation:
        """Begin to end a live reservation: from here it takes no renewal; its GPUs stay held until `settle`.

        `reason` says why in words; `lost` names the GPUs of it that have vanished. ValueError if it is being closed
        already.
        """
        if reservation.id in self._closing:
            raise ValueError(f"reservation {reservation.id} is being closed already")
        why = self._closing[reservation.id] = reason or reservation.end_reason
        gpus = reservation.gpus
        if lost:
            gpus = tuple(replace(gpu, lost=True) if gpu.uuid in lost else gpu for gpu in gpus)
        return moved(
            reservation,
            state=state,
            gpus=gpus,
            deadline=now + RETENTION,
            ended=wall,
            revoke_at=None,
            until=None,
            end_reason=why,
        )

    def settle(self, closed: Reservation) -> None:
        """Free the GPUs of a closed reservation: its end is on disk."""
        self._closing.pop(closed.id, None)
        self._live.pop(closed.id, None)
        self._granted_at.pop(closed.id, None)
        self._use.free(closed.id)
        self._put(closed)

    def closing(self, reservation_id: str) -> bool:
        """Whether the end of a reservation is on its way to disk."""
        return reservation_id in self._closing

    def reopen(self, closed: Reservation) -> None:
        """Take back a `close` whose write failed: the reservation lives on and its deadline is due again."""
        self._closing.pop(closed.id, None)
        self._put(self._reservations[closed.id])

    def due(self, now: float, limit: int) -> list[Reservation]:
        """At most `limit` reservations whose time has come: live ones to end, ended ones to forget.

        Each is named once; what is not ended or forgotten then must be given to `postpone`. Those with a write on
        its way (PENDING or closing) are left out: that write's outcome brings them back.
        """
        found: list[Reservation] = []
        while len(found) < limit and (reservation_id := self._deadlines.pop(now)) is not None:
            reservation = self._reservations.get(reservation_id)
            if reservation is None or reservation.state is State.PENDING or reservation_id in self._closing:
                continue
            if due_at(reservation) > now:
                self._deadlines.add(reservation_id, due_at(reservation))
            else:
                found.append(reservation)
        return found

    def postpone(self, reservation: Reservation) -> None:
        """Let a reservation that `due` named be named again."""
        self._deadlines.add(reservation.id, due_at(reservation))

    def forget(self, ended: Reservation) -> None:
        """Drop the record of an ended reservation, if it is here; on disk it may be kept."""
        if ended.id in self._reservations:
            self._drop(ended.id)

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Take in what the disk holds, oldest first; ValueError if more of a GPU is held than there is."""
        for reservation in reservations:
            if reservation.id not in self._reservations:
                self._fence = max(self._fence, reservation.fence)
                self._add(reservation)

    def expect(self, reservation_id: str, fence: int) -> Reservation:
        """The reservation that a caller knows the fence of; FailedPreconditionError if it is another's."""
        found = self.get(reservation_id)
        if fence != found.fence:
            raise FailedPreconditionError(
                f"fence {fence} is not the one of reservation {reservation_id};"
                " use the fence that came with the grant",
                reason="FENCE_MISMATCH",
                metadata={"reservation": reservation_id},
            )
        return found

    def expect_open(self, found: Reservation) -> Reservation:
        """The reservation; FailedPreconditionError if it has ended or is ending."""
        if not found.live or found.id in self._closing:
            why = self._closing.get(found.id, "") if found.live else found.end_reason
            raise FailedPreconditionError(
                f"reservation {found.id} has ended ({'ending' if found.live else found.state.value})"
                + (f": {why}" if why else "")
                + "; reserve anew: its GPUs may be another's",
                reason="RESERVATION_ENDED",
                metadata={"reservation": found.id},
            )
        return found

    def _add(self, reservation: Reservation) -> None:
        if reservation.live:
            self._use.hold(reservation)
        self._by_request[reservation.request_id] = reservation.id
        self._put(reservation)

    def _put(self, reservation: Reservation) -> Reservation:
        self._reservations[reservation.id] = reservation
        if reservation.live:
            self._live[reservation.id] = reservation
        else:
            self._ended[reservation.id] = None
        self._deadlines.add(reservation.id, due_at(reservation))
        return reservation

    def _drop(self, reservation_id: str) -> None:
        dropped = self._reservations.pop(reservation_id)
        del self._by_request[dropped.request_id]
        self._live.pop(reservation_id, None)
        self._ended.pop(reservation_id, None)
        self._granted_at.pop(reservation_id, None)
        self._use.free(reservation_id)


def activated(granted: Reservation) -> Reservation:
    """The reservation as it stands once it is on disk: what is written, and what the caller is told."""
    return granted if granted.state is State.ACTIVE else moved(granted, state=State.ACTIVE)


def due_at(reservation: Reservation) -> float:
    """When something is to be done about a reservation: its lease runs out, it is taken away, or forgotten."""
    if reservation.revoke_at is None and reservation.until is None:
        return reservation.deadline
    return min(reservation.deadline, leaves_at(reservation))


def leaves_at(reservation: Reservation) -> float:
    """When a reservation ends at the latest, however often it is renewed: it is taken away then, or has a limit; inf if not."""
    known = (reservation.revoke_at, reservation.until)
    return min((one for one in known if one is not None), default=float("inf"))


def rebased(reservation: Reservation, now: float) -> Reservation:
    """A reservation of an earlier boot: nobody watched its clock, so its time starts anew in full.

    What is left until it is taken away is counted from its last renewal, which is the latest moment known of that boot.
    """
    kept = reservation.ttl if reservation.live else RETENTION
    renewed = reservation.deadline - reservation.ttl
    revoke_at, until = (
        one if one is None else now + max(0.0, one - renewed)
        for one in (reservation.revoke_at, reservation.until)
    )
    job = reservation.job.unheard() if reservation.job else None
    return moved(reservation, deadline=now + kept, revoke_at=revoke_at, until=until, job=job)


KEY_PARTS = 4
"""The key is kept as so many numbers of 63 bits."""
_HALF = 8


class Tokens:
    """Makes the tokens of one key, which is `KEY_PARTS` random numbers, and knows them again."""

    def __init__(self, key: Sequence[int]) -> None:
        self._key = b"".join(part.to_bytes(8, "big") for part in key)

    def of_lease(self, reservation: Reservation) -> str:
        """The lease token of a reservation: 43 characters of HMAC-SHA256 (RFC 2104) over its id and first fence."""
        return _text(self._digest(f"{reservation.id} {reservation.first_fence}".encode()))

    def proves(self, token: str, reservation: Reservation) -> bool:
        """Whether a token is the lease token of a reservation; the time that this takes tells nothing of it."""
        return hmac.compare_digest(token.encode(), self.of_lease(reservation).encode())

    def of_page(self, fence: int) -> str:
        """The token of the page after the reservation with this fence, which it hides."""
        body = fence.to_bytes(_HALF, "big")
        mark = self._digest(b"page" + body)[:_HALF]
        return _text(mark + self._masked(mark, body))

    def fence_of_page(self, token: str) -> int:
        """The fence that `of_page` hid; InvalidArgumentError if no page returned the token."""
        try:
            raw = b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        fence = int.from_bytes(self._masked(raw[:_HALF], raw[_HALF:]), "big") if len(raw) == 2 * _HALF else 0
        if not hmac.compare_digest(self.of_page(fence).encode(), token.encode()):
            raise InvalidArgumentError(
                "page_token is not one that a page of this list returned", field="page_token"
            )
        return fence

    def _masked(self, mark: bytes, body: bytes) -> bytes:
        """The body hidden, or shown again, by a mask that depends on the mark."""
        return bytes(one ^ other for one, other in zip(body, self._digest(b"mask" + mark), strict=False))

    def _digest(self, message: bytes) -> bytes:
        return hmac.digest(self._key, message, "sha256")


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")
