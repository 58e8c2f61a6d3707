"""Backfill and preemption: what is kept for the request at the head of the queue, and which leases end early for it. Pure.

EASY backfill promises the first request that does not fit the earliest time at which it will, and lets others pass that do not
delay it. Here a lease may be renewed for ever, so no end of a lease is certain and none counts for letting others pass: they
pass only beside the promised GPUs. The promise stays in place until it is filled, given up or broken; leases on it are not
replaced as they end, so that requests for many GPUs do not starve (docs/adr/0006-backfill-beside-the-promise.md).

Preemption needs the consent of both sides. It only takes leases of lower priority that have run long enough, and only after a
trial placement has shown that the request would then be served. It prefers fewer victims, then less wasted attained service
(Tiresias, NSDI'19).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from gpuscale.allocator.domain.bookings import Booking
from gpuscale.allocator.domain.model import Ask, Pick
from gpuscale.allocator.queueing.model import LeaseTerms, QueueWorld, Waiter


@dataclass(frozen=True, slots=True)
class Promise:
    """GPUs (by UUID in lower case, as in asks) that are kept for a waiter.

    With `whole_nodes` their nodes are kept too, for CPU and main memory, or to stay apart from others. `start` is when they are
    free if every lease that it `awaits` ends in time; `victims` were revoked for it.
    """

    waiter: Waiter
    gpus: frozenset[str]
    nodes: frozenset[str]
    whole_nodes: bool
    start: float
    victims: frozenset[str] = frozenset()
    awaits: frozenset[str] = frozenset()


Kept: TypeAlias = Promise | Booking
"""What is kept for somebody else: GPUs or, with `whole_nodes`, the nodes."""


def make_promise(waiter: Waiter, ask: Ask, world: QueueWorld, now: float, *, refused: bool) -> Promise | None:
    """Promise the GPUs that will be free soonest if every lease ends in time; None if that is not enough.

    `ask` is the waiter's, beside what is promised to others, and known to be `refused` while nothing ends or not.
    """
    found = fewest(ask, [], world.ending_first(), world, now, refused=refused)
    if found is None:
        return None
    pick, freed = found
    return replace(promise_of(waiter, pick, _over(freed, now)), awaits=_ids(freed))


def promise_of(waiter: Waiter, pick: Pick, start: float, victims: Iterable[str] = ()) -> Promise:
    """The promise of a pick."""
    ask = waiter.order.ask
    return Promise(
        waiter,
        gpus=frozenset(gpu.uuid.lower() for gpu in pick.gpus),
        nodes=frozenset(gpu.node for gpu in pick.gpus),
        whole_nodes=bool(ask.cpu_milli or ask.host_memory_bytes or ask.apart_from or not ask.gpu_count),
        start=start,
        victims=frozenset(victims),
    )


def renewed(promise: Promise, ask: Ask, world: QueueWorld, now: float) -> Promise | None:
    """The promise as it stands now; None if it would not serve the ask even after all leases on it have ended."""
    leases = sorted(world.leases(promise.nodes), key=lambda lease: (lease.ends, lease.id))
    only = replace(ask, nodes=promise.nodes, gpus=ask.gpus if promise.whole_nodes else promise.gpus)
    # Not all that is on the nodes counts: others pass there, beside the GPUs that are promised.
    awaited: Sequence[LeaseTerms] = [lease for lease in leases if lease.id in promise.awaits]
    if not isinstance(world.place_after(only, now, [lease.id for lease in awaited]), Pick):
        found = fewest(only, [], leases, world, now)
        if found is None:
            return None
        _, awaited = found
    return replace(
        promise,
        start=_over(awaited, now),
        awaits=_ids(awaited),
        victims=promise.victims.intersection(lease.id for lease in leases if lease.revoked),
    )


def beside(ask: Ask, others: Collection[Kept]) -> Ask:
    """The ask without what is kept for others."""
    gpus = [one.gpus for one in others if not one.whole_nodes]
    nodes = [one.nodes for one in others if one.whole_nodes]
    return replace(
        ask, excluded_gpus=ask.excluded_gpus.union(*gpus), excluded_nodes=ask.excluded_nodes.union(*nodes)
    )


def clear_of(pick: Pick, others: Iterable[Kept]) -> bool:
    """Whether a pick takes nothing that is kept for others."""
    return not any(
        gpu.node in one.nodes if one.whole_nodes else gpu.uuid.lower() in one.gpus
        for one in others
        for gpu in pick.gpus
    )


GROWTH = 4
"""Growth factor of the leases freed in the next try."""


def fewest(
    ask: Ask,
    freed: Collection[str],
    leases: Iterable[LeaseTerms],
    world: QueueWorld,
    now: float,
    least: int = 0,
    refused: bool = False,
) -> tuple[Pick, Sequence[LeaseTerms]] | None:
    """The shortest prefix of `leases` whose end makes room, beside those in `freed`; None if even all do not.

    Freeing more never leaves less room, so it tries growing prefixes, then bisects between the last two: the cost grows with
    the leases that must end, not with all there are; less if `least` of them are known to be needed, or one (`refused`).
    """
    taken: list[LeaseTerms] = []
    coming = iter(leases)

    def place(count: int) -> Pick | None:
        found = world.place_after(ask, now, [*freed, *(lease.id for lease in taken[:count])])
        return found if isinstance(found, Pick) else None

    low, more = least or int(refused), 1
    while True:
        taken += islice(coming, least + more - len(taken))
        if best := place(len(taken)):
            break
        if len(taken) < least + more:
            return None
        low, more = len(taken) + 1, more * GROWTH
    high = len(taken)
    while low < high:
        middle = (low + high) // 2
        if pick := place(middle):
            best, high = pick, middle
        else:
            low = middle + 1
    return best, taken[:high]


def _over(leases: Iterable[LeaseTerms], now: float) -> float:
    """When all of them have ended, if none is renewed."""
    return max((lease.ends for lease in leases), default=now)


def _ids(leases: Iterable[LeaseTerms]) -> frozenset[str]:
    return frozenset(lease.id for lease in leases)


Preemption: TypeAlias = tuple[Sequence[LeaseTerms], Pick]
"""The leases to end, and what the request gets afterwards."""


def choose(
    ask: Ask, leases: Sequence[LeaseTerms], ripe: Sequence[LeaseTerms], world: QueueWorld, now: float
) -> Preemption | None:
    """Choose victims among the ripe leases, which may be ended for it; None if ending all of them does not admit the ask.

    Leases that were already revoked count as ended.
    """
    if not ripe:
        return None
    ending = [lease.id for lease in leases if lease.revoked]

    def least_service(lease: LeaseTerms) -> tuple[int, float, str]:
        return lease.priority, lease.attained(now), lease.id

    def largest(lease: LeaseTerms) -> tuple[int, int, float, str]:
        return lease.priority, -lease.gpu_milli, lease.attained(now), lease.id

    keys: tuple[Callable[[LeaseTerms], tuple[float | str, ...]], ...] = (least_service, largest)
    found = (_shortest(ask, ending, sorted(ripe, key=key), world, now) for key in keys)
    return min(
        filter(None, found),
        key=lambda one: (len(one[0]), sum(victim.attained(now) for victim in one[0])),
        default=None,
    )


def _shortest(
    ask: Ask, ending: list[str], ordered: Sequence[LeaseTerms], world: QueueWorld, now: float
) -> Preemption | None:
    """The shortest prefix that admits the ask, minus the leases that are not needed."""
    found = fewest(ask, ending, ordered, world, now)
    if found is None:
        return None
    pick, needed = found
    there = _ids(world.leases({gpu.node for gpu in pick.gpus}))
    elsewhere = [lease for lease in needed if lease.id not in there]
    for spared in (elsewhere, *([lease] for lease in reversed(needed) if lease not in elsewhere)):
        rest = [lease for lease in needed if lease not in spared]
        without = world.place_after(ask, now, [*ending, *(lease.id for lease in rest)])
        if isinstance(without, Pick):
            pick, needed = without, rest
    return needed, pick
