"""Takes snapshots: each orders a reading of the host and of every GPU, waits a moment, and says what is known then.

The sampler takes one each period, and at once when somebody needs a fresh one. It is one loop, so there is one reading
at a time: callers that need a fresh snapshot at the same moment share it, and none of them touches a driver.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from uuid import uuid4

from gpuscale.common.runtime.tasks import Clock
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.pods import name_pod
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
from gpuscale.monitor.wire.watch import Broadcast

LONGEST_WAIT_SECONDS = 0.5


class Collector:
    """Takes the snapshots of one run of the agent, one each `period` seconds; `seq` grows by one with each.

    `quarantines` has the UUIDs, in lower case, of GPUs for no new work, None until the fleet has told; whoever hears from it
    puts a new mapping there.
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
        """Take a snapshot; what does not answer within half a second is shown as last known."""
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
        """The GPUs, with what the agent knows of each beyond what the driver says."""
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
                reading = reading._replace(processes=name_pod(reading.processes, of_gpu[0]))
            shown.append(replace(view, reading=reading, quarantine=quarantine, pods=of_gpu))
        return tuple(shown)


# However many ask for new readings: a driver that is asked without a pause slows the work on its GPUs.
SHORTEST_GAP_SECONDS = 0.1


class Sampler:
    """Holds the newest snapshot, which `collect` takes each `period` seconds, and tells subscribers of each."""

    def __init__(self, collect: Callable[[], Awaitable[Snapshot]], period: float, clock: Clock) -> None:
        self._collect = collect
        self._period = period
        self._clock = clock
        self._latest: Snapshot | None = None
        self._wanted = asyncio.Event()
        self._next: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self.snapshots: Broadcast[Snapshot] = Broadcast()

    async def run(self) -> None:
        """Read until cancelled. Readings on demand do not shift the rhythm."""
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
