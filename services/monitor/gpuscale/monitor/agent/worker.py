"""Daemon threads that make blocking calls for an event loop, one call at a time each.

Not a thread pool: a thread that is stuck in a driver call cannot be freed, and the interpreter waits for the threads
of a pool when it ends. A stuck thread here is left behind and holds up nobody but its own GPU.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

from gpuscale.common.runtime.clock import Clock
from gpuscale.monitor.agent.ports import GpuSourceError
from gpuscale.monitor.model.readings import Timed

T = TypeVar("T")


class WorkerDiedError(Exception):
    """A call ended its thread with an error that it may not raise; the thread's own traceback says which."""


class Worker:
    """A named thread. To be used from the event loop only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue a call; the future gives its value, a GpuSourceError that it raised, or WorkerDiedError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(partial(self._perform, work, future, loop))
        return future

    def stop(self) -> None:
        """End the thread after the calls that are queued."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _perform(
        self, work: Callable[[], T], future: "asyncio.Future[T]", loop: asyncio.AbstractEventLoop
    ) -> None:
        deliver = partial(_fail, future, WorkerDiedError(f"thread {self._name} died"))
        try:
            deliver = partial(_resolve, future, work())
        except GpuSourceError as error:
            deliver = partial(_fail, future, error)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile: nobody waits any more
                loop.call_soon_threadsafe(deliver)


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class Reader(Generic[T]):
    """Something that is read again and again, never twice at once, by whatever thread has its turn.

    `order` has it read by a worker; `perform` and `settle` are the two halves of that, for those who bring a thread of
    their own.

    Attributes:
        last: the newest reading; None before the first.
        ordered_at: when the call that is out now was ordered; None when none is.
        error: why the newest call failed; None when it did not.
    """

    def __init__(self, read: Callable[[], T], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._outcome: Timed[T] | Exception | None = None
        self.last: Timed[T] | None = None
        self.ordered_at: float | None = None
        self.error: Exception | None = None

    def order(self, worker: Worker) -> "asyncio.Future[None]":
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
        self._outcome = WorkerDiedError("the thread that read died")
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
            self.error = outcome or WorkerDiedError(str(died))


async def wait_until(futures: Iterable[asyncio.Future[Any]], deadline: float) -> None:
    """Wait for all of the futures, until `deadline` of the running loop at the latest. Raises none of their errors."""
    waiting = list(futures)
    if waiting:
        await asyncio.wait(waiting, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
