"""A table of reservations that ended, and the count of the rows that are not in it."""

from alembic import op

from gpuscale.allocator.state.integrity import sealed

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """From version 3. The tables are made by the store; the allocator moves what has ended."""
    connection = op.get_bind()
    rows = sum(
        connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one()  # noqa: S608 - names of this file
        for table in ("reservation", "hold")
    )
    row = sealed({"name": "rows", "value": rows})
    values = f"'rows', {int(rows)}, {row['checksum']}"
    connection.exec_driver_sql(f"INSERT INTO counter (name, value, checksum) VALUES ({values})")  # noqa: S608
