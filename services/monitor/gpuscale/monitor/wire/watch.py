"""Those who are told of the newest value of something. One that never reads costs one reference, whatever happens."""

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Subscribers(Generic[T]):
    """Those who are told of something, each by an object of its own, which `new` makes."""

    def __init__(self, new: Callable[[], T]) -> None:
        self._new = new
        self.all: set[T] = set()

    def __len__(self) -> int:
        return len(self.all)

    @contextmanager
    def subscribe(self) -> Generator[T]:
        """A subscription that lasts as long as the block."""
        subscription = self._new()
        self.all.add(subscription)
        try:
            yield subscription
        finally:
            self.all.discard(subscription)


class BroadcastSubscription(Generic[T]):
    """One reader's place for the newest value."""

    def __init__(self, latest: Iterable[T]) -> None:
        self._values: list[T] = []
        self._dropped = 0
        self._arrived = asyncio.Event()
        for value in latest:
            self.put(value)

    def put(self, value: T) -> int:
        """Replace the value that has not been read yet; how many there were, 0 or 1."""
        replaced = len(self._values)
        self._dropped += replaced
        self._values = [value]
        self._arrived.set()
        return replaced

    def forgive(self) -> None:
        """Count only what is replaced from now on as missed."""
        self._dropped = 0

    async def get(self) -> tuple[T, int]:
        """Wait for a value that was not read yet; with it, how many were replaced since the last one read."""
        await self._arrived.wait()
        self._arrived.clear()
        value, dropped = self._values.pop(), self._dropped
        self._dropped = 0
        return value, dropped


class Broadcast(Subscribers[BroadcastSubscription[T]], Generic[T]):
    """Tells every subscription of each value, a new one first of the newest; `dropped` counts values never seen."""

    def __init__(self) -> None:
        super().__init__(lambda: BroadcastSubscription(self._latest))
        self.dropped = 0
        self._latest: list[T] = []

    def publish(self, value: T) -> None:
        """Give the value to every subscription."""
        self._latest = [value]
        for subscription in self.all:
            self.dropped += subscription.put(value)
