"""One thread that reads many things in a row, for as long as each of them answers at once.

Waking a thread for every GPU and every tick costs more than the reading. Healthy GPUs therefore share one, and whoever
holds it up keeps it: the readings behind are given back to be ordered elsewhere, and the next round has a new thread.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from gpuscale.monitor.agent.worker import Reader, Worker


class _Round:
    """The readings of one round: those that wait, and those that are done and not settled yet."""

    def __init__(self, readers: Sequence[Reader[Any]]) -> None:
        self.waiting = deque(readers)
        self.done: deque[Reader[Any]] = deque()

    def run(self) -> None:
        """Read one after the other. Ends with the first that has a bug."""
        while True:
            try:
                reader = self.waiting.popleft()
            except IndexError:
                return
            try:
                reader.perform()
            finally:
                self.done.append(reader)

    def settle(self) -> None:
        """Take in what is done so far. To be called on the event loop."""
        while self.done:
            self.done.popleft().settle()

    def give_back(self) -> list[Reader[Any]]:
        """Those that have not begun; they no longer will."""
        left: list[Reader[Any]] = []
        while True:
            try:
                left.append(self.waiting.popleft())
            except IndexError:
                return left


class Convoy:
    """A thread for whoever answers at once. To be used from one event loop."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._round: asyncio.Future[None] | None = None

    @property
    def round(self) -> "asyncio.Future[None] | None":
        """Done once the thread has done all of the last round that it will do; None before the first."""
        return self._round

    async def drive(
        self, readers: Sequence[Reader[Any]], patience: float
    ) -> tuple[list[Reader[Any]], "asyncio.Future[None] | None"]:
        """Read them in this order, for at most `patience` seconds.

        Returns:
            Those that have not begun when the patience ended, and what is done when the one that held them up is.
        """
        if not readers:
            return [], None
        if self._worker is None:
            self._worker = Worker("gpu-convoy")
        turn = _Round(readers)
        future = self._round = self._worker.call(turn.run)
        future.add_done_callback(lambda _: turn.settle())
        await asyncio.wait([future], timeout=patience)
        if future.done():
            if future.exception() is not None:
                self._worker = None  # its thread died of a bug, which the reader tells
            return turn.give_back(), None
        turn.settle()
        self._worker.stop()
        self._worker = None
        return turn.give_back(), future

    def stop(self) -> None:
        """End the thread once it is free."""
        if self._worker is not None:
            self._worker.stop()
