"""An index of decisions by their times, which may go back where those of ids go on."""

from alembic import op

revision = "10"
down_revision = "9"


def upgrade() -> None:
    """From version 9. Where the table is not there yet, the store makes it with its index."""
    connection = op.get_bind()
    if connection.dialect.has_table(connection, "decisionrow"):
        connection.exec_driver_sql("CREATE INDEX decision_by_time ON decisionrow (create_time, id)")
