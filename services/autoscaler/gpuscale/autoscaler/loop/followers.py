"""Tells those who follow an endpoint that it may have changed; what it is now, they read from the store."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager


class Followers:
    """Who follows which endpoint. Any number of changes before somebody looks are one."""

    def __init__(self) -> None:
        self._followers: dict[str, set[asyncio.Event]] = {}

    def tell(self, endpoint: str) -> None:
        """The endpoint may have changed, or be gone; what changed is on disk."""
        for event in self._followers.get(endpoint, ()):
            event.set()

    @contextmanager
    def follow(self, endpoint: str) -> Generator[asyncio.Event]:
        """An event that every change sets from now on; its owner clears it before each look."""
        event = asyncio.Event()
        followers = self._followers.setdefault(endpoint, set())
        followers.add(event)
        try:
            yield event
        finally:
            followers.discard(event)
            if not followers and self._followers.get(endpoint) is followers:
                del self._followers[endpoint]
