"""Snapshots of the host and its GPUs, taken every period and on demand.

A snapshot orders a reading of the host and of each GPU, waits a moment, and shows what is known then. The sampler takes one at a
time, which concurrent callers share. Of a broadcast, a subscriber that never reads holds one value at most.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar
from uuid import uuid4

from gpuscale.common.runtime.tasks import Clock
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.sources import HostSource
from gpuscale.monitor.agent.threads import CallThread, Reader, wait_until
from gpuscale.monitor.model.admission import Admissions, Holders
from gpuscale.monitor.model.readings import (
    GpuView,
    HostIdentity,
    HostReading,
    Quarantine,
    ReadingStatus,
    Snapshot,
)

LONGEST_WAIT_SECONDS = 0.5


class Collector:
    """Takes the snapshots of one run of the agent, numbered by `seq`.

    `quarantines` holds quarantined GPUs by lower-case UUID, None until the fleet reports them. `FleetPush` replaces it.
    """

    def __init__(
        self,
        node: str,
        period: float,
        gpus: Gpus,
        host: HostSource,
        identity: HostIdentity,
        clock: Clock,
        deadlines: ReadDeadlines,
        labels: Mapping[str, str] | None = None,
        admitted: Callable[[], Admissions] = Admissions,
        holders: Holders | None = None,
        pods: Callable[[], Mapping[str, tuple[str, ...]]] = dict,
    ) -> None:
        self._holders = holders or Holders()
        self.epoch = str(uuid4())
        self.start_time = clock.wall()
        self.node = node
        self.period = period
        self._gpus = gpus
        self._host = Reader(host.read, clock)
        self._host_worker = CallThread("host")
        self._identity = identity
        self._clock = clock
        self._deadlines = deadlines
        self._labels = tuple(sorted((labels or {}).items()))
        self._admitted = admitted
        self._pods = pods
        self.quarantines: Mapping[str, Quarantine] | None = None
        self._seq = 0

    async def collect(self) -> Snapshot:
        """Take a snapshot. What does not answer within half a second is shown as last known."""
        deadline = asyncio.get_running_loop().time() + min(LONGEST_WAIT_SECONDS, self.period / 2)
        host = None if self._host.ordered_at is not None else self._host.order(self._host_worker)
        await self._gpus.refresh(deadline)
        await wait_until([host] if host else [], deadline)
        if self._host.error is not None:
            raise self._host.error
        self._seq += 1
        now, last = self._clock.now(), self._host.last
        waiting = 0.0 if self._host.ordered_at is None else now - self._host.ordered_at
        return Snapshot(
            node=self.node,
            epoch=self.epoch,
            seq=self._seq,
            taken_at=now,
            sample_time=self._clock.wall(),
            period=self.period,
            host=self._identity,
            host_reading=last.value
            if last is not None and waiting < self._deadlines.hard
            else HostReading.nothing(ReadingStatus.TIMEOUT, f"no answer for {waiting:.0f} s"),
            host_read_at=last.read_at if last else None,
            driver_version=self._gpus.driver_version,
            cuda_version=self._gpus.cuda_version,
            gpus=self._views(),
            gpu_problem=self._gpus.problem(),
            simulated=self._gpus.simulated,
            labels=self._labels,
        )

    async def close(self) -> None:
        """Release the driver and end the idle threads."""
        self._host_worker.stop()
        await self._gpus.close()

    def _views(self) -> tuple[GpuView, ...]:
        """The GPUs with reservations, quarantines and pods added."""
        views, admissions, quarantines = self._gpus.views(), self._admitted(), self.quarantines or {}
        pods = self._pods()
        if not quarantines and not admissions.workers and not pods:
            return views
        shown: list[GpuView] = []
        for view in views:
            uuid, reading = view.identity.uuid, view.reading
            if reading.processes and admissions.workers:
                reading = reading._replace(processes=self._holders.mark(admissions, uuid, reading.processes))
            quarantine = quarantines.get(uuid.lower()) or quarantines.get(view.identity.parent_uuid.lower())
            of_gpu = pods.get(uuid, ())
            if len(of_gpu) == 1 and reading.processes:
                named = (replace(one, pod=of_gpu[0]) if one.pod else one for one in reading.processes)
                reading = reading._replace(processes=tuple(named))
            shown.append(replace(view, reading=reading, quarantine=quarantine, pods=of_gpu))
        return tuple(shown)


# The minimum time between readings on demand: polling a driver without a pause slows work on its GPUs.
SHORTEST_GAP_SECONDS = 0.1


class Sampler:
    """Takes a snapshot with `collect` every `period` seconds, keeps the newest and broadcasts each."""

    def __init__(self, collect: Callable[[], Awaitable[Snapshot]], period: float, clock: Clock) -> None:
        self._collect = collect
        self._period = period
        self._clock = clock
        self._latest: Snapshot | None = None
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self.snapshots: Broadcast[Snapshot] = Broadcast()

    async def run(self) -> None:
        """Take snapshots until cancelled. Those on demand do not shift the period."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            began = loop.time()
            snapshot = self._latest = await self._collect()
            waiting, self._next = self._next, loop.create_future()
            waiting.set_result(snapshot)
            self.snapshots.publish(snapshot)
            self._wanted.clear()
            if loop.time() >= due:
                due += self._period * ((loop.time() - due) // self._period + 1)
            try:
                async with asyncio.timeout_at(due):
                    await self._wanted.wait()
                    await asyncio.sleep(began + SHORTEST_GAP_SECONDS - loop.time())
            except TimeoutError:
                due += self._period  # not from the clock: a timer may fire a clock tick early

    async def get(self, max_age: float) -> Snapshot:
        """The newest snapshot if it is at most `max_age` seconds old, else the next one; 0 always waits for the next."""
        latest = self._latest
        if latest is not None and self._clock.now() - latest.taken_at <= max_age and max_age > 0:
            return latest
        self._wanted.set()
        return await asyncio.shield(self._next)


T = TypeVar("T")


class BroadcastSubscription(Generic[T]):
    """Holds the newest unread value for one subscriber."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._dropped = 0
        self._arrived = asyncio.Event()

    def put(self, value: T) -> int:
        """Replace the unread value; returns how many were replaced, 0 or 1."""
        replaced = len(self._values)
        self._dropped += replaced
        self._values = [value]
        self._arrived.set()
        return replaced

    def forgive(self) -> None:
        """Reset the count of replaced values."""
        self._dropped = 0

    async def get(self) -> tuple[T, int]:
        """Wait for an unread value; returns it and how many were replaced since the last call."""
        await self._arrived.wait()
        self._arrived.clear()
        value, dropped = self._values.pop(), self._dropped
        self._dropped = 0
        return value, dropped


class Broadcast(Generic[T]):
    """Hands each value to every subscription, and the newest one to a new subscription. `dropped` counts unread values."""

    def __init__(self) -> None:
        self._subscriptions: set[BroadcastSubscription[T]] = set()
        self._latest: list[T] = []
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._subscriptions)

    @contextmanager
    def subscribe(self) -> Generator[BroadcastSubscription[T]]:
        """Subscribe until the block ends."""
        subscription = BroadcastSubscription[T]()
        for value in self._latest:
            subscription.put(value)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def publish(self, value: T) -> None:
        """Hand the value to every subscription."""
        self._latest = [value]
        for subscription in self._subscriptions:
            self.dropped += subscription.put(value)
