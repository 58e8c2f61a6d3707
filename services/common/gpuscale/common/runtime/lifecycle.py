"""Program lifecycle: signals, the data directory lock, and the last handler of errors."""

import asyncio
import faulthandler
import fcntl
import gc
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self, cast

from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, InvalidArgumentError
from gpuscale.common.runtime.logs import get_logger, writes_json

STOP_WARNING_SECONDS = 8.0
STOP_LIMIT_SECONDS = 9.5
LARGEST_LIMIT = 1 << 20
"""Highest descriptor limit to request: some child processes walk through all possible descriptors."""
LOOK_AT_ALL = 3600.0
COLLECT_AFTER = 10_000
"""Net new objects before a collection of the youngest generation. Python's default of 700 collects whenever some twenty calls are
under way, finds nothing, and takes a ninth of the CPU of a Reserve."""
_STDERR = 2
_OLDEST = 2
"""The generation of a full collection."""

_log = get_logger(__name__)


def run(main: Callable[[asyncio.Event], Awaitable[None]], *, program: str) -> int:
    """Run a program until it ends or is stopped; returns its exit code. Configure the log first.

    `main` gets an event that SIGTERM, SIGINT or SIGHUP (unless it is ignored) sets, and should return soon after. A second signal
    but SIGHUP exits at once with 128 + its number. If `main` has not returned after 9.5 s, the program exits with 1.

    Any error ends the program with 1, that of a setting with 2, as `sources.load` does. A `GpuscaleError` raised outside tasks is
    printed as one line on stderr (JSON if the log is JSON and it is no setting's), others are logged with a traceback.
    """
    raise_descriptor_limit()
    new_loop = asyncio.new_event_loop
    with suppress(ImportError):
        from uvloop import new_event_loop as new_loop

    async def supervise() -> int:
        stop = asyncio.Event()
        with _signals(asyncio.get_running_loop(), stop):
            try:
                await main(stop)
            except Exception as error:  # noqa: BLE001 - the last handler
                code = 1
                for leaf in _leaves(error):
                    notes: list[str] = getattr(leaf, "__notes__", [])
                    if isinstance(leaf, GpuscaleError) and not notes:
                        told = leaf.message
                        if isinstance(leaf, InvalidArgumentError):
                            code = 2
                            told = "".join(f"{one.field}: " for one in leaf.violations) + told
                        if writes_json() and code == 1:
                            _log.error("the program failed", error=leaf.message, reason=leaf.reason)
                        else:
                            sys.stderr.write(f"{program}: error: {told}\n")
                    else:
                        _log.error(
                            "the program failed",
                            program=program,
                            error=repr(leaf),
                            where=notes,
                            exc_info=leaf,
                        )
                return code
        return 0

    with collecting_what_is_new(), asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(supervise())


@contextmanager
def collecting_what_is_new() -> Generator[None]:
    """Collect garbage only among objects newer than the last full collection.

    Modules, leases and nodes live long, and a scan of 10,000 of them blocks the loop for 0.2 s; everything is scanned every
    `LOOK_AT_ALL` seconds. The youngest are collected less often too, at the cost of some memory.
    """
    looked, thresholds = time.monotonic(), gc.get_threshold()

    def collecting(phase: str, info: Mapping[str, int]) -> None:
        nonlocal looked
        if info["generation"] == _OLDEST and phase == "stop":
            gc.freeze()
        elif info["generation"] == _OLDEST and time.monotonic() >= looked + LOOK_AT_ALL:
            looked = time.monotonic()
            gc.unfreeze()

    gc.set_threshold(COLLECT_AFTER, *thresholds[1:])
    gc.freeze()
    gc.enable()
    gc.callbacks.append(collecting)
    try:
        yield
    finally:
        gc.callbacks.remove(collecting)
        gc.set_threshold(*thresholds)


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Generator[None]:
    """Set `stop` on the first signal, exit on the second.

    The handlers are Python's own, not the loop's, so that the second signal works while the loop is stuck.
    """
    signalled = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal signalled
        if signalled and number == signal.SIGHUP:
            return  # the shell and the kernel each send one when a terminal closes
        if signalled:
            os._exit(128 + number)
        signalled = True
        # A watchdog in the interpreter: works even if all threads are stuck, and dumps their stacks.
        faulthandler.dump_traceback_later(STOP_LIMIT_SECONDS, exit=True, file=_STDERR)
        loop.call_soon_threadsafe(stop.set)
        loop.call_soon_threadsafe(loop.call_later, STOP_WARNING_SECONDS, warn)

    def warn() -> None:
        tasks = sorted(task.get_name() for task in asyncio.all_tasks())
        _log.warning("still stopping", tasks=tasks, limit_seconds=STOP_LIMIT_SECONDS)

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        yield
    finally:
        if signalled:
            faulthandler.cancel_dump_traceback_later()
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a program to stop: a terminal that closes, too, unless that is ignored, as by nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in nested groups; any other error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LARGEST_LIMIT if hard == resource.RLIM_INFINITY else min(hard, LARGEST_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    """The descriptor limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LARGEST_LIMIT if soft == resource.RLIM_INFINITY else soft


_MAX_PID_BYTES = 32


class DirectoryLock:
    """An exclusive lock on a directory while in the context; creates a missing directory with mode 0700.

    The lock is flock(2) on the file `lock` in it, so the kernel releases it when the process dies; the file remains with
    the pid of the last holder.

    Raises:
        FailedPreconditionError: on entering; DIRECTORY_LOCKED if another process holds it, DIRECTORY_UNUSABLE if the
            directory cannot be created or written, or other users can change its content.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._path.stat()
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise FailedPreconditionError(
                    f"other users may write to the directory {self._path}: chmod go-w {self._path}",
                    reason="DIRECTORY_UNUSABLE",
                )
            if status.st_uid not in {os.geteuid(), 0}:
                raise FailedPreconditionError(
                    f"the directory {self._path} belongs to another user: chown it, or choose another",
                    reason="DIRECTORY_UNUSABLE",
                )
            descriptor = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot use the directory {self._path}: {error.strerror}", reason="DIRECTORY_UNUSABLE"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, _MAX_PID_BYTES, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise FailedPreconditionError(
                f"the directory {self._path} is in use by process {holder or 'unknown'}",
                reason="DIRECTORY_LOCKED",
                metadata={"directory": str(self._path), "pid": holder},
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
