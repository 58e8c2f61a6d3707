"""The reading loop: a snapshot each period, and at once when somebody needs a fresh one. Readers never touch a driver.

There is one loop and so one reading at a time: callers that need a fresh snapshot at the same moment share it.
"""

import asyncio
from collections.abc import Awaitable, Callable

from gpuscale.common.runtime.clock import Clock
from gpuscale.monitor.agent.watch import Broadcast
from gpuscale.monitor.model.readings import Snapshot

# However many ask for new readings: a driver that is asked without a pause slows the work on its GPUs.
SHORTEST_GAP_SECONDS = 0.1


class Sampler:
    """Holds the newest snapshot and tells subscribers of each.

    Args:
        collect: takes a snapshot.
        period: seconds from one snapshot to the next.
        clock: what tells the time.
    """

    def __init__(self, collect: Callable[[], Awaitable[Snapshot]], period: float, clock: Clock) -> None:
        self._collect = collect
        self._period = period
        self._clock = clock
        self._latest: Snapshot | None = None
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self.snapshots: Broadcast[Snapshot] = Broadcast()

    async def run(self) -> None:
        """Read for ever; the rhythm is that of the loop's clock, and readings on demand do not shift it."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            began = loop.time()
            self._publish(await self._collect())
            self._wanted.clear()
            if loop.time() >= due:
                due += self._period * ((loop.time() - due) // self._period + 1)
            try:
                async with asyncio.timeout_at(due):
                    await self._wanted.wait()
                    await asyncio.sleep(began + SHORTEST_GAP_SECONDS - loop.time())
            except TimeoutError:
                due += self._period  # and not by the time: a timer may be early by a clock tick

    async def get(self, max_age: float) -> Snapshot:
        """The newest snapshot if it is at most `max_age` seconds old, else that of the reading that ends next.

        A `max_age` of 0 always waits for a reading.
        """
        latest = self._latest
        if latest is not None and self._clock.now() - latest.taken_at <= max_age and max_age > 0:
            return latest
        self._wanted.set()
        return await asyncio.shield(self._next)

    def _publish(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        waiting, self._next = self._next, asyncio.get_running_loop().create_future()
        waiting.set_result(snapshot)
        self.snapshots.publish(snapshot)
