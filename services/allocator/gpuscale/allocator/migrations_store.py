"""Migrations of the allocator's state: each takes a file from one schema version to the next, in one transaction."""

from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import Connection

from gpuscale.allocator import sealing
from gpuscale.allocator.schema_store import WHOLE_INDEX, guard_shares
from gpuscale.common.sqlite_store import raw

_NEW_COLUMNS = (
    "tenant VARCHAR NOT NULL DEFAULT ''",
    "priority INTEGER NOT NULL DEFAULT 0",
    "preemptible BOOLEAN NOT NULL DEFAULT 0",
    "cpu_milli INTEGER NOT NULL DEFAULT 0",
    "host_memory_bytes INTEGER NOT NULL DEFAULT 0",
    "member_count INTEGER NOT NULL DEFAULT 1",
    "revoke_seconds FLOAT",
    "end_reason VARCHAR NOT NULL DEFAULT ''",
)


def _shares(connection: Connection) -> None:
    """1 to 2: shares of GPUs, tenants, and what may be taken away. The tenant is the owner, as for a new request."""
    for column in _NEW_COLUMNS:
        connection.exec_driver_sql(f"ALTER TABLE reservation ADD COLUMN {column}")
    connection.exec_driver_sql("UPDATE reservation SET tenant = owner")
    connection.exec_driver_sql("DROP INDEX ix_hold_reservation_id")
    connection.exec_driver_sql("ALTER TABLE hold RENAME TO hold_before")
    connection.exec_driver_sql(
        "CREATE TABLE hold (gpu_uuid VARCHAR NOT NULL, reservation_id VARCHAR NOT NULL, milli INTEGER NOT NULL,"
        " PRIMARY KEY (gpu_uuid, reservation_id), FOREIGN KEY(reservation_id) REFERENCES reservation (id))"
    )
    connection.exec_driver_sql("INSERT INTO hold SELECT gpu_uuid, reservation_id, 1000 FROM hold_before")
    connection.exec_driver_sql("DROP TABLE hold_before")
    connection.exec_driver_sql("CREATE INDEX ix_hold_reservation_id ON hold (reservation_id)")
    WHOLE_INDEX.create(connection)
    guard_shares(None, connection)


def _seals(connection: Connection) -> None:
    """2 to 3: checksums of rows, and numbers of writes."""
    columns = ("write_number", "lasting_sum", "life_sum")
    _seal(connection, "reservation", columns, _reservation_sums)
    there = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars().all()
    for table in ("counter", "rank", "quota", "cordon"):
        if table in there:  # versions 1 and 2 had no other tables at first
            _seal(connection, table, ("checksum",), _checksum)


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


def _reservation_sums(row: Mapping[str, object]) -> dict[str, object]:
    return {
        "write_number": 0,
        "lasting_sum": sealing.lasting_sum(row),
        "life_sum": sealing.life_sum(row),
    }


def _checksum(row: Mapping[str, object]) -> dict[str, object]:
    return {"checksum": sealing.sealed(row)["checksum"]}


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = {1: _shares, 2: _seals}
"""By the version that they start from."""
