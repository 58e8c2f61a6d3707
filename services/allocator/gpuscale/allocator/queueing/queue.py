"""The queue: waiting requests, and the rounds that serve them. Pure.

A round goes through the queue in turn (`in_turn`), grants what fits beside what is promised to others, keeps a promise for the
first request that does not fit, and ends leases for it if both sides agreed to that (`backfill`). Requests that no change could
help are not placed again: a round costs one placement per different ask that may have become possible, however many requests
wait.

Order: higher priority first. Within a priority, the tenant with the lowest dominant share: the GPUs it holds, divided by its
weight (weighted dominant resource fairness, NSDI'11, with GPUs as the only resource). If past use counts, its decayed mean is
added (`FairShare`). Within a tenant: arrival.

A forecast gives each request in turn what it could have soonest beside what those before it get. It ends a lease when the
durations learned for its kind predict, or else as if not renewed; the range of a wait is that of the last lease that must end
for it.
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import TypeAlias
from weakref import WeakValueDictionary

from gpuscale.allocator.domain.bookings import Booking, local, milli
from gpuscale.allocator.domain.model import WHOLE, Ask, Order, Pick
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind, sentence, unpartitioned
from gpuscale.allocator.queueing import backfill, model
from gpuscale.common.errors import ResourceExhaustedError
from gpuscale.common.sizes import counted, hours_text

MOST_FORESEEN = 16
"""Most requests with a forecast: each costs some placements."""
MOST_LEASES = 256
"""Most leases for a forecast: a placement frees and holds them temporarily."""
MOST_LOOKED_AT = 2048
"""Leases from which those that end first are taken."""
MOST_AT_ONCE = 32
"""Most requests that get the answer of one alike before other work may run."""
_ALIKE = attrgetter("ask", "tenant", "priority", "booking", "limit", "preemptible", "may_preempt")
MOST_NAMED = 3
"""Most reservations that a message names."""
SETTLE = 5.0
"""Seconds for which GPUs that a victim left may still read as busy as with it."""


def _soonest(
    waiter: model.Waiter,
    taken: Iterable[backfill.Promise],
    leases: Sequence[model.LeaseTerms],
    after: float,
    needed: dict[tuple[Ask, Sequence[str]], int],
    world: model.QueueWorld,
    now: float,
) -> tuple[backfill.Promise, model.Foreseen] | None:
    """What a request could have soonest, but not before `after`, beside what is taken.

    `needed` is how many leases had to end for an earlier identical ask: it only grows as more is taken.
    """
    over = [lease.id for lease in leases if lease.ends <= after]
    booked = world.booked(waiter.order)
    ask = backfill.beside(waiter.order.ask, [*taken, *booked])
    same = waiter.order.ask, tuple(one.id for one in booked)
    found = backfill.fewest(ask, over, leases[len(over) :], world, now, least=needed.get(same, 0))
    if found is None:
        return None
    pick, freed = found
    needed[same] = len(freed)
    last = max(freed, key=attrgetter("ends"), default=None)
    if last is None:
        return backfill.promise_of(waiter, pick, after), model.Foreseen(after)
    return backfill.promise_of(waiter, pick, last.ends), model.Foreseen(last.ends, last.earliest, last.latest)


def asked_milli(ask: Ask) -> int:
    """Thousandths of GPUs that an ask holds at least: the share of a memory size depends on the GPU."""
    by_memory = ask.gpu_memory_bytes is not None and ask.gpu_milli >= WHOLE
    return ask.member_count * ask.gpu_count * (1 if by_memory else ask.gpu_milli)


def over_quota(world: model.QueueWorld, order: Order, pick: Pick | None = None) -> model.QueueObstacle | None:
    """Why its tenant's quota does not admit an order, or what was found for it; None if it does."""
    quota = world.quota(order.tenant)
    limit, hours = quota.gpu_milli_limit, quota.gpu_hours_per_month
    if limit is None and hours is None:
        return None
    least = asked_milli(order.ask)
    if hours is not None and least and not order.booking:
        month = world.month(order.tenant)
        if month.used + month.booked >= hours:
            also = f" and booked {hours_text(month.booked)}" if month.booked else ""
            helps = "cancel a booking, " if month.used < hours else ""
            helps += f"wait until {local(month.ends)}, or " if hours else ""
            return model.QueueObstacle(
                model.Reason.QUOTA_EXCEEDED,
                f"tenant {order.tenant} has used {hours_text(month.used)}{also} of the {hours:g} GPU-hours that its quota has for this"
                f" month. {sentence(f'{helps}have the quota raised')}",
                lasting=not hours,
                until=month.ends if 0 < hours <= month.used else None,
            )
    if limit is None:
        return None
    held = world.gpu_milli_held(order.tenant)
    booked = milli(
        one for one in world.booked(order) if one.tenant == order.tenant and one.id != order.booking
    )
    asked = least if pick is None else sum(gpu.milli for gpu in pick.gpus)
    if not asked or held + booked + asked <= limit:
        return None
    frees = ["release some"] * bool(held) + ["cancel a booking"] * bool(booked)
    helps = "ask for less" if asked > limit else " or ".join(frees)
    holds = f"holds {_gpus(held)}" + (f" and has booked {_gpus(booked)}" if booked else "")
    return model.QueueObstacle(
        model.Reason.QUOTA_EXCEEDED,
        f"tenant {order.tenant} may hold {counted(limit / WHOLE, 'GPU')} and {holds}; this asks for {_gpus(asked)}."
        f" {sentence(f'{helps}, or have the quota raised')}",
        lasting=least > limit,
    )


def in_turn(
    waiters: Collection[model.Waiter], promised: Collection[model.Waiter], world: model.QueueWorld
) -> Iterator[model.Waiter]:
    """The waiters in the order in which they are served.

    Shares are read during the iteration, so earlier grants count. A waiter with a promise precedes the others of its priority:
    otherwise changing shares would move the promise, and nobody would ever fill it.
    """
    groups = defaultdict[tuple[int, bool, str], deque[model.Waiter]](deque)
    for waiter in sorted(waiters, key=attrgetter("number")):
        groups[-waiter.order.priority, waiter not in promised, waiter.order.tenant].append(waiter)
    turns = [(key[:2], _share_of(key, world), group[0].number, key) for key, group in groups.items()]
    heapq.heapify(turns)
    while turns:
        rank, known, number, key = heapq.heappop(turns)
        if (now := _share_of(key, world)) != known:
            heapq.heappush(turns, (rank, now, number, key))
            continue
        group = groups[key]
        yield group.popleft()
        while group:
            if turns and turns[0] < (turn := (rank, _share_of(key, world), group[0].number, key)):
                heapq.heappush(turns, turn)
                break
            yield group.popleft()


def _share_of(group: tuple[int, bool, str], world: model.QueueWorld) -> float:
    """A tenant's dominant share: thousandths of GPUs held per weight, plus past use if that counts; 0 with a promise."""
    _, unpromised, tenant = group
    if not unpromised:
        return 0.0
    return (world.gpu_milli_held(tenant) + world.past.get(tenant, 0)) / world.quota(tenant).weight


def _gpus(milli: int) -> str:
    return f"{milli / WHOLE:g}"


BEHIND_OTHERS = model.QueueObstacle(
    model.Reason.BEHIND_OTHERS,
    "there is room, but it is reserved for requests ahead in the queue: wait for a turn, or ask for less.",
)


def in_the_way(pick: Pick, others: Iterable[backfill.Kept]) -> model.QueueObstacle:
    """Why available room (the pick) is not for a request: the first of `others` that keeps it."""
    for one in others:
        if isinstance(one, Booking) and not backfill.clear_of(pick, [one]):
            return model.QueueObstacle(
                model.Reason.BOOKED,
                f"there is room, but it is {one.why} from {local(one.start)} on: ask with a time limit that ends before,"
                " as preemptible, or for less.",
            )
    return BEHIND_OTHERS


Changed: TypeAlias = set[str] | None
"""The nodes on which room may have appeared; None for anywhere."""


def _could_help(changed: Changed, ask: Ask) -> bool:
    """Whether the ask may be possible now: a cheap check that errs towards yes."""
    if changed is None:
        return True
    return not changed.isdisjoint(ask.nodes) if ask.nodes else not changed <= ask.excluded_nodes


class Queue:
    """Waiting requests by request id."""

    def __init__(self, world: model.QueueWorld, rules: model.Rules) -> None:
        self._world = world
        self._rules = rules
        self._waiters: dict[str, model.Waiter] = {}
        self._alike = WeakValueDictionary[tuple[object, ...], model.Alike]()
        self._version = 0
        """Counts what may change an answer."""
        self._promises: dict[model.Waiter, backfill.Promise] = {}
        self._changed: Changed = set()
        self._number = 0
        self.due = self._pressing = False
        """Whether a round is due, and whether it may do more than set places."""
        self.look_again: float | None = None
        """When a round is due even without changes, because a lease becomes preemptible; None: never."""
        self._hopeless: set[tuple[Ask, int]] = set()
        self._ripening = set[int]()
        self._refused: dict[Ask, model.QueueObstacle] = {}
        self._unpromised: tuple[model.Waiter, Ask] | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def pressing(self) -> bool:
        """Whether that round may do more than set places: not if all that happened is that others joined the queue.

        Those were looked at as they joined, and the first has its promise.
        """
        return self.due and self._pressing

    def get(self, request_id: str) -> model.Waiter | None:
        """The waiter of a request; None if it does not wait."""
        return self._waiters.get(request_id)

    def waiting(self) -> dict[str, int]:
        """How many requests of each tenant wait."""
        return Counter(waiter.order.tenant for waiter in self._waiters.values())

    def factors(self, order: Order) -> str:
        """What decides the place of an order, in words, lower shares first; empty if past use does not count."""
        if not self._rules.past_counts:
            return ""
        tenant, world = order.tenant, self._world
        held, past = world.gpu_milli_held(tenant) / WHOLE, world.past.get(tenant, 0) / WHOLE
        weight = world.quota(tenant).weight
        return (
            f"priority {order.priority}, then by share: tenant {tenant} has {(held + past) / weight:.2f} = ({held:g} GPUs held"
            f" + {past:.2f} in the past, decayed) / weight {weight:g}"
        )

    def longest_wait(self, now: float) -> float:
        """Seconds that the oldest request has waited; 0 if none waits."""
        return max((now - waiter.since for waiter in self._waiters.values()), default=0.0)

    def line(self, most: int) -> list[model.Waiter]:
        """The first waiters, in turn."""
        return list(islice(in_turn(self._waiters.values(), self._promises.copy(), self._world), most))

    def promise(self, waiter: model.Waiter, pick: Pick, start: float, leases: Collection[str]) -> None:
        """Keep a pick for a waiter; these leases leave until `start`."""
        self._put(waiter, backfill.promise_of(waiter, pick, start, leases))

    def promised(self, but: model.Waiter | None) -> list[backfill.Promise]:
        """What is promised to anyone except `but`."""
        return [promise for owner, promise in self._promises.items() if owner is not but]

    def add(self, order: Order, now: float, until: float) -> model.Waiter:
        """Add a request to the queue; ResourceExhaustedError (QUEUE_FULL) unless its place is kept."""
        if not order.reservation_id:
            self.expect_room()
        self._number += 1
        self.due = True
        waiter = model.Waiter(
            order, self._number, now, until, self._alike.setdefault(_ALIKE(order), model.Alike())
        )
        behind = any(one.order.priority >= order.priority for one in self._promises)
        self._pressing = self._pressing or order.may_preempt or not behind
        self._waiters[order.request_id] = waiter
        return waiter

    def expect_room(self) -> None:
        """ResourceExhaustedError (QUEUE_FULL) if the queue is full."""
        if len(self._waiters) >= self._rules.max_waiting:
            raise ResourceExhaustedError(
                f"{len(self._waiters)} requests already wait, which is the maximum; try again later",
                reason="QUEUE_FULL",
                metadata={"waiting": str(len(self._waiters))},
            )

    def remove(self, waiter: model.Waiter) -> None:
        """Remove a waiter from the queue; what was promised to it may help others."""
        self._waiters.pop(waiter.order.request_id, None)
        self._give_up(waiter)

    def look(self, order: Order, now: float) -> Pick | Refusal | model.QueueObstacle:
        """Check once whether an order that does not wait yet can be served in its turn; call it when no round is due.

        Those who wait cannot use what is free, or it is promised to them: so nobody is passed over.
        """
        if obstacle := over_quota(self._world, order):
            return obstacle
        if isinstance(ask := self._world.claim(order) if order.booking else order.ask, model.QueueObstacle):
            return ask
        found = self._world.place(ask, now, again=False)
        others = self._kept_from(order)
        if isinstance(found, Pick) and others and not backfill.clear_of(found, others):
            free, found = found, self._world.place(backfill.beside(ask, others), now, again=True)
            if isinstance(found, Refusal):
                return in_the_way(free, others)
        if isinstance(found, Pick):
            if obstacle := over_quota(self._world, order, found):
                return obstacle
            self._spends(order)
        return found

    def changed(self, nodes: Iterable[str] | None = None) -> None:
        """Room may have appeared on these nodes, or anywhere."""
        if nodes is None:
            self._changed = None
        elif self._changed is not None:
            self._changed.update(nodes)
        self.due = self._pressing = True
        self._version += 1

    def round(self, now: float) -> Iterator[model.Step]:
        """Go through the queue in turn. Carry out each decision before asking for the next one.

        Waiters may come, go and change between two steps; new ones are looked at in the next round.
        """
        changed, self._changed = self._changed, set()
        self.look_again, self.due, self._pressing = None, False, False
        self._hopeless, self._ripening = set(), set[int]()
        self._version += 1
        self._refused = {}
        head: model.Waiter | None = None
        position, moved = 0, list[model.Waiter]()
        for waiter in in_turn(list(self._waiters.values()), self._promises.copy(), self._world):
            if self._waiters.get(waiter.order.request_id) is not waiter:
                continue
            promise, alike = self._promises.get(waiter), waiter.alike
            obstacle = None if promise or not head or alike.version != self._version else alike.found
            looked_at = obstacle is None
            if obstacle is not None:
                waiter.obstacle = obstacle
            else:
                found = self._find(waiter, changed, now)
                if isinstance(found, Pick):
                    # Nobody was passed over, so what the first waiter leaves of its promise needs no round of its own.
                    if not position and (kept := self._promises.pop(waiter, None)):
                        changed = None if changed is None else changed | kept.nodes
                        self._refused.clear()
                    self.remove(waiter)
                    self._spends(waiter.order)
                    self._version += 1
                    yield model.Grant(waiter, found)
                    continue
                yield from self._keep(waiter, found, changed, now, first=head is None)
                if self._waiters.get(waiter.order.request_id) is not waiter:
                    continue
                if found.reason is not model.Reason.QUOTA_EXCEEDED and not waiter.order.booking:
                    head = head or waiter
                promise = self._promises.get(waiter)
                obstacle = self._preempting(waiter, promise, found)
            place = model.QueuePlace(position, obstacle, promise.start if promise else None)
            if place != waiter.place:
                waiter.place = place
                moved.append(waiter)
            position += 1
            if looked_at or not position % MOST_AT_ONCE:
                yield model.Looked(waiter, moved)
                moved = []
        if moved:
            yield model.Looked(moved[-1], moved)

    def foresee(self, now: float) -> Iterator[tuple[model.Waiter, model.Foreseen | None] | None]:
        """The first requests in turn, each with its time; None if unknown, or its quota does not admit it. Nothing changes.

        Steps before the first yield None. Other work may run between two; the leases at the beginning count.
        """
        world = self._world
        leases = yield from world.likely_first(MOST_LOOKED_AT, MOST_LEASES, now)
        taken = {promise.waiter: promise for promise in self._promises.values()}
        needed: dict[tuple[Ask, Sequence[str]], int] = {}
        after = now
        for waiter in self.line(MOST_FORESEEN):
            told, found = taken.pop(waiter, None), None
            if told is not None and told.victims:
                found = told, model.Foreseen(told.start)
            elif not waiter.order.booking and over_quota(world, waiter.order) is None:
                if told is not None:  # what was kept from the earlier ones is not kept from this one
                    needed.clear()
                found = _soonest(waiter, taken.values(), leases, after, needed, world, now)
                if found is None and taken:
                    after = max(one.start + world.lasts(one.waiter.order) for one in taken.values())
                    taken, needed = {}, {}
                    found = _soonest(waiter, (), leases, after, needed, world, now)
            if found is not None:
                taken[waiter] = found[0]
            yield waiter, None if found is None else found[1]

    def _find(self, waiter: model.Waiter, changed: Changed, now: float) -> Pick | model.QueueObstacle:
        if obstacle := over_quota(self._world, waiter.order):
            waiter.obstacle = None
            return obstacle
        helped = _could_help(changed, waiter.order.ask)
        if waiter.obstacle is not None and not helped:
            return waiter.obstacle
        ask = self._world.claim(waiter.order) if waiter.order.booking else waiter.order.ask
        if isinstance(ask, model.QueueObstacle):
            waiter.obstacle = None
            return ask
        found = self._place(ask, now)
        if isinstance(found, Pick) and not backfill.clear_of(
            found, others := self._kept_from(waiter.order, waiter)
        ):
            free, found = found, self._place(backfill.beside(ask, others), now)
            found = found if isinstance(found, Pick) else in_the_way(free, others)
        waiter.obstacle = found if isinstance(found, model.QueueObstacle) else None
        if isinstance(found, Pick):
            return over_quota(self._world, waiter.order, found) or found
        if helped and not (waiter.order.booking or waiter.order.may_preempt or waiter in self._promises):
            waiter.alike.found, waiter.alike.version = found, self._version
        return found

    def _place(self, ask: Ask, now: float) -> Pick | model.QueueObstacle:
        """Place an ask, unless it was refused in this round: grants only reduce room."""
        if (known := self._refused.get(ask)) is not None:
            return known
        found = self._world.place(ask, now, again=True)
        if isinstance(found, Refusal):
            lasting = ask.mig_profile and found.kind is RefusalKind.UNSATISFIABLE
            message = unpartitioned(ask) if lasting else found.message
            self._refused[ask] = model.QueueObstacle(model.Reason.NO_CAPACITY, message)
            return self._refused[ask]
        return found

    def _keep(
        self, waiter: model.Waiter, found: model.QueueObstacle, changed: Changed, now: float, *, first: bool
    ) -> Iterator[model.Revoke]:
        """Keep a promise for a request that does not fit, if it is the first or leases end for it."""
        promise = self._promises.get(waiter)
        if found.reason is model.Reason.QUOTA_EXCEEDED:
            return self._give_up(waiter)
        if waiter.order.booking or not (first or waiter.order.may_preempt or promise):
            return  # bookings are kept in any case
        ask = backfill.beside(waiter.order.ask, self._kept_from(waiter.order, waiter))
        promise = promise and (
            self._settling(promise, now) or backfill.renewed(promise, ask, self._world, now)
        )
        preempting = self._preempt(waiter, promise, ask, now)
        if preempting is not None and preempting.victims:
            yield model.Revoke(waiter, tuple(sorted(preempting.victims)))
            if self._waiters.get(waiter.order.request_id) is not waiter:
                return  # it left meanwhile
        promise = preempting or promise
        if first:
            # Only the head has a promise, and those for whom leases end.
            for owner, promised in list(self._promises.items()):
                if owner is not waiter and not promised.victims:
                    self._give_up(owner)
            if promise is None and (self._unpromised != (waiter, ask) or _could_help(changed, ask)):
                promise = backfill.make_promise(waiter, ask, self._world, now, refused=ask in self._refused)
                self._unpromised = None if promise else (waiter, ask)
        elif promise is not None and not promise.victims:
            promise = None
        self._put(waiter, promise)

    def _settling(self, promise: backfill.Promise, now: float) -> backfill.Promise | None:
        """The promise as it stood, while GPUs that a victim left may still read busy: nobody else is to leave for them."""
        since = min(promise.start, now)
        there = {lease.id for lease in self._world.leases(promise.nodes)} if promise.victims else ()
        if promise.victims.issubset(there) or now >= since + SETTLE:
            return None
        self.look_again = min(self.look_again or math.inf, since + SETTLE)
        return replace(promise, start=since)

    def _preempt(
        self, waiter: model.Waiter, promise: backfill.Promise | None, ask: Ask, now: float
    ) -> backfill.Promise | None:
        """The promise with leases ended for it as its victims, in place of one without."""
        if not waiter.order.may_preempt or (promise and promise.victims):
            return None
        if now + self._rules.grace > waiter.until or (ask, waiter.order.priority) in self._hopeless:
            return None
        leases = self._world.revocable()
        possible = [
            (lease, lease.since + self._rules.min_runtime)
            for lease in leases
            if lease.preemptible and not lease.revoked and lease.priority < waiter.order.priority
        ]
        ripe = [lease for lease, at in possible if at <= now]
        found = backfill.choose(ask, leases, ripe, self._world, now)
        if found is None:
            self._hopeless.add((ask, waiter.order.priority))
            if later := [at for _, at in possible if at > now]:
                self.look_again = min(self.look_again or math.inf, *later)
                self._ripening.add(waiter.order.priority)
            return None
        victims, pick = found
        return backfill.promise_of(waiter, pick, now + self._rules.grace, [lease.id for lease in victims])

    def _preempting(
        self, waiter: model.Waiter, promise: backfill.Promise | None, found: model.QueueObstacle
    ) -> model.QueueObstacle:
        """The obstacle of a request: if it may preempt, who leaves for it, or when somebody may have to."""
        if not waiter.order.may_preempt:
            return found
        if promise and promise.victims:
            waiter.foreseen = model.Foreseen(promise.start)
            first = ", ".join(f"reservations/{one}" for one in sorted(promise.victims)[:MOST_NAMED])
            more = f" and {left} more" if (left := len(promise.victims) - MOST_NAMED) > 0 else ""
            return replace(
                found, message=f"it preempts {first}{more}, given {self._rules.grace:g} s to leave"
            )
        if waiter.order.priority not in self._ripening:
            return found
        ripe = f"{found.message} It may preempt others once they have run for {self._rules.min_runtime:g} s."
        return replace(found, message=ripe)

    def _kept_from(self, order: Order, waiter: model.Waiter | None = None) -> Sequence[backfill.Kept]:
        """What is kept from an order: promised to others ahead of it, or booked. Nothing from one that claims a booking."""
        if order.booking:
            return ()
        promised = [
            promise
            for owner, promise in self._promises.items()
            if owner is not waiter and owner.order.priority >= order.priority
        ]
        booked = self._world.booked(order)
        return [*promised, *booked] if booked else promised

    def _spends(self, order: Order) -> None:
        """A grant may use up a quota for the tenant's other waiters: their promises are given up."""
        if self._waiters and self._world.quota(order.tenant).gpu_milli_limit is not None:
            self.changed(())

    def _put(self, waiter: model.Waiter, promise: backfill.Promise | None) -> None:
        before = self._promises.pop(waiter, None)
        if promise is not None:
            self._promises[waiter] = promise
        if before is not None and (promise is None or before.gpus != promise.gpus):
            self.changed(before.nodes)

    def _give_up(self, waiter: model.Waiter) -> None:
        self._put(waiter, None)
