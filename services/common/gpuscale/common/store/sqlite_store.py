"""The SQLite backend of a store: its two connections, errors, reserved disk space.

On a full disk nothing could be released or deleted. So blocks after the end of the file and of its log are reserved; while
the file system has none to reserve, only work that frees space is done.
"""

import ctypes
import errno
import os
import sqlite3
from collections.abc import Generator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol
from urllib.parse import quote

from sqlalchemy import Connection, MetaData, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.store.store import DISK_FULL, Backend, Migration, Migrations

BUSY_TIMEOUT_SECONDS = 5.0
SMALL_FILE = 16 << 20
"""Bytes up to which a file is fully checked at each start."""
_FULL = 2
MOST_FREE_PAGES = 1024
"""Free pages of 4 KiB that a file keeps for later writes."""
_VACUUM_PAGES = 64
_WRITER_PRAGMAS = (
    "temp_store=MEMORY",  # a full disk must not fail work that needs no space
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "cell_size_check=ON",
    "mmap_size=0",
    "cache_size=-8000",  # KiB, used when needed: what does not fit is written to the log more than once
)
_NEW_PRAGMAS = ("auto_vacuum=INCREMENTAL",)
"""For a new file only, as it writes. Free pages are returned to the disk a few at a time."""
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
    """Checks the file for its service; called by the writer thread."""

    def inspect(self, connection: sqlite3.Connection, version: int) -> None:
        """Check the file before any change, over a read-only connection; version 0 has no tables.

        Raises FailedPreconditionError: it must not be used; it stays unchanged.
        """
        ...

    def ended(self, *, committed: bool) -> None:
        """Called after a transaction, before its callers are answered."""
        ...


ROOM = 8 << 20
"""Bytes reserved after the end of each file: some thousand changes."""
_KEEP_SIZE = 1
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class Room:
    """Reserved disk space of one SQLite file, for the writer thread; `short` of it if the file system had no blocks.

    Close it after the connections.
    """

    def __init__(self, database: Path) -> None:
        self.short = False
        self._paths = (str(database), f"{database}-wal")
        # Open as long as SQLite: closing any descriptor of a file releases its locks.
        self._files: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._able = True
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def look(self) -> bool:
        """Reserve space for files that have grown, or lacked it before. Whether they are `short` of it."""
        if not self._able:
            return self.short
        was_short, self.short = self.short, False
        for path in self._paths:
            if (file := self._files.get(path)) is None:
                try:
                    file = self._files[path] = os.open(path, os.O_RDWR)
                except FileNotFoundError:
                    continue
            size = os.lseek(file, 0, os.SEEK_END)  # a seventh of what fstat takes
            if not was_short and self._sizes.get(path) == size:
                continue
            number = ctypes.get_errno() if self._fallocate(file, _KEEP_SIZE, size, ROOM) else 0
            self._sizes[path] = size
            self.short = self.short or number in _NO_ROOM
            if number and number not in _NO_ROOM:
                self._able = False
                _log.info("the file system cannot reserve space for the state", problem=os.strerror(number))
        if self.short and not was_short:
            _log.error(
                "the disk of the state is full: only what gives something back is written",
                file=self._paths[0],
                bytes=ROOM,
            )
        return self.short

    def close(self) -> None:
        """Close the files, which releases the space."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


@dataclass(eq=False)
class Sqlite(Backend):
    """A store's SQLite file; a missing directory is created with mode 0700.

    An earlier `version` is migrated, by `migrations` from each. `guard` checks the file before its use, and is called after
    each transaction. Tables that are `unchecked` are not checked in a file larger than `SMALL_FILE`.
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

    @property
    def where(self) -> str:
        """The path."""
        return str(self.path)

    @contextmanager
    def writer(self) -> Generator[Connection]:
        """The connection that writes and checkpoints.

        Creates the file (mode 0600) and the tables if missing. An existing file is first checked over a read-only
        connection; one of an earlier version is migrated in one transaction.

        Raises:
            FailedPreconditionError: STATE_UNREADABLE, the file is damaged, not ours, or unreadable; STATE_VERSION, no
                migrations from its version; or an error of the guard. The file is unchanged.
            UnavailableError: as `failure`.
        """
        with self.opening():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            # Check it without changing it; its version is 0 if it has no tables.
            uri = f"file:{quote(str(self.path))}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_SECONDS)) as reader:
                check(reader, "quick_check", self.unchecked)
                found: int = reader.execute("PRAGMA user_version").fetchone()[0]
                tables: int = reader.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                if found or tables:  # else new, as after a crash during its creation
                    self.check_version(found)
                if self.guard is not None:
                    self.guard.inspect(reader, found)
            pragmas = _WRITER_PRAGMAS if found else (*_NEW_PRAGMAS, *_WRITER_PRAGMAS)
            connection = _connect(self.path, pragmas, "BEGIN IMMEDIATE")
        with closing(self._room), closing(connection):
            with self.opening():
                # SQLite ignores pragmas it cannot apply, such as WAL on a network file system.
                driver = raw(connection)
                journal: str = driver.execute("PRAGMA journal_mode").fetchone()[0]
                synchronous: int = driver.execute("PRAGMA synchronous").fetchone()[0]
                if journal != "wal" or synchronous != _FULL:
                    raise sqlite3.DatabaseError(
                        f"journal_mode={journal}, synchronous={synchronous} instead of wal, full"
                    )
                # A new table needs no new version. Take no lock if there is nothing to do.
                names = driver.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                there = {name for (name,) in names.fetchall()}
                if found != self.version or self.metadata.tables.keys() - there:
                    with connection.begin():
                        for step in range(found or self.version, self.version):
                            self.migrations[step](connection)
                        self.metadata.create_all(connection)
                        connection.exec_driver_sql(f"PRAGMA user_version={self.version}")
            self.short = self._room.look()
            yield connection

    @contextmanager
    def reader(self) -> Generator[Connection]:
        """A read-only connection. Raises as `writer`."""
        with self.opening():
            connection = _connect(self.path, _READER_PRAGMAS, "BEGIN")
        with closing(connection):
            yield connection

    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """A write transaction."""
        return _Transaction(connection)

    @contextmanager
    def taking_room(self, connection: Connection) -> Generator[None]:
        """Refuse changes while the disk is `short`."""
        before = raw(connection).total_changes
        yield
        if self.short and raw(connection).total_changes != before:
            self.short = self._room.look()
            if self.short:
                raise UnavailableError(DISK_FULL, reason="DISK_FULL")

    def in_transaction(self, connection: Connection) -> bool:
        """Whether a transaction is open."""
        return raw(connection).in_transaction

    def failure(self, error: Exception) -> Exception:
        """The error for callers whose work raised `error`; errors not of the storage are unchanged."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        code = getattr(cause, "sqlite_errorcode", None) if isinstance(cause, sqlite3.Error) else None
        if code is None:
            return error
        primary = code & 0xFF
        if primary == sqlite3.SQLITE_FULL:
            return UnavailableError(DISK_FULL, reason="DISK_FULL")
        if primary in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
            return FailedPreconditionError("the state is damaged", reason="STATE_UNREADABLE")
        if primary in _UNAVAILABLE:
            return UnavailableError(f"the state cannot be used now: {cause}", reason="STATE_UNAVAILABLE")
        return error

    def ended(self, *, committed: bool) -> None:
        """Call the guard, and reserve space after the written data."""
        if self.guard is not None:
            self.guard.ended(committed=committed)
        self.short = self._room.look()


class _Transaction:
    """A write transaction; ended by SQLAlchemy if the work used it, else by the driver.

    To begin and end one with SQLAlchemy costs as much as writing ten rows, and a generator of this twice its time.
    """

    __slots__ = ("_connection", "_driver")

    def __init__(self, connection: Connection) -> None:
        self._connection, self._driver = connection, raw(connection)

    def __enter__(self) -> None:
        self._driver.execute("BEGIN IMMEDIATE").close()

    def __exit__(self, kind: object, _: object, __: object) -> None:
        committed = False
        try:
            if kind is None:
                (self._connection if self._connection.in_transaction() else self._driver).commit()
                committed = True
        finally:
            if not committed:
                self._connection.rollback()
                self._driver.rollback()


def raw(connection: Connection) -> sqlite3.Connection:
    """The driver's connection of a connection of this module."""
    driver = connection.connection.dbapi_connection
    if not isinstance(driver, sqlite3.Connection):
        raise TypeError("not a connection of a store")
    return driver


def give_back(connection: Connection) -> None:
    """Return some free pages of a SQLite file to the disk; does nothing for PostgreSQL."""
    driver = connection.connection.dbapi_connection
    if isinstance(driver, sqlite3.Connection):
        free: int = driver.execute("PRAGMA freelist_count").fetchone()[0]
        for _ in range(min(free - MOST_FREE_PAGES, _VACUUM_PAGES)):
            # One at a time: the driver does not run a pragma without columns to its end.
            driver.execute("PRAGMA incremental_vacuum(1)").close()


def check(connection: sqlite3.Connection, pragma: str, unchecked: frozenset[str]) -> None:
    """Raise sqlite3.DatabaseError for a damaged file; does not check the `unchecked` tables of a large one."""
    [pages], [size] = (connection.execute(f"PRAGMA {one}").fetchone() for one in ("page_count", "page_size"))
    asked = ["1"]
    if unchecked and pages * size > SMALL_FILE:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        asked = [f"'{name}'" for (name,) in tables if name not in unchecked]
    for table in asked:
        problem: str = connection.execute(f"PRAGMA {pragma}({table})").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(" ".join(problem.split()))


def _connect(path: Path, pragmas: tuple[str, ...], begin: str) -> Connection:
    """A connection outside a pool that begins its transactions with `begin`."""
    driver = sqlite3.connect(path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None)
    for pragma in pragmas:
        driver.execute(f"PRAGMA {pragma}").close()
    # Parameters would appear in errors and so in logs.
    engine = create_engine("sqlite://", creator=lambda: driver, poolclass=NullPool, hide_parameters=True)

    def on_begin(_: Connection) -> None:
        if not driver.in_transaction:  # `transaction` may have begun it already
            driver.execute(begin).close()

    event.listen(engine, "begin", on_begin)
    return engine.connect()
