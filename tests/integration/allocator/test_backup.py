"""A copy that is taken while the allocator runs brings its reservations back, as docs/operations.md says it is done."""

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpuscale.allocator.app import DATABASE
from tests.support.allocator import running
from tests.support.fake_fleet import FakeFleet, node_message


def back_up(data_dir: Path, copy: Path) -> None:
    """What `sqlite3 allocator.db ".backup copy"` does."""
    with closing(sqlite3.connect(data_dir / DATABASE)) as live, closing(sqlite3.connect(copy)) as into:
        live.backup(into)


def put_back(copy: Path, data_dir: Path) -> None:
    """All that belongs to the former database goes: its log would be read into the copy."""
    for path in data_dir.glob(f"{DATABASE}*"):
        path.unlink()
    shutil.copy(copy, data_dir / DATABASE)


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet(node_message("n1", count=4))


async def test_what_was_granted_before_the_copy_is_there_and_fences_go_on(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    data_dir, copy = tmp_path / "data", tmp_path / "copy.db"
    async with running(data_dir, fleet) as client:
        before = await client.reserve(ttl=3600)
        await asyncio.to_thread(back_up, data_dir, copy)
        after = await client.reserve(ttl=3600)
    put_back(copy, data_dir)
    async with running(data_dir, fleet) as client:
        assert [one.name for one in await client.live()] == [before.name]
        again = await client.reserve(ttl=3600)
        assert again.fence == after.fence, "which is why holders of later ones must have been stopped"
        assert again.name != after.name
        await client.release(before)


async def test_fences_can_be_told_to_go_on_above_those_that_the_copy_does_not_know(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    """Also after that: a grant is on disk with its fence."""
    data_dir, copy = tmp_path / "data", tmp_path / "copy.db"
    async with running(data_dir, fleet) as client:
        await asyncio.to_thread(back_up, data_dir, copy)
        lost = await client.reserve(ttl=3600)
    put_back(copy, data_dir)
    async with running(data_dir, fleet, fences_above=lost.fence + 1_000_000) as client:
        first = await client.reserve(ttl=3600)
    async with running(data_dir, fleet) as client:
        second = await client.reserve(ttl=3600)
    assert (first.fence, second.fence) == (lost.fence + 1_000_001, lost.fence + 1_000_002)
