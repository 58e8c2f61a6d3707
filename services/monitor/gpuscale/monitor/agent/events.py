"""Driver events: the thread that waits for them, and the faults to report to the fleet. For use from one event loop."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable

from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent.sources import GpuSource
from gpuscale.monitor.agent.threads import CallThread
from gpuscale.monitor.model.readings import GpuEvent, GpuState, GpuView


class Listener:
    """Waits for events of a source in a thread and calls `observers` with each on the event loop.

    `wait`: seconds of one blocking call, and so how long a pause may take. Events end it at once.
    """

    def __init__(
        self, source: GpuSource, clock: Clock, observers: Iterable[Callable[[GpuEvent], None]], wait: float
    ) -> None:
        self._source = source
        self._wait = wait
        self._clock = clock
        self._observers = observers
        self._worker = CallThread("gpu-events")
        self._paused = threading.Event()
        self._listening: asyncio.Future[None] | None = None

    @property
    def listening(self) -> "asyncio.Future[None] | None":
        """Done once the thread leaves the driver; None if it is not in the driver."""
        if self._listening is not None and self._listening.done():
            return None
        return self._listening

    @property
    def error(self) -> BaseException | None:
        """The error that ended listening, if any."""
        if self._listening is None or not self._listening.done():
            return None
        return self._listening.exception()

    def start(self) -> None:
        """Start listening, or cancel a pause that has not taken effect."""
        self._paused.clear()
        if self.listening is None:
            loop = asyncio.get_running_loop()

            def listen() -> None:
                while not self._paused.is_set():
                    found = self._source.wait_event(self._wait)
                    if found is not None:
                        event = GpuEvent(found.uuid, found.xid, self._clock.now(), self._clock.wall())
                        try:
                            for observe in self._observers:
                                loop.call_soon_threadsafe(observe, event)
                        except RuntimeError:
                            return  # the loop is closed

            self._listening = self._worker.call(listen)
            # Retrieve the error, so that asyncio does not log it: the GPUs report a source that ended.
            self._listening.add_done_callback(lambda ended: ended.exception())

    def pause(self) -> None:
        """Stop listening when the current wait ends."""
        self._paused.set()

    def stop(self) -> None:
        """Stop listening for good."""
        self._paused.set()
        self._worker.stop()


MOST_FAULTS = 64
_AWAY = frozenset({GpuState.LOST, GpuState.RESET_REQUIRED, GpuState.RELEASED})


class FaultLog:
    """The newest XID faults of this host, numbered from 0."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str, int, float]] = deque(maxlen=MOST_FAULTS)
        self._count = 0
        self._told = -1
        self._arrived = asyncio.Event()

    def note(self, event: GpuEvent) -> None:
        """Add an event of the driver."""
        self.add(event.uuid, event.xid, event.seen_at)

    def add(self, uuid: str, xid: int, at: float) -> None:
        """Add a fault reported at `at`, in seconds of the clock."""
        self._kept.append((self._count, uuid, xid, at))
        self._count += 1
        self._arrived.set()

    async def after(self, last: int) -> None:
        """Wait for a fault with a number above `last`. Only one task may wait."""
        while not self._kept or self._kept[-1][0] <= last:
            self._arrived.clear()
            await self._arrived.wait()

    def message(self, last: int, now: float) -> monitor_internal.ReportedFaults:
        """The faults numbered above `last`, oldest first."""
        return monitor_internal.ReportedFaults(
            faults=[
                monitor_internal.ReportedFault(
                    uuid=uuid, xid=xid, seq=seq, age=to_duration(max(now - at, 0.0))
                )
                for seq, uuid, xid, at in self._kept
                if seq > last
            ]
        )

    def told(self, last: int) -> None:
        """Note that faults up to this number were sent to the fleet."""
        self._told = max(self._told, last)

    def saw(self, gpus: Iterable[GpuView]) -> None:
        """Drop faults that were sent and whose GPU is lost, released or needs a reset in this snapshot."""
        away = {gpu.identity.uuid for gpu in gpus if gpu.state in _AWAY} if self._kept else None
        if away:
            kept = [fault for fault in self._kept if fault[0] > self._told or fault[1] not in away]
            self._kept = deque(kept, maxlen=MOST_FAULTS)
