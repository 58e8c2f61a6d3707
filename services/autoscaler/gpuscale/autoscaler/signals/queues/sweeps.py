"""Reading the queues of one broker, all that are due in one sweep.

Connections and tasks stay the same in number however long it goes on: two tasks for each broker, the second for its own
statistics, which are slow and wait for no sweep nor a sweep for them; during a sweep one more for each virtual host that is
watched, and a connection with a channel for each of those.
"""

import asyncio
from collections.abc import Mapping, Sequence

from gpuscale.autoscaler.domain.queues import (
    PENDING,
    QueueFailure,
    QueueReading,
    QueueTarget,
    failed,
    next_sweep,
)
from gpuscale.autoscaler.signals.queues.brokers import Broker
from gpuscale.autoscaler.signals.queues.management import ManagementClient
from gpuscale.autoscaler.signals.queues.virtual_hosts import VirtualHostReader
from gpuscale.common.runtime.clock import Clock

MAX_VIRTUAL_HOSTS_AT_ONCE = 4


class BrokerSweeps:
    """Reads the queues of one broker that are watched, each at its own interval."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self._management = ManagementClient(broker, broker.management) if broker.management else None
        self._intervals: Mapping[QueueTarget, float] = {}
        self._next: dict[QueueTarget, float] = {}
        self._readings: dict[QueueTarget, QueueReading] = {}
        self._readers: dict[str, VirtualHostReader] = {}
        self._rated: frozenset[str] = frozenset()
        self._changed, self._swept = asyncio.Event(), asyncio.Event()

    def watch(self, intervals: Mapping[QueueTarget, float]) -> None:
        """Watch these queues, every so many seconds, and no others; new ones, and those to be read more often, at once."""
        before = self._intervals
        self._next = {
            target: self._next[target] if target in before and before[target] <= interval else 0.0
            for target, interval in intervals.items()
        }
        self._readings = {target: self._readings.get(target, PENDING) for target in intervals}
        self._intervals = intervals
        self._rated = frozenset(target.virtual_host for target in intervals if target.rates)
        for host, reader in self._readers.items():
            reader.keep([target for target in intervals if target.virtual_host == host])
        self._changed.set()

    @property
    def counts_all(self) -> bool:
        """Whether the broker has a management API, which patterns and rates need."""
        return self._management is not None

    def reading(self, target: QueueTarget) -> QueueReading:
        """What was read of a queue last."""
        return self._readings.get(target, PENDING)

    async def run(self) -> None:
        """Sweep for ever; cancelled, close what was opened."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._measure(), name=f"statistics {self._broker.name}")
                while True:
                    await self._sweep()
                    self._swept.set()
                    await self._wait()
        finally:
            for reader in self._readers.values():
                await reader.close()
            if self._management is not None:
                await self._management.close()

    async def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        due = [target for target, at in self._next.items() if at <= now]
        intervals = {self._intervals[target] for target in due}
        following = {interval: next_sweep(now, interval) for interval in intervals}
        self._next.update({target: following[self._intervals[target]] for target in due})
        await self._close_unused()
        hosts = {target.virtual_host for target in due}
        some = asyncio.Semaphore(MAX_VIRTUAL_HOSTS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for host in hosts:
                targets = [target for target in due if target.virtual_host == host]
                group.create_task(self._read(host, targets, some), name=f"sweep {self._broker.name} {host}")

    async def _read(self, host: str, targets: Sequence[QueueTarget], some: asyncio.Semaphore) -> None:
        if host not in self._readers:
            self._readers[host] = VirtualHostReader(self._broker, host, self._management, self._clock)

        def publish(target: QueueTarget, result: QueueReading | QueueFailure) -> None:
            previous = self._readings.get(target)
            if previous is not None:  # it may be watched no longer
                self._readings[target] = (
                    failed(previous, result) if isinstance(result, QueueFailure) else result
                )

        async with some:
            await self._readers[host].read(targets, publish)

    async def _measure(self) -> None:
        """After each sweep, read the statistics that are due, for ever."""
        while True:
            await self._swept.wait()
            self._swept.clear()
            for host, reader in tuple(self._readers.items()):
                await reader.measure(host in self._rated)

    async def _close_unused(self) -> None:
        for host in self._readers.keys() - {target.virtual_host for target in self._next}:
            await self._readers.pop(host).close()

    async def _wait(self) -> None:
        """Wait for the next queue that is due, or for other queues to watch."""
        until = min(self._next.values(), default=None)
        self._changed.clear()
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            return
