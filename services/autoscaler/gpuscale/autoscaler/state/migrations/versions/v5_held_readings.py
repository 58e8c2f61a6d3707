"""Readings of queues that were the same for long, and a table more, of repeated decisions, which the store makes by itself."""

import sqlalchemy
from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """From version 4, or 2, in which there were no readings: the store makes their table too."""
    if sqlalchemy.inspect(op.get_bind()).has_table("readingrow"):
        op.add_column("readingrow", sqlalchemy.Column("since", sqlalchemy.Float))
