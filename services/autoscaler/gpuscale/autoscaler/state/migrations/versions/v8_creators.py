"""Who created an endpoint."""

import sqlalchemy
from alembic import op

revision = "8"
down_revision = "7"


def upgrade() -> None:
    """From version 7, in which the reservations of its replicas were the autoscaler's."""
    creator = sqlalchemy.Column("creator", sqlalchemy.String, nullable=False, server_default="")
    op.add_column("endpointrow", creator)
