"""The store under kill -9, lost pages and foreign bytes."""

import ctypes
import hashlib
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Column, Connection, Integer, MetaData, Table, insert, select

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.store import sqlite_store
from gpuscale.common.store.store import Store

ROOT = Path(__file__).parents[3]
METADATA = MetaData()
PAIRS = Table(
    "pair", METADATA, Column("id", Integer, primary_key=True), Column("half", Integer, primary_key=True)
)

# Writes pairs of rows, 8 at a time, and tells the number of each pair once the store has acknowledged it.
WRITER = """
import asyncio, os, sys
from tests.fault.common.test_store_faults import open_pairs, write_pair

async def main(path, first, last):
    numbers = iter(range(first, last))

    async def write(store):
        for number in numbers:
            await write_pair(store, number)
            os.write(1, b"%d\\n" % number)

    async with open_pairs(path) as store:
        os.write(1, b"open\\n")
        await asyncio.gather(*(write(store) for _ in range(8)))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def open_pairs(path: Path | str) -> AbstractAsyncContextManager[Store]:
    return Store.open(sqlite_store.Sqlite(Path(path), METADATA, 1), name="pairs")


async def write_pair(store: Store, number: int) -> None:
    def work(connection: Connection) -> None:
        connection.execute(insert(PAIRS).values(id=number, half=1))
        connection.execute(insert(PAIRS).values(id=number, half=2))

    await store.write(work)


async def whole_pairs(path: Path) -> set[int]:
    """The pairs in the file; no half may be without the other."""
    async with open_pairs(path) as store:
        rows = await store.read(lambda connection: connection.execute(select(PAIRS.c.id, PAIRS.c.half)).all())
    halves: dict[int, set[int]] = {}
    for number, half in rows:
        halves.setdefault(number, set()).add(half)
    assert all(half == {1, 2} for half in halves.values())
    return set(halves)


@contextmanager
def writer(path: Path, first: int, last: int, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(first), str(last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def acknowledged(process: subprocess.Popen[str]) -> set[int]:
    out, err = process.communicate(timeout=60)
    assert err == ""
    return {int(line) for line in out.splitlines() if line != "open"}


@pytest.mark.parametrize(("point", "expected"), [("before_commit", set[int]()), ("after_commit", {100})])
async def test_a_kill_around_a_commit_leaves_it_whole_or_absent(
    tmp_path: Path, point: str, expected: set[int]
) -> None:
    path = tmp_path / "pairs.db"
    with writer(path, 0, 20) as process:
        assert acknowledged(process) == set(range(20))
    with writer(path, 100, 101, GPUSCALE_FAILPOINTS=f"pairs.store.{point}=kill") as process:
        assert acknowledged(process) == set()
        assert process.returncode == -signal.SIGKILL
    assert await whole_pairs(path) == {*range(20), *expected}


FSYNC_COUNTER = """
#define _GNU_SOURCE
#include <dlfcn.h>
static int count;
int synced(void) { return count; }
int fsync(int fd) { count++; return ((int (*)(int)) dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { count++; return ((int (*)(int)) dlsym(RTLD_NEXT, "fdatasync"))(fd); }
"""


async def _print_fsyncs_per_write(path: Path, library: str) -> None:
    counter = ctypes.CDLL(library)
    async with open_pairs(path) as store:
        for number in range(10):
            before: int = counter.synced()
            await write_pair(store, number)
            print(counter.synced() - before)


def test_every_acknowledged_write_was_synced_to_the_disk(tmp_path: Path) -> None:
    """kill -9 cannot prove this: the pages of a killed process live on in the kernel, those of a power loss do not."""
    from tests.support.fixtures import need  # not in the programs that import this file

    if shutil.which("cc") is None:
        need("a C compiler is not installed to count calls of fsync (Debian: gcc)")
    source, library = tmp_path / "count.c", tmp_path / "count.so"
    source.write_text(FSYNC_COUNTER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    program = (
        "import asyncio, sys; from tests.fault.common.test_store_faults import _print_fsyncs_per_write as main; "
        "asyncio.run(main(sys.argv[1], sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "pairs.db", library],
        env={**os.environ, "LD_PRELOAD": str(library)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    counts = [int(line) for line in done.stdout.split()]
    assert len(counts) == 10
    assert min(counts) >= 1


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed")
    path = directory / "pairs.db"
    with writer(path, 0, 1000) as process:
        acknowledged(process)
    with writer(path, 3000, 4000) as process:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        process.kill()
        process.wait()
    assert (directory / "pairs.db-wal").stat().st_size > 0
    return directory


@pytest.fixture
def killed(killed_once: Path, tmp_path: Path) -> Path:
    """A store as kill -9 left it: some pairs in the file, some only in its write-ahead log."""
    shutil.copytree(killed_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "pairs.db"


def digests(path: Path) -> dict[str, str]:
    files = (path, path.with_name(f"{path.name}-wal"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated to half a page": lambda path: os.truncate(path, 2048),
    "truncated between two pages": lambda path: os.truncate(path, 5 * 4096),
    "truncated within a page": lambda path: os.truncate(path, 5 * 4096 + 100),
    "not a database": lambda path: path.write_bytes(b"hello " * 10_000),
    "a header of zeros": lambda path: overwrite(path, 0, bytes(100)),
    "a page of zeros": lambda path: overwrite(path, 3 * 4096, bytes(4096)),
    "a page of noise": lambda path: overwrite(path, 3 * 4096, bytes(range(256)) * 16),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_file_is_refused_and_left_as_it_is(killed: Path, damage: str) -> None:
    # The pages of the log would hide the damage below them.
    killed.with_name("pairs.db-wal").write_bytes(b"")
    DAMAGE[damage](killed)
    before = digests(killed)
    for _ in range(2):
        with pytest.raises(FailedPreconditionError) as caught:
            async with open_pairs(killed):
                pass
        assert caught.value.reason == "STATE_UNREADABLE"
        assert str(killed) in caught.value.message
        assert digests(killed) == before


async def test_the_log_of_a_damaged_file_is_left_as_it_is_too(killed: Path) -> None:
    os.truncate(killed, 2 * 4096)
    before = digests(killed)
    with pytest.raises(FailedPreconditionError):
        async with open_pairs(killed):
            pass
    assert digests(killed) == before


async def test_damage_found_while_serving_is_refused_too(killed: Path) -> None:
    await whole_pairs(killed)
    async with open_pairs(killed) as store:
        overwrite(killed, 2 * 4096, bytes(killed.stat().st_size - 2 * 4096))
        with pytest.raises(FailedPreconditionError) as caught:
            await store.read(lambda connection: connection.execute(select(PAIRS)).all())
        assert caught.value.reason == "STATE_UNREADABLE"


async def test_a_file_that_another_program_holds_is_unavailable_and_not_damaged(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "BUSY_TIMEOUT_SECONDS", 0.1)
    await whole_pairs(killed)
    other = sqlite3.connect(killed, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        async with open_pairs(killed) as store:
            with pytest.raises(Exception, match="locked") as caught:
                await write_pair(store, 9999)
            assert getattr(caught.value, "reason", None) == "STATE_UNAVAILABLE"
            other.execute("ROLLBACK")
            await write_pair(store, 9999)
    finally:
        other.close()
    assert 9999 in await whole_pairs(killed)


async def test_a_device_that_stops_taking_writes_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """A limit on the size of files makes write(2) itself fail, within works as well as within commits."""
    path = tmp_path / "pairs.db"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    known: set[int] = set()
    async with open_pairs(path) as store:

        async def write_until_refused() -> None:
            for number in range(1, 1000):
                await write_pair(store, number)
                known.add(number)

        await write_pair(store, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512 * 1024, limits[1]))
        try:
            with pytest.raises(UnavailableError) as caught:
                await write_until_refused()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.reason in {"DISK_FULL", "STATE_UNAVAILABLE"}
        await write_pair(store, 2000)
    assert known
    assert {*known, 0, 2000} <= await whole_pairs(path)
