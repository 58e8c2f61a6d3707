"""Daemon threads that make blocking calls for an event loop.

Not a thread pool: a thread that is stuck in a driver call cannot be freed, and the interpreter waits for the threads
of a pool when it ends. A stuck thread here is left behind and holds up nobody but its own GPU.

Waking a thread for every GPU and every tick costs more than the reading. Healthy GPUs therefore share one
(`SharedThread`), and whoever holds it up keeps it: the readings behind are given back to be ordered elsewhere, and the
next round has a new thread.
"""

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from gpuscale.common.runtime.tasks import Clock
from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import Timed

T = TypeVar("T")


class ThreadDiedError(Exception):
    """A call ended its thread with an error that it may not raise; the thread's own traceback says which."""


class CallThread:
    """A named thread. To be used from the event loop only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def run() -> None:
            while (job := self._jobs.get()) is not None:
                job()

        threading.Thread(target=run, name=name, daemon=True).start()

    def call(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue a call; the future gives its value, a GpuSourceError that it raised, or ThreadDiedError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def perform() -> None:
            settle = partial(future.set_exception, ThreadDiedError(f"thread {self._name} died"))
            try:
                settle = partial(future.set_result, work())
            except GpuSourceError as error:
                settle = partial(future.set_exception, error)
            finally:
                with contextlib.suppress(
                    RuntimeError
                ):  # the loop has closed meanwhile: nobody waits any more
                    loop.call_soon_threadsafe(lambda: None if future.done() else settle())

        self._jobs.put(perform)
        return future

    def stop(self) -> None:
        """End the thread after the calls that are queued."""
        self._jobs.put(None)


class Reader(Generic[T]):
    """Something that is read again and again, never twice at once, by any thread; `last` is the newest reading.

    `order` has it read by a worker; `perform` and `settle` are the two halves of that, for those who bring a thread of
    their own. `ordered_at`: since when a call is out; `error`: why the newest one failed.
    """

    def __init__(self, read: Callable[[], T], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._outcome: Timed[T] | Exception | None = None
        self.last: Timed[T] | None = None
        self.ordered_at: float | None = None
        self.error: Exception | None = None

    def order(self, worker: CallThread) -> "asyncio.Future[None]":
        """Order a reading by a worker; only where none is out."""
        self.ordered_at = self._clock.now()
        future = worker.call(self.perform)
        future.add_done_callback(lambda done: self.settle(done.exception()))
        return future

    def perform(self) -> None:
        """Read. To be called in a thread, and followed by `settle` on the event loop however it ends."""
        ordered_at = self.ordered_at
        if ordered_at is None:
            ordered_at = self.ordered_at = self._clock.now()
        self._outcome = ThreadDiedError("the thread that read died")
        try:
            self._outcome = Timed(self._read(), ordered_at, self._clock.now())
        except GpuSourceError as error:
            self._outcome = error

    def settle(self, died: BaseException | None = None) -> None:
        """Take in how the reading ended; `died` where its thread did."""
        outcome, self._outcome = self._outcome, None
        self.ordered_at = None
        if isinstance(outcome, Timed):
            self.last, self.error = outcome, None
        else:
            self.error = outcome or ThreadDiedError(str(died))


async def wait_until(futures: Iterable[asyncio.Future[Any]], deadline: float) -> None:
    """Wait for all of the futures, until `deadline` of the running loop at the latest. Raises none of their errors."""
    waiting = list(futures)
    if waiting:
        await asyncio.wait(waiting, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))


class _Round:
    """The readings of one round: those waiting, and those done but not settled."""

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
        """Withdraw the readings that have not begun."""
        left: list[Reader[Any]] = []
        while True:
            try:
                left.append(self.waiting.popleft())
            except IndexError:
                return left


class SharedThread:
    """A thread for readers that answer quickly. To be used from one event loop."""

    def __init__(self) -> None:
        self._worker: CallThread | None = None
        self._round: asyncio.Future[None] | None = None

    @property
    def round(self) -> "asyncio.Future[None] | None":
        """Done once the thread has done all of the last round that it will do; None before the first."""
        return self._round

    async def drive(
        self, readers: Sequence[Reader[Any]], limit: float
    ) -> tuple[list[Reader[Any]], "asyncio.Future[None] | None"]:
        """Read them in order, for so many seconds; those not begun by then, and what is done when the last one is."""
        if not readers:
            return [], None
        if self._worker is None:
            self._worker = CallThread("gpus")
        turn = _Round(readers)
        future = self._round = self._worker.call(turn.run)
        future.add_done_callback(lambda _: turn.settle())
        await asyncio.wait([future], timeout=limit)
        if future.done():
            if future.exception() is not None:
                self._worker = None  # its thread died of a bug, which the reader tells
            return turn.give_back(), None
        turn.settle()
        self._worker.stop()
        self._worker = None
        return turn.give_back(), future

    def stop(self) -> None:
        """End the thread once it is idle."""
        if self._worker is not None:
            self._worker.stop()
