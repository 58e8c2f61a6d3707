"""Checksums of rows, and numbers of writes."""

from collections.abc import Callable, Mapping, Sequence

from alembic import op
from sqlalchemy import Connection

from gpuscale.allocator.state import integrity as sealing
from gpuscale.common.store.sqlite_store import raw

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """From version 2, which was only ever kept in SQLite."""
    connection = op.get_bind()
    columns = ("write_number", "lasting_sum", "life_sum")
    _seal(
        connection,
        "reservation",
        columns,
        lambda row: {
            "write_number": 0,
            "lasting_sum": sealing.lasting_sum(row),
            "life_sum": sealing.life_sum(row),
        },
    )
    there = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars().all()
    for table in ("counter", "rank", "quota", "cordon"):
        if table in there:  # versions 1 and 2 had no other tables at first
            _seal(connection, table, ("checksum",), lambda row: {"checksum": sealing.sealed(row)["checksum"]})


def _seal(
    connection: Connection,
    table: str,
    columns: Sequence[str],
    sums: Callable[[Mapping[str, object]], dict[str, object]],
) -> None:
    for column in columns:
        connection.exec_driver_sql(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
    driver = raw(connection)
    cursor = driver.execute(f"SELECT rowid, * FROM {table}")  # noqa: S608 - a name of this file
    names = [column[0] for column in cursor.description][1:]
    values = ", ".join(f"{column} = :{column}" for column in columns)
    change = f"UPDATE {table} SET {values} WHERE rowid = :rowid"  # noqa: S608 - as above
    for rowid, *found in cursor.fetchall():
        row = dict(zip(names, found, strict=True))
        driver.execute(change, {"rowid": rowid} | sums(row))
