"""Watchers of patterns and of rates; version 1 knew single queues only."""

import sqlalchemy
from alembic import op

revision = "2"
down_revision = None


def upgrade() -> None:
    """From version 1, which was only ever kept in SQLite."""
    for name in ("pattern", "rates"):
        column = sqlalchemy.Column(
            name, sqlalchemy.Boolean, nullable=False, server_default=sqlalchemy.text("0")
        )
        op.add_column("watcherrow", column)
