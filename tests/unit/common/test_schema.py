"""Prepared statements: each parameter of a statement gets the value of its name, wherever and how often it stands."""

from sqlalchemy import (
    Column,
    Integer,
    MetaData,
    String,
    Table,
    bindparam,
    create_engine,
    delete,
    insert,
    literal_column,
    or_,
    update,
)

from gpuscale.common.store.store import Prepared

COLUMNS = Column("id", Integer, primary_key=True), Column("state", String), Column("note", String)
ITEM = Table("item", MetaData(), *COLUMNS)
ADD = Prepared(insert(ITEM))
CHANGE = Prepared(
    update(ITEM)
    .where(ITEM.c.id == bindparam("id"))
    .where(or_(ITEM.c.state == literal_column("'live'"), ITEM.c.state == bindparam("state")))
    .values(state=bindparam("state"), note=bindparam("note"))
)
PUT = Prepared.replacing(ITEM)
REMOVE = Prepared(delete(ITEM).where(ITEM.c.note == bindparam("key")))


def test_values_are_taken_by_name_whatever_their_order() -> None:
    """A name that a statement has twice is taken twice, and what the statement does not name is left alone."""
    with create_engine("sqlite://").connect() as connection:
        ITEM.create(connection)
        ADD.run(
            connection, [{"note": "a", "id": 1, "state": "live"}, {"id": 2, "state": "over", "note": "b"}]
        )
        rows = [{"state": "gone", "unused": 0, "note": note, "id": id_} for id_, note in ((1, "c"), (2, "d"))]
        assert CHANGE.run(connection, rows) == 1
        PUT.run(connection, [{"note": "e", "state": "live", "id": 2}])
        found = connection.exec_driver_sql("SELECT id, state, note FROM item ORDER BY id").all()
    assert [tuple(row) for row in found] == [(1, "gone", "c"), (2, "live", "e")]


def test_a_statement_may_have_one_parameter() -> None:
    with create_engine("sqlite://").connect() as connection:
        ITEM.create(connection)
        ADD.run(
            connection, [{"id": id_, "state": "live", "note": note} for id_, note in ((1, "a"), (2, "bc"))]
        )
        assert REMOVE.run(connection, [{"key": "a"}, {"key": "bc"}]) == 2
