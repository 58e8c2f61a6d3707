"""Notes have stars; a revision that fails half way if a note says so."""

import sqlalchemy
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """From version 2."""
    op.add_column("note", sqlalchemy.Column("stars", sqlalchemy.Integer))
    op.execute("UPDATE note SET stars = length(text)")
    broken = op.get_bind().exec_driver_sql("SELECT count(*) FROM note WHERE text = 'broken'").scalar()
    if broken:
        op.execute("SELECT * FROM nowhere")
