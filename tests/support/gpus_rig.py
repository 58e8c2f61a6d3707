"""The owner of the GPU source over a fake one, on a clock that a test puts forward."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.model.readings import GpuState, GpuView
from tests.support.monitor import FakeGpus
from tests.support.monitor_values import identity
from tests.support.waiting import eventually

FIRST, SECOND = identity(0).uuid, identity(1).uuid


class Clock(SystemClock):
    """The real clock, which a test can put forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class Rig:
    def __init__(self, source: FakeGpus) -> None:
        self.source = source
        self.clock = Clock()
        self.gpus = Gpus(source, self.clock, ReadDeadlines(soft=2.0, hard=10.0), event_wait=0.1)

    async def refresh(self, wait: float = 5.0) -> float:
        """One round; returns the seconds that it took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.gpus.refresh(began + wait)
        return loop.time() - began

    async def silent(self, *uuids: str) -> list[threading.Event]:
        """A round in which these GPUs do not answer until their events are set, and all others have, however long that takes."""
        gates, began = [self.source.block(uuid) for uuid in uuids], self.clock.now()
        await self.refresh(wait=0.1)
        others = [view.identity.uuid for view in self.gpus.views() if view.identity.uuid not in uuids]
        await eventually(lambda: all((self.view(uuid).read_at or 0.0) >= began for uuid in others))
        return gates

    def view(self, uuid: str) -> GpuView:
        return next(one for one in self.gpus.views() if one.identity.uuid == uuid)

    async def until(self, uuid: str, state: GpuState) -> None:
        """Refresh until a GPU has that state."""

        async def check() -> bool:
            await self.refresh()
            return self.view(uuid).state is state

        await eventually(check)


@asynccontextmanager
async def rig(source: FakeGpus | None = None) -> AsyncGenerator[Rig, None]:
    one = Rig(source or FakeGpus())
    try:
        yield one
    finally:
        for gate in one.source.gates.values():
            gate.set()
        await one.gpus.close()
