"""From one who publishes to many who read at their own pace: each sees the newest value, and how many it missed.

There is no queue: a reader that never reads costs one reference.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Subscription(Generic[T]):
    """One reader's place for the newest value."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._dropped = 0
        self._arrived = asyncio.Event()

    def put(self, value: T) -> int:
        """Replace the value that has not been read yet; how many there were, 0 or 1."""
        replaced = len(self._values)
        self._dropped += replaced
        self._values = [value]
        self._arrived.set()
        return replaced

    def forgive(self) -> None:
        """Count as missed only what is replaced from now on."""
        self._dropped = 0

    async def get(self) -> tuple[T, int]:
        """Wait for a value that was not read yet; with it, how many were replaced since the last one read."""
        await self._arrived.wait()
        self._arrived.clear()
        value, dropped = self._values.pop(), self._dropped
        self._dropped = 0
        return value, dropped


class Broadcast(Generic[T]):
    """Tells every subscription of each value; a new one begins with the newest value so far.

    Attributes:
        dropped: how many values subscribers never saw, all of them together.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._latest: list[T] = []
        self._subscriptions: set[Subscription[T]] = set()

    def __len__(self) -> int:
        return len(self._subscriptions)

    @contextmanager
    def subscribe(self) -> Generator[Subscription[T]]:
        """A subscription that ends with the block."""
        subscription: Subscription[T] = Subscription()
        for value in self._latest:
            subscription.put(value)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def publish(self, value: T) -> None:
        """Give the value to every subscription."""
        self._latest = [value]
        for subscription in self._subscriptions:
            self.dropped += subscription.put(value)
