"""Forecast: when the first of the line will be served, by how long leases are likely to last. Pure.

Each in turn gets what it could have soonest beside what those before it get. A lease counts as ending when it will, by what was
learned of its kind, or else as not renewed; the range of a wait is that of the last lease which must end for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from operator import attrgetter

from gpuscale.allocator.domain.model import Ask
from gpuscale.allocator.queueing.backfill import Promise, beside, fewest, promise_of
from gpuscale.allocator.queueing.model import Foreseen, LeaseTerms, QueueWorld, Waiter

MOST_FORESEEN = 16
"""Requests of the line that are foreseen: each costs some placements."""
MOST_LEASES = 256
"""Most leases with which anything is foreseen: a placement frees and holds them for a moment."""
MOST_LOOKED_AT = 2048
"""Leases of which those are taken that will end first."""


def forecast(
    line: Iterable[Waiter],
    promises: Iterable[Promise],
    world: QueueWorld,
    now: float,
    admits: Callable[[Waiter], bool],
) -> Iterator[tuple[Waiter, Foreseen | None]]:
    """The first of the line, in turn, each with its time; None where that is not known, or its quota does not admit it.

    Between two of them leases may come and go: those count that were there at the beginning.
    """
    looked_at = (world.expected(one, now) for one in islice(world.ending_first(), MOST_LOOKED_AT))
    leases = nsmallest(MOST_LEASES, looked_at, key=attrgetter("ends"))
    taken = {promise.waiter: promise for promise in promises}
    needed: dict[tuple[Ask, Sequence[str]], int] = {}
    after = now
    for waiter in islice(line, MOST_FORESEEN):
        told, found = taken.pop(waiter, None), None
        if told is not None and told.victims:
            found = told, Foreseen(told.start)
        elif not waiter.order.booking and admits(waiter):
            if told is not None:  # what was kept from those before it is not kept from it
                needed.clear()
            found = _soonest(waiter, taken.values(), leases, after, needed, world, now)
            if found is None and taken:
                after = max(one.start + world.lasts(one.waiter.order) for one in taken.values())
                taken, needed = {}, {}
                found = _soonest(waiter, (), leases, after, needed, world, now)
        if found is not None:
            taken[waiter] = found[0]
        yield waiter, None if found is None else found[1]


def _soonest(
    waiter: Waiter,
    taken: Iterable[Promise],
    leases: Sequence[LeaseTerms],
    after: float,
    needed: dict[tuple[Ask, Sequence[str]], int],
    world: QueueWorld,
    now: float,
) -> tuple[Promise, Foreseen] | None:
    """What a request could have soonest, but not before a time, beside what is taken.

    `needed` is how many leases had to end for one before it that asks for the same: ever more are as more is taken.
    """
    over = [lease.id for lease in leases if lease.ends <= after]
    booked = world.booked(waiter.order)
    ask = beside(waiter.order.ask, [*taken, *booked])
    same = waiter.order.ask, tuple(one.id for one in booked)
    found = fewest(ask, over, leases[len(over) :], world, now, least=needed.get(same, 0))
    if found is None:
        return None
    pick, freed = found
    needed[same] = len(freed)
    last = max(freed, key=attrgetter("ends"), default=None)
    if last is None:
        return promise_of(waiter, pick, after), Foreseen(after)
    return promise_of(waiter, pick, last.ends), Foreseen(last.ends, last.earliest, last.latest)
