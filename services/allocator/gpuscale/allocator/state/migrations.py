"""What leads to each version of the allocator's schema (docs/adr/0009). The store makes tables that are missing by itself."""

from math import ceil
from time import time

from alembic.operations import Operations
from sqlalchemy import text

from gpuscale.allocator.state import integrity, schema

_ADD_COUNTER = text("INSERT INTO counter (name, value, checksum) VALUES (:name, :value, :checksum)")


def to_6(op: Operations) -> None:
    """When the youngest of all forgotten reservations ended, for ledgers that forgot without a note of it.

    Whatever was forgotten has ended by now: more is not known, so that none counts as kept.
    """
    connection = op.get_bind()
    names = set(connection.execute(text("SELECT name FROM counter")).scalars())
    if schema.FENCE in names and schema.FORGOTTEN not in names:
        connection.execute(_ADD_COUNTER, integrity.sealed({"name": schema.FORGOTTEN, "value": ceil(time())}))
