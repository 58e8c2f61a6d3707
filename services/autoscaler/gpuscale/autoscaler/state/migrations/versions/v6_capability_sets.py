"""Capability sets: groups aimed at of each, and what the workers of a replica can do."""

import sqlalchemy
from alembic import op

revision = "6"
down_revision = "5"


def upgrade() -> None:
    """From version 5, whose endpoints have no sets."""
    sets = sqlalchemy.Column("sets", sqlalchemy.String, nullable=False, server_default="")
    op.add_column("endpointrow", sets)
    group = sqlalchemy.Column("worker_group", sqlalchemy.LargeBinary, nullable=False, server_default="")
    op.add_column("replicarow", group)
