"""Notes have colours."""

import sqlalchemy
from alembic import op

revision = "2"
down_revision = None


def upgrade() -> None:
    """From version 1."""
    op.add_column(
        "note", sqlalchemy.Column("colour", sqlalchemy.String, nullable=False, server_default="red")
    )
