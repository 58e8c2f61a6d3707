"""Migrations to each version of the allocator's schema (docs/adr/0009). The store creates missing tables itself.

Versions 1 and 2 only existed in SQLite.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from time import time

from alembic.operations import Operations
from sqlalchemy import Connection, text

from gpuscale.allocator.state import integrity, schema
from gpuscale.common.store.sqlite_store import raw

_COLUMNS_OF_SHARES = (
    "tenant VARCHAR NOT NULL DEFAULT ''",
    "priority INTEGER NOT NULL DEFAULT 0",
    "preemptible BOOLEAN NOT NULL DEFAULT 0",
    "cpu_milli INTEGER NOT NULL DEFAULT 0",
    "host_memory_bytes INTEGER NOT NULL DEFAULT 0",
    "member_count INTEGER NOT NULL DEFAULT 1",
    "revoke_seconds FLOAT",
    "end_reason VARCHAR NOT NULL DEFAULT ''",
)
_ADD_COUNTER = text("INSERT INTO counter (name, value, checksum) VALUES (:name, :value, :checksum)")


def to_2(op: Operations) -> None:
    """Shares of GPUs, tenants, revocation. The tenant is the owner, as for a new request."""
    connection = op.get_bind()
    for column in _COLUMNS_OF_SHARES:
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
    schema.guard_holds(None, connection)


def to_3(op: Operations) -> None:
    """Checksums of rows, and write numbers."""
    connection = op.get_bind()
    columns = ("write_number", "lasting_sum", "life_sum")
    _seal(
        connection,
        "reservation",
        columns,
        lambda row: {
            "write_number": 0,
            "lasting_sum": integrity.lasting_sum(row),
            "life_sum": integrity.life_sum(row),
        },
    )
    there = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars().all()
    for table in ("counter", "rank", "quota", "cordon"):
        if table in there:  # versions 1 and 2 had no other tables at first
            _seal(
                connection, table, ("checksum",), lambda row: {"checksum": integrity.sealed(row)["checksum"]}
            )


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


def to_4(op: Operations) -> None:
    """A table of ended reservations, and the count of rows outside it. The allocator moves the ended ones."""
    connection = op.get_bind()
    rows = sum(
        connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one()  # noqa: S608 - names of this file
        for table in ("reservation", "hold")
    )
    connection.execute(_ADD_COUNTER, integrity.sealed({"name": "rows", "value": rows}))


def to_5(op: Operations) -> None:
    """An index of ended reservations by id, since ids no longer contain the fence."""
    connection = op.get_bind()
    if connection.dialect.has_table(connection, "ended"):
        connection.exec_driver_sql("CREATE INDEX ended_by_id ON ended (id)")


def to_6(op: Operations) -> None:
    """When the youngest forgotten reservation ended, for ledgers that did not record it.

    Whatever was forgotten has ended by now; no more is known, so none counts as kept.
    """
    connection = op.get_bind()
    if not connection.dialect.has_table(connection, "counter"):
        return
    names = set(connection.execute(text("SELECT name FROM counter")).scalars())
    if schema.FENCE in names and schema.FORGOTTEN not in names:
        connection.execute(_ADD_COUNTER, integrity.sealed({"name": schema.FORGOTTEN, "value": ceil(time())}))


def to_7(op: Operations) -> None:
    """Clock and memory figures of held GPUs."""
    connection = op.get_bind()
    if connection.dialect.has_table(connection, "usage"):
        connection.exec_driver_sql("ALTER TABLE usage ADD COLUMN hardware VARCHAR NOT NULL DEFAULT '{}'")


def to_8(op: Operations) -> None:
    """The count of rows leaves out holds, which are compared with the live reservations."""
    connection = op.get_bind()
    holds = connection.exec_driver_sql("SELECT count(*) FROM hold").scalar_one()
    rows = connection.execute(text("SELECT value FROM counter WHERE name = 'rows'")).scalar() or 0
    connection.execute(text("DELETE FROM counter WHERE name = 'rows'"))
    connection.execute(_ADD_COUNTER, integrity.sealed({"name": "rows", "value": rows - holds}))
