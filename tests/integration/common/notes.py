"""A store of notes, for tests of stores: its table, works on it, and groups of works."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, func, insert, select

from gpuscale.common.store.store import Store

METADATA = MetaData()
NOTES = Table("note", METADATA, Column("id", Integer, primary_key=True), Column("text", String(100)))


def add(number: int, note: str = "") -> Callable[[Connection], int]:
    """A work that adds a note; returns 1."""

    def work(connection: Connection) -> int:
        connection.execute(insert(NOTES).values(id=number, text=note))
        return 1

    return work


def count(connection: Connection) -> int:
    """A work that counts the notes."""
    return connection.execute(select(func.count()).select_from(NOTES)).scalar_one()


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
    """Works that wait for the writer, in this order."""
    tasks = [asyncio.create_task(notes.write(work)) for work in works]
    await asyncio.sleep(0)
    return tasks


async def as_group(notes: Store, *works: Callable[[Connection], object]) -> list[object]:
    """What each of the works came to that were submitted as one group."""
    async with held(notes):
        tasks = await submit(notes, *works)
    return await asyncio.gather(*tasks, return_exceptions=True)
