"""Events of GPUs: the thread that waits for them, who subscribes to them, and the faults that the fleet must be told of.

To be used from one event loop. Each subscriber has a bounded queue of its own: one that does not read loses the oldest
events and is told how many, and holds up neither the driver's thread nor another subscriber.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable

from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent.sources import GpuSource
from gpuscale.monitor.agent.threads import CallThread
from gpuscale.monitor.model.readings import GpuEvent, GpuEventKind, GpuState, GpuView
from gpuscale.monitor.wire.watch import Subscribers

QUEUE_LENGTH = 256


class EventQueue:
    """One subscriber's events, oldest first. `dropped` counts those that were lost since it began."""

    def __init__(self) -> None:
        self.dropped = 0
        self._events: deque[GpuEvent] = deque(maxlen=QUEUE_LENGTH)
        self._arrived = asyncio.Event()

    def put(self, event: GpuEvent) -> None:
        """Add an event; a full queue drops the oldest."""
        self.dropped += len(self._events) == QUEUE_LENGTH
        self._events.append(event)
        self._arrived.set()

    async def get(self) -> GpuEvent:
        """Wait for the next event."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class GpuEvents(Subscribers[EventQueue]):
    """Hands each event to every subscriber. There is no history: a subscription begins empty."""

    def __init__(self) -> None:
        super().__init__(EventQueue)

    def publish(self, event: GpuEvent) -> None:
        """Give an event to every subscriber."""
        for queue in self.all:
            queue.put(event)


class Listener:
    """Hands the events of a source to subscribers. To be used from one event loop.

    `wait` is the seconds that a pause may have to wait: an event wakes the thread at once, and each wait that ends without
    one costs a little.
    """

    def __init__(self, source: GpuSource, clock: Clock, events: GpuEvents, wait: float) -> None:
        self._source = source
        self._wait = wait
        self._clock = clock
        self._events = events
        self._worker = CallThread("gpu-events")
        self._paused = threading.Event()
        self._listening: asyncio.Future[None] | None = None

    @property
    def listening(self) -> "asyncio.Future[None] | None":
        """Done once the thread has left the driver; None while it is not in it."""
        if self._listening is not None and self._listening.done():
            return None
        return self._listening

    @property
    def error(self) -> BaseException | None:
        """Why listening ended other than by a pause: the source has a bug."""
        ended = self._listening is not None and self._listening.done()
        return self._listening.exception() if ended and self._listening is not None else None

    def start(self) -> None:
        """Start listening, or go on where a pause has not taken effect."""
        self._paused.clear()
        if self.listening is None:
            loop = asyncio.get_running_loop()
            self._listening = self._worker.call(lambda: self._listen(loop))
            # A source that ends is told of by its GPUs: that nobody asks why this ended is nothing for the log.
            self._listening.add_done_callback(lambda ended: ended.exception())

    def pause(self) -> None:
        """Stop listening as soon as the thread returns."""
        self._paused.set()

    def stop(self) -> None:
        """Stop listening for good."""
        self._paused.set()
        self._worker.stop()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._paused.is_set():
            found = self._source.wait_event(self._wait)
            if found is not None:
                event = GpuEvent(found.uuid, found.kind, found.xid, self._clock.now(), self._clock.wall())
                try:
                    loop.call_soon_threadsafe(self._events.publish, event)
                except RuntimeError:
                    return  # the loop has closed: nobody listens any more


MOST_FAULTS = 64
_AWAY = frozenset({GpuState.LOST, GpuState.RESET_REQUIRED, GpuState.RELEASED})


class FaultLog:
    """The newest faults of this host, numbered from 0."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str, int, float]] = deque(maxlen=MOST_FAULTS)
        self._count = 0
        self._told = -1
        self._arrived = asyncio.Event()

    async def follow(self, events: GpuEvents) -> None:
        """Keep faults until cancelled."""
        with events.subscribe() as queue:
            while True:
                event = await queue.get()
                if event.kind is GpuEventKind.XID and event.xid is not None:
                    self.add(event.uuid, event.xid, event.seen_at)

    def add(self, uuid: str, xid: int, at: float) -> None:
        """Keep a fault reported at `at`, in seconds of the clock."""
        self._kept.append((self._count, uuid, xid, at))
        self._count += 1
        self._arrived.set()

    async def after(self, last: int) -> None:
        """Wait until there is a fault with a number above `last`. One may wait at a time."""
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
        """The fleet has been told of faults up to this number."""
        self._told = max(self._told, last)

    def saw(self, gpus: Iterable[GpuView]) -> None:
        """Drop faults that need not be repeated, by the GPUs that a snapshot shows."""
        away = {gpu.identity.uuid for gpu in gpus if gpu.state in _AWAY} if self._kept else None
        if away:
            kept = [fault for fault in self._kept if fault[0] > self._told or fault[1] not in away]
            self._kept = deque(kept, maxlen=MOST_FAULTS)
