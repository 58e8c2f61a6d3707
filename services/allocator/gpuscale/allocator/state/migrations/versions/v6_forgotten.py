"""When the youngest of all forgotten reservations ended, for ledgers that forgot without a note of it."""

from math import ceil
from time import time

from alembic import op
from sqlalchemy import text

from gpuscale.allocator.state import schema
from gpuscale.allocator.state.integrity import sealed

revision = "6"
down_revision = "5"


def upgrade() -> None:
    """From version 5. Whatever was forgotten has ended by now: more is not known, so that none counts as kept."""
    connection = op.get_bind()
    if not connection.dialect.has_table(connection, "counter"):
        return
    names = set(connection.execute(text("SELECT name FROM counter")).scalars())
    if schema.FENCE in names and schema.FORGOTTEN not in names:
        row = sealed({"name": schema.FORGOTTEN, "value": ceil(time())})
        connection.execute(
            text("INSERT INTO counter (name, value, checksum) VALUES (:name, :value, :checksum)"), row
        )
