"""Shares of GPUs, tenants, and what may be taken away. The tenant is the owner, as for a new request."""

from alembic import op

from gpuscale.allocator.state.schema import WHOLE_INDEX, guard_shares

revision = "2"
down_revision = None

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


def upgrade() -> None:
    """From version 1, which was only ever kept in SQLite."""
    connection = op.get_bind()
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
