"""Guard of the allocator's state: looks at all of it before it is used, and keeps count of what was acknowledged.

What SQLite notices by itself (the shape of pages, rows that an index names and the table lacks), what it does not (a
row that is not as it was written: `gpuscale.allocator.state.sealing`), and what nobody can see in the file alone (writes that
are gone: `gpuscale.allocator.state.witness`) is refused here, before a connection is open that could change the file.
"""

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from gpuscale.allocator.state.disk_room import Room
from gpuscale.allocator.state.sealing import is_whole, is_whole_reservation
from gpuscale.allocator.state.witness import Witness
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.store.sqlite_store import check

SEALED_SINCE = 3
"""The first schema version whose rows have checksums."""
UNCHECKED = frozenset({"ended"})
"""Tables that are too large to be looked at in whole at each start; each row is when it is read."""
LAST_WRITE = "write"
"""The counter that keeps the number of the last write that was not one of reservations."""

_IsWhole: TypeAlias = Callable[[Mapping[str, object]], bool]
_ROWS: Mapping[str, _IsWhole] = {
    "SELECT rowid, * FROM reservation NOT INDEXED": is_whole_reservation,
    "SELECT rowid, * FROM counter NOT INDEXED": is_whole,
    "SELECT rowid, * FROM rank NOT INDEXED": is_whole,
    "SELECT rowid, * FROM quota NOT INDEXED": is_whole,
    "SELECT rowid, * FROM cordon NOT INDEXED": is_whole,
}
"""How the rows of each table are read, and what tells whether one is as it was written."""


class Numbering:
    """Numbers the writes, on from the last one; for the thread that writes."""

    def __init__(self, number: int) -> None:
        self._number = number

    def next(self) -> int:
        """The number of a write that begins."""
        self._number += 1
        return self._number

    @property
    def short(self) -> bool:
        """Whether the disk lacks the room that is kept for ends of reservations."""
        return False

    def wrote(self, number: int) -> None:
        """The rows of a write are in the transaction that is open, and its number with them."""

    def accepted(self) -> None:
        """All that was read is as it was acknowledged."""


class StateGuard(Numbering):
    """Guards one file. What `common.sqlite_store.Guard` asks for is for the thread that writes, too."""

    def __init__(self, database: Path) -> None:
        super().__init__(0)
        self._witness = Witness(database)
        self._room = Room(database)
        self._staged = 0

    @property
    def witness(self) -> Witness:
        """The file beside the database."""
        return self._witness

    @property
    def short(self) -> bool:
        """Whether the disk lacks the room that is kept for ends of reservations."""
        return self._room.short

    def close(self) -> None:
        """Close what is open beside the database; after that."""
        self._witness.close()
        self._room.close()

    def inspect(self, connection: sqlite3.Connection, version: int) -> None:
        """Read everything once.

        Raises:
            FailedPreconditionError: STATE_INCONSISTENT, something is not as it was acknowledged.
            sqlite3.DatabaseError: an index and its table disagree.
        """
        if version >= SEALED_SINCE:
            check(connection, "integrity_check", UNCHECKED)
            for query, whole in _ROWS.items():
                _check_rows(connection, query, whole)
            self._number = _last_write(connection)
        self._witness.check_after(self._number)

    def accepted(self) -> None:
        """Write the witness: before, it is left as it was, as the database is."""
        self._witness.open(self._number)

    def wrote(self, number: int) -> None:
        """Remember it until the transaction has ended."""
        self._staged = number

    def ended(self, *, committed: bool) -> None:
        """A transaction has ended; nobody was answered yet."""
        if committed and self._staged:
            self._witness.put(self._staged)
        self._staged = 0
        self._room.look()


def _check_rows(connection: sqlite3.Connection, query: str, whole: _IsWhole) -> None:
    cursor = connection.execute(query)
    columns = [column[0] for column in cursor.description][1:]
    for rowid, *values in cursor:
        if not whole(dict(zip(columns, values, strict=True))):
            raise FailedPreconditionError(
                f"row {rowid} of the stored {query.split()[4]}s is not as it was written; nothing is granted on such a state, and it"
                " was left as it is: restore a copy",
                reason="STATE_INCONSISTENT",
            )


def _last_write(connection: sqlite3.Connection) -> int:
    """The number of the last write that the database knows of."""
    query = (
        "SELECT max((SELECT coalesce(max(write_number), 0) FROM reservation),"
        " (SELECT coalesce(max(value), 0) FROM counter WHERE name = ?))"
    )
    number: int = connection.execute(query, (LAST_WRITE,)).fetchone()[0]
    return number
