"""The life of a program: its named tasks, its signals, and the one place where unforeseen errors end."""

import asyncio
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, TypeGuard, TypeVar

from gpuscale.common.errors import GpuscaleError, InternalError
from gpuscale.common.runtime.connections import raise_descriptor_limit
from gpuscale.common.runtime.logs import get_logger

STOP_WARNING_SECONDS = 8.0
STOP_LIMIT_SECONDS = 9.5
_STDERR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")
_log = get_logger(__name__)


class TaskScope:
    """Tasks that end no later than the block they were started in.

    Leaving the block cancels and awaits them all. A task that fails cancels the block and the other tasks, and the
    block raises its error, with a note that names the task; several errors are raised as one ExceptionGroup.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if len(group.exceptions) != 1:
                raise
            failure = group.exceptions[0]
            context = failure.__context__
            try:
                raise failure
            finally:
                # The group and the cancellation it caused say nothing about where the failure came from.
                failure.__context__ = context

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that never ends by itself; its end, even without an error, ends the scope.

        Raises:
            RuntimeError: the scope is closing.
        """
        self._create(name, _never_ending(name, work), work)

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a task that ends by itself; only its failure ends the scope.

        Raises:
            RuntimeError: the scope is closing.
        """
        return self._create(name, _named(name, work), work)

    def _create(
        self, name: str, guarded: Coroutine[Any, Any, T], work: Coroutine[Any, Any, Any]
    ) -> asyncio.Task[T]:
        try:
            task = self._group.create_task(guarded, name=name)
        except RuntimeError:
            guarded.close()
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task cancelled before its first step never reaches the work inside of it.
        task.add_done_callback(lambda _: work.close())
        return task


class _Named:
    """Adds the name of the task to an error that leaves the block."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            error.add_note(f"in task {self._name}")


async def _named(name: str, work: Coroutine[Any, Any, T]) -> T:
    with _Named(name):
        return await work


async def _never_ending(name: str, work: Coroutine[Any, Any, None]) -> None:
    await _named(name, work)
    raise InternalError(f"task {name} ended, which it never should", reason="TASK_ENDED")


def run(main: Callable[[asyncio.Event], Awaitable[None]], *, program: str, quiet: bool = False) -> int:
    """Run a program until it ends or is told to, and return its exit code. Set up the log before.

    `main` gets an event that SIGTERM or SIGINT sets, and is to return soon after. A second signal exits at once with
    128 + its number; so does the first one, with 1, if `main` has not returned 9.5 s later.

    An error of our own tree that no task raised is one line on stderr and exit code 1. Any other error is logged with
    its traceback: exit code 1.

    `quiet` says that it wakes up a few times a second only: uvloop would save no CPU then, and costs 2 MB of memory.
    """
    raise_descriptor_limit()
    # What the imports made lives as long as the program: the collector need not look at it again and again.
    gc.freeze()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop if quiet else _loop_factory()) as runner:
        return runner.run(_supervise(main, program))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


async def _supervise(main: Callable[[asyncio.Event], Awaitable[None]], program: str) -> int:
    stop = asyncio.Event()
    with _signals(asyncio.get_running_loop(), stop):
        try:
            await main(stop)
        except Exception as error:  # noqa: BLE001 - the last place that can still say what ended the program
            _report(error, program)
            return 1
    return 0


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Generator[None]:
    """Set `stop` on the first signal, exit on the second.

    The handlers are Python's own and not the loop's, so that the second signal works while the loop is stuck.
    """
    signalled = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal signalled
        if signalled:
            os._exit(128 + number)
        signalled = True
        # A watchdog of the interpreter: it works whatever the threads are stuck in, and writes down where they are.
        faulthandler.dump_traceback_later(STOP_LIMIT_SECONDS, exit=True, file=_STDERR)
        loop.call_soon_threadsafe(stop.set)
        loop.call_soon_threadsafe(loop.call_later, STOP_WARNING_SECONDS, _warn)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        if signalled:
            faulthandler.cancel_dump_traceback_later()
        for number, handler in before.items():
            signal.signal(number, handler)


def _warn() -> None:
    tasks = sorted(task.get_name() for task in asyncio.all_tasks())
    _log.warning("still stopping", tasks=tasks, limit_seconds=STOP_LIMIT_SECONDS)


def _report(error: Exception, program: str) -> None:
    for leaf in _leaves(error):
        notes: list[str] = getattr(leaf, "__notes__", [])
        if isinstance(leaf, GpuscaleError) and not notes:
            sys.stderr.write(f"{program}: error: {leaf.message}\n")
        else:
            _log.error("the program failed", program=program, error=repr(leaf), where=notes, exc_info=leaf)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, without the groups; any other error itself."""
    if _is_group(error):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _is_group(error: BaseException) -> TypeGuard[BaseExceptionGroup[BaseException]]:
    return isinstance(error, BaseExceptionGroup)
