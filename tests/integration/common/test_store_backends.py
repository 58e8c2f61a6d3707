"""What the store promises on SQLite and on PostgreSQL alike: its works, and its migrations by alembic, which are whole or not at all."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

from gpuscale.common.errors import AbortedError, FailedPreconditionError, UnavailableError
from gpuscale.common.runtime import tasks
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Prepared, Store, revisions
from tests.integration.common.notes import METADATA, NOTES, add, as_group, count, held, submit
from tests.integration.common.shared_notes import leading, leading_store
from tests.support.postgresql import PostgresServer

pytestmark = pytest.mark.usefixtures("lead_outlasts_stalls")

Opened = Callable[[], AbstractAsyncContextManager[Store]]


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Opens the store, on the same data each time."""
    if request.param == "sqlite":
        return partial(Store.open, Sqlite(tmp_path / "notes.db", METADATA, 1), name="notes")
    server: PostgresServer = request.getfixturevalue("postgresql")
    url = server.database()

    @asynccontextmanager
    async def on_postgresql() -> AsyncGenerator[Store]:
        async with leading(url) as (store, _):
            yield store

    return on_postgresql


async def test_the_loop_never_runs_a_work_and_one_thread_runs_all_writes(opened: Opened) -> None:
    async with opened() as notes:
        threads = [await notes.write(lambda _: threading.get_ident()) for _ in range(3)]
        reader = await notes.read(lambda _: threading.get_ident())
    assert len(set(threads)) == 1
    assert len({*threads, reader, threading.get_ident()}) == 3


async def test_writes_that_wait_together_share_one_commit(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[str] = []
    monkeypatch.setattr(tasks, "hit", points.append)
    async with opened() as notes:
        points.clear()
        assert await as_group(notes, *(add(number) for number in range(50))) == [1] * 50
    # One commit for the holder of the gate, one for all the others.
    assert points == ["notes.store.before_commit", "notes.store.after_commit"] * 2


async def test_a_work_that_fails_is_undone_alone(opened: Opened) -> None:
    def half(connection: Connection) -> None:
        add(100)(connection)
        raise KeyError("half way")

    async with opened() as notes:
        results = await as_group(notes, add(1), half, add(2), add(1), add(3))
        assert results[0] == results[2] == results[4] == 1
        assert isinstance(results[1], KeyError)
        assert isinstance(results[3], IntegrityError)
        assert await notes.read(lambda connection: connection.scalars(select(NOTES.c.id)).all()) == [1, 2, 3]


async def test_works_run_in_the_order_of_submission(opened: Opened) -> None:
    ran: list[int] = []

    def note(number: int, connection: Connection) -> None:
        ran.append(number)

    async with opened() as notes:
        await asyncio.gather(*(notes.write(partial(note, number)) for number in range(300)))
    assert ran == list(range(300)), "more than one group"


async def test_a_cancelled_caller_does_not_undo_its_work(opened: Opened) -> None:
    async with opened() as notes:
        async with held(notes):
            (cancelled,) = await submit(notes, add(1))
            cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        # Works run in order, so the cancelled one is done when this one is.
        await notes.write(add(2))
        assert await notes.read(count) == 2


async def test_the_reader_cannot_write(opened: Opened) -> None:
    async with opened() as notes:
        with pytest.raises(UnavailableError, match=r"read.?only"):
            await notes.read(add(1))
        assert await notes.read(count) == 0


async def test_an_error_of_a_read_is_its_callers(opened: Opened) -> None:
    async with opened() as notes:
        failing = (lambda _: 1 // 0), (lambda found: found.exec_driver_sql("SELECT * FROM nowhere"))
        reads = [notes.read(one) for fails in failing for one in (count, fails, count)]
        found = await asyncio.gather(*reads, return_exceptions=True)
        assert (found[0::3], found[2::3]) == ([0, 0], [0, 0])
        assert isinstance(found[1], ZeroDivisionError)
        assert isinstance(found[4], Exception)


async def test_a_read_sees_every_write_acknowledged_before_it(opened: Opened) -> None:
    async with opened() as notes:
        for number in range(30):
            await notes.write(add(number))
            assert await notes.read(count) == number + 1


@pytest.mark.parametrize(("point", "kept"), [("before_commit", 0), ("after_commit", 3)])
async def test_an_error_around_the_commit_reaches_every_caller_of_the_group(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, point: str, kept: int
) -> None:
    async with opened() as notes:
        monkeypatch.setattr(tasks, "_points", tasks.parse_failpoints(f"notes.store.{point}=error"))
        written = await submit(notes, add(1), add(2), add(3))
        results = await asyncio.gather(*written, return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError] * 3
        monkeypatch.setattr(tasks, "_points", {})
        assert await notes.read(count) == kept
        assert await notes.write(add(9)) == 1


async def test_a_work_that_ends_the_transaction_fails_with_its_group_and_not_the_store(
    opened: Opened,
) -> None:
    def commit(connection: Connection) -> None:
        connection.exec_driver_sql("COMMIT")
        raise KeyError("x")

    async with opened() as notes:
        results = await as_group(notes, add(1), commit)
        assert all(isinstance(result, Exception) for result in results)
        assert await notes.write(add(2)) == 1


async def test_a_prepared_statement_tells_how_many_rows_it_changed(opened: Opened) -> None:
    put = Prepared.replacing(NOTES)
    async with opened() as notes:
        rows = [{"id": number, "text": "new"} for number in range(3)]
        assert await notes.write(lambda connection: put.run(connection, rows)) == 3
        assert await notes.write(lambda connection: put.run(connection, [{"id": 2, "text": "newer"}])) == 1
        texts = await notes.read(
            lambda connection: connection.scalars(select(NOTES.c.text).order_by(NOTES.c.id)).all()
        )
    assert texts == ["new", "new", "newer"]


async def test_what_a_prepared_statement_may_not_write_is_a_conflict(opened: Opened) -> None:
    put = Prepared(insert(NOTES))
    async with opened() as notes:
        await notes.write(add(1))
        with pytest.raises(AbortedError) as caught:
            await notes.write(lambda connection: put.run(connection, [{"id": 1, "text": "again"}]))
        assert caught.value.reason == "STATE_CONFLICT"
        assert await notes.read(count) == 1


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
