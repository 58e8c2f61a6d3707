"""The ledger: the state machine of reservations, their leases, fences, request ids and lease tokens. Pure.

    PENDING ──confirm──> ACTIVE ──close/settle──> RELEASED | EXPIRED | CANCELLED | LOST ──forget──> gone
       └──withdraw──> gone (never acknowledged)

Every change that must be on disk before anybody sees it has two halves. `grant` and `close` precede the write: a granted GPU is
held at once; a closed reservation still holds its GPUs but accepts no renewals. `confirm` and `settle` follow the write,
`withdraw` and `reopen` a failed one. So a GPU is free only when it is free on disk as well, and nobody can look up or list what
is not on disk yet. Times are seconds of CLOCK_BOOTTIME, `wall` is for display.

Lease tokens and page tokens are derived from a stored key, so they stay valid across retries, restarts and failover, and
nothing is stored per grant or page.
"""

import binascii
import heapq
import hmac
from base64 import b64decode
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from math import inf
from os import urandom
from types import MappingProxyType

from gpuscale.allocator.domain.jobs import JobMember
from gpuscale.allocator.domain.model import (
    LIVE,
    MOVABLE_LABEL,
    Order,
    Reservation,
    ReservedGpu,
    State,
    Use,
    Wanted,
    moved,
)
from gpuscale.common import errors
from gpuscale.common.names import reservation_name


class Deadlines:
    """Keys by the time at which they are due.

    A deadline that moves later leaves its entry in place: the key comes up early and the caller adds it again. So a lease
    renewed every second for a week still has one entry.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}

    def add(self, key: str, deadline: float) -> None:
        """Queue the key for `deadline`, unless it is already queued earlier."""
        if deadline < self._queued.get(key, inf):
            self._queued[key] = deadline
            heapq.heappush(self._heap, (deadline, key))

    def earliest(self) -> float | None:
        """When the next key is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> str | None:
        """Take out a key that is due; None if there is none."""
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heapq.heappop(self._heap)
            if self._queued.get(key) == deadline:
                del self._queued[key]
                return key
        return None


_PENDING = State.PENDING  # looked up in an enum, a member takes as long as a call
RETENTION = 14 * 86_400.0
"""Seconds for which an ended reservation is kept, for late retries of its request and for look-ups."""


AT_ONCE = 256
"""Reservations that are read of their order in one step."""

_LETTERS = b"abcdefghijklmnopqrstuvwxyz234567" * 8


def random_id(wall: float) -> str:
    """A new id, never reused: of the time, in steps of 1/64 s, so that a batch writes few pages of indexes, and 45 random bits."""
    step = int(64 * wall)
    letters = bytes((step >> 10 & 31, step >> 5 & 31, step & 31))
    return "r" + (letters + urandom(9)).translate(_LETTERS).decode()


class Ledger:
    """All reservations in memory, live and ended, and the highest fence ever given: new ones are higher than `fence`."""

    def __init__(self, fence: int = 0, new_id: Callable[[float], str] = random_id) -> None:
        self.fence = fence
        self._new_id = new_id
        self._reservations: dict[str, Reservation] = {}
        self._live: dict[str, Reservation] = {}
        self.live: Mapping[str, Reservation] = MappingProxyType(self._live)
        """The reservations that hold GPUs, by id, including those not on disk yet."""
        self._by_request: dict[str, str] = {}
        self._ended: dict[str, None] = {}
        self._by_fence: dict[str, tuple[list[int], list[int]]] = {"": ([], [])}
        """Fences, in their order, of the ended, and of the live: of each holder, and of all ("")."""
        self._of_fence: dict[int, str] = {}
        self.use = Use()
        """What live reservations hold of GPUs and nodes; always current."""
        self._closing: dict[str, str] = {}  # why each ends
        self._granted_at: dict[str, float] = {}
        self._deadlines = Deadlines()

    def get(self, reservation_id: str) -> Reservation:
        """Look up a reservation; NotFoundError if there is none, or none yet, or it was forgotten."""
        found = self._reservations.get(reservation_id)
        if found is None or found.state is _PENDING:
            raise errors.NotFoundError(
                f"no reservation {reservation_id}: it never existed, or ended so long ago that it was forgotten",
                metadata={"name": reservation_name(reservation_id)},
            )
        return found

    def reservations(
        self, *, ended: bool, after: int = 0, holder: str = "", gpu: str = "", node: str = ""
    ) -> Iterator[Reservation]:
        """The reservations on disk with fences above `after`, oldest first; with `ended`, ended ones too.

        With `holder`, those of that one; of live ones, only those on a `gpu` (or an instance of it), or else on a `node`.
        They may come, go and change between two of them.
        """
        kept = self._reservations if ended else self._live
        while True:
            over, live = self._by_fence.get(holder, ([], []))
            if gpu or node:
                names = self.use.holders(gpu) if gpu else self.use.node(node).reservations
                there = (one for one in map(self._live.get, names) if one and holder in {"", one.holder})
                live = sorted(one.fence for one in there)
            orders = (live, over) if ended else (live,)
            starts = ((order, bisect_right(order, after)) for order in orders)
            fences = sorted(fence for order, at in starts for fence in order[at : at + AT_ONCE])[:AT_ONCE]
            if not fences:
                return
            for fence in fences:
                one = kept.get(self._of_fence.get(fence, ""))
                if one is not None and one.state is not _PENDING:
                    yield one
            after = fences[-1]

    def live_since(self, fence: int) -> list[Reservation]:
        """The live reservations with higher fences, oldest first, including those not on disk yet."""
        _, order = self._by_fence[""]
        return [self._live[self._of_fence[one]] for one in order[bisect_right(order, fence) :]]

    def knows(self, reservation_id: str = "", request_id: str = "") -> bool:
        """Whether a reservation is in memory, by its id or its request id."""
        return reservation_id in self._reservations or request_id in self._by_request

    @property
    def ended_count(self) -> int:
        """The number of ended reservations in memory."""
        return len(self._ended)

    def first_ended(self, limit: int) -> list[Reservation]:
        """At most `limit` ended reservations, those that ended first."""
        return [self._reservations[key] for key in islice(self._ended, limit)]

    def granted_at(self, reservation_id: str) -> float | None:
        """When a live reservation was granted; None if it was restored from disk, or there is none."""
        return self._granted_at.get(reservation_id)

    def next_deadline(self) -> float | None:
        """When something is due next; None while nothing is kept."""
        return self._deadlines.earliest()

    def replay(self, request_id: str, fingerprint: str) -> Reservation | None:
        """What an earlier call with the same request id was granted; AlreadyExistsError if its arguments differ."""
        known = self._by_request.get(request_id)
        if known is None:
            return None
        found = self._reservations[known]
        if found.fingerprint != fingerprint:
            raise errors.request_id_reused(request_id)
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
        fence = self.fence + 1
        lease = order.ttl if wait is None else wait
        granted = Reservation(
            id=self._new_id(wall.timestamp()),
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
            state=_PENDING,
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
        self.fence = fence  # a refused one spends none
        self._granted_at[granted.id] = now
        return granted

    def begin(
        self, reservation_id: str, gpus: Iterable[ReservedGpu], now: float, wall: datetime, limit: float
    ) -> Reservation:
        """Let a waiting reservation hold free GPUs under a new fence; its lease starts now and lasts `limit` at most.

        This is visible at once; calls that change the reservation are answered once it is on disk. FailedPreconditionError if
        it has ended.
        """
        before = self.expect_open(self.get(reservation_id))
        if not before.waiting or before.wanted is None:
            raise ValueError(f"reservation {reservation_id} does not wait")
        ttl = before.wanted.ttl
        after = replace(before, fence=self.fence + 1, gpus=tuple(gpus), ttl=ttl, deadline=now + ttl)
        after.wanted = before.wanted if before.wanted.first else replace(before.wanted, granted=wall)
        after.until = now + limit if limit else None
        self._hold_instead(after)
        self.fence, self._granted_at[after.id] = after.fence, now
        return after

    def leave(self, reservation_id: str, ended: JobMember, wait: float, now: float) -> Reservation:
        """Let a reservation whose job `ended` an attempt wait again for what it wanted, under a new fence.

        Its GPUs stay held until the caller frees them in `use`, once that is on disk. A time limit keeps its remainder.
        FailedPreconditionError if it has ended.
        """
        before = self.expect_open(self.get(reservation_id))
        if before.waiting or before.wanted is None or before.job is None:
            raise ValueError(f"reservation {reservation_id} cannot restart")
        limit = 0.0 if before.until is None else max(1.0, before.until - now)
        self.fence += 1
        wanted = replace(before.wanted, fence=self.fence, first=before.first_fence, limit=limit)
        after = replace(before, fence=self.fence, gpus=(), ttl=wait, deadline=now + wait, wanted=wanted)
        after.revoke_at, after.until, after.end_reason, after.job = None, None, "", before.job.again(ended)
        return self._put(after)

    def _hold_instead(self, after: Reservation) -> None:
        self.use.free(after.id)
        self.use.hold(after)
        self._put(after)

    def confirm(self, granted: Reservation) -> Reservation:
        """Make a granted reservation ACTIVE: it is on disk. Nobody was told of it before, so it is changed in place."""
        found = self._reservations[granted.id]
        found.state = State.ACTIVE
        self.postpone(found)  # its deadline may have come up meanwhile
        return found

    def withdraw(self, granted: Reservation) -> None:
        """Undo a grant whose write failed: nobody was told of it. Its fence stays used."""
        self.forget(granted)

    def renew(
        self, reservation_id: str, fence: int, ttl: float | None, now: float, member: JobMember | None = None
    ) -> Reservation:
        """Restart the lease now, with a new ttl if given; `member` is the state of one member of its job.

        A lease that has run out but not been ended can be renewed: its GPUs are still its own. FailedPreconditionError if it
        has ended or the fence is another's.
        """
        found = self.get(reservation_id)
        job, first = found.job, found.first_fence
        again = job is not None and job.attempt > 1  # then its earlier attempts are no longer reported
        if not (member is None and first <= fence <= found.fence if again else fence == first):
            self.expect(reservation_id, fence)
        self.expect_open(found)
        if member is not None:
            if job is None or member.member >= found.member_count:
                raise errors.InvalidArgumentError(
                    f"reservation {reservation_id} has no job with a member {member.member}", field="member"
                )
            nodes = {gpu.member: gpu.node for gpu in found.gpus}
            job = job.with_member(member, nodes, now, found.ttl)
        if found.waiting:
            return found if member is None else self._put(moved(found, job=job))
        lease = found.ttl if ttl is None else ttl
        return self._put(moved(found, ttl=lease, deadline=now + lease, job=job))

    def revoke(self, reservation_id: str, at: float | None, reason: str) -> Reservation:
        """Schedule the revocation of a reservation, with a reason; `at` None cancels it.

        It is due then, whatever its lease, and can be renewed until then. An earlier time that was set before stays.
        FailedPreconditionError if it has ended or is ending.
        """
        found = self.expect_open(self.get(reservation_id))
        if at is not None and found.revoke_at is not None and found.revoke_at <= at:
            return found
        return self._put(moved(found, revoke_at=at, end_reason="" if at is None else reason))

    def undo(self, before: Reservation, after: Reservation) -> None:
        """Undo a renewal or revocation whose write failed, unless the reservation has changed since."""
        if self._live.get(after.id) is not after:
            return
        if before.fence == after.fence:
            self._put(before)
        else:
            self._hold_instead(before)

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
        """Start to end a live reservation: it accepts no more renewals, but holds its GPUs until `settle`.

        `reason` is for people; `lost` names GPUs of it that have vanished. ValueError if it is already being closed.
        """
        if reservation.id in self._closing:
            raise ValueError(f"reservation {reservation.id} is already being closed")
        why = self._closing[reservation.id] = reason or reservation.end_reason
        gpus = reservation.gpus
        if lost:
            gpus = tuple(replace(gpu, lost=True) if gpu.uuid in lost else gpu for gpu in gpus)
        closed = moved(reservation, state=state)
        closed.gpus, closed.deadline, closed.ended, closed.end_reason = gpus, now + RETENTION, wall, why
        closed.revoke_at = closed.until = None
        return closed

    def settle(self, closed: Reservation) -> None:
        """Free the GPUs of a closed reservation: its end is on disk."""
        self._closing.pop(closed.id, None)
        self._live.pop(closed.id, None)
        self._granted_at.pop(closed.id, None)
        self.use.free(closed.id)
        self._put(closed)

    def closing(self, reservation_id: str) -> bool:
        """Whether the end of a reservation is being written."""
        return reservation_id in self._closing

    def reopen(self, closed: Reservation) -> None:
        """Undo a `close` whose write failed: the reservation lives on and its deadline is due again."""
        self._closing.pop(closed.id, None)
        self._put(self._reservations[closed.id])

    def due(self, now: float, limit: int) -> list[Reservation]:
        """At most `limit` due reservations: live ones to end, ended ones to forget.

        Each is returned once; give those that were not ended or forgotten to `postpone`. Those being written (PENDING or
        closing) are left out: the outcome of the write brings them back.
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
        """Let `due` return a reservation again."""
        self._deadlines.add(reservation.id, due_at(reservation))

    def forget(self, one: Reservation) -> None:
        """Drop a reservation from memory, if it is there; it may still be on disk."""
        dropped = self._reservations.pop(one.id, None)
        if dropped is None:
            return
        del self._by_request[dropped.request_id]
        fence, live = dropped.fence, dropped.live
        del self._of_fence[fence]
        for holder in {"", dropped.holder}:
            orders = self._by_fence[holder]
            at = bisect_left(orders[live], fence)
            del orders[live][orders[live].index(fence, at, at + 1)]  # never another's: ValueError
            if holder and not any(orders):
                del self._by_fence[holder]
        self._live.pop(one.id, None)
        self._ended.pop(one.id, None)
        self._granted_at.pop(one.id, None)
        self.use.free(one.id)

    def restore(self, reservations: Iterable[Reservation]) -> None:
        """Load the reservations on disk, oldest first; ValueError if more of a GPU is held than there is."""
        for reservation in reservations:
            if reservation.id not in self._reservations:
                self.fence = max(self.fence, reservation.fence)
                self._add(reservation)

    def expect(self, reservation_id: str, fence: int) -> Reservation:
        """The reservation, if the fence is its own; FailedPreconditionError if it is another's."""
        found = self.get(reservation_id)
        if fence != found.fence:
            raise errors.FailedPreconditionError(
                f"fence {fence} does not belong to reservation {reservation_id};"
                " use the fence returned with the grant",
                reason="FENCE_MISMATCH",
                metadata={"reservation": reservation_id},
            )
        return found

    def expect_open(self, found: Reservation) -> Reservation:
        """The reservation, if it is open; FailedPreconditionError if it has ended or is ending."""
        if not found.live or found.id in self._closing:
            why = self._closing.get(found.id, "") if found.live else found.end_reason
            raise errors.FailedPreconditionError(
                f"reservation {found.id} has ended ({'ending' if found.live else found.state.value})"
                + (f": {why}" if why else "")
                + "; reserve again: its GPUs may have been granted to others",
                reason="RESERVATION_ENDED",
                metadata={"reservation": found.id},
            )
        return found

    def _add(self, reservation: Reservation) -> None:
        if reservation.live:
            self.use.hold(reservation)
        self._by_request[reservation.request_id] = reservation.id
        self._put(reservation)

    def _put(self, reservation: Reservation) -> Reservation:
        before, live = self._reservations.get(reservation.id), reservation.live
        self._reservations[reservation.id] = reservation
        if live:
            self._live[reservation.id] = reservation
        else:
            self._ended[reservation.id] = None
        fence = reservation.fence
        if before is None or before.fence != fence or not live:
            if before is not None:
                del self._of_fence[before.fence]
            self._of_fence[fence] = reservation.id
            for holder in {"", reservation.holder}:
                orders = self._by_fence.get(holder) or self._by_fence.setdefault(holder, ([], []))
                if before is not None:
                    order = orders[before.state in LIVE]
                    at = bisect_left(order, before.fence)
                    del order[order.index(before.fence, at, at + 1)]  # never another's: ValueError
                insort(orders[live], fence)
        self._deadlines.add(reservation.id, due_at(reservation))
        return reservation


def due_at(reservation: Reservation) -> float:
    """When a reservation needs action: its lease runs out, it is revoked, or its record is forgotten."""
    if reservation.revoke_at is None and reservation.until is None:
        return reservation.deadline
    return min(reservation.deadline, leaves_at(reservation))


def leaves_at(reservation: Reservation) -> float:
    """When a reservation ends at the latest, however often it is renewed: revoked or at its limit; inf if neither."""
    at, until = reservation.revoke_at, reservation.until
    return min(inf if at is None else at, inf if until is None else until)


def rebased(reservation: Reservation, now: float) -> Reservation:
    """A reservation of an earlier boot: nobody watched its clock, so its full time starts again.

    The time until a revocation is counted from the last renewal, the latest known moment of that boot.
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
"""The key is stored as this many numbers of 63 bits."""
_HALF = 8
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class Tokens:
    """Makes and verifies the tokens of one key of `KEY_PARTS` random numbers, which is hashed once and not for each message."""

    def __init__(self, key: Sequence[int]) -> None:
        self._keyed = hmac.new(b"".join(part.to_bytes(8, "big") for part in key), digestmod="sha256")

    def of_lease(self, reservation: Reservation) -> str:
        """The lease token of a reservation: 43 characters of HMAC-SHA256 (RFC 2104) over its id and first fence."""
        return _text(self._digest(f"{reservation.id} {reservation.first_fence}".encode()))

    def proves(self, token: str, reservation: Reservation) -> bool:
        """Whether a token is the lease token of a reservation, compared in constant time."""
        return hmac.compare_digest(token.encode(), self.of_lease(reservation).encode())

    def of_page(self, fence: int) -> str:
        """The token of the page after the reservation with this fence, which it hides."""
        body = fence.to_bytes(_HALF, "big")
        mark = self._digest(b"page" + body)[:_HALF]
        return _text(mark + self._masked(mark, body))

    def fence_of_page(self, token: str) -> int:
        """The fence hidden by `of_page`; InvalidArgumentError if the token is not from a page."""
        try:
            raw = b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        fence = int.from_bytes(self._masked(raw[:_HALF], raw[_HALF:]), "big") if len(raw) == 2 * _HALF else 0
        if not hmac.compare_digest(self.of_page(fence).encode(), token.encode()):
            raise errors.InvalidArgumentError("page_token was not returned by this list", field="page_token")
        return fence

    def _masked(self, mark: bytes, body: bytes) -> bytes:
        """The body XORed with a mask derived from the mark; applying it twice restores it."""
        return bytes(one ^ other for one, other in zip(body, self._digest(b"mask" + mark), strict=False))

    def _digest(self, message: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(message)
        return keyed.digest()


def _text(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).translate(_URL_SAFE, b"=").decode()
