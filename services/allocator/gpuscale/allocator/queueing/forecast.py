"""Forecast: when those who wait are served at the latest, if every lease ends in time and nobody renews. Pure.

The line is played through without doing anything: each request is given the GPUs that are free soonest beside those of
the requests before it. Where nothing is left, those that come after are served once the leases of all before them have
run out too. It is for people to read; nothing is promised or kept by it.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from gpuscale.allocator.queueing.backfill import Promise, beside, fewest, promise_of
from gpuscale.allocator.queueing.fairness import over_quota
from gpuscale.allocator.queueing.model import Waiter, World

MOST_FORESEEN = 16
"""Requests of the line that are foreseen: each costs some placements."""
MOST_LEASES = 256
"""Most leases with which anything is foreseen: a placement frees and holds them for a moment."""


def forecast(
    line: Iterable[Waiter], promises: Iterable[Promise], world: World, now: float
) -> Iterator[tuple[Waiter, float | None]]:
    """The first of the line, in turn, each with its time; None where that is not known.

    Between two of them leases may come and go.
    """
    told = {promise.waiter: promise for promise in promises}
    taken: list[Promise] = list(told.values())
    after = now
    for waiter in islice(line, MOST_FORESEEN):
        found = told.get(waiter)
        if found is None and over_quota(world, waiter.order) is None:
            found = _soonest(waiter, taken, after, world, now)
            if found is None and taken:
                after = max(one.start + one.waiter.order.ttl for one in taken)
                taken = []
                found = _soonest(waiter, taken, after, world, now)
            if found is not None:
                taken.append(found)
        yield waiter, None if found is None else found.start


def _soonest(waiter: Waiter, taken: list[Promise], after: float, world: World, now: float) -> Promise | None:
    """What a request could have soonest, but not before a time, beside what is taken."""
    leases = sorted(world.leases(), key=lambda lease: (lease.ends, lease.id))
    if len(leases) > MOST_LEASES:
        return None
    over = [lease.id for lease in leases if lease.ends <= after]
    running = [lease for lease in leases if lease.ends > after]
    found = fewest(beside(waiter.order.ask, taken), over, running, world, now)
    if found is None:
        return None
    pick, freed = found
    return promise_of(waiter, pick, max((lease.ends for lease in freed), default=after))
