"""The thread that waits for the driver's events. It can be asked to pause, so that the driver can be let go of."""

import asyncio
import threading
from datetime import datetime

from gpuscale.common.runtime.clock import Clock
from gpuscale.monitor.agent.events import GpuEvents
from gpuscale.monitor.agent.ports import GpuSource
from gpuscale.monitor.agent.worker import Worker
from gpuscale.monitor.model.readings import DriverEvent, GpuEvent


class Listener:
    """Hands the events of a source to subscribers. To be used from one event loop.

    Args:
        source: whose events they are.
        clock: what tells the time.
        events: the subscribers.
        wait: seconds that a pause may have to wait. An event wakes the thread at once; each wait that ends without one
            costs a little.
    """

    def __init__(self, source: GpuSource, clock: Clock, events: GpuEvents, wait: float) -> None:
        self._source = source
        self._wait = wait
        self._clock = clock
        self._events = events
        self._worker = Worker("gpu-events")
        self._paused = threading.Event()
        self._listening: asyncio.Future[None] | None = None

    @property
    def listening(self) -> "asyncio.Future[None] | None":
        """Done once the thread has left the driver; None when it is not in there."""
        if self._listening is not None and self._listening.done():
            return None
        return self._listening

    @property
    def error(self) -> BaseException | None:
        """Why listening ended other than by a pause: the source has a bug."""
        ended = self._listening is not None and self._listening.done()
        return self._listening.exception() if ended and self._listening is not None else None

    def start(self) -> None:
        """Begin to listen, or go on where a pause has not come to effect yet."""
        self._paused.clear()
        if self.listening is None:
            loop = asyncio.get_running_loop()
            self._listening = self._worker.call(lambda: self._listen(loop))
            # A source that ends is told of by its GPUs: that nobody asks why this ended is nothing for the log.
            self._listening.add_done_callback(lambda ended: ended.exception())

    def pause(self) -> None:
        """Stop listening, as soon as the thread comes back."""
        self._paused.set()

    def stop(self) -> None:
        """Stop listening for good."""
        self._paused.set()
        self._worker.stop()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._paused.is_set():
            found = self._source.wait_event(self._wait)
            if found is not None:
                event = _event(found, self._clock.now(), self._clock.wall())
                try:
                    loop.call_soon_threadsafe(self._events.publish, event)
                except RuntimeError:
                    return  # the loop has closed: nobody listens any more


def _event(found: DriverEvent, seen_at: float, seen_time: datetime) -> GpuEvent:
    return GpuEvent(found.uuid, found.kind, found.xid, seen_at, seen_time)
