"""The store: durable, grouped, one writer, and errors that reach the one they belong to."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, func, insert, select, text
from sqlalchemy.exc import IntegrityError

from gpuscale.common import failpoints, sqlite_store, store
from gpuscale.common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from gpuscale.common.store import Store

METADATA = MetaData()
NOTES = Table("note", METADATA, Column("id", Integer, primary_key=True), Column("text", String(100)))


def add(number: int, note: str = "") -> Callable[[Connection], int]:
    return lambda connection: connection.execute(insert(NOTES).values(id=number, text=note)).rowcount


def count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(NOTES)).scalar_one()


def pragma(name: str) -> Callable[[Connection], object]:
    return lambda connection: connection.exec_driver_sql(f"PRAGMA {name}").scalar()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "notes.db"


def open_notes(path: Path, version: int = 1) -> AbstractAsyncContextManager[Store]:
    return Store.open(path, METADATA, name="notes", version=version)


@asynccontextmanager
async def held(notes: Store) -> AsyncGenerator[None]:
    """Keep the writer busy until the block ends: what is submitted in the block forms one group."""
    entered, go = threading.Event(), threading.Event()

    def hold(connection: Connection) -> None:
        entered.set()
        assert go.wait(30)

    holder = asyncio.create_task(notes.write(hold))
    await asyncio.to_thread(entered.wait, 30)
    try:
        yield
    finally:
        go.set()
        await holder


async def submit(notes: Store, *works: Callable[[Connection], object]) -> list[asyncio.Task[object]]:
    tasks = [asyncio.create_task(notes.write(work)) for work in works]
    await asyncio.sleep(0)
    return tasks


async def as_group(notes: Store, *works: Callable[[Connection], object]) -> list[object]:
    """What each of the works came to that were submitted as one group."""
    async with held(notes):
        tasks = await submit(notes, *works)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_was_written_is_there_after_reopening(path: Path) -> None:
    async with open_notes(path) as notes:
        assert await notes.write(add(1)) == 1
        assert await notes.read(count) == 1
    async with open_notes(path) as notes:
        assert await notes.read(count) == 1


async def test_the_writer_commits_with_wal_and_full_synchronous(path: Path) -> None:
    """2 is FULL: each commit waits for the disk."""
    async with open_notes(path) as notes:
        assert await notes.write(pragma("synchronous")) == 2
        assert await notes.write(pragma("journal_mode")) == "wal"
        assert await notes.write(pragma("mmap_size")) == 0
        assert await notes.write(pragma("foreign_keys")) == 1


@pytest.mark.parametrize("pragma", ["journal_mode=DELETE", "synchronous=NORMAL"])
async def test_a_store_that_would_not_be_durable_does_not_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, pragma: str
) -> None:
    """As on a network file system, where SQLite answers journal_mode=WAL with another mode and no error."""
    monkeypatch.setattr(sqlite_store, "_WRITER_PRAGMAS", (*sqlite_store._WRITER_PRAGMAS, pragma))
    with pytest.raises(FailedPreconditionError, match="instead of wal, full"):
        async with open_notes(path):
            pass


async def test_file_and_directory_are_the_owners_alone(path: Path) -> None:
    async with open_notes(path) as notes:
        await notes.write(add(1))
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
        assert modes == {"notes.db": 0o600, "notes.db-wal": 0o600, "notes.db-shm": 0o600}
        assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_the_loop_never_runs_a_work_and_one_thread_runs_all_writes(path: Path) -> None:
    async with open_notes(path) as notes:
        threads = [await notes.write(lambda _: threading.get_ident()) for _ in range(3)]
        reader = await notes.read(lambda _: threading.get_ident())
    assert len(set(threads)) == 1
    assert len({*threads, reader, threading.get_ident()}) == 3


async def test_writes_that_wait_together_share_one_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[str] = []
    monkeypatch.setattr(failpoints, "hit", points.append)
    async with open_notes(path) as notes:
        points.clear()
        assert await as_group(notes, *(add(number) for number in range(50))) == [1] * 50
    # One commit for the holder of the gate, one for all the others.
    assert points == ["notes.store.before_commit", "notes.store.after_commit"] * 2


async def test_a_work_that_fails_is_undone_alone(path: Path) -> None:
    def half(connection: Connection) -> None:
        add(100)(connection)
        raise KeyError("half way")

    async with open_notes(path) as notes:
        results = await as_group(notes, add(1), half, add(2), add(1), add(3))
        assert results[0] == results[2] == results[4] == 1
        assert isinstance(results[1], KeyError)
        assert isinstance(results[3], IntegrityError)
        assert await notes.read(lambda connection: connection.scalars(select(NOTES.c.id)).all()) == [1, 2, 3]


async def test_works_run_in_the_order_of_submission(path: Path) -> None:
    ran: list[int] = []

    def note(number: int, connection: Connection) -> None:
        ran.append(number)

    async with open_notes(path) as notes:
        await asyncio.gather(*(notes.write(partial(note, number)) for number in range(600)))
    assert ran == list(range(600))


async def test_a_cancelled_caller_does_not_undo_its_work(path: Path) -> None:
    async with open_notes(path) as notes:
        async with held(notes):
            (cancelled,) = await submit(notes, add(1))
            cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        # Works run in order, so the cancelled one is done when this one is.
        await notes.write(add(2))
        assert await notes.read(count) == 2


async def test_the_reader_cannot_write(path: Path) -> None:
    async with open_notes(path) as notes:
        with pytest.raises(UnavailableError, match="readonly"):
            await notes.read(add(1))
        assert await notes.read(count) == 0


async def test_an_error_of_a_read_is_its_callers(path: Path) -> None:
    async with open_notes(path) as notes:
        with pytest.raises(ZeroDivisionError):
            await notes.read(lambda _: 1 // 0)
        assert await notes.read(count) == 0


async def test_a_read_sees_every_write_acknowledged_before_it(path: Path) -> None:
    async with open_notes(path) as notes:
        for number in range(100):
            await notes.write(add(number))
            assert await notes.read(count) == number + 1


async def test_too_many_waiting_works_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_WAITING", 3)
    async with open_notes(path) as notes:
        async with held(notes):
            waiting = await submit(notes, add(1), add(2), add(3))
            with pytest.raises(ResourceExhaustedError) as caught:
                await notes.write(add(9))
            assert caught.value.reason == "STORE_BUSY"
        assert await asyncio.gather(*waiting) == [1, 1, 1]


async def test_closing_finishes_what_was_submitted_and_then_refuses(path: Path) -> None:
    async with open_notes(path) as notes:
        tasks = await submit(notes, lambda _: time.sleep(0.05), add(1), add(2))
    assert [task.result() for task in tasks] == [None, 1, 1]
    for call in (notes.write, notes.read):
        with pytest.raises(UnavailableError) as caught:
            await call(count)
        assert caught.value.reason == "STORE_CLOSED"
    names = {thread.name for thread in threading.enumerate()}
    assert names.isdisjoint({"notes-store-writer", "notes-store-reader"})
    assert [file.name for file in path.parent.iterdir()] == ["notes.db"]


@pytest.mark.parametrize(("point", "kept"), [("before_commit", 0), ("after_commit", 3)])
async def test_an_error_around_the_commit_reaches_every_caller_of_the_group(
    path: Path, monkeypatch: pytest.MonkeyPatch, point: str, kept: int
) -> None:
    async with open_notes(path) as notes:
        monkeypatch.setattr(failpoints, "_points", failpoints.parse(f"notes.store.{point}=error"))
        tasks = await submit(notes, add(1), add(2), add(3))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError] * 3
        monkeypatch.setattr(failpoints, "_points", {})
        assert await notes.read(count) == kept
        assert await notes.write(add(9)) == 1


async def test_a_work_that_ends_the_transaction_fails_with_its_group_and_not_the_store(path: Path) -> None:
    def commit(connection: Connection) -> None:
        connection.exec_driver_sql("COMMIT")
        raise KeyError("x")

    async with open_notes(path) as notes:
        results = await as_group(notes, add(1), commit)
        assert all(isinstance(result, Exception) for result in results)
        assert await notes.write(add(2)) == 1


async def test_a_full_disk_is_an_error_of_its_own_and_loses_nothing(path: Path) -> None:
    async with open_notes(path) as notes:
        await notes.write(add(1))
        pages = await notes.write(pragma("page_count"))
        await notes.write(pragma(f"max_page_count={pages}"))

        def large(connection: Connection) -> None:
            connection.execute(text("CREATE TABLE big AS SELECT randomblob(100000) AS data"))

        results = await as_group(notes, add(2), large, add(3))
        assert [getattr(result, "reason", None) for result in results] == ["DISK_FULL"] * 3
        assert await notes.read(count) == 1
        await notes.write(pragma("max_page_count=1000000"))
        assert await notes.write(add(2)) == 1


async def test_a_file_of_another_version_is_refused_and_kept(path: Path) -> None:
    async with open_notes(path, version=2) as notes:
        await notes.write(add(1))
    before = path.read_bytes()
    for version in (1, 3):
        with pytest.raises(FailedPreconditionError, match="schema version 2") as caught:
            async with open_notes(path, version=version):
                pass
        assert caught.value.reason == "STATE_VERSION"
    assert path.read_bytes() == before


async def test_a_database_of_another_program_is_refused(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (x)")
    other.close()
    with pytest.raises(FailedPreconditionError):
        async with open_notes(path):
            pass


async def test_a_file_whose_making_was_interrupted_is_made_again(path: Path) -> None:
    path.parent.mkdir()
    interrupted = sqlite3.connect(path)
    interrupted.execute("PRAGMA journal_mode=WAL")
    interrupted.close()
    assert path.stat().st_size > 0
    async with open_notes(path) as notes:
        assert await notes.write(add(1)) == 1


async def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPreconditionError) as caught:
        async with open_notes(tmp_path / "file" / "notes.db"):
            pass
    assert caught.value.reason == "STATE_UNREADABLE"


async def test_a_cancelled_opening_leaves_no_thread(path: Path) -> None:
    async def opening() -> None:
        async with open_notes(path):
            raise AssertionError("opened")

    task = asyncio.create_task(opening())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for thread in threading.enumerate():
        if thread.name == "notes-store-writer":
            await asyncio.to_thread(thread.join, 30)
            assert not thread.is_alive()


async def test_parameters_do_not_stand_in_errors(path: Path) -> None:
    async with open_notes(path) as notes:
        await notes.write(add(1))
        with pytest.raises(IntegrityError) as caught:
            await notes.write(add(1, note="canary"))
        assert "canary" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_fault_of_the_store_itself_answers_everybody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever on a thread that is gone."""

    def unforeseen(name: str) -> None:
        raise RuntimeError(name)

    async with open_notes(path) as notes:
        monkeypatch.setattr(failpoints, "hit", unforeseen)
        tasks = await submit(notes, add(1), add(2))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [getattr(result, "reason", None) for result in results] == ["STORE_CLOSED"] * 2
        with pytest.raises(UnavailableError):
            await notes.write(add(3))
