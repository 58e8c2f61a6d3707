"""Why a replica ended, and when an endpoint was deleted."""

import sqlalchemy
from alembic import op

revision = "11"
down_revision = "10"


def upgrade() -> None:
    """From version 10, which did not note them."""
    op.add_column("endpointrow", sqlalchemy.Column("delete_time", sqlalchemy.Float))
    reason = sqlalchemy.Column("end_reason", sqlalchemy.String, nullable=False, server_default="")
    op.add_column("replicarow", reason)
