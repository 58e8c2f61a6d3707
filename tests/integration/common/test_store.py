"""The store: durable, grouped, one writer, and errors that reach the one they belong to."""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from gpuscale.common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from gpuscale.common.runtime import tasks
from gpuscale.common.store import sqlite_store, store
from gpuscale.common.store.store import Store
from tests.integration.common.notes import METADATA, add, as_group, count, held, submit


def pragma(name: str) -> Callable[[Connection], object]:
    return lambda connection: connection.exec_driver_sql(f"PRAGMA {name}").scalar()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "notes.db"


def open_notes(path: Path, version: int = 1) -> AbstractAsyncContextManager[Store]:
    return Store.open(sqlite_store.Sqlite(path, METADATA, version), name="notes")


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_who_fails_when_told_of_a_write_keeps_its_end_from_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context["exception"]))
    bug = KeyError("told")

    def fail(*_: object) -> None:
        raise bug

    async with asyncio.timeout(60), open_notes(path) as notes:
        async with held(notes):
            notes.begin(add(1), fail)
            [beside] = await submit(notes, add(2))
        assert await beside == 1
        monkeypatch.setattr(tasks, "hit", fail)  # ends the thread
        notes.begin(add(3), fail)
    assert [*map(type, failed)] == [KeyError] * 2


async def test_a_full_disk_is_an_error_of_its_own_and_loses_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = Store.failures
    caplog.set_level(logging.INFO)
    async with open_notes(path) as notes:
        await notes.write(add(1))
        pages = await notes.write(pragma("page_count"))
        await notes.write(pragma(f"max_page_count={pages}"))

        def large(connection: Connection) -> None:
            connection.execute(text("CREATE TABLE big AS SELECT randomblob(100000) AS data"))

        results = await as_group(notes, add(2), large, add(3))
        assert [getattr(result, "reason", None) for result in results] == ["DISK_FULL"] * 3
        assert await notes.read(count) == 1
        with pytest.raises(UnavailableError):
            await notes.write(large)  # alone, as a group it is counted too
        assert Store.failures == failures + 2
        monkeypatch.setattr(sqlite_store.Room, "look", lambda _: True)
        await notes.write(lambda _: None)  # what takes no room, as a look for some
        assert "the state is written again" not in caplog.text
        monkeypatch.undo()
        await notes.write(pragma("max_page_count=1000000"))
        assert await notes.write(add(2)) == 1
        # The allocator refuses a grant before it asks its store: that the disk is short is told all the same.
        monkeypatch.setattr(sqlite_store.Room, "look", lambda _: True)
        await notes.write(lambda _: None)
        told = "the notes cannot write its state: the disk of the state is full"
        assert Store.trouble("notes", why=True) == told
    assert "notes" not in Store.problem, "another member may write it now"
    said = [record.getMessage() for record in caplog.records]
    for text_of, times in (("the state cannot be written", 2), ("the state is written again", 1)):
        assert sum(text_of in one for one in said) == times
    assert "the disk of the state is full" in "".join(said)


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
        monkeypatch.setattr(tasks, "hit", unforeseen)
        written = await submit(notes, add(1), add(2))
        results = await asyncio.gather(*written, return_exceptions=True)
        assert [getattr(result, "reason", None) for result in results] == ["STORE_CLOSED"] * 2
        with pytest.raises(UnavailableError):
            await notes.write(add(3))
