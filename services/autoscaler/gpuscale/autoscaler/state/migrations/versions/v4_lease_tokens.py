"""The token that came with a replica's GPUs. Replicas of before have none: they were admitted when they started."""

import sqlalchemy
from alembic import op

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """From version 3."""
    op.add_column(
        "replicarow",
        sqlalchemy.Column(
            "lease_token", sqlalchemy.String, nullable=False, server_default=sqlalchemy.text("''")
        ),
    )
