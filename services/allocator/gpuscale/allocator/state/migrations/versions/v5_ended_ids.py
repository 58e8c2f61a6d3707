"""An index of ended reservations by their ids, which tell nothing of their fences any more."""

from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """From version 4. Where the table is not there yet, the store makes it with its index."""
    connection = op.get_bind()
    if connection.dialect.has_table(connection, "ended"):
        connection.exec_driver_sql("CREATE INDEX ended_by_id ON ended (id)")
