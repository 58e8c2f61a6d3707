"""Use cases before reserving: is there room, wait for room, explain what blocks an ask, rank idle nodes.

They use the same placement as Reserve and hold nothing.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuscale.allocator.domain.architectures import GpuKind
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Ask, Order, Pick, ReservedGpu
from gpuscale.allocator.domain.ranking import Idleness, RankedNode, best_first, rank
from gpuscale.allocator.placing.explanation import Outlook, remedies
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Reconsider, Refusal, RefusalKind
from gpuscale.allocator.queueing.model import QueueObstacle
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.allocator.usecases.fleet import FleetFollower, FleetView
from gpuscale.allocator.usecases.reserving import Waiting
from gpuscale.common.errors import NotFoundError, ResourceExhaustedError
from gpuscale.common.runtime.tasks import Clock

DEFAULT_TIMEOUT = 300.0
"""Default seconds of a wait: the seed's."""
MOST_WAITS = 128
"""Most concurrent waits: a quarter of the calls that the server handles."""
LOOK_GAP = 0.05
"""Least seconds between two checks of a waiting call, however often something changes."""
RANK_SLICE = 128
"""Nodes that are ranked before other calls run: about 3 ms."""
_RETRY = 1.0


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """Whether an ask could be granted, in words; the GPUs it would get, or the reason as a code.

    `final` says that waiting does not help.
    """

    message: str
    available: bool = False
    reason: str = ""
    gpus: tuple[ReservedGpu, ...] = ()
    final: bool = False


@dataclass(eq=False)
class Capacity:
    """Read-only queries.

    Every method raises NotFoundError for an unknown chosen node, and UnavailableError (NO_TELEMETRY) while the fleet's GPUs are
    unknown.
    """

    placer: Placer
    waiting: Waiting
    view: FleetView
    follower: FleetFollower
    ledger: Ledger
    maintenance: Maintenance
    clock: Clock
    reconsider: Reconsider = field(init=False)
    _waits: int = field(default=0, init=False)
    _change: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def check(self, ask: Ask, tenant: str) -> CapacityAnswer:
        """Whether the tenant would be granted the ask now; requests in the queue come first."""
        found = self._look(ask, tenant)
        return _answer(await self.reconsider(ask, found) if isinstance(found, Refusal) else found)

    def _look(self, ask: Ask, tenant: str) -> Pick | Refusal | QueueObstacle:
        self.expect_telemetry()
        now = self.clock.now()
        found = self.placer.place(ask, now, again=True)
        if isinstance(found, Pick):
            order = Order("", "", holder=tenant, owner=tenant, ttl=0.0, labels={}, ask=ask, tenant=tenant)
            return self.waiting.look(order, now)
        return found

    async def wait(self, ask: Ask, tenant: str, seconds: float) -> tuple[CapacityAnswer, float]:
        """Check until the ask could be granted or `seconds` have passed; the last answer, and how long it took."""
        loop = asyncio.get_running_loop()
        began, change = loop.time(), self._change
        answer = await self.check(ask, tenant)
        if self._waits >= MOST_WAITS:
            raise ResourceExhaustedError(
                f"{MOST_WAITS} calls already wait for room, which is the maximum; join the queue with Reserve",
                reason="TOO_MANY_WAITS",
                retry_after=_RETRY,
            )
        self._waits += 1
        try:
            async with asyncio.timeout_at(began + seconds):
                while not (answer.available or answer.final):
                    await change.wait()
                    change = self._change  # before the check, so that no later change is missed
                    seen = _answer(self._look(ask, tenant))
                    if not (seen.final and ask.mig_profile):  # idle GPUs may still be partitioned for it
                        answer = seen
                    await asyncio.sleep(0 if answer.available else LOOK_GAP)
        except TimeoutError:
            pass  # the last answer stands: nothing has changed since
        finally:
            self._waits -= 1
        return answer, loop.time() - began

    async def explain(self, ask: Ask, tenant: str) -> tuple[CapacityAnswer, Outlook, Sequence[str]]:
        """The answer to the ask, what each constraint and the nearest nodes do to it, and what would make room."""
        answer = await self.check(ask, tenant)
        now = self.clock.now()
        outlook = self.placer.explain(ask, now)
        held = [one for one in self.ledger.reservations(ended=False) if not self.ledger.closing(one.id)]
        found = remedies(
            outlook,
            room_after=lambda freed: isinstance(self.placer.place_after(ask, now, freed), Pick),
            live=held,
            cordons=self.maintenance.cordons,
            now=now,
        )
        return answer, outlook, found

    def kinds(self) -> list[GpuKind]:
        """The known kinds of whole GPUs in the fleet, those with most memory last."""
        counts: dict[tuple[str, int], list[int]] = {}
        for node in self.view.nodes:
            whole = (gpu for gpu in node.gpus if not (gpu.parent or gpu.mig_profile))
            for (model, size), count in Counter((gpu.model, gpu.memory_total_bytes) for gpu in whole).items():
                if size and not node.forgotten:
                    counts.setdefault((model, size), []).append(count)
        kinds = [GpuKind(model, size, sum(many), max(many)) for (model, size), many in counts.items()]
        return sorted(kinds, key=lambda kind: (kind.memory_bytes, kind.model))

    async def rank(self, idleness: Idleness) -> list[RankedNode]:
        """Nodes by how many idle GPUs they have, best first; other calls run between slices of a large fleet."""
        self.expect_telemetry()
        nodes, now = self.view.nodes, self.clock.now()
        found: list[RankedNode] = []
        for start in range(0, len(nodes), RANK_SLICE):
            some = nodes[start : start + RANK_SLICE]
            found += rank(some, idleness, self.ledger.use, self.maintenance.cordons, now)
            await asyncio.sleep(0)
        return sorted(found, key=best_first)

    def changed(self, _nodes: object = None) -> None:
        """Room may have appeared: whoever waits checks again, as an ask may look anywhere."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    def expect_telemetry(self) -> None:
        """Raise UnavailableError (NO_TELEMETRY) while the fleet's GPUs are unknown."""
        if not self.view.complete:
            raise self.follower.no_telemetry()


def _answer(found: Pick | Refusal | QueueObstacle) -> CapacityAnswer:
    if isinstance(found, Pick):
        where = dict.fromkeys(gpu.node for gpu in found.gpus)
        gpus = ", ".join(f"{gpu.uuid} ({gpu.node})" for gpu in found.gpus)
        return CapacityAnswer(f"available now on {', '.join(where)}: {gpus}", available=True, gpus=found.gpus)
    if isinstance(found, QueueObstacle):
        return CapacityAnswer(found.message, reason=found.reason, final=found.lasting)
    if found.kind is RefusalKind.NOT_FOUND:
        raise NotFoundError(found.message, metadata=found.metadata)
    return CapacityAnswer(found.message, reason=found.kind, final=found.kind is RefusalKind.UNSATISFIABLE)
