"""Migrations by alembic, on either database: whole or not at all, and never of what is newer."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from sqlalchemy import Connection

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Store, revisions
from tests.integration.common.notes import METADATA, add, count
from tests.integration.common.shared_notes import leading_store
from tests.support.postgresql import PostgresServer

MIGRATIONS = revisions("tests.integration.common.note_migrations", 3)
At = Callable[[int], AbstractAsyncContextManager[Store]]


@pytest.fixture(params=["sqlite", "postgresql"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> At:
    """Opens the store as the program of a version does, on the same data each time."""
    if request.param == "sqlite":
        path = tmp_path / "notes.db"
        return lambda version: Store.open(Sqlite(path, METADATA, version, MIGRATIONS), name="notes")
    server: PostgresServer = request.getfixturevalue("postgresql")
    url = server.database()
    return lambda version: leading_store(url, version=version, migrations=MIGRATIONS)


def columns(connection: Connection) -> list[str]:
    return [*connection.exec_driver_sql("SELECT * FROM note").keys()]


def colours(connection: Connection) -> list[tuple[object, ...]]:
    return [tuple(row) for row in connection.exec_driver_sql("SELECT id, colour, stars FROM note")]


async def test_an_earlier_version_is_migrated_step_by_step(at: At) -> None:
    async with at(1) as notes:
        await notes.write(add(1, "abc"))
    async with at(3) as notes:
        assert await notes.read(colours) == [(1, "red", 3)]
    async with at(3) as notes:
        assert await notes.read(count) == 1


async def test_a_table_that_is_new_is_made_without_a_new_version(at: At) -> None:
    async with at(3) as notes:
        await notes.write(lambda connection: connection.exec_driver_sql("DROP TABLE note").close())
    async with at(3) as notes:
        assert await notes.read(count) == 0


async def test_a_newer_version_is_refused_and_left_as_it_is(at: At) -> None:
    async with at(1) as notes:
        await notes.write(add(1))
    async with at(2) as notes:
        before = await notes.read(columns)
    with pytest.raises(FailedPreconditionError) as caught:
        async with at(1):
            pass
    assert (caught.value.reason, caught.value.metadata) == ("STATE_VERSION", {"found": "2", "wanted": "1"})
    async with at(2) as notes:
        assert await notes.read(columns) == before


async def test_a_migration_that_fails_leaves_the_version_before(at: At) -> None:
    async with at(1) as notes:
        await notes.write(add(1, "broken"))
    with pytest.raises(FailedPreconditionError):
        async with at(3):
            pass
    async with at(1) as notes:
        assert await notes.read(columns) == ["id", "text"]
