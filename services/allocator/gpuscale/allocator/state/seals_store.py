"""Seals in PostgreSQL: looks at the checksum of every row before a term begins to act on them.

The server checks pages only where its cluster was made with checksums, and a row that somebody changed by hand passes
there too. A file is looked at in the same way by `gpuscale.allocator.state.guard`.
"""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import JSON, Boolean, Column, ColumnElement, Connection, Integer, Table, Text, cast, select

from gpuscale.allocator.state.sealing import is_whole, is_whole_reservation
from gpuscale.common.errors import FailedPreconditionError


def check_seals(connection: Connection, tables: Iterable[Table]) -> None:
    """Read every row of those tables that have checksums.

    Raises:
        FailedPreconditionError: STATE_INCONSISTENT, one is not as it was written.
    """
    for table in tables:
        if "life_sum" in table.columns:
            whole = is_whole_reservation
        elif "checksum" in table.columns:
            whole = is_whole
        else:
            continue
        for row in connection.execute(select(*map(as_sealed, table.columns))).mappings():
            if not whole(dict(row)):
                key = ", ".join(str(row[column.name]) for column in table.primary_key)
                raise FailedPreconditionError(
                    f"the stored {table.name} {key} is not as it was written; nothing is granted on such a state, and it"
                    " was left as it is: restore a copy",
                    reason="STATE_INCONSISTENT",
                )


def as_sealed(column: Column[Any]) -> ColumnElement[Any]:
    """A column, with its values as `sealing` knows them: JSON as the text that was written, truth as a number."""
    if isinstance(column.type, JSON):
        return cast(column, Text).label(column.name)
    if isinstance(column.type, Boolean):
        return cast(column, Integer).label(column.name)
    return column
