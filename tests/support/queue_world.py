"""A small fleet of whole GPUs for the queue: first node that fits, leases that end when a test says so."""

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from gpuscale.allocator.domain.bookings import Booking, Bookings
from gpuscale.allocator.domain.model import WHOLE, Ask, Order, Pick
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from gpuscale.allocator.queueing import model
from gpuscale.allocator.queueing.queue import Queue
from tests.support.allocator_values import NOW, ask, reserved


@dataclass
class Held:
    """A live reservation of the small fleet."""

    lease: model.LeaseTerms
    tenant: str
    gpus: frozenset[str]


@dataclass
class QueueWorld:
    """Nodes with a number of GPUs each, and what is held of them."""

    nodes: Mapping[str, int]
    now: float = NOW
    quotas: dict[str, model.Quota] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    placements: int = 0
    imagined: int = 0
    leases_read: int = 0
    past: dict[str, float] = field(default_factory=dict)
    months: dict[str, model.MonthStanding] = field(default_factory=dict)
    likely: dict[str, model.LeaseTerms] = field(default_factory=dict)
    bookings: Bookings = field(default_factory=lambda: Bookings(86_400.0))

    def place(self, ask: Ask, now: float, *, again: bool) -> Pick | Refusal:
        self.placements += 1
        return self._place(ask, {})

    def place_after(self, ask: Ask, now: float, freed: Collection[str]) -> Pick | Refusal:
        self.imagined += 1
        return self._place(ask, dict.fromkeys(freed))

    def leases(self, nodes: Collection[str]) -> Sequence[model.LeaseTerms]:
        return [
            one.lease
            for one in self.held.values()
            if not {uuid.rsplit("-", 1)[0] for uuid in one.gpus}.isdisjoint(nodes)
        ]

    def ending_first(self) -> Iterator[model.LeaseTerms]:
        leases = (one.lease for one in self.held.values())
        for lease in sorted(leases, key=lambda lease: (lease.ends, lease.id)):
            self.leases_read += 1
            yield lease

    def revocable(self) -> Sequence[model.LeaseTerms]:
        return [one.lease for one in self.held.values() if one.lease.preemptible or one.lease.revoked]

    def gpu_milli_held(self, tenant: str) -> int:
        return sum(one.lease.gpu_milli for one in self.held.values() if one.tenant == tenant)

    def quota(self, tenant: str) -> model.Quota:
        return self.quotas.get(tenant, model.Quota(tenant))

    def month(self, tenant: str) -> model.MonthStanding:
        return self.months.get(tenant, model.MonthStanding())

    def likely_first(
        self, looked_at: int, most: int, now: float
    ) -> Generator[None, None, Sequence[model.LeaseTerms]]:
        yield from ()
        first = [self.likely.get(one.id, one) for one in islice(self.ending_first(), looked_at)]
        return sorted(first, key=lambda one: one.ends)[:most]

    def lasts(self, order: Order) -> float:
        return order.ttl

    def booked(self, order: Order) -> Sequence[Booking]:
        return self.bookings.in_the_way(order.limit, self.now, preemptible=order.preemptible)

    def claim(self, order: Order) -> Ask | model.QueueObstacle:
        found = self.bookings.get(order.booking).restricted(order.ask)
        assert found is not None
        return found

    def hold(self, order: Order, uuids: Collection[str], *, ttl: float | None = None) -> model.LeaseTerms:
        taken = {uuid for one in self.held.values() for uuid in one.gpus}
        assert taken.isdisjoint(uuids), "a GPU is held twice"
        lease = model.LeaseTerms(
            order.request_id,
            order.priority,
            order.preemptible,
            WHOLE * len(uuids),
            self.now,
            self.now + (order.ttl if ttl is None else ttl),
        )
        self.held[order.request_id] = Held(lease, order.tenant, frozenset(uuids))
        return lease

    def end(self, name: str, queue: Queue) -> None:
        """End a lease and say so."""
        gone = self.held.pop(name)
        queue.changed({uuid.rsplit("-", 1)[0] for uuid in gone.gpus})

    def revoke(self, name: str, at: float) -> None:
        """A lease will end then."""
        one = self.held[name]
        one.lease = replace(one.lease, revoked=True, ends=at)

    def _place(self, ask: Ask, freed: Collection[str]) -> Pick | Refusal:
        taken = {uuid for name, one in self.held.items() if name not in freed for uuid in one.gpus}
        if ask.gpu_count > max(self.nodes.values()):
            return Refusal(RefusalKind.UNSATISFIABLE, "never", {}, {})
        for name, count in self.nodes.items():
            if name in ask.excluded_nodes or name in self.down or (ask.nodes and name not in ask.nodes):
                continue
            uuids = [f"{name}-{index}" for index in range(count)]
            free = [
                one
                for one in uuids
                if one not in taken and one not in ask.excluded_gpus and (not ask.gpus or one in ask.gpus)
            ]
            if len(free) >= ask.gpu_count:
                return Pick(tuple(reserved(one, node=name) for one in free[: ask.gpu_count]))
        return Refusal(RefusalKind.NO_CAPACITY, "no room", {}, {})


def wish(
    name: str,
    count: int = 1,
    *,
    tenant: str = "t",
    priority: int = 0,
    ttl: float = 60.0,
    preemptible: bool = False,
    may_preempt: bool = False,
    nodes: Collection[str] = (),
) -> Order:
    """An order, named by its request id."""
    return Order(
        request_id=name,
        fingerprint=name,
        holder="job",
        owner="ann",
        ttl=ttl,
        labels={},
        ask=ask(count, nodes=nodes),
        tenant=tenant,
        priority=priority,
        preemptible=preemptible,
        may_preempt=may_preempt,
    )


@dataclass
class Line:
    """A queue over the small fleet, played by a test."""

    world: QueueWorld
    rules: model.Rules = field(default_factory=model.Rules)

    def __post_init__(self) -> None:
        self.queue = Queue(self.world, self.rules)

    def ask(self, *orders: Order, wait: float = 1e6) -> None:
        for order in orders:
            self.queue.add(order, self.world.now, self.world.now + wait)

    def play(self) -> list[model.Step]:
        """Rounds until nothing is due, each decision carried out; the grants and revocations in their order."""
        done: list[model.Step] = []
        rounds = 0
        while self.queue.due:
            rounds += 1
            assert rounds < 20, "the queue never comes to rest"
            for step in self.queue.round(self.world.now):
                if isinstance(step, model.Grant):
                    self.world.hold(step.waiter.order, [gpu.uuid for gpu in step.pick.gpus])
                if isinstance(step, model.Revoke):
                    for lease in step.leases:
                        self.world.revoke(lease, self.world.now + self.rules.grace)
                done.append(step)
        return done

    def granted(self) -> list[str]:
        """Play, and name who was granted, in that order."""
        return [step.waiter.order.request_id for step in self.play() if isinstance(step, model.Grant)]

    def revoked(self) -> list[str]:
        """Play, and name the leases that are to end."""
        return [lease for step in self.play() if isinstance(step, model.Revoke) for lease in step.leases]

    def place(self, name: str) -> model.QueuePlace:
        """Where a request stands."""
        waiter = self.queue.get(name)
        assert waiter is not None
        assert waiter.place is not None
        return waiter.place

    def leave(self, *names: str) -> None:
        for name in names:
            waiter = self.queue.get(name)
            assert waiter is not None
            self.queue.remove(waiter)

    def end(self, *names: str) -> None:
        """Leases end."""
        for name in names:
            self.world.end(name, self.queue)
