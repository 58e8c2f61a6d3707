"""Use cases of requesting GPUs: reserve, one request or several, at once or after a wait in the queue.

There is no await from the first look at the ledger to the hold, so no other call can interfere: two callers never get the same
GPU. The answer leaves only once the change is on disk.

`Waiting` runs the rounds of the queue. They run when something changed (new room, a request that came or left, a new quota),
never on a timer, except when a lease becomes old enough to be preempted. Other work may run between two steps of a round; a
caller who wants an answer at once finishes the round first, so nobody is passed over.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import PREEMPTED_FOR, Order, Pick, Reservation
from gpuscale.allocator.placing.refusal import Reconsider, Refusal, RefusalKind
from gpuscale.allocator.queueing import model
from gpuscale.allocator.queueing.queue import MOST_FORESEEN, Queue
from gpuscale.allocator.state.archive import Archive
from gpuscale.allocator.state.commits import Commits, Outcome
from gpuscale.allocator.usecases.fleet import FleetFollower, FleetView
from gpuscale.common import errors
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.sizes import counted

MOST_CALLS = 256
"""Most concurrent waits: half of the calls that the server handles, so that GPUs can still be released."""
NEWS_GAP, MOST_NEWS_GAP = 0.25, 10.0
"""Least seconds between two messages on the first places in the queue, and on the last: each grant moves all behind it."""
PLACES_A_GAP = 16
"""The gap grows by its own length for each this many places."""
PART_TOLD = 8
"""Places without a forecast are reported again after changing by this part: each grant moves all of them."""
JOINED_GAP = 0.1
"""Seconds for which new requests are collected into a round, if nothing else needs one."""
FORESEE_AGAIN = 30.0
"""Seconds after which a waiting request gets a new forecast even without other changes."""
FORESEE_GAP, _FORESEE_REST = 3.0, 100.0
"""Least seconds between two forecasts, and the pause after one as a multiple of its time."""
REVOKE_AGAIN = 1.0
"""Seconds after which a failed revocation is retried."""
_SLICE = 0.005
"""Seconds after which a round lets other work run."""
_REST = 2.0
"""The pause after a round as a multiple of its time: rounds take at most a third of a core, however many wait."""


@dataclass(eq=False)
class _Entry:
    """A waiting request, of one caller or of several that repeat it; `granted` becomes the reservation's id."""

    waiter: model.Waiter
    granted: asyncio.Future[str]
    callers: int = 0
    bells: set[asyncio.Event] = field(default_factory=set[asyncio.Event])
    rung: model.QueuePlace | None = None

    def ring(self) -> None:
        self.rung = self.waiter.place
        for bell in self.bells:
            bell.set()


def _is_news(place: model.QueuePlace, told: model.QueuePlace | None) -> bool:
    """Whether a new place is worth telling: any change among the first, and a significant one further back."""
    if told is None or place.position < MOST_FORESEEN:
        return place != told
    moved = abs(place.position - told.position) * PART_TOLD >= told.position
    return moved or place.obstacle.reason is not told.obstacle.reason


class Waiting:
    """Carries out the queue's decisions and informs those who wait. `run` must run."""

    def __init__(self, queue: Queue, *, ledger: Ledger, commits: Commits, grace: float, clock: Clock) -> None:
        self._queue = queue
        self._ledger = ledger
        self._commits = commits
        self._grace = grace
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._round: Iterator[model.Step] | None = None
        self._wake = asyncio.Event()
        self._calls = 0
        self._served: Outcome | None = None
        self._foreseeing = asyncio.Lock()
        self._foresee_again = 0.0
        self._foreseen_to = 0

    def changed(self, nodes: Iterable[str] | None = None) -> None:
        """Room may have appeared on these nodes, or anywhere; none of them: a quota may admit more."""
        if len(self._queue):
            self._queue.changed(nodes)
            self._wake.set()

    def look(self, order: Order, now: float) -> Pick | Refusal | model.QueueObstacle:
        """Check once whether an order can be served after everyone ahead of it."""
        while self._round is not None or self._queue.pressing:
            self._advance()
        found = self._queue.look(order, now)
        if self._queue.due:
            self._wake.set()
        return found

    def knows(self, order: Order) -> bool:
        """Whether the request waits; AlreadyExistsError if it waits with other arguments or for another caller."""
        entry = self._entries.get(order.request_id)
        if entry is not None and entry.waiter.order.fingerprint != order.fingerprint:
            raise errors.request_id_reused(order.request_id)
        return entry is not None

    def keep(self, one: Reservation) -> None:
        """Put a waiting reservation into the queue, until it is granted or ends."""
        self._join(one.order(), one.deadline - self._clock.now())

    def note(self, one: Reservation, _told: bool) -> None:
        """A reservation has ended; it may have waited."""
        if one.waiting and (entry := self._entries.get(one.request_id)):
            self._leave(entry)

    def place(self, request_id: str) -> model.QueuePlace | None:
        """The place of a waiting request; None before its first look, or if it does not wait."""
        waiter = self._queue.get(request_id)
        return None if waiter is None or waiter.place is None else self._told(waiter, waiter.place)

    async def foresee(self, waiting: Iterable[Reservation]) -> None:
        """Forecast the wait of these, for `place` to show."""
        for one in waiting:
            if (waiter := self._queue.get(one.request_id)) and waiter.place:
                await self._foresee(waiter, waiter.place)

    def _told(self, waiter: model.Waiter, place: model.QueuePlace) -> model.QueuePlace:
        return place._replace(foreseen=waiter.foreseen, order=self._queue.factors(waiter.order))

    def expect_room(self) -> None:
        """Raises ResourceExhaustedError, QUEUE_FULL, if the queue is full."""
        self._queue.expect_room()

    async def wait(self, order: Order, seconds: float) -> str:
        """Wait in the queue until granted (WAIT_TIMEOUT, QUEUE_FULL); the returned id may not be on disk yet."""
        if self._calls >= MOST_CALLS:
            message = f"{MOST_CALLS} calls already wait, which is the maximum; wait with ReserveAndWatch"
            raise errors.ResourceExhaustedError(
                message, reason="QUEUE_FULL", metadata={"waiting": str(self._calls)}
            )
        self._calls += 1
        entry = self._join(order, seconds)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(entry.granted)
        except TimeoutError:
            return self._too_late(entry, seconds)
        finally:
            self._calls -= 1
            self._leave(entry)

    async def watch(self, order: Order, seconds: float) -> AsyncGenerator[model.QueuePlace | str]:
        """Like `wait`, and yield the place whenever it changes; the last item is the reservation's id."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        bell, entry = asyncio.Event(), self._join(order, seconds)
        entry.bells.add(bell)
        told: model.QueuePlace | None = None
        again, quiet = until, 0.0
        try:
            while not entry.granted.done():
                place, now = entry.waiter.place, loop.time()
                if place is not None and (_is_news(place, told) or again <= now < until):
                    if now < quiet:
                        await asyncio.wait([entry.granted], timeout=quiet - now)
                        continue
                    # The grant being written is answered first; if that fails, places change back.
                    if told and self._served and not self._served.known:
                        with suppress(TimeoutError):
                            async with asyncio.timeout_at(until):
                                await self._served
                    told = place = entry.waiter.place or place
                    again = min(now + FORESEE_AGAIN, until) if place.position < MOST_FORESEEN else until
                    await self._foresee(entry.waiter, place)
                    if entry.granted.done():
                        break
                    yield self._told(entry.waiter, place)
                    gap = min(NEWS_GAP * (1 + place.position / PLACES_A_GAP), MOST_NEWS_GAP)
                    quiet = min(loop.time() + gap, until)
                    continue
                bell.clear()
                try:
                    async with asyncio.timeout_at(again):
                        await bell.wait()
                except TimeoutError:
                    if loop.time() >= until:
                        break
            yield entry.granted.result() if entry.granted.done() else self._too_late(entry, seconds)
        finally:
            entry.bells.discard(bell)
            self._leave(entry)

    async def _foresee(self, asking: model.Waiter, place: model.QueuePlace) -> None:
        """Forecast the wait for everyone, unless that was done a moment ago or is not possible."""
        if place.position >= MOST_FORESEEN:
            return
        async with self._foreseeing:  # callers meanwhile share the next look
            now = self._clock.now()
            if now < self._foresee_again and asking.number <= self._foreseen_to:
                return
            self._foresee_again = now + FORESEE_GAP
            self._foreseen_to = max((entry.waiter.number for entry in self._entries.values()), default=0)
            for found in self._queue.foresee(now):
                if found is not None:
                    found[0].foreseen = found[1]
                await asyncio.sleep(0)
            spent = self._clock.now() - now
            self._foresee_again = now + max(FORESEE_GAP, _FORESEE_REST * spent)

    async def run(self) -> NoReturn:
        """Run rounds for ever."""
        loop = asyncio.get_running_loop()
        while True:
            again = self._queue.look_again
            try:
                async with asyncio.timeout(None if again is None else max(0.0, again - self._clock.now())):
                    await self._wake.wait()
            except TimeoutError:
                self.changed(())
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(JOINED_GAP):
                    while self._round is None and not self._queue.pressing:
                        await self._wake.wait()
                        self._wake.clear()
            spent, began = 0.0, loop.time()
            while self._advance():
                if (now := loop.time()) >= began + _SLICE:
                    spent += now - began
                    await asyncio.sleep(0)
                    began = loop.time()
            spent += loop.time() - began
            await asyncio.sleep(_REST * spent)  # arrivals and ends meanwhile share the next round

    def _advance(self) -> bool:
        """Carry out one step of the round; False when none is due."""
        if self._round is None:
            if not self._queue.due:
                return False
            self._round = self._queue.round(self._clock.now())
        match next(self._round, None):
            case None:
                self._round = None
            case model.Grant(waiter, pick):
                entry = self._entries.pop(waiter.order.request_id)
                entry.granted.set_result(self.grant(waiter.order, pick))
                entry.ring()
            case model.Revoke(waiter, leases):
                # Victims are told when they have to leave. A failed write is undone; the next round chooses again.
                at, order = self._clock.now() + self._grace, waiter.order
                reason = f"{PREEMPTED_FOR}a request of {order.tenant} with priority {order.priority}"
                before = [self._ledger.get(lease) for lease in leases]
                after = [self._ledger.revoke(one.id, at, reason) for one in before]

                def settled(error: errors.GpuscaleError | None) -> None:
                    if error is not None:
                        asyncio.get_running_loop().call_later(REVOKE_AGAIN, self.changed, ())

                self._commits.change(before, after).on_settled(settled)
            case model.Looked(_, moved):
                if self._served is None or self._served.known:
                    self._ring(moved)
                else:
                    self._ring(moved, new=True)
                    self._served.on_settled(lambda _: self._ring(moved))
        return True

    def _ring(self, moved: Iterable[model.Waiter], *, new: bool = False) -> None:
        """Wake the watchers of waiters whose place has news; with `new`, only those that were never woken."""
        for waiter in moved:
            waits, place = self._entries.get(waiter.order.request_id), waiter.place
            if waits and place and not (new and waits.rung) and _is_news(place, waits.rung):
                waits.ring()

    def grant(self, order: Order, pick: Pick) -> str:
        """Hold a pick; returns the id of the reservation."""
        now, wall = self._clock.now(), self._clock.wall()
        if not order.reservation_id:
            granted = self._ledger.grant(order, pick.gpus, now=now, wall=wall)
            self._served = self._commits.grant([granted])
            return granted.id
        if not self._ledger.closing(order.reservation_id):
            before = self._ledger.get(order.reservation_id)
            after = self._ledger.begin(before.id, pick.gpus, now, wall, order.lasts)

            def settled(error: errors.GpuscaleError | None) -> None:
                if error is not None and before.id in self._ledger.live:
                    self.keep(before)

            self._served = self._commits.change([before], [after])
            self._served.on_settled(settled)
        return order.reservation_id

    def _join(self, order: Order, seconds: float) -> _Entry:
        now = self._clock.now()
        entry = self._entries.get(order.request_id)
        if entry is None:
            waiter = self._queue.add(order, now, now + seconds)
            entry = _Entry(waiter, asyncio.get_running_loop().create_future())
            self._entries[order.request_id] = entry
            self._wake.set()
        if entry.waiter.until < now + seconds:
            entry.waiter.until = now + seconds
            self.changed(())  # leases may be worth ending for it now
        entry.callers += 1
        return entry

    def _leave(self, entry: _Entry) -> None:
        """One caller less; without any the request leaves the queue, unless it was granted."""
        entry.callers -= 1
        if entry.callers or entry.granted.done():
            return
        del self._entries[entry.waiter.order.request_id]
        self._queue.remove(entry.waiter)
        if self._queue.due:
            self._wake.set()

    def _too_late(self, entry: _Entry, seconds: float) -> str:
        """The wait is over: granted at the last moment, or not at all."""
        if entry.granted.done():
            return entry.granted.result()
        place = entry.waiter.place
        said = place and f", {counted(place.position, 'request')} before it: {place.obstacle.message}"
        message = f"not served within {seconds:g} s{said or ''}"
        raise errors.ResourceExhaustedError(
            message,
            reason="WAIT_TIMEOUT",
            metadata={"waited_seconds": f"{seconds:g}"}
            | ({"last_reason": place.obstacle.reason} if place else {}),
        )


_RETRY_EMPTY = 5.0
_RETRY_LIMITS = (1.0, 30.0)


@dataclass(frozen=True, slots=True)
class Reserving:
    """Grants. Methods raise errors of `gpuscale.common.errors`, as in the contract."""

    ledger: Ledger
    waiting: Waiting
    view: FleetView
    follower: FleetFollower
    commits: Commits
    archive: Archive
    clock: Clock
    expect_own: Callable[[Order], None]
    reconsider: Reconsider

    async def reserve(self, order: Order, wait: float = 0.0) -> Reservation:
        """Grant GPUs, waiting at most `wait` seconds, or return what the same request was granted before.

        For an order that is to `keep` its place, a waiting reservation is returned at once. ResourceExhaustedError has a retry
        delay; after an UnavailableError nothing was granted.
        """
        granted = await self._begin(order, wait)
        if granted is None and order.keep:  # a place in the queue, on disk first
            self.waiting.expect_room()
            placed = self.ledger.grant(order, (), now=self.clock.now(), wall=self.clock.wall(), wait=wait)

            def settled(error: errors.GpuscaleError | None) -> None:
                if error is None:
                    self.waiting.keep(self.ledger.get(placed.id))

            self.commits.grant([placed]).on_settled(settled)
            granted = placed.id
        elif granted is None:
            granted = await self.waiting.wait(order, wait)
        return (await self._answers([granted], [order]))[0]

    async def reserve_and_watch(
        self, order: Order, wait: float
    ) -> AsyncGenerator[model.QueuePlace | Reservation]:
        """Like `reserve`, and yield the place in the queue meanwhile; the reservation is the last item."""
        granted = await self._begin(order, wait)
        if granted is None:
            async with aclosing(self.waiting.watch(order, wait)) as news:
                async for one in news:
                    if isinstance(one, model.QueuePlace):
                        yield one
                    else:
                        granted = one
        if granted is not None:
            yield (await self._answers([granted], [order]))[0]

    async def reserve_all(self, orders: Sequence[Order]) -> Sequence[Reservation]:
        """Grant several orders, all or none, in one transaction; raises like `reserve` for the first that is refused.

        As with one order, the archive is only searched if some are refused, or were granted before and have ended.
        """
        requests = [order.request_id for order in orders]
        try:
            ids = self._begin_all(orders)
        except errors.GpuscaleError:
            await self.archive.recall(requests=requests)
            if not any(self.ledger.knows(request_id=one) for one in requests):
                raise
            ids = self._begin_all(orders)
        return await self._answers(ids, orders)

    def _begin_all(self, orders: Sequence[Order]) -> Sequence[str]:
        """The ids of what is granted at once, or was before."""
        found: list[str] = []
        granted: list[Reservation] = []
        try:
            for order in orders:
                known = self.ledger.replay(order.request_id, order.fingerprint)
                if known is None:
                    self.waiting.knows(order)
                    pick = self._look(order)
                    if not isinstance(pick, Pick):
                        raise self._refused(pick)
                    known = self.ledger.grant(order, pick.gpus, now=self.clock.now(), wall=self.clock.wall())
                    granted.append(known)
                found.append(known.id)
        except errors.GpuscaleError:
            for one in reversed(granted):
                self.ledger.withdraw(one)
            raise
        if granted:
            self.commits.grant(granted)
        return found

    async def _begin(self, order: Order, wait: float) -> str | None:
        """The id of what is granted at once, or was before; None if the request is to wait.

        The archive is only searched for an earlier grant if nothing is granted: a grant finds out when it is written. Raises
        like `reserve`.
        """
        known = self.ledger.replay(order.request_id, order.fingerprint)
        if known is not None:
            return known.id
        if self.waiting.knows(order):
            return None
        found = self._look(order)
        if isinstance(found, Pick):
            return self.waiting.grant(order, found)
        await self.archive.recall(requests=[order.request_id])
        known = self.ledger.replay(order.request_id, order.fingerprint)
        if known is not None:
            return known.id
        if isinstance(found, Refusal):
            found = await self.reconsider(order.ask, found)
        passing = {RefusalKind.NO_CAPACITY, RefusalKind.NODE_NOT_ONLINE}  # an agent comes back
        lasting = found.lasting if isinstance(found, model.QueueObstacle) else found.kind not in passing
        if wait > 0 and not lasting:
            return None
        raise self._refused(found)

    def _look(self, order: Order) -> Pick | Refusal | model.QueueObstacle:
        if not self.view.complete:
            raise self.follower.no_telemetry()
        if order.booking:
            self.expect_own(order)
        return self.waiting.look(order, self.clock.now())

    async def _answers(self, ids: Sequence[str], orders: Sequence[Order]) -> Sequence[Reservation]:
        """The reservations, once on disk; or what an earlier grant of a request became. Raises like `reserve`."""
        error = await self.commits.wait(*ids)
        if error is not None and error.reason == "REQUEST_ENDED":
            await self.archive.recall(requests=[order.request_id for order in orders])
            ids = self._begin_all(orders)
            error = await self.commits.wait(*ids)
        if error is not None:
            raise error
        await tasks.hit_async("allocator.reserve.before_reply")
        if len(ids) > 1:  # one that had ended may have left memory while the others were written
            await self.archive.recall(ids=ids)
        return [self.ledger.get(one) for one in ids]

    def _refused(self, found: Refusal | model.QueueObstacle) -> errors.GpuscaleError:
        if isinstance(found, model.QueueObstacle):
            # A quota, or what is kept for others: without a wait, that is no capacity.
            over = found.reason is model.Reason.QUOTA_EXCEEDED
            if found.reason is model.Reason.BOOKING_NOT_OPEN:
                return errors.FailedPreconditionError(found.message, reason=found.reason)
            return errors.ResourceExhaustedError(
                found.message,
                reason="QUOTA_EXCEEDED" if over else "NO_CAPACITY",
                metadata={} if over else {found.reason.lower(): "true"},
                retry_after=None if found.lasting else self._retry_after(found.until),
            )
        if self.follower.problem:
            problem = f" The fleet cannot be followed at the moment: {self.follower.problem}."
            found = replace(found, message=found.message + problem)
        return refusal_error(found, self._retry_after())

    def _retry_after(self, until: float | None = None) -> float:
        """Seconds until a lease may run out, within reason; or until a time since 1970."""
        if until is not None:
            return max(1.0, until - self.clock.wall().timestamp())
        due = self.ledger.next_deadline()
        least, most = _RETRY_LIMITS
        return _RETRY_EMPTY if due is None else min(max(due - self.clock.now(), least), most)


def refusal_error(found: Refusal, retry_after: float | None = None) -> errors.GpuscaleError:
    """The error of a refusal."""
    if found.kind is RefusalKind.NOT_FOUND:
        return errors.NotFoundError(found.message, metadata=found.metadata)
    if found.kind is RefusalKind.NO_CAPACITY:
        return errors.ResourceExhaustedError(
            found.message, reason=found.kind, metadata=found.metadata, retry_after=retry_after
        )
    return errors.FailedPreconditionError(found.message, reason=found.kind, metadata=found.metadata)
