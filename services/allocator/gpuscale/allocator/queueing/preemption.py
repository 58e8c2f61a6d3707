"""Preemption: which leases end early so that a request with a higher priority is served. Pure.

Both sides must have agreed to it. Only leases with a lower priority that have run for long enough are taken, and
only after a scratch placement has shown that the request would then be served. Of two ways the one with fewer victims
is taken, then the one that wastes less attained service (Tiresias, NSDI'19).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuscale.allocator.domain.model import Ask
from gpuscale.allocator.domain.placement import Pick
from gpuscale.allocator.queueing.backfill import fewest
from gpuscale.allocator.queueing.model import Lease, World


@dataclass(frozen=True, slots=True)
class Preemption:
    """The leases to end, and what the request gets once they did."""

    victims: tuple[Lease, ...]
    pick: Pick


def candidates(leases: Sequence[Lease], priority: int) -> list[Lease]:
    """Leases that may be ended for a request with this priority, however long they have run."""
    return [one for one in leases if one.preemptible and not one.revoked and one.priority < priority]


def ripens_at(leases: Sequence[Lease], min_runtime: float, now: float) -> float | None:
    """When the next of the candidates will have run for long enough; None when all have."""
    return min((ripe for one in leases if (ripe := one.since + min_runtime) > now), default=None)


def choose(
    ask: Ask, leases: Sequence[Lease], ripe: Sequence[Lease], world: World, now: float
) -> Preemption | None:
    """Choose victims among the ripe candidates; None if ending all of them would not admit the ask.

    Leases that were revoked before count as ended: they will be.
    """
    if not ripe:
        return None
    ending = [lease.id for lease in leases if lease.revoked]

    def least_service(lease: Lease) -> tuple[int, float, str]:
        return lease.priority, lease.attained(now), lease.id

    def largest(lease: Lease) -> tuple[int, int, float, str]:
        return lease.priority, -lease.gpu_milli, lease.attained(now), lease.id

    keys: tuple[Callable[[Lease], tuple[float | str, ...]], ...] = (least_service, largest)
    found = [_shortest(ask, ending, sorted(ripe, key=key), world, now) for key in keys]
    return min(
        (one for one in found if one is not None),
        key=lambda one: (len(one.victims), sum(victim.attained(now) for victim in one.victims)),
        default=None,
    )


def _shortest(
    ask: Ask, ending: list[str], ordered: Sequence[Lease], world: World, now: float
) -> Preemption | None:
    """The shortest beginning that admits the ask, without those of it that are not needed."""
    found = fewest(ask, ending, ordered, world, now)
    if found is None:
        return None
    pick, needed = found
    there = {lease.id for lease in world.leases({gpu.node for gpu in pick.gpus})}
    for spared in (
        *([lease for lease in needed if lease.id not in there],),
        *([lease] for lease in reversed(needed) if lease.id in there),
    ):
        rest = [lease for lease in needed if lease not in spared]
        without = world.place_after(ask, now, [*ending, *(lease.id for lease in rest)])
        if isinstance(without, Pick):
            pick, needed = without, rest
    return Preemption(tuple(needed), pick)
