"""Bugs that a test puts into an allocator, to prove that the check of histories finds them. Never part of the program.

Each is a mistake that real systems have made. Some take the database's own refusals away too, which would otherwise
keep the bug from doing harm.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from sqlalchemy import UniqueConstraint, event

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import FREE_GPU, WHOLE, GpuUse, Reservation, Use
from gpuscale.allocator.state import schema as schema_store
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.tasks import SystemClock

DELAY = 60.0
"""Seconds by which a write may come too late; longer than any schedule."""
BETWEEN = "planted.between"
"""Failpoint between two writes that belong together."""

_TABLES = schema_store.Table.metadata.tables
_later: set[asyncio.Task[None]] = set()


def reply_before_commit() -> None:
    """What was granted is on disk some time after it was answered (Slurm saves its state every few seconds)."""
    save = AllocatorStore.save

    async def soon(
        self: AllocatorStore, added: Sequence[Reservation], changed: Sequence[Reservation]
    ) -> None:
        async def later() -> None:
            await asyncio.sleep(DELAY)
            await save(self, added, changed)

        task = asyncio.create_task(later())
        _later.add(task)
        task.add_done_callback(_later.discard)

    AllocatorStore.save = soon  # type: ignore[method-assign]


def two_transactions() -> None:
    """What belongs together is written one after the other."""
    save = AllocatorStore.save

    async def apart(
        self: AllocatorStore, added: Sequence[Reservation], changed: Sequence[Reservation]
    ) -> None:
        await save(self, [], changed)
        for index, one in enumerate(added):
            if index:
                await tasks.hit_async(BETWEEN)
            await save(self, [one], [])

    AllocatorStore.save = apart  # type: ignore[method-assign]


def fence_in_memory() -> None:
    """The fence begins anew with each start (Ray #66199, Slurm)."""
    restore = Ledger.restore

    def forgetful(self: Ledger, reservations: Iterable[Reservation]) -> None:
        restore(self, reservations)
        self._fence = 0

    Ledger.restore = forgetful  # type: ignore[method-assign]
    _drop_unique("fence")


def wall_clock_expiry() -> None:
    """Leases run by the wall clock (etcd #12291, hashicorp/raft #108)."""

    def now(self: SystemClock) -> float:
        return self.wall().timestamp()

    SystemClock.now = now  # type: ignore[method-assign]


def shares_unchecked() -> None:
    """Shares of a GPU are not added up (kai-scheduler #2153)."""
    gpu = Use.gpu

    def free_looking(self: Use, uuid: str) -> GpuUse:
        use = gpu(self, uuid)
        return use if use.milli >= WHOLE else FREE_GPU

    def add(self: Use, reservation: Reservation, sign: int) -> None:
        Use.gpu = gpu  # type: ignore[method-assign]
        try:
            really_add(self, reservation, sign)
        finally:
            Use.gpu = free_looking  # type: ignore[method-assign]

    really_add = Use._add
    Use.gpu = free_looking  # type: ignore[method-assign]
    Use._add = add  # type: ignore[method-assign]
    event.remove(_TABLES["hold"], "after_create", schema_store.guard_shares)


def request_id_ignored() -> None:
    """A repeated request is granted again (Kubernetes #52678)."""
    Ledger.replay = _nothing_known  # type: ignore[method-assign]
    _drop_unique("request_id")


def stale_fence_accepted() -> None:
    """Whoever knows the name of a reservation may renew it, whatever fence it has (etcd's own lock example)."""

    def expect(self: Ledger, reservation_id: str, fence: int) -> Reservation:
        return self.get(reservation_id)

    Ledger.expect = expect  # type: ignore[method-assign]


def _nothing_known(self: Ledger, request_id: str, fingerprint: str) -> Reservation | None:
    return None


def _drop_unique(column: str) -> None:
    table = _TABLES["reservation"]
    for constraint in list(table.constraints):
        if isinstance(constraint, UniqueConstraint) and list(constraint.columns) == [table.c[column]]:
            table.constraints.discard(constraint)


PLANTS: Mapping[str, Callable[[], None]] = {
    plant.__name__: plant
    for plant in (
        reply_before_commit,
        two_transactions,
        fence_in_memory,
        wall_clock_expiry,
        shares_unchecked,
        request_id_ignored,
        stale_fence_accepted,
    )
}
"""By name."""
