"""Migrations to each version of the allocator's schema (docs/adr/0009). The store creates missing tables itself.

Versions 1 and 2 only existed in SQLite.
"""

from math import ceil
from time import time

from alembic.operations import Operations
from sqlalchemy import Column, Connection, PrimaryKeyConstraint, UniqueConstraint, inspect, text

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
    for statement in _HOLDS_APART:
        connection.exec_driver_sql(statement)
    _put_holds_back(connection, "1000", "INTEGER")


def to_3(op: Operations) -> None:
    """Checksums of rows, and write numbers."""
    driver = raw(op.get_bind())
    tables = driver.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for table in ("reservation", "counter", "rank", "quota", "cordon"):
        if (table,) not in tables:  # versions 1 and 2 had no other tables at first
            continue
        sums = ("write_number", "lasting_sum", "life_sum") if table == "reservation" else ("checksum",)
        for column in sums:
            driver.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
        cursor = driver.execute(f"SELECT *, rowid AS at FROM {table}")  # noqa: S608 - a name of this file
        names = [column[0] for column in cursor.description]
        for values in cursor.fetchall():
            row = dict(zip(names, values, strict=True))
            at = row.pop("at")
            if table == "reservation":
                row |= integrity.sums(row)
            else:
                row = integrity.sealed(row)
            changes = ", ".join(f"{column} = :{column}" for column in sums)
            driver.execute(f"UPDATE {table} SET {changes} WHERE rowid = :at", {**row, "at": at})  # noqa: S608 - as above


def to_4(op: Operations) -> None:
    """A table of ended reservations, and the count of rows outside it."""
    connection = op.get_bind()
    columns = (
        Column(one["name"], one["type"], nullable=one["nullable"], autoincrement=False)
        for one in inspect(connection).get_columns("reservation")
    )
    op.create_table("ended", *columns, PrimaryKeyConstraint("fence"), UniqueConstraint("request_id"))
    rows = sum(
        connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one()  # noqa: S608 - names of this file
        for table in ("reservation", "hold")
    )
    connection.execute(_ADD_COUNTER, integrity.sealed({"name": "rows", "value": rows}))


def to_5(op: Operations) -> None:
    """An index of ended reservations by id, which version 9 makes anew."""


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


def to_9(op: Operations) -> None:
    """Ended reservations stay in their table: the rows of `reservation` join the many of `ended`, which takes its name."""
    connection = op.get_bind()
    columns = ", ".join(connection.exec_driver_sql("SELECT * FROM ended LIMIT 0").keys())
    whole = "BIGINT" if connection.dialect.name == "postgresql" else "INTEGER"
    for statement in (
        *(f"DROP INDEX IF EXISTS ended_by_{one}" for one in ("id", "deadline", "holder")),
        f"ALTER TABLE ended ADD COLUMN archived {whole} NOT NULL DEFAULT 1 CHECK (archived = 0 OR state <> 'active')",
        f"INSERT INTO ended ({columns}, archived) SELECT {columns}, 0 FROM reservation ORDER BY fence",  # noqa: S608 - names of the schema
        *_HOLDS_APART,
        "DROP TABLE reservation",
        "ALTER TABLE ended RENAME TO reservation",
        "CREATE UNIQUE INDEX ix_reservation_id ON reservation (id)",
    ):
        connection.exec_driver_sql(statement)
    _put_holds_back(connection, "milli", whole)
    schema.guard(schema.RESERVATION, connection)
    if connection.dialect.name == "sqlite" and connection.dialect.has_table(connection, "usage"):
        with op.batch_alter_table("usage", recreate="always", table_kwargs={"sqlite_with_rowid": False}):
            pass  # kept by its key alone


_HOLDS_APART = ("CREATE TABLE hold_before AS SELECT * FROM hold", "DROP TABLE hold")
"""While holds refer to a table, it cannot be replaced."""


def _put_holds_back(connection: Connection, milli: str, whole: str) -> None:
    without = " WITHOUT ROWID" if connection.dialect.name == "sqlite" else ""
    columns = f"gpu_uuid VARCHAR NOT NULL, reservation_id VARCHAR NOT NULL, milli {whole} NOT NULL"
    keys = "PRIMARY KEY (gpu_uuid, reservation_id), FOREIGN KEY(reservation_id) REFERENCES reservation (id)"
    for statement in (
        f"CREATE TABLE hold ({columns}, {keys}){without}",
        f"INSERT INTO hold SELECT gpu_uuid, reservation_id, {milli} FROM hold_before",  # noqa: S608 - a value of this file
        "DROP TABLE hold_before",
        "CREATE INDEX ix_hold_reservation_id ON hold (reservation_id)",
    ):
        connection.exec_driver_sql(statement)
    schema.guard(schema.HOLD, connection)
