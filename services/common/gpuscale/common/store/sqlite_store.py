"""The two connections of a store's SQLite file, and what its errors mean. `gpuscale.common.store.store` gives them threads.

On a full disk nothing could be released or deleted. So blocks behind the end of the file and of its log are kept; while the
file system has none to keep, only works that free room are done.
"""

import ctypes
import errno
import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol
from urllib.parse import quote

from sqlalchemy import Connection, MetaData, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.store.store import Backend, Migration, Migrations

BUSY_TIMEOUT_SECONDS = 5.0
SMALL_FILE = 16 << 20
"""Bytes up to which a file is checked in whole at each start."""
_FULL = 2
MOST_FREE_PAGES = 1024
"""Pages of 4 KiB that a file keeps for what is written next."""
_VACUUM_PAGES = 64
_WAL_RESET_FIXED = (3, 51, 3)
_WRITER_PRAGMAS = (
    "temp_store=MEMORY",  # a disk that is full must not fail what needs no room on it
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "cell_size_check=ON",
    "mmap_size=0",
)
_NEW_PRAGMAS = ("auto_vacuum=INCREMENTAL",)
"""Of a new file; it would write to one that there is. Pages that are free go back to the disk, a few at a time."""
_READER_PRAGMAS = ("query_only=ON", "cell_size_check=ON", "mmap_size=0")

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

_log = get_logger(__name__)


class WriteGuard(Protocol):
    """Checks a file for its service; called by the thread that writes."""

    def inspect(self, connection: sqlite3.Connection, version: int) -> None:
        """Check a file before anything changes it, over a read-only connection; version 0 has no tables.

        Raises:
            FailedPreconditionError: it is not to be used; it stays as it is.
        """
        ...

    def ended(self, *, committed: bool) -> None:
        """A transaction has ended; nobody was answered yet."""
        ...


ROOM = 8 << 20
"""Bytes that are kept behind the end of either file: some thousand changes."""
_KEEP_SIZE = 1
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class Room:
    """The room of one SQLite file. For the thread that writes; `close` comes after the connections are closed.

    Attributes:
        short: whether the file system had no blocks to keep.
    """

    def __init__(self, database: Path) -> None:
        self.short = False
        self._paths = (str(database), f"{database}-wal")
        # Open for as long as SQLite is: to close any descriptor of a file gives up its locks.
        self._files: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._able = True

    def look(self) -> None:
        """Keep room where the files have grown, or lacked it before."""
        if not self._able:
            return
        was_short, self.short = self.short, False
        for path in self._paths:
            if path not in self._files:
                with suppress(FileNotFoundError):
                    self._files[path] = os.open(path, os.O_RDWR)
            if path in self._files:
                self._keep(path, again=was_short)
        if self.short and not was_short:
            _log.error(
                "the disk of the state is full: only what gives something back is written",
                file=self._paths[0],
                bytes=ROOM,
            )

    def close(self) -> None:
        """Close the files; the room is given back."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _keep(self, path: str, *, again: bool) -> None:
        """Have the file system keep blocks behind the end of a file."""
        size = os.fstat(self._files[path]).st_size
        if not again and self._sizes.get(path) == size:
            return
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        number = ctypes.get_errno() if fallocate(self._files[path], _KEEP_SIZE, size, ROOM) else 0
        self._sizes[path] = size
        self.short = self.short or number in _NO_ROOM
        if number and number not in _NO_ROOM:
            self._able = False
            _log.info("the file system keeps no room for the state", problem=os.strerror(number))


@dataclass(eq=False)
class Sqlite(Backend):
    """A store's SQLite file.

    Args:
        path: the file; its directory is made too, for its owner only.
        metadata: the tables.
        version: of the schema; a file of another version is refused, unless it is earlier and
        migrations: lead from it to this one, each from the version that is its key to the next.
        guard: looks at the file before it is used, and is told of every transaction that ended.
        unchecked: tables that are not looked at in whole in a file of more than `SMALL_FILE`.
    """

    path: Path
    metadata: MetaData
    version: int
    migrations: Migrations = field(default_factory=dict[int, Migration])
    guard: WriteGuard | None = None
    unchecked: frozenset[str] = frozenset()
    errors: ClassVar[tuple[type[Exception], ...]] = (sqlite3.Error, DBAPIError)
    _room: Room = field(init=False)

    def __post_init__(self) -> None:
        self._room = Room(self.path)

    @contextmanager
    def writer(self) -> Generator[Connection]:
        """The connection that writes and checkpoints.

        Makes the file (mode 0600, its directory 0700) and the tables if they are missing. A file that exists is checked
        first, over a connection that cannot change it; one of an earlier version is migrated, in one transaction.

        Raises:
            FailedPreconditionError: STATE_UNREADABLE for a file that is damaged, not ours, or out of reach, STATE_VERSION
                for one of a schema version that no migration starts from, or what its guard raises. The file stays as
                it is.
            UnavailableError: as `failure` says.
        """
        with self._state_errors():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            found = self._check()
            pragmas = _WRITER_PRAGMAS if found else (*_NEW_PRAGMAS, *_WRITER_PRAGMAS)
            connection = _connect(self.path, pragmas, "BEGIN IMMEDIATE")
        with closing(self._room), closing(connection):
            with self._state_errors():
                # SQLite answers a pragma it cannot follow (WAL on a network file system, say) without an error.
                driver = raw(connection)
                journal: str = driver.execute("PRAGMA journal_mode").fetchone()[0]
                synchronous: int = driver.execute("PRAGMA synchronous").fetchone()[0]
                if journal != "wal" or synchronous != _FULL:
                    raise sqlite3.DatabaseError(
                        f"journal_mode={journal}, synchronous={synchronous} instead of wal, full"
                    )
                # A table that is new needs no new version; where nothing is to be done, nothing is locked.
                names = driver.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                there = {name for (name,) in names.fetchall()}
                if found != self.version or self.metadata.tables.keys() - there:
                    with connection.begin():
                        for step in range(found or self.version, self.version):
                            self.migrations[step](connection)
                        self.metadata.create_all(connection)
                        connection.exec_driver_sql(f"PRAGMA user_version={self.version}")
            if sqlite3.sqlite_version_info < _WAL_RESET_FIXED:
                _log.debug(
                    "sqlite has the wal-reset bug, which one writer avoids", version=sqlite3.sqlite_version
                )
            self._room.look()
            yield connection

    @contextmanager
    def reader(self) -> Generator[Connection]:
        """A connection that can only query. Raises as `writer` does."""
        with self._state_errors():
            connection = _connect(self.path, _READER_PRAGMAS, "BEGIN")
        with closing(connection):
            yield connection

    @contextmanager
    def transaction(self, connection: Connection) -> Generator[None]:
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

    @property
    def short(self) -> bool:
        """Whether the disk has no more room than what is kept for works that free some."""
        return self._room.short

    @contextmanager
    def taking_room(self, connection: Connection) -> Generator[None]:
        """Refuse what a work changes while the disk is `short`: what is left is for others."""
        before = raw(connection).total_changes
        yield
        if self._room.short and raw(connection).total_changes != before:
            self._room.look()
            if self._room.short:
                raise UnavailableError("the disk of the state is full", reason="DISK_FULL")

    def in_transaction(self, connection: Connection) -> bool:
        """Whether a transaction is open."""
        return raw(connection).in_transaction

    def failure(self, error: Exception) -> Exception:
        """The error for the callers whose work ended with `error`; errors other than the storage's stay as they are."""
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

    def ended(self, *, committed: bool) -> None:
        """Tell the guard, and keep room behind what was written."""
        if self.guard is not None:
            self.guard.ended(committed=committed)
        self._room.look()

    def _check(self) -> int:
        """Check the file without changing it; returns its version, 0 if it has no tables, as after a crash at its making."""
        uri = f"file:{quote(str(self.path))}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_SECONDS)) as connection:
            check(connection, "quick_check", self.unchecked)
            found: int = connection.execute("PRAGMA user_version").fetchone()[0]
            tables: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            fresh = found == 0 and tables == 0
            known = found <= self.version and all(
                step in self.migrations for step in range(found, self.version)
            )
            if not known and not fresh:
                raise FailedPreconditionError(
                    f"the state in {self.path} has schema version {found}, this program writes version"
                    f" {self.version}; it was left as it is",
                    reason="STATE_VERSION",
                    metadata={"found": str(found), "wanted": str(self.version)},
                )
            if self.guard is not None:
                self.guard.inspect(connection, found)
        return found

    @contextmanager
    def _state_errors(self) -> Generator[None]:
        try:
            yield
        except (
            sqlite3.Error,
            DBAPIError,
            OSError,
            UnicodeDecodeError,
        ) as error:  # the last of a damaged name
            found = self.failure(error)
            if isinstance(found, UnavailableError):
                raise found from error
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise FailedPreconditionError(
                f"the state in {self.path} cannot be read ({cause}); it was left as it is",
                reason="STATE_UNREADABLE",
            ) from error


def raw(connection: Connection) -> sqlite3.Connection:
    """The driver's connection below a connection of this module."""
    driver = connection.connection.dbapi_connection
    if not isinstance(driver, sqlite3.Connection):
        raise TypeError("not a connection of a store")
    return driver


def give_back(connection: Connection) -> None:
    """Return free pages of the file to the disk, a few at a time; PostgreSQL does so by itself."""
    driver = connection.connection.dbapi_connection
    if isinstance(driver, sqlite3.Connection):
        free: int = driver.execute("PRAGMA freelist_count").fetchone()[0]
        for _ in range(min(free - MOST_FREE_PAGES, _VACUUM_PAGES)):
            # One at a time: the driver does not step a pragma that has no columns to its end.
            driver.execute("PRAGMA incremental_vacuum(1)").close()


def check(connection: sqlite3.Connection, pragma: str, unchecked: frozenset[str]) -> None:
    """Have SQLite check a file; of a large one, without the `unchecked` tables.

    Raises:
        sqlite3.DatabaseError: it is damaged.
    """
    [pages], [size] = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
    )
    asked = ["1"]
    if unchecked and pages * size > SMALL_FILE:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        asked = [f"'{name}'" for (name,) in tables if name not in unchecked]
    for table in asked:
        problem: str = connection.execute(f"PRAGMA {pragma}({table})").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(" ".join(problem.split()))


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
