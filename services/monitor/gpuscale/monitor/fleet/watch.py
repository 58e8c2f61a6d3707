"""Who watches the nodes: each watcher has the set of nodes that changed since it last looked, and nothing else.

A watcher that never reads costs one id per node, whatever happens meanwhile.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager


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


class Watchers:
    """All watchers."""

    def __init__(self) -> None:
        self._watches: set[NodeWatch] = set()

    def __len__(self) -> int:
        return len(self._watches)

    @contextmanager
    def watch(self) -> Generator[NodeWatch]:
        """A watch that ends with the block."""
        watch = NodeWatch()
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def mark(self, node: str) -> None:
        """Tell every watcher that a node changed."""
        for watch in self._watches:
            watch.mark(node)
