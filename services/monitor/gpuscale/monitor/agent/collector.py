"""Takes snapshots: orders a reading of the host and of every GPU, waits a moment, and says what is known then."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from uuid import uuid4

from gpuscale.common.runtime.clock import Clock
from gpuscale.monitor.agent.admission import Admissions, Holders
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.ports import HostSource
from gpuscale.monitor.agent.staleness import Deadlines
from gpuscale.monitor.agent.worker import Reader, Worker, wait_until
from gpuscale.monitor.model.readings import (
    GpuView,
    HostIdentity,
    HostReading,
    Quarantine,
    ReadingStatus,
    Snapshot,
    Timed,
)

LONGEST_WAIT_SECONDS = 0.5


class Collector:
    """Takes the snapshots of one run of the agent; their `seq` grows by one each.

    Args:
        node: id of this node.
        period: seconds between snapshots.
        gpus: reads the GPUs.
        host: reads the host.
        identity: what the host is.
        clock: what tells the time.
        deadlines: when the host counts as silent.
        labels: the operator's own, by name.
        admitted: what work was admitted on the GPUs.
        holders: tells whose processes are by that.

    Attributes:
        quarantines: GPUs that no new work should be placed on, by UUID in lower case; None until the fleet has told. Whoever
            hears from it puts a new mapping here; the next snapshot shows it.
    """

    def __init__(
        self,
        node: str,
        period: float,
        gpus: Gpus,
        host: HostSource,
        identity: HostIdentity,
        clock: Clock,
        deadlines: Deadlines,
        labels: Mapping[str, str] | None = None,
        admitted: Callable[[], Admissions] = Admissions,
        holders: Holders | None = None,
    ) -> None:
        self._holders = holders or Holders()
        self.epoch = str(uuid4())
        self.start_time = clock.wall()
        self.node = node
        self.period = period
        self._gpus = gpus
        self._host = Reader(host.read, clock)
        self._host_worker = Worker("host")
        self._identity = identity
        self._clock = clock
        self._deadlines = deadlines
        self._labels = tuple(sorted((labels or {}).items()))
        self._admitted = admitted
        self.quarantines: Mapping[str, Quarantine] | None = None
        self._seq = 0

    async def collect(self) -> Snapshot:
        """Take a snapshot; what has not answered within half a second is in it as it was last known.

        Raises:
            WorkerDiedError: a source has a bug.
        """
        deadline = asyncio.get_running_loop().time() + min(LONGEST_WAIT_SECONDS, self.period / 2)
        host = None if self._host.ordered_at is not None else self._host.order(self._host_worker)
        await self._gpus.refresh(deadline)
        await wait_until([host] if host else [], deadline)
        if self._host.error is not None:
            raise self._host.error
        return self._assemble()

    async def close(self) -> None:
        """Let go of the driver and end the threads that are free."""
        self._host_worker.stop()
        await self._gpus.close()

    def _assemble(self) -> Snapshot:
        self._seq += 1
        now = self._clock.now()
        return Snapshot(
            node=self.node,
            epoch=self.epoch,
            seq=self._seq,
            taken_at=now,
            sample_time=self._clock.wall(),
            period=self.period,
            host=self._identity,
            host_reading=self._host_reading(self._host.last, now),
            host_read_at=self._host.last.read_at if self._host.last else None,
            driver_version=self._gpus.driver_version,
            gpus=self._views(),
            gpu_problem=self._gpus.problem(),
            simulated=self._gpus.simulated,
            labels=self._labels,
        )

    def _views(self) -> tuple[GpuView, ...]:
        """The GPUs, with what the agent itself knows of each beside the driver."""
        views, admissions = self._gpus.views(), self._admitted()
        if not self.quarantines and not admissions.workers:
            return views
        return tuple(self._marked(view, admissions) for view in views)

    def _marked(self, view: GpuView, admissions: Admissions) -> GpuView:
        uuid, reading = view.identity.uuid, view.reading
        if reading.processes and admissions.workers:
            reading = reading._replace(processes=self._holders.mark(admissions, uuid, reading.processes))
        found, parent = self.quarantines or {}, view.identity.parent_uuid
        quarantine = found.get(uuid.lower()) or found.get(parent.lower())
        return replace(view, reading=reading, quarantine=quarantine)

    def _host_reading(self, last: Timed[HostReading] | None, now: float) -> HostReading:
        waiting = 0.0 if self._host.ordered_at is None else now - self._host.ordered_at
        if last is None or waiting >= self._deadlines.hard:
            return HostReading.nothing(ReadingStatus.TIMEOUT, f"no answer for {waiting:.0f} s")
        return last.value
