"""The world as the queue sees it: placer, ledger and quotas of this allocator."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from gpuscale.allocator.domain.ledger import Ledger, due_at
from gpuscale.allocator.domain.model import Ask, Reservation, State
from gpuscale.allocator.domain.placement import Pick
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Refusal
from gpuscale.allocator.queueing.model import Lease, Quota
from gpuscale.common.errors import NotFoundError
from gpuscale.common.runtime.clock import Clock


class AllocatorWorld:
    """Answers the queue's questions.

    Args:
        quota: looks up the quota of a tenant.
    """

    def __init__(
        self, *, ledger: Ledger, placer: Placer, quota: Callable[[str], Quota], clock: Clock
    ) -> None:
        self._ledger = ledger
        self._placer = placer
        self._quota = quota
        self._clock = clock
        self._since: dict[str, float] = {}

    def place(self, ask: Ask, now: float, *, again: bool) -> Pick | Refusal:
        """Which GPUs serve the ask, or why none do; `again` says that it was placed before."""
        return self._placer.place(ask, now, again=again)

    def place_after(self, ask: Ask, now: float, freed: Collection[str]) -> Pick | Refusal:
        """The same, if the reservations with these ids held nothing."""
        return self._placer.place_after(ask, now, freed)

    def leases(self, nodes: Collection[str] | None = None) -> Sequence[Lease]:
        """All leases, or those that hold something of these nodes."""
        if nodes is None:
            live = {one.id: one for one in self._on([node.id for node in self._placer.nodes])}
            self._since = {key: since for key, since in self._since.items() if key in live}
        else:
            live = {one.id: one for one in self._on(nodes)}
        return [self._lease(one) for one in live.values()]

    def gpu_milli_held(self, tenant: str) -> int:
        """What the tenant holds."""
        return self._ledger.use.tenants.get(tenant, 0)

    def quota(self, tenant: str) -> Quota:
        """The quota of the tenant; one without a limit where none was set."""
        return self._quota(tenant)

    def _on(self, nodes: Iterable[str]) -> Iterator[Reservation]:
        """Live reservations on nodes, those too that are not on disk yet; one on two nodes comes twice."""
        for node in nodes:
            for held in self._ledger.use.reservations(node):
                try:
                    yield self._ledger.get(held.id)
                except NotFoundError:
                    yield held

    def _lease(self, one: Reservation) -> Lease:
        """One that is not on disk yet cannot be revoked, and one whose end is on its way there needs not be."""
        return Lease(
            id=one.id,
            priority=one.priority,
            preemptible=one.preemptible and one.state is not State.PENDING,
            gpu_milli=sum(gpu.milli for gpu in one.gpus),
            since=self._granted_at(one),
            ends=due_at(one),
            revoked=one.revoke_at is not None or self._ledger.closing(one.id),
        )

    def _granted_at(self, one: Reservation) -> float:
        """When it was granted, on the boot clock.

        Of one of an earlier run of the program the date is all that is known: worked out once, so that later steps of the
        wall clock do not count.
        """
        known = self._ledger.granted_at(one.id)
        if known is not None:
            return known
        if one.id not in self._since:
            age = (self._clock.wall() - one.created).total_seconds()
            self._since[one.id] = self._clock.now() - max(0.0, age)
        return self._since[one.id]
