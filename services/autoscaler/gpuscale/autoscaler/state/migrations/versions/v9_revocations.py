"""That the GPUs of a replica will be taken away."""

import sqlalchemy
from alembic import op

revision = "9"
down_revision = "8"


def upgrade() -> None:
    """From version 8, which did not look: the allocator tells at the next connection."""
    revocation = sqlalchemy.Column("revocation", sqlalchemy.String, nullable=False, server_default="")
    op.add_column("replicarow", revocation)
