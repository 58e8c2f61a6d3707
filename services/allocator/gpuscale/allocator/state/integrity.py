"""Integrity: proves at start that the state is intact, and keeps it provable. For the writer thread.

- Checksums: SQLite checks the shape of its pages but not their content, so each row carries the CRC-32 of its other
  columns; a reservation carries two, since most writes change only its lease. They guard against decay, not forgery.
- The witness, a small file beside the database, records the last acknowledged write. SQLite ends the replay of its
  write-ahead log at the first damaged or missing frame, and silently loses what came after it, acknowledged grants
  included. Every write has a number, stored in the database with its rows; a database that knows of fewer writes than
  the witness has lost some. The witness is written after each commit and only synced at starts: after a power failure it may
  be older than the database, which proves nothing and is accepted. It also holds the first salt of the log, which SQLite
  draws for a new log and increments on each restart of it: that reveals the log of another database, or an earlier log
  that was put back, before it is replayed.

`StateGuard` uses both on a file, `check_seals` the checksums in PostgreSQL, whose server only checks pages if its cluster was
initialized with checksums.
"""

import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import Any
from zlib import crc32

from sqlalchemy import JSON, Boolean, Column, ColumnElement, Connection, Integer, Table, Text, cast, select

from gpuscale.allocator.state.schema import KEPT
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.store.sqlite_store import check

LASTING = (
    *("id", "fence", "request_id", "fingerprint", "holder", "owner", "labels", "policy", "create_time"),
    *("tenant", "priority", "preemptible", "cpu_milli", "host_memory_bytes", "member_count", "gpus"),
)
"""Columns of a reservation that `lasting_sum` covers, in their order."""
LIFE = (
    *("id", "state", "ttl_seconds", "deadline_seconds", "boot_id", "end_time", "revoke_seconds"),
    *("end_reason", "write_number"),
)
"""Columns of a reservation that `life_sum` covers, in their order."""


_shown = lru_cache(maxsize=64)(repr)


def total(values: Iterable[object]) -> int:
    """The checksum of column values, as the database returns them: text, int, float or None."""
    return crc32(repr([*values]).encode())


def total_of_life(values: Iterable[Any]) -> int:
    """The same, of `LIFE`: a batch ends at one time, and finding the shortest text of a float takes long."""
    key, state, ttl, deadline, boot, end, revoked, reason, number = values
    begin = f"[{key!r}, {state!r}, {ttl!r}, {_shown(deadline)}, {boot!r}, {end and _shown(end)}"
    return crc32(f"{begin}, {revoked!r}, {reason!r}, {number}]".encode())


def sealed(row: Mapping[str, object]) -> dict[str, object]:
    """A row of a table with one checksum, with that checksum: over all columns by name."""
    return {**row, "checksum": _checksum(row)}


def sums(row: Mapping[str, object]) -> dict[str, object]:
    """The two checksums of a reservation: of the columns that stay the same for its life, and of the others."""
    kinds = {"lasting_sum": LASTING, "life_sum": LIFE}
    return {name: total(row[column] for column in columns) for name, columns in kinds.items()}


def is_whole(row: Mapping[str, object]) -> bool:
    """Whether a row is as it was written: a reservation by its two checksums, any other by its one."""
    try:
        if "life_sum" in row:
            return sums(row).items() <= row.items()
        return row["checksum"] == _checksum(row)
    except KeyError:  # a column name is damaged
        return False


def _checksum(row: Mapping[str, object]) -> int:
    return total(row[column] for column in sorted(row) if column != "checksum")


NO_SALT = 0
"""The log is unknown or missing."""
MOST_RESETS = 1 << 16
"""Most restarts of the log that a power failure may have hidden from the witness."""
_RECORD = Struct("<QLL")
_SALT = Struct(">L")
_SALT_AT = 16


class Witness:
    """The witness of a database. The writer thread calls `put`, the rest runs before and after that thread."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(f"{database.name}-witness")
        self._database = database
        self._wal = database.with_name(f"{database.name}-wal")
        self._file = -1
        self._wal_file = -1
        self._failing = False
        self._seen: tuple[int, int] | None = None
        """The last acknowledged write, and the first salt of the log; None if nothing is recorded."""

    def check_before(self) -> None:
        """Read what was acknowledged; call it before the database is opened.

        STATE_INCONSISTENT if the witness is damaged, the database is gone, or its log is not the last one written.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        if not content:  # created, and then the power failed
            return
        number, seen, found = _RECORD.unpack(content) if len(content) == _RECORD.size else (0, NO_SALT, None)
        if found != crc32(_RECORD.pack(number, seen, 0)):
            raise self._inconsistent("the record of the last write is damaged")
        self._seen = number, seen
        if number and not (self._database.exists() and self._database.stat().st_size):
            raise self._inconsistent("the database is empty")
        salt = _salt(self._wal)
        if salt and seen and (salt - seen) % (1 << 32) > MOST_RESETS:
            raise self._inconsistent("its write-ahead log is not the last one written")

    def check_after(self, number: int) -> None:
        """Compare with the last write in the database; STATE_INCONSISTENT if one is lost."""
        known = self._seen[0] if self._seen else 0
        if number < known:
            raise self._inconsistent(f"it ends with write {number}, and write {known} was acknowledged")
        if self._seen and not _salt(self._wal):  # the next log is ours, even if we are killed before `open`
            self._write(known, NO_SALT)
            with suppress(OSError):
                os.fsync(self._file)

    def open(self, number: int) -> None:
        """Record commits from now on."""
        self._write(number, _salt(self._wal))

    def put(self, number: int) -> None:
        """Record a write that is on disk. Failing does not fail the write: it is only guarded less well."""
        if self._wal_file < 0:
            with suppress(FileNotFoundError):
                self._wal_file = os.open(self._wal, os.O_RDONLY)
        self._write(number, _salt_of(self._wal_file) if self._wal_file >= 0 else NO_SALT)

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._wal_file):
            if file >= 0:
                os.close(file)

    def _write(self, number: int, salt: int) -> None:
        body = _RECORD.pack(number, salt, 0)
        try:
            if self._file < 0:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(self._file, _RECORD.pack(number, salt, crc32(body)), 0)
        except OSError as error:
            if not self._failing:
                _log.warning("cannot write the witness", file=str(self.path), problem=str(error))
            self._failing = True

    def _inconsistent(self, what: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"the state in {self._database} is not what was acknowledged: {what}. Nothing is granted, and"
            f" nothing was changed. Restore a copy, or remove {self.path} to continue with this state",
            reason="STATE_INCONSISTENT",
        )


def _salt(wal: Path) -> int:
    """The first salt of a log; NO_SALT if there is none."""
    try:
        with wal.open("rb") as file:
            return _salt_of(file.fileno())
    except FileNotFoundError:
        return NO_SALT


def _salt_of(file: int) -> int:
    found = os.pread(file, _SALT.size, _SALT_AT)
    return _SALT.unpack(found)[0] if len(found) == _SALT.size else NO_SALT


_log = get_logger(__name__)

SEALED_SINCE = 3
"""The first schema version whose rows have checksums."""
UNCHECKED = frozenset({"ended", "reservation", "usage"})
"""Tables too large to check at each start; archived reservations are checked when read."""
LAST_WRITE = "write"
"""The counter with the number of the last write without reservations."""

_SEALED = ("reservation", "counter", "rank", "quota", "cordon")
"""Tables whose rows are all checked when a file is opened, but for archived reservations."""
_UNLISTED = (
    f"SELECT count(*) FROM reservation AS one WHERE {KEPT}"  # noqa: S608 - a condition of the schema
    " AND (fence IS NOT (SELECT fence FROM reservation WHERE id = one.id)"
    " OR fence IS NOT (SELECT fence FROM reservation WHERE request_id = one.request_id))"
)
"""The rows that an index lacks: of a large file no other check would tell."""


class Numbering:
    """Numbers the writes, continuing from the last; for the writer thread. `rows`: the counter `schema.ROWS`; None: read it."""

    rows: int | None = None

    def __init__(self, number: int) -> None:
        self._number = number

    def next(self) -> int:
        """The number of a new write."""
        self._number += 1
        return self._number

    def wrote(self, number: int, rows: int | None = None) -> None:
        """The rows of a write are in the open transaction, with its number, and the counter of them if it is known."""

    def accepted(self) -> None:
        """All that was read is as acknowledged."""


class StateGuard(Numbering):
    """Guards one file, implementing `common.sqlite_store.Guard`; for the writer thread, too."""

    def __init__(self, database: Path) -> None:
        super().__init__(0)
        self.witness = Witness(database)
        self._staged = 0

    def inspect(self, connection: sqlite3.Connection, version: int) -> None:
        """Read everything once; STATE_INCONSISTENT if anything differs from what was acknowledged."""
        if version >= SEALED_SINCE:
            check(connection, "integrity_check", UNCHECKED)
            kept = f" WHERE {KEPT}" if version > 8 else ""  # archived ones had a table of their own
            for table in _SEALED:
                chosen = kept if kept and table == "reservation" else " NOT INDEXED"
                cursor = connection.execute(f"SELECT rowid, * FROM {table}{chosen}")  # noqa: S608 - a name of this file
                columns = [column[0] for column in cursor.description][1:]
                for rowid, *values in cursor:
                    row = dict(zip(columns, values, strict=True))
                    if not is_whole(row) or row.get("archived"):  # its index says that it is not
                        raise damaged(f"row {rowid} of the stored {table}s")
            if kept and connection.execute(_UNLISTED).fetchone() != (0,):
                raise damaged("an index of the stored reservations")
            last = (
                f"SELECT max((SELECT coalesce(max(write_number), 0) FROM reservation{kept}),"  # noqa: S608 - as above
                " (SELECT coalesce(max(value), 0) FROM counter WHERE name = ?))"
            )
            self._number = connection.execute(last, (LAST_WRITE,)).fetchone()[0]
        self.witness.check_after(self._number)

    def accepted(self) -> None:
        """Write the witness; until here the database is left untouched."""
        self.witness.open(self._number)

    def wrote(self, number: int, rows: int | None = None) -> None:
        """Keep the number until the transaction ends, and the counter until one fails."""
        self._staged, self.rows = number, rows

    def ended(self, *, committed: bool) -> None:
        """A transaction has ended; nobody has been answered yet."""
        if not committed:
            self.rows = None
        elif self._staged:
            self.witness.put(self._staged)
        self._staged = 0


def damaged(what: str) -> FailedPreconditionError:
    """The error for a damaged row."""
    return FailedPreconditionError(
        f"{what} does not match its checksum; nothing is granted and nothing was changed: restore a copy",
        reason="STATE_INCONSISTENT",
    )


def check_seals(connection: Connection, tables: Iterable[Table]) -> None:
    """Read the rows of the tables that have checksums, but for archived ones; STATE_INCONSISTENT if one is damaged."""
    for table in tables:
        if not {"life_sum", "checksum"} & set(table.columns.keys()):
            continue
        rows = select(*map(as_sealed, table.columns))
        for row in connection.execute(rows.where(KEPT) if "archived" in table.columns else rows).mappings():
            if not is_whole(dict(row)):
                key = ", ".join(str(row[column.name]) for column in table.primary_key)
                raise damaged(f"the stored {table.name} {key}")


def as_sealed(column: Column[Any]) -> ColumnElement[Any]:
    """A column with its values in the form that was checksummed: JSON as text, booleans as numbers."""
    if isinstance(column.type, JSON):
        return cast(column, Text).label(column.name)
    if isinstance(column.type, Boolean):
        return cast(column, Integer).label(column.name)
    return column
