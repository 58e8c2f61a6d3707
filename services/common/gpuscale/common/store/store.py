"""Durable state in one SQLite file, or in PostgreSQL: a write is on disk before its caller goes on.

One thread owns the only connection that writes and checkpoints (SQLite up to 3.51.2 may corrupt a WAL that two
connections write), a second thread reads. Writes that wait together share one transaction and one fsync, each in a
savepoint of its own; they are answered together with one wake-up of the event loop. With WAL, synchronous=FULL and
BEGIN IMMEDIATE a commit that returned survives kill -9 and power loss. What is particular to a database is behind
`Backend`, in `sqlite_store` and `postgres`.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, LiteralString, Protocol, Self, TypeVar

from sqlalchemy import Connection

from gpuscale.common.errors import GpuscaleError, InternalError, ResourceExhaustedError, UnavailableError
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.tasks import require_uninterrupted

MAX_WAITING = 10_000
MAX_GROUP = 256

T = TypeVar("T")


class Driver(Protocol):
    """The connection of the database's driver, below SQLAlchemy's."""

    def execute(self, query: LiteralString, /) -> object:
        """Run a statement without parameters."""
        ...


class Backend(Protocol):
    """A database. `writer` and `reader` are entered each by the thread that then uses the connection."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What its driver raises, and SQLAlchemy for it."""
        ...

    def writer(self) -> AbstractContextManager[Connection]:
        """The connection that writes. Makes or migrates the tables first."""
        ...

    def reader(self) -> AbstractContextManager[Connection]:
        """A connection that can only query; each of its transactions sees one moment."""
        ...

    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """A transaction that writes; durable when the block was left without an error."""
        ...

    def driver(self, connection: Connection) -> Driver:
        """The driver's connection below one of these."""
        ...

    def in_transaction(self, connection: Connection) -> bool:
        """Whether a transaction is open."""
        ...

    def failure(self, error: Exception) -> Exception:
        """The error for the callers whose work ended with `error`; errors other than the storage's stay as they are."""
        ...

    def ended(self, *, committed: bool) -> None:
        """A transaction that writes has ended; nobody was answered yet."""
        ...


class Store:
    """The state of one service. Made by `Store.open`; used from the event loop that opened it."""

    def __init__(self, writer: "_Worker", reader: "_Worker") -> None:
        self._writer = writer
        self._reader = reader

    @classmethod
    @asynccontextmanager
    async def open(cls, backend: Backend, *, name: str) -> AsyncGenerator[Self]:
        """Open the state in a database, or make it; close it after all that was submitted is done.

        Args:
            backend: the database; `Sqlite` and `Postgres` say what may be wrong with it.
            name: of the service; names the threads and the failpoints.

        Raises:
            FailedPreconditionError: STATE_UNREADABLE or STATE_VERSION, or what the backend adds; the state stays as it is.
            UnavailableError: STATE_UNAVAILABLE or DISK_FULL.
        """
        commit = partial(_commit, f"{name}.store", backend)
        async with (
            _Worker(f"{name}-store-writer", backend.writer, commit) as writer,
            _Worker(f"{name}-store-reader", backend.reader, partial(_query, backend)) as reader,
        ):
            yield cls(writer, reader)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in the writer's thread and return its value once it is on disk.

        Works run one after another in the order of submission. A work that raises is undone alone and its error is
        raised here. A work must not commit or roll back. A caller that is cancelled does not undo its work: within a
        call, only a use case that is `uninterrupted` may write.

        Raises:
            InternalError: it is not.
            UnavailableError: DISK_FULL, STATE_UNAVAILABLE (after an error of the device nobody can tell whether the
                write will be there after a restart) or STORE_CLOSED.
            FailedPreconditionError: STATE_UNREADABLE, the file was found damaged.
            ResourceExhaustedError: STORE_BUSY, too many works wait.
        """
        require_uninterrupted()
        return await self._writer.submit(work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in the reader's thread on all that was committed; it cannot write. Raises as `write` does."""
        return await self._reader.submit(work)


def _commit(name: str, backend: Backend, connection: Connection, group: Sequence["_Job[Any]"]) -> None:
    """Run the jobs in one transaction. If it fails, so does every job that had not failed by itself."""
    committed = False
    caught: tuple[type[Exception], ...] = (*backend.errors, GpuscaleError)
    try:
        with backend.transaction(connection):
            for job in group:
                _run_alone(backend, connection, job, shared=len(group) > 1)
            tasks.hit(f"{name}.before_commit")
        committed = True
        tasks.hit(f"{name}.after_commit")
    except _UndoneError:
        for job in group:
            job.error = job.error and backend.failure(job.error)
    except caught as error:
        for job in group:
            job.error = job.error or backend.failure(error)
    finally:
        backend.ended(committed=committed)


class _UndoneError(Exception):
    """A job failed that had the transaction to itself."""


def _run_alone(backend: Backend, connection: Connection, job: "_Job[Any]", *, shared: bool) -> None:
    """Run a job in a savepoint of the driver; SQLAlchemy's own cost 50 times as much.

    A job that does not share the transaction needs none: the transaction is undone where it fails.

    Raises:
        GpuscaleError: the job met a failure of the storage, or ended the transaction of the whole group.
    """
    if not shared:
        job.run(connection)
        if job.error is not None:
            raise _UndoneError from job.error
        return
    driver = backend.driver(connection)
    driver.execute("SAVEPOINT job")
    job.run(connection)
    if job.error is None:
        driver.execute("RELEASE job")
        return
    failure = backend.failure(job.error)
    if isinstance(failure, GpuscaleError) and failure is not job.error:
        job.error = failure
        raise failure
    if not backend.in_transaction(connection):
        raise InternalError("work ended the transaction of its group")
    driver.execute("ROLLBACK TO job")
    driver.execute("RELEASE job")


def _query(backend: Backend, connection: Connection, group: Sequence["_Job[Any]"]) -> None:
    """Run the jobs on one snapshot, taken after the last of them was submitted; one that fails fails alone."""
    driver = backend.driver(connection)
    caught: tuple[type[Exception], ...] = (*backend.errors, GpuscaleError)
    try:
        with connection.begin():
            for job in group:
                driver.execute("SAVEPOINT job")
                job.run(connection)
                if job.error is not None:
                    job.error = backend.failure(job.error)
                    driver.execute("ROLLBACK TO job")
                driver.execute("RELEASE job")
    except caught as error:
        for job in group:
            job.error = job.error or backend.failure(error)


class _Job(Generic[T]):
    """A unit of work, its result, and the future that waits for it.

    As a context it keeps the error of the work, whatever it is, for the one who waits.
    """

    def __init__(self, work: Callable[[Connection], T], future: asyncio.Future[T]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._future = future
        self._values: list[T] = []

    def run(self, connection: Connection) -> None:
        """Do the work and keep its result; in the worker's thread."""
        with self:
            self._values.append(self._work(connection))

    def settle(self) -> None:
        """Answer the caller; on the event loop."""
        if self._future.done():
            return
        if self.error is None:
            self._future.set_result(self._values[0])
        else:
            self._future.set_exception(self.error)

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False


class _Worker:
    """A thread with one connection, which serves jobs in groups: all that wait when it is ready for more."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], AbstractContextManager[Connection]],
        serve: Callable[[Connection, Sequence[_Job[Any]]], None],
    ) -> None:
        self._connect = connect
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._queue: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._serving: list[_Job[Any]] = []
        self._closed = False
        self._last = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            await self._opened
        except asyncio.CancelledError:
            self._queue.put(None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._queue.put(None)
        await self._ended
        self._thread.join()

    async def submit(self, work: Callable[[Connection], T]) -> T:
        """Queue work and wait for its result."""
        if self._closed:
            raise UnavailableError("the state is closed", reason="STORE_CLOSED")
        if self._queue.qsize() >= MAX_WAITING:
            raise ResourceExhaustedError(
                "too many reads and writes of the state are waiting", reason="STORE_BUSY", retry_after=1.0
            )
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_Job(work, future))
        return await future

    def _run(self) -> None:
        failure: GpuscaleError | None = None
        try:
            with self._connect() as connection:
                self._loop.call_soon_threadsafe(self._open)
                while self._take():
                    self._serve(connection, self._serving)
                    self._loop.call_soon_threadsafe(_settle, self._serving)
        except GpuscaleError as error:
            failure = error
        finally:
            self._loop.call_soon_threadsafe(self._end, failure)

    def _take(self) -> bool:
        """Take the jobs that wait, and wait for the first; False once there are none and never will be."""
        self._serving = []
        while not self._last and len(self._serving) < MAX_GROUP:
            if self._serving and self._queue.empty():
                break
            job = self._queue.get()
            if job is None:
                self._last = True
            else:
                self._serving.append(job)
        return bool(self._serving)

    def _open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def _end(self, failure: GpuscaleError | None) -> None:
        """Answer all who still wait; on the event loop."""
        failure = failure or UnavailableError("the state is closed", reason="STORE_CLOSED")
        self._closed = True
        if not self._opened.done():
            self._opened.set_exception(failure)
        left = [*self._serving]
        while not self._queue.empty():
            job = self._queue.get()
            if job is not None:
                left.append(job)
        for job in left:
            job.error = job.error or failure
        _settle(left)
        if not self._ended.done():
            self._ended.set_result(None)


def _settle(jobs: Sequence[_Job[Any]]) -> None:
    for job in jobs:
        job.settle()
