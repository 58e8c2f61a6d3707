"""Daemon threads that make blocking calls for an event loop, one call at a time each.

Not a thread pool: a thread that is stuck in a driver call cannot be freed, and the interpreter waits for the threads
of a pool when it ends. A stuck thread here is left behind and holds up nobody but its own GPU.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from gpuscale.common.clock import Clock
from gpuscale.monitor.agent.model import Timed
from gpuscale.monitor.agent.ports import GpuSourceError

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
    """Something that is read again and again in a thread of its own, never twice at once.

    Attributes:
        last: the newest reading; None before the first.
        ordered_at: when the call that is out now was ordered; None when none is.
        error: why the newest call failed; None when it did not.
    """

    def __init__(self, name: str, read: Callable[[], T], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._worker = Worker(name)
        self.last: Timed[T] | None = None
        self.ordered_at: float | None = None
        self.error: BaseException | None = None

    def order(self) -> "asyncio.Future[Timed[T]] | None":
        """Order a reading; None when one is out already."""
        if self.ordered_at is not None:
            return None
        self.ordered_at = self._clock.now()
        future = self._worker.call(partial(self._timed, self.ordered_at))
        future.add_done_callback(self._settle)
        return future

    def stop(self) -> None:
        """End the thread once it is free."""
        self._worker.stop()

    def _timed(self, ordered_at: float) -> Timed[T]:
        value = self._read()
        return Timed(value, ordered_at, self._clock.now())

    def _settle(self, future: "asyncio.Future[Timed[T]]") -> None:
        self.ordered_at = None
        self.error = future.exception()
        if self.error is None:
            self.last = future.result()
