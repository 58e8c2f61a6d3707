"""Durable state in a SQLite file or PostgreSQL: a write is on disk before its caller continues.

One thread owns the only connection that writes and checkpoints (SQLite up to 3.51.2 may corrupt a WAL written by two
connections); a second thread reads. Waiting writes share one transaction and one fsync, each in its own savepoint, and
are answered with one wake-up of the event loop. With WAL, synchronous=FULL and BEGIN IMMEDIATE, a commit survives kill -9
and power loss. `Backend` hides the differences between `sqlite_store` and `postgres`.

Column types, prepared statements and migrations work with both. A migration is a function `to_N` that upgrades to version
N in the transaction of the store, with the operations of alembic, which is imported only if needed; the store keeps the
version (docs/adr/0009).
"""

import asyncio
import shutil
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from sqlalchemy import BigInteger, Boolean, Connection, Dialect, Integer, Table, TypeDecorator
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import bindparam, literal_column
from sqlalchemy.sql.compiler import Compiled, SQLCompiler
from sqlalchemy.sql.elements import ClauseElement
from sqlalchemy.types import TypeEngine

from gpuscale.common.errors import (
    AbortedError,
    FailedPreconditionError,
    GpuscaleError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.metrics_text import Family, Histogram, MetricsPage
from gpuscale.common.runtime.tasks import require_uninterrupted

_log = get_logger(__name__)
# Without one, the driver raises and drops an AttributeError for each NULL that it binds.
sqlite3.register_adapter(type(None), dict[None, None]().get)

MAX_WAITING = 10_000
MAX_GROUP = 256

T = TypeVar("T")


class Backend(ABC):
    """A database. The thread that enters `writer` or `reader` uses the connection.

    `errors` are of its driver and of SQLAlchemy. An earlier `version` is migrated, by `migrations` from each. `short` while
    the disk has only the space left that is reserved for work that frees some.
    """

    errors: ClassVar[tuple[type[Exception], ...]]
    version: int
    migrations: "Migrations"
    short = False

    @property
    @abstractmethod
    def where(self) -> str:
        """Where the state is, for errors."""

    @abstractmethod
    def writer(self) -> AbstractContextManager[Connection]:
        """The connection that writes. Creates or migrates the tables first."""

    @abstractmethod
    def reader(self) -> AbstractContextManager[Connection]:
        """A read-only connection; each of its transactions sees a snapshot."""

    @abstractmethod
    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """A write transaction; durable when the block ends without an error."""

    def taking_room(self, connection: Connection) -> AbstractContextManager[None]:  # noqa: ARG002
        """For work that frees no space: raises UnavailableError (DISK_FULL) for changes while the disk is `short`."""
        return nullcontext()

    @abstractmethod
    def in_transaction(self, connection: Connection) -> bool:
        """Whether a transaction is open."""

    @abstractmethod
    def failure(self, error: Exception) -> Exception:
        """The error for callers whose work raised `error`; errors not of the storage are unchanged."""

    def ended(self, *, committed: bool) -> None:  # noqa: B027 - optional
        """Called after a write transaction, before its callers are answered."""

    def check_version(self, found: int) -> None:
        """Raise FailedPreconditionError (STATE_VERSION) unless migrations lead from version `found` to this one."""
        if found > self.version or not all(step in self.migrations for step in range(found, self.version)):
            raise FailedPreconditionError(
                f"the state in {self.where} has schema version {found}, this program writes version"
                f" {self.version}; it was left as it is",
                reason="STATE_VERSION",
                metadata={"found": str(found), "wanted": str(self.version)},
            )

    @contextmanager
    def opening(self) -> Generator[None]:
        """Raise errors of opening the state as UnavailableError or, if a retry cannot help, FailedPreconditionError."""
        caught: tuple[type[Exception], ...] = (*self.errors, OSError, UnicodeDecodeError)  # of a name
        try:
            yield
        except caught as error:
            found = self.failure(error)
            if isinstance(found, UnavailableError):
                raise found from error
            cause = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
            raise FailedPreconditionError(
                f"the state in {self.where} cannot be used ({cause}); it was left as it is",
                reason="STATE_UNREADABLE",
            ) from error


DISK_FULL = "the disk of the state is full"
SLOW, RECENT = 2.0, 60.0
"""Seconds of a commit from which it is told as a problem, and for how long."""


class Store:
    """The state of one service. Created by `Store.open`; for the event loop that opened it.

    `commits` has the durations of write transactions, with their sync, of all stores of this process, and `failures` how
    many failed; `problem` says why those of each service fail now, and `slow` when its last slow one ended and how long it took.
    """

    commits: ClassVar[Histogram] = Histogram()
    failures: ClassVar[int] = 0
    problem: ClassVar[dict[str, str]] = {}
    slow: ClassVar[dict[str, tuple[float, float]]] = {}

    @classmethod
    def trouble(cls, service: str, *, why: bool) -> str:
        """What to tell of writes of a service: that they fail, with the reason if wanted, or that one was slow lately."""
        if problem := cls.problem.get(service):
            reason = f": {problem.encode('ascii', 'replace').decode()}" if why else ""
            return f"the {service} cannot write its state{reason}"
        ended, took = cls.slow.get(service, (-RECENT, 0.0))
        recent = time.monotonic() < ended + RECENT
        return f"a commit of the {service}'s state took {took:.1f} s" if recent else ""

    def __init__(self, backend: Backend, writer: "_Worker", reader: "_Worker") -> None:
        self._backend = backend
        self._writer = writer
        self._reader = reader

    @property
    def short(self) -> bool:
        """Whether the disk has only the space left that is reserved for work that frees some."""
        return self._backend.short

    @classmethod
    @asynccontextmanager
    async def open(cls, backend: Backend, *, name: str) -> AsyncGenerator[Self]:
        """Open or create the state; on leaving, finish submitted work and close. `name` is for threads and failpoints.

        Raises:
            FailedPreconditionError: STATE_UNREADABLE, STATE_VERSION or an error of the backend; the state is unchanged.
            UnavailableError: STATE_UNAVAILABLE or DISK_FULL.
        """
        commit = partial(_commit, name, backend)
        try:
            async with (
                _Worker(f"{name}-store-writer", backend.writer, commit) as writer,
                _Worker(f"{name}-store-reader", backend.reader, partial(_query, backend)) as reader,
            ):
                yield cls(backend, writer, reader)
        finally:
            cls.problem.pop(name, "")  # of a leader that has stepped down: its successor tells its own

    async def write(self, work: Callable[[Connection], T], *, frees: bool = False) -> T:
        """Run `work` in the writer thread and return its result once it is on disk.

        Work runs in the order of submission and must not commit or roll back. If it raises, only its own changes are
        undone, and the error is raised here. Cancelling the caller does not undo it, so within a call only an
        `uninterrupted` use case may write. Work that `frees` space, now or later, also runs on a full disk, in reserved
        space.

        Raises:
            InternalError: the use case is not `uninterrupted`.
            UnavailableError: DISK_FULL, STORE_CLOSED, or STATE_UNAVAILABLE (after a device error the write may or may
                not be there after a restart).
            FailedPreconditionError: STATE_UNREADABLE, the file is damaged.
            ResourceExhaustedError: STORE_BUSY, too much work is waiting.
        """
        require_uninterrupted()
        return await self._writer.submit(work if frees else partial(self._while_there_is_room, work))

    def _while_there_is_room(self, work: Callable[[Connection], T], connection: Connection) -> T:
        try:
            with self._backend.taking_room(connection):
                return work(connection)
        except UnavailableError:
            Store.failures += 1
            raise

    def begin(self, work: Callable[[Connection], T], done: "_Done[T]") -> None:
        """Start work that `frees` space, for a caller who does not wait and need not be `uninterrupted`.

        `done` is told in a later turn of the loop what `write` would raise or return; it should not raise.
        """
        self._writer.begin(work, done)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in the reader thread on the committed state; it cannot write. Raises as `write`."""
        return await self._reader.submit(work)


def add_store(page: MetricsPage, prefix: str, file: Path | None) -> None:
    """Add the series of commits and, for a file, its size and the free space of its disk."""
    name = f"{prefix}_store"
    commits = Family(f"{name}_commit_seconds", "histogram", "Duration of commits, with their sync.")
    failed = Family(f"{name}_commits_failed_total", "counter", "Failed commits.")
    page.add_histogram(commits, {}, Store.commits)
    page.add(failed, "", Store.failures)
    if file is None:
        return
    size = Family(f"{prefix}_store_bytes", "gauge", "Size of the database and its log on disk.")
    room = Family(f"{prefix}_store_free_bytes", "gauge", "Free space on the disk of the database.")
    files = [one for one in (file, file.with_name(f"{file.name}-wal")) if one.exists()]
    page.add(size, "", sum(one.stat().st_size for one in files))
    page.add(room, "", shutil.disk_usage(file.parent).free)


def _commit(name: str, backend: Backend, connection: Connection, group: Sequence["_Job[Any]"]) -> None:
    """Run jobs in one transaction. If it fails, so does each job that had not failed already."""
    committed, began = False, time.monotonic()
    trouble: Exception | None = None
    caught: tuple[type[Exception], ...] = (*backend.errors, GpuscaleError)
    try:
        with backend.transaction(connection):
            for job in group:
                _run_alone(backend, connection, job, shared=len(group) > 1)
            tasks.hit(f"{name}.store.before_commit")
        committed = True
        tasks.hit(f"{name}.store.after_commit")
    except _UndoneError:
        for job in group:
            failure = job.error and backend.failure(job.error)
            trouble = None if failure is job.error else failure
            job.error = failure
    except caught as error:
        trouble = backend.failure(error)
        for job in group:
            job.error = job.error or trouble
    finally:
        backend.ended(committed=committed)
        took = (ended := time.monotonic()) - began
        Store.commits.observe(took)
        if took > SLOW:
            Store.slow[name] = ended, took
    if trouble is not None or (committed and (backend.short or Store.problem.get(name))):
        Store.failures += trouble is not None
        before = Store.problem.get(name, "")
        # While the disk is short, what takes room is refused, often before it gets here.
        if problem := str(trouble or "") or ((before or DISK_FULL) if backend.short else ""):
            Store.problem[name] = problem
            if problem != before:
                _log.error("the state cannot be written", state=f"{name}.store", problem=problem)
        elif Store.problem.pop(name, ""):
            _log.info("the state is written again", state=f"{name}.store")


class _UndoneError(Exception):
    """The only job of a transaction failed."""


def _run_alone(backend: Backend, connection: Connection, job: "_Job[Any]", *, shared: bool) -> None:
    """Run a job in a savepoint of the driver (SQLAlchemy's cost 50 times as much), or without one if not `shared`.

    Raises GpuscaleError: the storage failed, or the job ended the transaction of the whole group.
    """
    if not shared:
        job.run(connection)
        if job.error is not None:
            raise _UndoneError from job.error
        return
    driver: Any = connection.connection.dbapi_connection
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
    """Run jobs on one snapshot, taken after the last was submitted. A failed job does not affect the others."""
    driver: Any = connection.connection.dbapi_connection
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


_Done: TypeAlias = Callable[[Exception | None, Sequence[T]], None]
"""Told of the error of a job, or of its result."""


class _Job(Generic[T]):
    """A unit of work, its result, and who is told of it. As a context manager it stores any error."""

    def __init__(self, work: Callable[[Connection], T], done: _Done[T]) -> None:
        self.error: Exception | None = None
        self.done = done
        self.values: list[T] = []
        self._work = work

    def run(self, connection: Connection) -> None:
        """Do the work and keep its result; called in the worker thread."""
        with self:
            self.values.append(self._work(connection))

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False


class _Worker:
    """A thread with one connection that serves all waiting jobs as one group."""

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

    def begin(self, work: Callable[[Connection], T], done: _Done[T]) -> None:
        """Start work; `done` is told in a later turn of the loop."""
        if self._closed:
            self._loop.call_soon(done, UnavailableError("the state is closed", reason="STORE_CLOSED"), ())
        elif self._queue.qsize() >= MAX_WAITING:
            busy = "too many reads and writes of the state are waiting"
            self._loop.call_soon(done, ResourceExhaustedError(busy, reason="STORE_BUSY", retry_after=1.0), ())
        else:
            self._queue.put(_Job(work, done))

    async def submit(self, work: Callable[[Connection], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        self.begin(work, partial(_answer, future))
        return await future

    def _run(self) -> None:
        failure: GpuscaleError | None = None

        def opened() -> None:
            if not self._opened.done():
                self._opened.set_result(None)

        try:
            with self._connect() as connection:
                self._loop.call_soon_threadsafe(opened)
                while self._take():
                    self._serve(connection, self._serving)
                    self._loop.call_soon_threadsafe(_settle, iter(self._serving))
        except GpuscaleError as error:
            failure = error
        finally:
            self._loop.call_soon_threadsafe(self._end, failure)

    def _take(self) -> bool:
        """Wait for a job and take all that wait; False after the last job."""
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

    def _end(self, failure: GpuscaleError | None) -> None:
        """Fail all waiting jobs; called on the event loop."""
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
        if not self._ended.done():
            self._ended.set_result(None)
        _settle(iter(left))


def _answer(future: asyncio.Future[T], error: Exception | None, values: Sequence[T]) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(values[0])
    else:
        future.set_exception(error)


def _settle(jobs: Iterator[_Job[Any]]) -> None:
    """Tell who waits for jobs; if telling one raises, the others are told in the next turn of the loop."""
    try:
        for job in jobs:
            job.done(job.error, job.values)
    finally:
        if left := [*jobs]:
            asyncio.get_running_loop().call_soon(_settle, iter(left))


class Whole(TypeDecorator[int]):
    """A 64-bit integer: INTEGER in SQLite, BIGINT in PostgreSQL."""

    impl = Integer
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[int]:
        """The column type for the database."""
        return dialect.type_descriptor(BigInteger() if dialect.name == "postgresql" else Integer())


def revisions(module: str, newest: int) -> Mapping[int, Callable[[Connection], None]]:
    """The migrations `to_2` to `to_{newest}` of a module, by the version that each starts from."""

    def apply(version: int, connection: Connection) -> None:
        from alembic.operations import Operations
        from alembic.runtime.migration import MigrationContext

        migrate = getattr(import_module(module), f"to_{version}")
        migrate(Operations(MigrationContext.configure(connection)))

    return {version - 1: partial(apply, version) for version in range(2, newest + 1)}


Migration: TypeAlias = Callable[[Connection], None]
Migrations: TypeAlias = Mapping[int, Migration]
"""Upgrades from one schema version to the next, by the version that each starts from."""

_Build: TypeAlias = Callable[[str], ClauseElement]
_Values = Callable[[Mapping[str, object]], Sequence[object]]
"""Extracts the parameters of a statement from a row, in order."""


class Prepared:
    """A Core statement for both databases, compiled at its first use.

    Rows map parameter names to values of SQLite's driver: JSON as text, booleans as 0 and 1.
    """

    def __init__(self, statement: ClauseElement | _Build) -> None:
        self._build: _Build = statement if callable(statement) else lambda _: statement
        self._sqlite: tuple[str, _Values] | None = None
        self._postgresql = ""
        self._truths: tuple[str, ...] = ()
        self._constants: Mapping[str, object] = {}

    @classmethod
    def replacing(cls, table: Table, constants: Mapping[str, str] | None = None) -> Self:
        """An upsert by primary key; `constants` are columns that have the same literal in each row."""
        keys = [column.name for column in table.primary_key]
        others = [column.name for column in table.columns if column.name not in keys]
        values: dict[str, Any] = {column.name: bindparam(column.name) for column in table.columns}
        values |= {name: literal_column(text) for name, text in (constants or {}).items()}

        def upsert(dialect: str) -> ClauseElement:
            # import only this dialect: PostgreSQL's takes 2 MB
            into: Any = import_module(f"sqlalchemy.dialects.{dialect}").insert(table).values(values)
            others_anew = {name: into.excluded[name] for name in others}
            statement: ClauseElement = into.on_conflict_do_update(index_elements=keys, set_=others_anew)
            return statement

        return cls(upsert)

    def run(self, connection: Connection, rows: Sequence[Mapping[str, object]]) -> int:
        """Execute it for each row in the open transaction; returns the number of changed rows.

        Raises AbortedError: STATE_CONFLICT, a constraint or trigger refused a row.
        """
        driver = connection.connection.dbapi_connection
        if isinstance(driver, sqlite3.Connection):
            text, values = self._sqlite or self._of_sqlite()
            try:  # by position: the driver would look up each parameter by name
                return driver.executemany(text, map(values, rows)).rowcount
            except sqlite3.IntegrityError as error:
                raise _refusal(error) from error
        from gpuscale.common.store.postgres import IntegrityError, raw  # needs an extra

        text, truths = self._of_postgresql(connection), self._truths
        given = [{**self._constants, **row, **{name: bool(row[name]) for name in truths}} for row in rows]
        try:
            with raw(connection).cursor() as cursor:
                if len(given) == 1:  # a pipeline of one takes longer
                    cursor.execute(text.encode(), given[0])
                else:
                    cursor.executemany(text.encode(), given)
                return cursor.rowcount
        except IntegrityError as error:
            raise _refusal(error) from error

    def first(self, connection: Connection, row: Mapping[str, object]) -> Sequence[object] | None:
        """Query in the open transaction; the first row, or None."""
        return next(iter(self.all(connection, row)), None)

    def all(self, connection: Connection, row: Mapping[str, object]) -> Sequence[Sequence[Any]]:
        """Query in the open transaction; the rows, with values in the order of the columns."""
        driver = connection.connection.dbapi_connection
        if isinstance(driver, sqlite3.Connection):
            text, values = self._sqlite or self._of_sqlite()
            found: Sequence[Sequence[Any]] = driver.execute(text, values(row)).fetchall()
            return found
        from gpuscale.common.store.postgres import raw

        with raw(connection).cursor() as cursor:
            query = self._of_postgresql(connection).encode()
            return cursor.execute(query, {**self._constants, **row}).fetchall()

    def _of_sqlite(self) -> "tuple[str, _Values]":
        compiled = self._build("sqlite").compile(dialect=sqlite.dialect(paramstyle="qmark"))
        names = (compiled.positiontup or ()) if isinstance(compiled, SQLCompiler) else ()
        # Positional, with repetitions. An itemgetter of one name would return a bare value.
        order: _Values = itemgetter(*names) if len(names) > 1 else lambda row: [row[name] for name in names]
        constants = self._constants = _constants(compiled)
        with_constants: _Values = lambda row: order({**constants, **row})  # noqa: E731
        self._sqlite = str(compiled), with_constants if constants else order
        return self._sqlite

    def _of_postgresql(self, connection: Connection) -> str:
        if not self._postgresql:
            compiled = self._build("postgresql").compile(dialect=connection.dialect)
            self._truths, self._constants = _truths(compiled), _constants(compiled)
            self._postgresql = str(compiled)
        return self._postgresql


def _truths(compiled: Compiled) -> tuple[str, ...]:
    """Names of boolean parameters."""
    if not isinstance(compiled, SQLCompiler):
        return ()
    return tuple(name for bind, name in compiled.bind_names.items() if isinstance(bind.type, Boolean))


def _constants(compiled: Compiled) -> Mapping[str, object]:
    """Literal values in the statement, by parameter name."""
    return {name: value for name, value in (compiled.params or {}).items() if value is not None}


def _refusal(error: Exception) -> AbortedError:
    first = str(error).partition("\n")[0]
    return AbortedError(f"the state refuses the change: {first}", reason="STATE_CONFLICT")
