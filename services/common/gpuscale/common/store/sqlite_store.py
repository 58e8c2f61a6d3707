"""The two connections of a store's SQLite file, and what its errors mean. `gpuscale.common.store.store` gives them threads."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from sqlalchemy import Connection, MetaData, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.store.store_backend import Migrations

BUSY_TIMEOUT_SECONDS = 5.0
_FULL = 2
_WAL_RESET_FIXED = (3, 51, 3)
_WRITER_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "cell_size_check=ON",
    "mmap_size=0",
)
_READER_PRAGMAS = ("query_only=ON", "cell_size_check=ON", "mmap_size=0")

_log = get_logger(__name__)


class Guard(Protocol):
    """Watches over a file for its service; called by the thread that writes."""

    def inspect(self, connection: sqlite3.Connection, version: int) -> None:
        """Look at a file before anything is changed, over a connection that cannot; 0 is the version of one without tables.

        Raises:
            FailedPreconditionError: it is not to be used; it stays as it is.
        """
        ...

    def ended(self, *, committed: bool) -> None:
        """A transaction has ended; nobody was answered yet."""
        ...


@dataclass(frozen=True)
class Sqlite:
    """A store's SQLite file as a `store_backend.Backend`.

    Args:
        path: the file; its directory is made too, for its owner only.
        metadata: the tables.
        version: of the schema; a file of another version is refused, unless it is earlier and
        migrations: lead from it to this one, each from the version that is its key to the next.
        guard: looks at the file before it is used, and is told of every transaction that ended.
    """

    path: Path
    metadata: MetaData
    version: int
    migrations: Migrations
    guard: Guard | None = None

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What the driver raises, and SQLAlchemy for it."""
        return sqlite3.Error, DBAPIError

    def writer(self) -> AbstractContextManager[Connection]:
        """See `writer`."""
        return writer(self.path, self.metadata, self.version, self.migrations, self.guard)

    def reader(self) -> AbstractContextManager[Connection]:
        """See `reader`."""
        return reader(self.path)

    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """See `transaction`."""
        return transaction(connection)

    def driver(self, connection: Connection) -> sqlite3.Connection:
        """See `raw`."""
        return raw(connection)

    def in_transaction(self, connection: Connection) -> bool:
        """Whether a transaction is open."""
        return raw(connection).in_transaction

    def failure(self, error: Exception) -> Exception:
        """See `failure`."""
        return failure(error)

    def ended(self, *, committed: bool) -> None:
        """Tell the guard."""
        if self.guard is not None:
            self.guard.ended(committed=committed)


@contextmanager
def writer(
    path: Path, metadata: MetaData, version: int, migrations: Migrations, guard: Guard | None = None
) -> Generator[Connection]:
    """The connection that writes and checkpoints; only the calling thread may use it.

    Makes the file (mode 0600, its directory 0700) and the tables if they are missing. A file that exists is checked
    first, over a connection that cannot change it; one of an earlier version is migrated, in one transaction.

    Raises:
        FailedPreconditionError: STATE_UNREADABLE for a file that is damaged, not ours, or out of reach, STATE_VERSION for
            one of a schema version that no migration starts from, or what `guard` raises. The file stays as it is.
        UnavailableError: as `failure` says.
    """
    with _state_errors(path):
        _create(path)
        found = _check(path, version, migrations, guard)
        connection = _connect(path, _WRITER_PRAGMAS, "BEGIN IMMEDIATE")
    with closing(connection):
        with _state_errors(path):
            _require_durability(connection)
            if found != version:
                with connection.begin():
                    for step in range(found or version, version):
                        migrations[step](connection)
                    metadata.create_all(connection)
                    connection.exec_driver_sql(f"PRAGMA user_version={version}")
        if sqlite3.sqlite_version_info < _WAL_RESET_FIXED:
            _log.debug(
                "sqlite has the wal-reset bug, which one writer avoids", version=sqlite3.sqlite_version
            )
        yield connection


@contextmanager
def reader(path: Path) -> Generator[Connection]:
    """A connection that can only query; only the calling thread may use it. Raises as `writer` does."""
    with _state_errors(path):
        connection = _connect(path, _READER_PRAGMAS, "BEGIN")
    with closing(connection):
        yield connection


@contextmanager
def transaction(connection: Connection) -> Generator[None]:
    """A transaction that writes; ended by SQLAlchemy if a work in it used SQLAlchemy, else by the driver alone.

    SQLAlchemy's own way to begin and end one costs as much as writing ten rows.
    """
    driver = raw(connection)
    driver.execute("BEGIN IMMEDIATE").close()
    committed = False
    try:
        yield
        if connection.in_transaction():
            connection.commit()
        else:
            driver.commit()
        committed = True
    finally:
        if not committed:
            connection.rollback()
            driver.rollback()


def raw(connection: Connection) -> sqlite3.Connection:
    """The driver's connection below a connection of this module."""
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        raise TypeError("not a connection of a store")
    return driver


def failure(error: Exception) -> Exception:
    """What to tell the callers whose work ended with `error`; errors that are not the storage's stay what they are."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", None) if isinstance(cause, sqlite3.Error) else None
    if code is None:
        return error
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL:
        return UnavailableError("the disk of the state is full", reason="DISK_FULL")
    if primary in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
        return FailedPreconditionError("the state is damaged", reason="STATE_UNREADABLE")
    if primary in _UNAVAILABLE:
        return UnavailableError(f"the state cannot be used now: {cause}", reason="STATE_UNAVAILABLE")
    return error


_UNAVAILABLE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)


@contextmanager
def _state_errors(path: Path) -> Generator[None]:
    try:
        yield
    except (sqlite3.Error, DBAPIError, OSError) as error:
        found = failure(error)
        if isinstance(found, UnavailableError):
            raise found from error
        cause = error.orig if isinstance(error, DBAPIError) else error
        raise FailedPreconditionError(
            f"the state in {path} cannot be read ({cause}); it was left as it is", reason="STATE_UNREADABLE"
        ) from error


def _create(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _check(path: Path, version: int, migrations: Migrations, guard: Guard | None) -> int:
    """Look at the file without changing it; its version, 0 while it is without tables, as after a crash at its making."""
    uri = f"file:{quote(str(path))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_SECONDS)) as connection:
        problem: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        found: int = connection.execute("PRAGMA user_version").fetchone()[0]
        tables: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(" ".join(problem.split()))
        fresh = found == 0 and tables == 0
        known = found <= version and all(step in migrations for step in range(found, version))
        if not known and not fresh:
            raise FailedPreconditionError(
                f"the state in {path} has schema version {found}, this program writes version {version}; "
                "it was left as it is",
                reason="STATE_VERSION",
                metadata={"found": str(found), "wanted": str(version)},
            )
        if guard is not None:
            guard.inspect(connection, found)
    return found


def _connect(path: Path, pragmas: tuple[str, ...], begin: str) -> Connection:
    """A connection outside of any pool that begins its transactions with `begin`."""
    driver = sqlite3.connect(path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)
    for pragma in pragmas:
        driver.execute(f"PRAGMA {pragma}").close()
    # Parameters are hidden: they would stand in the text of errors, and so in logs.
    engine = create_engine("sqlite://", creator=lambda: driver, poolclass=NullPool, hide_parameters=True)

    def on_begin(_: Connection) -> None:
        if not driver.in_transaction:  # `transaction` may have begun it already
            driver.execute(begin).close()

    event.listen(engine, "begin", on_begin)
    return engine.connect()


def _require_durability(connection: Connection) -> None:
    """SQLite answers a pragma it cannot follow (WAL on a network file system, say) without an error."""
    driver = raw(connection)
    journal: str = driver.execute("PRAGMA journal_mode").fetchone()[0]
    synchronous: int = driver.execute("PRAGMA synchronous").fetchone()[0]
    if journal != "wal" or synchronous != _FULL:
        raise sqlite3.DatabaseError(f"journal_mode={journal}, synchronous={synchronous} instead of wal, full")
