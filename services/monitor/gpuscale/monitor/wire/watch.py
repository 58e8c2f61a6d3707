"""Streams to many watchers: what each is still to be told, and responses that are encoded once for all.

A watcher that never reads costs one reference (`Broadcast`), or one id for each node (`Watchers`), whatever happens.

Encoded messages of one type can be joined: fields of the later ones are added to those of the earlier, and the items of
lists follow each other (protobuf.dev, "Encoding", on last-one-wins and merging). So a response is put together from parts
that were each encoded once.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message


def encoded_stream(
    service: str,
    method: str,
    request: type[Message],
    behavior: Callable[[Any, Any], AsyncGenerator[bytes, None]],
) -> grpc.GenericRpcHandler:
    """A handler of one method that takes a message and streams encoded ones.

    Of several handlers for a method the one that was added to the server first answers.
    """
    handler: grpc.RpcMethodHandler[Any, bytes] = grpc.unary_stream_rpc_method_handler(
        behavior, request_deserializer=request.FromString, response_serializer=None
    )
    return grpc.method_handlers_generic_handler(service, {method: handler})


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
    """Tells every subscription of each value; a new one begins with the newest value so far.

    Attributes:
        dropped: how many values subscribers never saw, all of them together.
    """

    def __init__(self) -> None:
        super().__init__(lambda: BroadcastSubscription(self._latest))
        self.dropped = 0
        self._latest: list[T] = []

    def publish(self, value: T) -> None:
        """Give the value to every subscription."""
        self._latest = [value]
        for subscription in self.all:
            self.dropped += subscription.put(value)


class NodeWatch:
    """One watcher's nodes that changed."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._any = asyncio.Event()

    def mark(self, node: str) -> None:
        """A node changed."""
        self._changed.add(node)
        self._any.set()

    async def changed(self) -> list[str]:
        """Wait for changes; the ids of the nodes that changed since the last call, in order."""
        await self._any.wait()
        self._any.clear()
        changed, self._changed = sorted(self._changed), set()
        return changed


class Watchers(Subscribers[NodeWatch]):
    """All watchers."""

    def __init__(self) -> None:
        super().__init__(NodeWatch)

    def mark(self, node: str) -> None:
        """Tell every watcher that a node changed."""
        for watch in self.all:
            watch.mark(node)
