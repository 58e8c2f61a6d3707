"""The one owner of the GPU source: opens it, reads each GPU in a thread of its own, and opens it again when it broke.

No call runs on the event loop, none is queued on a GPU whose call is out, and a GPU that was late once is not waited
for again until it has answered. The source is closed and opened only while no call is out: what a driver does with
such a call is not documented.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpuscale.common.backoff import Backoff
from gpuscale.common.clock import Clock
from gpuscale.common.logs import get_logger
from gpuscale.monitor.agent.model import (
    GPU_FIELDS,
    GpuIdentity,
    GpuReading,
    GpuSample,
    GpuState,
    GpuView,
    Inventory,
    ReadingStatus,
)
from gpuscale.monitor.agent.ports import GpuSource, GpuSourceError
from gpuscale.monitor.agent.staleness import Deadlines, view
from gpuscale.monitor.agent.worker import Reader, Worker

REOPEN_INITIAL_SECONDS = 1.0
REOPEN_CAP_SECONDS = 30.0
# Opening again takes the healthy GPUs away for a moment: for a part of them only seldom.
REOPEN_FOR_SOME_SECONDS = 300.0
CLOSE_SECONDS = 2.0

_log = get_logger(__name__)


@dataclass(slots=True)
class _Gpu:
    """A GPU that was found at least once; `present` is False when the newest inventory lacks it."""

    identity: GpuIdentity
    reader: Reader[GpuSample]
    present: bool = True

    def unusable(self) -> bool:
        """Whether its newest reading says that the source's handle of it is of no use any more."""
        if self.reader.last is None:
            return False
        sample = self.reader.last.value
        gone = sample.state in {GpuState.LOST, GpuState.RESET_REQUIRED}
        return gone or len(sample.reading.absent) == len(GPU_FIELDS)


class Gpus:
    """The GPUs of a source. To be used from one event loop."""

    def __init__(self, source: GpuSource, clock: Clock, deadlines: Deadlines) -> None:
        self._source = source
        self._clock = clock
        self._deadlines = deadlines
        self._control = Worker("gpu-source")
        self._gpus: dict[str, _Gpu] = {}
        self._inventory: Inventory | None = None
        self._problem = "the GPUs have not been looked for yet"
        self._opening_since: float | None = None
        self._opened_at = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(REOPEN_INITIAL_SECONDS, REOPEN_CAP_SECONDS)
        self._bug: BaseException | None = None

    @property
    def driver_version(self) -> str:
        """Version of the driver; empty where there is none."""
        return self._inventory.driver_version if self._inventory else ""

    @property
    def simulated(self) -> bool:
        """Whether no hardware stands behind the GPUs."""
        return self._source.simulated

    def problem(self) -> str:
        """Why GPUs cannot be read; empty when all is well."""
        if self._opening_since is not None:
            waiting = self._clock.now() - self._opening_since
            if waiting >= self._deadlines.soft:
                return f"the driver has not answered for {waiting:.0f} s since it was asked to start"
        return self._problem

    def views(self) -> tuple[GpuView, ...]:
        """Every GPU that was ever found, in the driver's order, as it is to be shown now."""
        ordered = sorted(self._gpus.values(), key=lambda gpu: (gpu.identity.index, gpu.identity.uuid))
        return tuple(self._view(gpu) for gpu in ordered)

    async def refresh(self, deadline: float) -> None:
        """Order a reading of every GPU that has no call out, and wait for the answers until `deadline`.

        Args:
            deadline: time of the running loop.

        Raises:
            WorkerDiedError: the source has a bug.
        """
        if self._due():
            await wait_until([self._open()], deadline)
        if self._inventory is not None and self._opening_since is None:
            present = [gpu for gpu in self._gpus.values() if gpu.present]
            ordered = [future for gpu in present if (future := gpu.reader.order()) is not None]
            await wait_until(ordered, deadline)
        self._judge()

    async def close(self) -> None:
        """Let go of the driver, unless a call is out: then its thread is left behind."""
        if not self._busy():
            await asyncio.wait([self._control.call(self._source.close)], timeout=CLOSE_SECONDS)
        self._control.stop()
        for gpu in self._gpus.values():
            gpu.reader.stop()

    def _busy(self) -> bool:
        calls = (gpu.reader.ordered_at for gpu in self._gpus.values())
        return self._opening_since is not None or any(call is not None for call in calls)

    def _due(self) -> bool:
        """Whether the source is to be opened now, for the first time or again."""
        now = self._clock.now()
        if self._busy() or now < self._retry_at:
            return False
        if self._inventory is None or self._errors():
            return True
        unusable = [gpu.unusable() for gpu in self._gpus.values() if gpu.present]
        if unusable and all(unusable):
            return True
        lacking = any(unusable) or self._inventory.problem != ""
        return lacking and now - self._opened_at >= REOPEN_FOR_SOME_SECONDS

    def _open(self) -> asyncio.Future[Inventory]:
        self._opening_since = self._clock.now()
        future = self._control.call(self._close_and_open)
        future.add_done_callback(self._opened)
        return future

    def _close_and_open(self) -> Inventory:
        self._source.close()
        return self._source.open()

    def _opened(self, future: asyncio.Future[Inventory]) -> None:
        self._opening_since = None
        self._opened_at = self._clock.now()
        self._retry_at = self._opened_at + self._backoff.next()
        error = future.exception()
        if error is None:
            self._take(future.result())
        elif isinstance(error, GpuSourceError):
            self._inventory = None
            self._say(error.problem)
        else:
            self._bug = error

    def _take(self, inventory: Inventory) -> None:
        self._inventory = inventory
        found = {identity.uuid: identity for identity in inventory.gpus}
        for uuid, gpu in self._gpus.items():
            gpu.present = uuid in found
        for uuid, identity in found.items():
            if uuid in self._gpus:
                self._gpus[uuid].identity = identity
            else:
                reader = Reader(f"gpu-{uuid}", partial(self._source.read, uuid), self._clock)
                self._gpus[uuid] = _Gpu(identity, reader)
        self._say(inventory.problem)

    def _errors(self) -> list[BaseException]:
        """Why reading failed, of each GPU of the newest inventory whose newest call did."""
        present = (gpu for gpu in self._gpus.values() if gpu.present)
        return [gpu.reader.error for gpu in present if gpu.reader.error is not None]

    def _judge(self) -> None:
        """Draw the consequences of a round of readings."""
        for error in (self._bug, *self._errors()):
            if error is not None and not isinstance(error, GpuSourceError):
                raise error
        if self._inventory is None:
            return
        errors = self._errors()
        self._say(str(errors[0]) if errors else self._inventory.problem)
        if not errors and not any(gpu.unusable() for gpu in self._gpus.values() if gpu.present):
            self._backoff.reset()

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            if problem:
                _log.warning("GPUs cannot be read", problem=problem)
            else:
                _log.info("GPUs can be read", count=len(self._gpus), driver=self.driver_version)

    def _view(self, gpu: _Gpu) -> GpuView:
        last, error = gpu.reader.last, gpu.reader.error
        if self._inventory is None or not gpu.present or error is not None:
            detail = (
                str(error) if error is not None else self._problem or "the driver does not list it any more"
            )
            reading = GpuReading.nothing(ReadingStatus.LOST, detail)
            return GpuView(gpu.identity, GpuState.LOST, reading, last.read_at if last else None)
        ordered_at = self._opening_since if gpu.reader.ordered_at is None else gpu.reader.ordered_at
        return view(
            gpu.identity, last, ordered_at=ordered_at, now=self._clock.now(), deadlines=self._deadlines
        )


async def wait_until(futures: Iterable[asyncio.Future[Any]], deadline: float) -> None:
    """Wait for all of the futures, until `deadline` of the running loop at the latest. Raises none of their errors."""
    waiting = list(futures)
    if waiting:
        await asyncio.wait(waiting, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
