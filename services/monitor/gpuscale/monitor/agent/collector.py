"""Snapshots of the host and its GPUs, taken every period and on demand.

A snapshot orders a reading of the host and of each GPU, waits a moment, and shows what is known then. The sampler takes one at a
time, which concurrent callers share.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Generic, TypeVar
from uuid import uuid4

from gpuscale.common.runtime.tasks import Clock
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.gpus import Gpus
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
        read_host: Callable[[], HostReading],
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
        self._host = Reader(read_host, clock)
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
        gpus, admissions, quarantines = self._gpus.views(), self._admitted(), self.quarantines or {}
        pods = self._pods()
        if quarantines or admissions.workers or pods:
            shown: list[GpuView] = []
            for view in gpus:
                uuid, reading = view.identity.uuid, view.reading
                if reading.processes and admissions.workers:
                    marked = self._holders.mark(admissions, uuid, reading.processes)
                    reading = reading._replace(processes=marked)
                quarantine = quarantines.get(uuid.lower()) or quarantines.get(
                    view.identity.parent_uuid.lower()
                )
                of_gpu = pods.get(uuid, ())
                if len(of_gpu) == 1 and reading.processes:
                    named = (one._replace(pod=of_gpu[0]) if one.pod else one for one in reading.processes)
                    reading = reading._replace(processes=tuple(named))
                shown.append(view._replace(reading=reading, quarantine=quarantine, pods=of_gpu))
            gpus = tuple(shown)
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
            gpus=gpus,
            gpu_problem=self._gpus.problem(),
            simulated=self._gpus.simulated,
            labels=self._labels,
        )

    async def close(self) -> None:
        """Release the driver and end the idle threads."""
        self._host_worker.stop()
        await self._gpus.close()


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


class Broadcast(Generic[T]):
    """Hands each of its `followers` the newest value whenever it is ready for one. `dropped` counts values that they missed."""

    def __init__(self) -> None:
        self._newest: list[T] = []
        self._published = 0
        self._changed = asyncio.Event()
        self.followers = self.dropped = 0

    def publish(self, value: T) -> None:
        """Hand a value to every follower."""
        changed, self._changed = self._changed, asyncio.Event()
        self._newest = [value]
        self._published += 1
        changed.set()

    async def follow(self, interval: float = 0.0) -> AsyncGenerator[tuple[T, int]]:
        """The newest value, then each later one, with how many were missed; those within `interval` seconds are left out."""
        seen = self._published - len(self._newest)
        self.followers += 1
        try:
            while True:
                while seen == self._published:
                    await self._changed.wait()
                missed, seen = self._published - seen - 1, self._published
                self.dropped += missed
                yield self._newest[0], missed
                if interval:
                    await asyncio.sleep(interval)
                    seen = max(seen, self._published - 1)
        finally:
            self.followers -= 1
