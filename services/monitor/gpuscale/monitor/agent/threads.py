"""Daemon threads that make blocking calls for an event loop.

Not a thread pool: the interpreter waits for a pool's threads at exit, and one stuck in a driver call never ends. Here it is left
behind and delays only its own GPU.

Waking a thread for each GPU costs more than reading it, so healthy GPUs share one (`SharedThread`). A call that blocks it keeps
the thread: the remaining readings are returned to the caller, and the next round gets a new thread.
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
    """A call ended its thread with an unexpected error, whose traceback the thread printed."""


class CallThread:
    """A named thread, for use from the event loop only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def run() -> None:
            while (job := self._jobs.get()) is not None:
                job()

        threading.Thread(target=run, name=name, daemon=True).start()

    def call(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue a call; the future gets its value, its GpuSourceError, or ThreadDiedError for any other error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def perform() -> None:
            settle = partial(future.set_exception, ThreadDiedError(f"thread {self._name} died"))
            try:
                settle = partial(future.set_result, work())
            except GpuSourceError as error:
                settle = partial(future.set_exception, error)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(lambda: None if future.done() else settle())

        self._jobs.put(perform)
        return future

    def stop(self) -> None:
        """End the thread after the queued calls."""
        self._jobs.put(None)


class Reader(Generic[T]):
    """Reads something repeatedly, never twice at once. `last` is the newest reading.

    `order` reads in a worker; `perform` and `settle` are its two halves, for callers with their own thread. `ordered_at`: when
    the pending call was ordered. `error`: why the newest call failed.
    """

    def __init__(self, read: Callable[[], T], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._outcome: Timed[T] | Exception | None = None
        self.last: Timed[T] | None = None
        self.ordered_at: float | None = None
        self.error: Exception | None = None

    def order(self, worker: CallThread) -> "asyncio.Future[None]":
        """Order a reading by a worker. No call may be pending."""
        self.ordered_at = self._clock.now()
        future = worker.call(self.perform)
        future.add_done_callback(lambda done: self.settle(done.exception()))
        return future

    def perform(self) -> None:
        """Read, in a thread. Call `settle` on the event loop afterwards, even after an error."""
        ordered_at = self.ordered_at
        if ordered_at is None:
            ordered_at = self.ordered_at = self._clock.now()
        self._outcome = ThreadDiedError("the thread that read died")
        try:
            self._outcome = Timed(self._read(), ordered_at, self._clock.now())
        except GpuSourceError as error:
            self._outcome = error

    def settle(self, died: BaseException | None = None) -> None:
        """Take in the result; `died` is the error that ended the thread, if any."""
        outcome, self._outcome = self._outcome, None
        self.ordered_at = None
        if isinstance(outcome, Timed):
            self.last, self.error = outcome, None
        else:
            self.error = outcome or ThreadDiedError(str(died))


async def wait_until(futures: Iterable[asyncio.Future[Any]], deadline: float) -> None:
    """Wait for all futures, at most until `deadline` on the loop's clock. Does not raise their errors."""
    waiting = list(futures)
    if waiting:
        await asyncio.wait(waiting, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))


class _Round:
    """The readings of one round: waiting ones, and those done but not settled."""

    def __init__(self, readers: Sequence[Reader[Any]]) -> None:
        self.waiting = deque(readers)
        self.done: deque[Reader[Any]] = deque()

    def run(self) -> None:
        """Read one after the other; an unexpected error ends the round."""
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
        """Settle finished readings, on the event loop."""
        while self.done:
            self.done.popleft().settle()

    def give_back(self) -> list[Reader[Any]]:
        """Withdraw and return the readings that have not begun."""
        left: list[Reader[Any]] = []
        while True:
            try:
                left.append(self.waiting.popleft())
            except IndexError:
                return left


class SharedThread:
    """A thread shared by quick readers, for use from one event loop."""

    def __init__(self) -> None:
        self._worker: CallThread | None = None
        self._round: asyncio.Future[None] | None = None

    @property
    def round(self) -> "asyncio.Future[None] | None":
        """Done once the thread has left the last round; None before the first."""
        return self._round

    async def drive(
        self, readers: Sequence[Reader[Any]], limit: float
    ) -> tuple[list[Reader[Any]], "asyncio.Future[None] | None"]:
        """Read in order for at most `limit` seconds.

        Returns the readers that have not begun, and a future for the one that still blocks, if any.
        """
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
                self._worker = None  # its thread died; the reader has the error
            return turn.give_back(), None
        turn.settle()
        self._worker.stop()
        self._worker = None
        return turn.give_back(), future

    def stop(self) -> None:
        """End the thread once it is idle."""
        if self._worker is not None:
            self._worker.stop()
