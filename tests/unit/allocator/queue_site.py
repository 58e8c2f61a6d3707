"""The queue with its task, ledger, commits and sweeper on virtual time; whole GPUs of a few nodes, a disk that keeps nothing."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gpuscale.allocator.domain.bookings import Bookings
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Ask, Node, Order, Pick, Reservation, State
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from gpuscale.allocator.queueing.model import QueueWorld, Quota, Rules
from gpuscale.allocator.queueing.queue import Queue
from gpuscale.allocator.state.commits import Changes, Commits
from gpuscale.allocator.usecases.endings import Sweeper
from gpuscale.allocator.usecases.reserving import Waiting
from gpuscale.common.errors import GpuscaleError, UnavailableError
from gpuscale.common.runtime.tasks import TaskScope
from tests.support.allocator_values import plain_node, reserved
from tests.support.clock import LoopClock


class Disk:
    """A store whose writes can be begun, too."""

    short = False

    async def save(
        self, added: list[Reservation], changed: list[Reservation], begun: list[Reservation], also: object
    ) -> None:
        raise NotImplementedError

    async def why(self, error: GpuscaleError, _: Sequence[Reservation]) -> UnavailableError:
        return (
            error if isinstance(error, UnavailableError) else UnavailableError("refused", reason=error.reason)
        )

    def begin(self, *what: Any) -> None:
        *saved, done = what
        saving = asyncio.ensure_future(self.save(*saved))
        saving.add_done_callback(lambda one: one.cancelled() or done(one.exception(), None))


class NoDisk(Disk):
    """A store that is done at once, or fails while `broken`; it counts what is changed and forgotten at a time."""

    def __init__(self) -> None:
        self.broken = False
        self.changes: list[int] = []
        self.forgotten: list[int] = []

    async def save(
        self, added: list[Reservation], changed: list[Reservation], begun: list[Reservation], also: object
    ) -> None:
        await self._write()
        self.changes.append(len(changed))

    async def forget(self, ended: list[Reservation], fence: int) -> None:
        await self._write()
        self.forgotten.append(len(ended))

    async def _write(self) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise UnavailableError("the disk is full", reason="DISK_FULL")


class FirstFit:
    """Places on the first node with enough GPUs that nobody holds."""

    def __init__(self, ledger: Ledger, sizes: Mapping[str, int]) -> None:
        self._ledger = ledger
        self.sizes = dict(sizes)
        self.placements = 0

    @property
    def nodes(self) -> list[Node]:
        return [plain_node(name, count) for name, count in self.sizes.items()]

    def place(self, ask: Ask, now: float, *, again: bool = False) -> Pick | Refusal:
        self.placements += 1
        return self.place_after(ask, now, ())

    def place_after(
        self, ask: Ask, now: float, freed: Collection[str], *, told: bool = False
    ) -> Pick | Refusal:
        for name, count in self.sizes.items():
            free = [f"{name}-{index}" for index in range(count) if self._free(f"{name}-{index}", ask, freed)]
            if len(free) >= ask.gpu_count and (not ask.nodes or name in ask.nodes):
                return Pick(tuple(reserved(one, node=name) for one in free[: ask.gpu_count]))
        return Refusal(RefusalKind.NO_CAPACITY, "no room", {}, {})

    def _free(self, uuid: str, ask: Ask, freed: Collection[str]) -> bool:
        holders = set(self._ledger.use.gpu(uuid).reservations) - set(freed)
        return not holders and uuid not in ask.excluded_gpus and (not ask.gpus or uuid in ask.gpus)


class QueueSite:
    """Everything of an allocator that has to do with waiting."""

    def __init__(self, sizes: Mapping[str, int], rules: Rules) -> None:
        self.clock = LoopClock()
        self.ledger = Ledger()
        self.disk = NoDisk()
        self.changes = Changes()
        self.commits = Commits(self.ledger, self.disk, self.changes)
        self.placer = FirstFit(self.ledger, sizes)
        self.quotas: dict[str, Quota] = {}
        world = QueueWorld(
            self.ledger, self.placer, self.quotas, Bookings(86_400.0), self.clock.now, self.clock.wall
        )
        self.queue = Queue(world, rules)
        self.waiting = Waiting(
            self.queue, ledger=self.ledger, commits=self.commits, grace=rules.grace, clock=self.clock
        )
        self.changes.on_room(self.waiting.changed)

    async def grant(self, order: Order) -> Reservation:
        pick = self.waiting.look(order, self.clock.now())
        assert isinstance(pick, Pick)
        granted = self.ledger.grant(order, pick.gpus, now=self.clock.now(), wall=self.clock.wall())
        assert await self.commits.grant([granted]) is None
        return self.ledger.get(granted.id)

    async def release(self, one: Reservation) -> None:
        closed = self.ledger.close(one, State.RELEASED, now=self.clock.now(), wall=self.clock.wall())
        await self.commits.end([closed])

    async def settle(self) -> None:
        """Let everything that is ready run."""
        for _ in range(20):
            await asyncio.sleep(0)


@asynccontextmanager
async def queue_site(rules: Rules | None = None, **sizes: int) -> AsyncGenerator[QueueSite]:
    site = QueueSite(sizes, rules or Rules())
    async with TaskScope() as tasks:
        tasks.spawn("commits", site.commits.run())
        tasks.spawn("waiting", site.waiting.run())
        tasks.spawn("sweeper", Sweeper(site.ledger, site.disk, site.commits, site.clock).run())
        yield site
        assert not len(site.queue), "somebody is left in the queue"
        assert not site.waiting._entries, "somebody is left waiting"
