"""Events of GPUs, from the one thread that waits for them to whoever subscribes. To be used from one event loop.

Each subscriber has a bounded queue of its own. One that does not read loses the oldest events and is told how many:
it can hold up neither the driver's thread nor another subscriber.
"""

import asyncio
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from gpuscale.monitor.model.readings import GpuEvent

QUEUE_LENGTH = 256


class EventQueue:
    """One subscriber's events, oldest first. `dropped` counts those that were lost since it began."""

    def __init__(self) -> None:
        self.dropped = 0
        self._events: deque[GpuEvent] = deque(maxlen=QUEUE_LENGTH)
        self._arrived = asyncio.Event()

    def put(self, event: GpuEvent) -> None:
        """Add an event; the oldest goes where the queue is full."""
        self.dropped += len(self._events) == QUEUE_LENGTH
        self._events.append(event)
        self._arrived.set()

    async def get(self) -> GpuEvent:
        """Wait for the next event."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class GpuEvents:
    """Hands each event to every subscriber. There is no history: a subscription begins empty."""

    def __init__(self) -> None:
        self._queues: set[EventQueue] = set()

    @contextmanager
    def subscribe(self) -> Generator[EventQueue]:
        """A queue that ends with the block."""
        queue = EventQueue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def publish(self, event: GpuEvent) -> None:
        """Give an event to every subscriber."""
        for queue in self._queues:
            queue.put(event)
