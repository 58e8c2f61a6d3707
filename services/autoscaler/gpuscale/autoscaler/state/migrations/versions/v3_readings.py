"""A table more: what the queues of endpoints were like. The store makes tables that are missing, so nothing is left to do."""

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """From version 2, which has all the other tables as they are."""
