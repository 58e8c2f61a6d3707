"""Whose quota the GPUs of an endpoint count against."""

import sqlalchemy
from alembic import op

revision = "7"
down_revision = "6"


def upgrade() -> None:
    """From version 6, in which they counted against the autoscaler's own."""
    tenant = sqlalchemy.Column("tenant", sqlalchemy.String, nullable=False, server_default="")
    op.add_column("endpointrow", tenant)
