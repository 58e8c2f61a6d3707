"""The owner of the GPU source: opens it, reads every GPU in threads, and reopens it after a failure.

No call blocks the event loop, a GPU has at most one pending call, and a late GPU is not waited for again until it answers. The
source is opened and closed only while no call is pending, since drivers do not define what happens to such calls.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, Clock
from gpuscale.monitor.agent.device import QUICK_SECONDS, Collection, Device, ReadDeadlines
from gpuscale.monitor.agent.events import Listener
from gpuscale.monitor.agent.pci import pci_address
from gpuscale.monitor.agent.sources import GpuSource, GpuSourceError
from gpuscale.monitor.agent.threads import CallThread, Reader, SharedThread, wait_until
from gpuscale.monitor.model import readings

# The longest pause before reopening an interrupted driver: it may have recovered.
LONGEST_PAUSE_SECONDS = 5.0


def wire(ends: Mapping[str, tuple[str | None, ...]]) -> dict[str, tuple[tuple[str, int], ...]]:
    """The NVLinks between GPUs as (UUID, count), from the other ends of each GPU's links (None is a switch).

    Two GPUs on switches have as many links between them as the one with fewer.
    """
    switched = {uuid: found.count(None) for uuid, found in ends.items()}
    peers: dict[str, tuple[tuple[str, int], ...]] = {}
    for uuid, found in ends.items():
        counts = Counter(end for end in found if end is not None)
        for other, links in switched.items():
            if other != uuid:
                counts[other] += min(links, switched[uuid])
        peers[uuid] = tuple(sorted((other, count) for other, count in counts.items() if count))
    return peers


REOPEN_INITIAL_SECONDS = 1.0
REOPEN_CAP_SECONDS = 30.0
# The pause before reopening while some GPUs work, since that interrupts them.
REOPEN_FOR_SOME_SECONDS = 300.0
CLOSE_SECONDS = 2.0
# Closing the driver may have to wait this long for the events thread.
LONGEST_EVENT_WAIT_SECONDS = 1.0
# The least deadline of opening, which takes seconds on a large host.
OPENING_SECONDS = 10.0
# How long a release waits for pending calls.
RELEASE_SECONDS = 5.0

_NAMESPACE = uuid5(NAMESPACE_URL, "gpuscale:missing-gpu")

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Window:
    """The driver is released until a time of the agent's clock."""

    problem: str
    until: float


class Gpus:
    """The GPUs of a source, for use from one event loop. `observers` are called with each driver event.

    `event_wait`: seconds that the events thread stays in the driver. `node` is part of the names of unidentified GPUs.
    """

    def __init__(
        self,
        source: GpuSource,
        clock: Clock,
        deadlines: ReadDeadlines,
        event_wait: float = LONGEST_EVENT_WAIT_SECONDS,
        node: str = "",
    ) -> None:
        self.observers: list[Callable[[readings.GpuEvent], None]] = []
        self._source = source
        self._clock = clock
        self._deadlines = deadlines
        self._node = node
        self._control = CallThread("gpu-source")
        self._listener = Listener(source, clock, self.observers, event_wait)
        self._shared = SharedThread()
        self._devices: dict[str, Device] = {}
        self._inventory: readings.Inventory | None = None
        self._problem = "the GPUs have not been looked for yet"
        self._opening_since: float | None = None
        self._opened_at = 0.0
        self._retry_at = 0.0
        self._backoff = Backoff(REOPEN_INITIAL_SECONDS, REOPEN_CAP_SECONDS)
        self._window: _Window | None = None
        self._control_call: asyncio.Future[Any] | None = None
        self._alone: set[asyncio.Future[None]] = set()
        self._link_ends: dict[str, tuple[str | None, ...]] = {}
        # Since when an interrupted driver is silent, and when it was interrupted: HUNG GPUs stay HUNG until they are read.
        self._silent_since: float | None = None
        self._interrupted_at = 0.0
        self.collection = Collection()
        self._bug: BaseException | None = None

    @property
    def driver_version(self) -> str:
        """Version of the driver; empty without one."""
        return self._inventory.driver_version if self._inventory else ""

    @property
    def cuda_version(self) -> str:
        """Highest CUDA version that the driver supports; empty without a driver."""
        return self._inventory.cuda_version if self._inventory else ""

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated."""
        return self._source.simulated

    def problem(self) -> str:
        """Why GPUs cannot be read; empty if they can."""
        if self._window is not None:
            return self._window.problem
        if self._opening_since is not None:
            waiting = self._clock.now() - self._opening_since
            if waiting >= self._deadlines.soft:
                return f"the driver has not answered for {waiting:.0f} s while starting"
        return self._problem

    def knows(self, uuid: str) -> bool:
        """Whether this host has such a GPU or MIG instance that work can run on."""
        device = self._devices.get(uuid)
        return device is not None and device.present and not device.identity.divided

    def views(self) -> tuple[readings.GpuView, ...]:
        """Every GPU found so far, in the driver's order; MIG instances follow their GPU, unidentified GPUs come last."""
        views: list[readings.GpuView] = []
        for device in self._devices.values():
            lost, opening_since = None, self._opening_since
            silent_since = self._silent_since if device.read_at < self._interrupted_at else None
            if silent_since is not None and device.present:
                opening_since = silent_since
            elif device.error is not None:
                lost = str(device.error)
            elif self._inventory is None or not device.present:
                lost = self._problem or "the driver no longer lists it"
            released = self._window is not None
            views.append(device.view(opening_since=opening_since, lost=lost, released=released))
        views.sort(
            key=lambda view: (view.identity.index, view.identity.parent_uuid != "", view.identity.uuid)
        )
        known = [view.identity for view in views]
        for missing in self._inventory.missing if self._inventory is not None else ():
            address = pci_address(missing.pci_bus_id)
            if any(
                address == pci_address(gpu.pci_bus_id)
                if address and gpu.pci_bus_id
                else missing.index == gpu.index
                for gpu in known
            ):
                continue
            name = uuid5(_NAMESPACE, f"{self._node}/{address or missing.index}")
            identity = readings.GpuIdentity(f"LOST-{name}", missing.index, "", pci_bus_id=missing.pci_bus_id)
            reading = readings.GpuReading.nothing(readings.ReadingStatus.LOST, missing.problem)
            views.append(readings.GpuView(identity, readings.GpuState.LOST, reading, None))
        return tuple(views)

    async def refresh(self, deadline: float) -> None:
        """Order a reading of every GPU without a pending call, and wait until `deadline` on the loop's clock."""
        if self._window is not None:
            if self._clock.now() < self._window.until:
                return
            self.resume()
        self._interrupt_if_silent()
        if self._due():
            await self._quiet(deadline)
            if not self._calls() and self._window is None:

                def reopen() -> readings.Inventory:
                    self._source.close()
                    return self._source.open()

                self._opening_since = self._clock.now()
                self.collection.openings += 1
                self._control_call = self._control.call(reopen)
                self._control_call.add_done_callback(self._opened)
                await wait_until([self._control_call], deadline)
        if self._inventory is not None and self._opening_since is None and self._window is None:
            await self._read(deadline)
        self._judge()

    async def _read(self, deadline: float) -> None:
        """Read GPUs: quick ones in one shared thread, each other one in its own."""
        quick: dict[Reader[Any], Device] = {}
        asked: list[asyncio.Future[None]] = []
        for device in self._devices.values():
            reader = device.due() if device.present else None
            if reader is not None and device.quick:
                quick[reader] = device
            elif reader is not None:
                asked.append(self._order(device, reader))
        now = asyncio.get_running_loop().time()
        left, held_up = await self._shared.drive(list(quick), min(QUICK_SECONDS, (deadline - now) / 2))
        asked.extend(self._order(quick[reader], reader) for reader in left)
        if held_up is not None:
            asked.append(self._tracked(held_up))
        await wait_until(asked, deadline)

    def _order(self, device: Device, reader: Reader[Any]) -> asyncio.Future[None]:
        return self._tracked(device.order(reader))

    def _tracked(self, call: asyncio.Future[None]) -> asyncio.Future[None]:
        self._alone.add(call)
        call.add_done_callback(self._alone.discard)
        return call

    async def release(self, seconds: float, problem: str) -> None:
        """Release the driver for at most `seconds`, during which GPUs show `problem`.

        FailedPreconditionError (DRIVER_CALL_OUT) if a call does not return; the driver is then still held.
        """
        released = self._window is not None
        self._window = _Window(problem, self._clock.now() + seconds)
        if released:
            return
        await self._quiet(_in(RELEASE_SECONDS))
        if self._calls() and self._source.interrupt():
            await self._quiet(_in(CLOSE_SECONDS))
        if not self._calls():
            self._inventory = None
            self._control_call = self._control.call(self._source.close)
            await wait_until([self._control_call], _in(CLOSE_SECONDS))
        if self._calls():
            self._window = None
            if self._inventory is not None and self._inventory.has_events:
                self._listener.start()
            raise FailedPreconditionError(
                "a call has not returned from the driver, which is therefore still held",
                reason="DRIVER_CALL_OUT",
            )
        _log.warning("driver released", seconds=seconds, problem=problem)

    def resume(self) -> bool:
        """Take the driver back with the next refresh; returns whether it was released."""
        released = self._window is not None
        if released:
            self._window = None
            self._retry_at = 0.0
            self._problem = "the GPUs have not been looked for yet"
            _log.info("driver taken back")
        return released

    async def close(self) -> None:
        """Release the driver and stop the threads; one with a pending call is left behind."""
        self._listener.pause()
        if self._listener.listening is not None:
            await wait_until([self._listener.listening], _in(CLOSE_SECONDS))
        if self._calls() and self._source.interrupt():
            await self._quiet(_in(CLOSE_SECONDS))
        if not self._calls():
            await wait_until([self._control.call(self._source.close)], _in(CLOSE_SECONDS))
        self._control.stop()
        self._listener.stop()
        self._shared.stop()
        for device in self._devices.values():
            device.stop()

    async def _quiet(self, deadline: float) -> None:
        """Wait until every thread has left the driver, at most until the deadline."""
        self._listener.pause()
        await wait_until(self._calls(), deadline)

    def _calls(self) -> list[asyncio.Future[Any]]:
        """A future for each thread in the driver, done once it leaves."""
        calls = (self._listener.listening, self._shared.round, self._control_call, *self._alone)
        return [call for call in calls if call is not None and not call.done()]

    def _present(self) -> list[Device]:
        return [device for device in self._devices.values() if device.present]

    def _due(self) -> bool:
        """Whether to open or reopen the source now."""
        now = self._clock.now()
        listening = self._listener.listening
        if now < self._retry_at or any(call is not listening for call in self._calls()):
            return False
        if self._inventory is None or self._errors() or self._source.outdated:
            return True
        unusable = [device.unusable() for device in self._present()]
        lacking = any(unusable) or self._inventory.problem != ""
        pause = 0.0 if unusable and all(unusable) else REOPEN_FOR_SOME_SECONDS
        return lacking and now - self._opened_at >= pause

    def _interrupt_if_silent(self) -> None:
        """Interrupt the source if no GPU answers and a call is pending beyond the hard deadline."""
        now, opening, present = self._clock.now(), self._opening_since, self._present()
        if opening is not None:
            silent = now - opening >= max(self._deadlines.hard, OPENING_SECONDS)
        else:
            silent = any(device.hung for device in present) and not any(device.answers for device in present)
        if silent and self._source.interrupt():
            waiting = (opening, self._silent_since, *(device.ordered_at for device in self._devices.values()))
            self._silent_since = min((at for at in waiting if at is not None), default=now)
            self._interrupted_at = now
            self.collection.interruptions += 1
            _log.warning("driver does not answer and is interrupted", count=self.collection.interruptions)

    def _opened(self, future: asyncio.Future[readings.Inventory]) -> None:
        began, self._opening_since = self._opening_since, None
        self._opened_at = self._clock.now()
        pause = self._backoff.next()
        if self._silent_since is not None:
            pause = min(pause, LONGEST_PAUSE_SECONDS)
        self._retry_at = self._opened_at + pause
        error = future.exception()
        if isinstance(error, GpuSourceError):
            self._inventory = None
            if began is None or began > self._interrupted_at:
                self._silent_since = None  # it answers again
            self._say(error.problem)
            return
        if error is not None:
            self._bug = error
            return
        inventory = self._inventory = future.result()
        found = {identity.uuid: identity for identity in inventory.gpus}
        for uuid, device in list(self._devices.items()):
            device.present = uuid in found
            # A missing GPU stays and is LOST; a missing MIG instance was removed on purpose.
            if not device.present and device.identity.parent_uuid:
                del self._devices[uuid]
                device.stop()
        for uuid, identity in found.items():
            if uuid in self._devices:
                self._devices[uuid].identity = identity
            else:
                self._devices[uuid] = Device(
                    identity, self._source, self._clock, self._deadlines, self.collection
                )
        self._link_ends = {}  # the new identities have no links yet
        if inventory.has_events and self._window is None:
            self._listener.start()
        self._say(inventory.problem)

    def _errors(self) -> list[BaseException]:
        return [device.error for device in self._present() if device.error is not None]

    def _judge(self) -> None:
        errors = self._errors()
        for error in (self._bug, self._listener.error, *errors):
            if error is not None and not isinstance(error, GpuSourceError):
                raise error
        if self._inventory is None:
            return
        ends = {uuid: device.link_ends for uuid, device in self._devices.items()}
        if ends != self._link_ends:
            self._link_ends = ends
            for uuid, nvlinks in wire(ends).items():
                device = self._devices[uuid]
                device.identity = replace(device.identity, nvlinks=nvlinks)
        self._say(str(errors[0]) if errors else self._inventory.problem)
        if not errors and not any(device.unusable() for device in self._present()):
            self._backoff.reset()

    def _say(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            if problem:
                _log.warning("GPUs cannot be read", problem=problem)
            else:
                _log.info("GPUs can be read", count=len(self._devices), driver=self.driver_version)


def _in(seconds: float) -> float:
    """A deadline that many seconds from now, on the loop's clock."""
    return asyncio.get_running_loop().time() + seconds
