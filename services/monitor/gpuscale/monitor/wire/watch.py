"""Broadcasts of the newest value. A subscriber that never reads holds one value at most."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class BroadcastSubscription(Generic[T]):
    """Holds the newest unread value for one subscriber."""

    def __init__(self) -> None:
        self._values: list[T] = []
        self._dropped = 0
        self._arrived = asyncio.Event()

    def put(self, value: T) -> int:
        """Replace the unread value; returns how many were replaced, 0 or 1."""
        replaced = len(self._values)
        self._dropped += replaced
        self._values = [value]
        self._arrived.set()
        return replaced

    def forgive(self) -> None:
        """Reset the count of replaced values."""
        self._dropped = 0

    async def get(self) -> tuple[T, int]:
        """Wait for an unread value; returns it and how many were replaced since the last call."""
        await self._arrived.wait()
        self._arrived.clear()
        value, dropped = self._values.pop(), self._dropped
        self._dropped = 0
        return value, dropped


class Broadcast(Generic[T]):
    """Hands each value to every subscription, and the newest one to a new subscription. `dropped` counts unread values."""

    def __init__(self) -> None:
        self._subscriptions: set[BroadcastSubscription[T]] = set()
        self._latest: list[T] = []
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._subscriptions)

    @contextmanager
    def subscribe(self) -> Generator[BroadcastSubscription[T]]:
        """Subscribe until the block ends."""
        subscription = BroadcastSubscription[T]()
        for value in self._latest:
            subscription.put(value)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def publish(self, value: T) -> None:
        """Hand the value to every subscription."""
        self._latest = [value]
        for subscription in self._subscriptions:
            self.dropped += subscription.put(value)
