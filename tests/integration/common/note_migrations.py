"""Migrations of the store of notes, which suit either database."""

import sqlalchemy
from alembic.operations import Operations


def to_2(op: Operations) -> None:
    """Notes have colours."""
    op.add_column(
        "note", sqlalchemy.Column("colour", sqlalchemy.String, nullable=False, server_default="red")
    )


def to_3(op: Operations) -> None:
    """Notes have stars; fails half way if a note says so."""
    op.add_column("note", sqlalchemy.Column("stars", sqlalchemy.Integer))
    op.execute("UPDATE note SET stars = length(text)")
    broken = op.get_bind().exec_driver_sql("SELECT count(*) FROM note WHERE text = 'broken'").scalar()
    if broken:
        op.execute("SELECT * FROM nowhere")
