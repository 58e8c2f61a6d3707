"""Tasks: scopes that end them, uninterrupted changes, backoff, clocks, failpoints.

A write on its way to disk cannot be cancelled: it is there after a restart, so memory must have it too. A use case that
writes and then changes memory is marked `uninterrupted`. Within a call, `Store.write` refuses to run without the mark, so
a missing mark fails the first call and not one cancelled call in a thousand.

Decisions use seconds since boot (CLOCK_BOOTTIME), which clock changes do not affect and which count during a suspend, so
that a lease does not outlive it. They are valid only for one boot: store them with `boot_id`. Dates are for display.

Failpoints are named points where a test makes the program fail (the idea is from gofail, which tests etcd). The variable
GPUSCALE_FAILPOINTS lists them: `name=kill,name2=sleep:2.5,name3=error`. `kill` sends SIGKILL to the process, `sleep` waits
for seconds, `error` raises UnavailableError with reason FAILPOINT. Names are `room.operation.point`, such as
`allocator.store.before_commit`. Without the variable a failpoint costs one lookup in an empty dictionary.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from gpuscale.common import errors

# A retry would fail again, and two callers with one name would keep replacing each other.
REFUSED_WAIT_SECONDS = (30.0, 60.0)
_REFUSALS = (
    errors.AbortedError,
    errors.FailedPreconditionError,
    errors.InvalidArgumentError,
    errors.PermissionDeniedError,
    errors.UnauthenticatedError,
)
_random = SystemRandom()


class Backoff:
    """Full-jitter backoff of one retry loop, whose bound grows from `initial` to `cap`, in seconds."""

    def __init__(self, initial: float = 0.5, cap: float = 30.0) -> None:
        self._initial = initial
        self._cap = cap
        self._ceiling = initial

    def next(self) -> float:
        """Seconds to wait before the next attempt."""
        wait = _random.uniform(0.0, self._ceiling)
        self._ceiling = min(self._cap, self._ceiling * 2)
        return wait

    def after(self, error: errors.GpuscaleError) -> float:
        """Seconds to wait before reopening a stream that ended with `error`."""
        return _random.uniform(*REFUSED_WAIT_SECONDS) if isinstance(error, _REFUSALS) else self.next()

    def reset(self) -> None:
        """Start over after a success."""
        self._ceiling = self._initial


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, at most so long; None for as long as it takes."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def pause_before_retry(seconds: float) -> None:
    """Sleep before a stream is opened again. Raises CancelledError for a cancellation that gRPC lost, as it does while one begins."""
    if (task := asyncio.current_task()) is not None and task.cancelling():
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


async def endings(
    follow: Callable[[Backoff], Awaitable[None]], cap: float, ended: str = "it ended the stream"
) -> AsyncGenerator[str]:
    """Follow a stream for ever, again after a pause of at most `cap` seconds; yields why it ended, or `ended`, each time that it did.

    `follow` resets its backoff whenever it receives something.
    """
    backoff = Backoff(cap=cap)
    while True:
        problem = ended
        try:
            await follow(backoff)
        except errors.GpuscaleError as error:
            problem = error.message
        yield problem
        await pause_before_retry(backoff.next())


P = ParamSpec("P")
T = TypeVar("T")

_interruptible: ContextVar[bool] = ContextVar("gpuscale_interruptible", default=False)


begin_call = partial(_interruptible.set, True)  # noqa: FBT003 - a value
"""Called by the interceptor: from here on a caller may cancel the task at any await."""


def require_uninterrupted() -> None:
    """Raise InternalError in a call whose use case is not `uninterrupted`."""
    if _interruptible.get():
        raise errors.InternalError("a call writes outside an uninterrupted use case")


def uninterrupted(change: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a change so that it always completes; a cancellation of the caller is raised afterwards.

    The change runs in its own task, which ends before the caller continues. Each of its awaits must end by itself.
    """

    @wraps(change)
    async def complete(*args: P.args, **kwargs: P.kwargs) -> T:
        async def run() -> T:
            _interruptible.set(False)  # in the task's context
            return await change(*args, **kwargs)

        task = asyncio.create_task(run(), name=change.__qualname__)
        gave_up: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                gave_up = error
        failure = None if task.cancelled() else task.exception()
        # A cancelled caller does not get the error of the change, except for a bug.
        if gave_up is not None and (failure is None or isinstance(failure, errors.GpuscaleError)):
            raise gave_up
        return task.result()

    return complete


async def in_slices(items: Iterable[T], size: int) -> AsyncGenerator[T]:
    """The items; other tasks run before each `size` of them are fetched."""
    await asyncio.sleep(0)
    for nth, one in enumerate(items, 1):
        yield one
        if nth % size == 0:
            await asyncio.sleep(0)


class TaskScope:
    """Tasks that end no later than the block that started them.

    Leaving the block cancels and awaits them. A task that fails cancels the block and the other tasks, and the block
    raises its error with a note that names the task; several errors are raised as an ExceptionGroup.
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
                # Drop the group and its cancellation from the traceback.
                failure.__context__ = context

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that must not end by itself; if it does, the scope fails. Raises RuntimeError: the scope is closing."""
        self._create(name, _named(name, work, endless=True), work)

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that ends by itself; only its failure ends the scope. Raises RuntimeError: the scope is closing."""
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
        # A task cancelled before its first step never starts its work.
        task.add_done_callback(lambda _: work.close())
        return task


async def _named(name: str, work: Coroutine[Any, Any, T], *, endless: bool = False) -> T:
    try:
        result = await work
    finally:
        if isinstance(error := sys.exception(), Exception):
            error.add_note(f"in task {name}")
    if endless:
        raise errors.InternalError(f"task {name} ended, which it never should", reason="TASK_ENDED")
    return result


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Tells the time; programs use `SystemClock`, tests their own."""

    @property
    def boot_id(self) -> str:
        """The kernel's id of the current boot."""
        ...

    def now(self) -> float:
        """Seconds since boot; never decreases within one `boot_id`."""
        ...

    def wall(self) -> datetime:
        """The date, aware and in UTC; may jump in either direction."""
        ...


def read_boot_id() -> str:
    """The kernel's id of the current boot; OSError if not on Linux."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def pid_namespace() -> int | None:
    """Inode of this process's PID namespace; None if unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def network_namespace(proc: Path = Path("/proc")) -> int:
    """Inode of this process's network namespace; 0 if unknown.

    It tells containers on one kernel apart, which share its `boot_id`.
    """
    try:
        return (proc / "self/ns/net").stat().st_ino
    except OSError:
        return 0


class SystemClock:
    """The clock of this host."""

    # Without a frame of Python: a lone Reserve and Release ask eleven times.
    now = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    wall = staticmethod(partial(datetime.now, UTC))

    def __init__(self) -> None:
        self.boot_id = read_boot_id()


FAILPOINTS = "GPUSCALE_FAILPOINTS"


@dataclass(frozen=True, slots=True)
class _Action:
    kind: str
    seconds: float = 0.0


def parse_failpoints(text: str) -> Mapping[str, _Action]:
    """The action of each failpoint. Raises ValueError for a text of another form than above."""
    actions: dict[str, _Action] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, action = item.partition("=")
        kind, _, argument = action.partition(":")
        if not name or kind not in {"kill", "sleep", "error"} or bool(argument) != (kind == "sleep"):
            raise ValueError(f"{FAILPOINTS}: {item!r} must be name=kill, name=sleep:SECONDS or name=error")
        actions[name] = _Action(kind, float(argument) if argument else 0.0)
    return actions


_points = parse_failpoints(os.environ.get(FAILPOINTS, ""))


def failpoints_set() -> Collection[str]:
    """The names of all failpoints that are set; for code that would otherwise ask for many."""
    return _points


def hit(name: str) -> None:
    """Pass a failpoint in a thread. Raises UnavailableError for `error`."""
    if (action := _points.get(name)) is None:
        return
    if action.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action.kind == "error":
        raise errors.UnavailableError(f"failpoint {name}", reason="FAILPOINT")
    time.sleep(action.seconds)


async def hit_async(name: str) -> None:
    """Pass a failpoint on the event loop. Raises UnavailableError for `error`."""
    action = _points.get(name)
    if action is not None and action.kind == "sleep":
        await asyncio.sleep(action.seconds)
    elif action is not None:
        hit(name)
