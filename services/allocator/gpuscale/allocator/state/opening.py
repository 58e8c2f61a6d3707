"""Opening of the state: the file or the PostgreSQL schema, brought to this version and found whole."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, func, select

from gpuscale.allocator.state import schema
from gpuscale.allocator.state.integrity import LAST_WRITE, UNCHECKED, Numbering, StateGuard, check_seals
from gpuscale.allocator.state.store import SERVICE, AllocatorStore
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Store, revisions
from gpuscale.common.store.term import Term

MIGRATIONS = revisions("gpuscale.allocator.state.migrations", schema.VERSION)
"""By the version that they start from."""
_RESERVATION = schema.Table.metadata.tables["reservation"]
_COUNTER = schema.Table.metadata.tables["counter"]


@asynccontextmanager
async def open_store(path: Path, boot_id: str) -> AsyncGenerator[AllocatorStore]:
    """Open the file, or make it.

    FailedPreconditionError if it is damaged, is not what was acknowledged, or is of another version; it stays as it is.
    """
    guard = StateGuard(path)
    await asyncio.to_thread(guard.witness.check_before)
    backend = Sqlite(path, schema.Table.metadata, schema.VERSION, MIGRATIONS, guard, UNCHECKED)
    try:
        async with Store.open(backend, name=SERVICE) as store:
            yield AllocatorStore(store, guard, boot_id)
    finally:
        guard.witness.close()


@asynccontextmanager
async def open_shared_store(url: SecretUrl, term: Term, boot_id: str) -> AsyncGenerator[AllocatorStore]:
    """Open the state in PostgreSQL for a term, or make it.

    FailedPreconditionError if it is of another version, or a row is not as it was written; it stays as it is.
    """
    from gpuscale.common.store.postgres import Postgres

    backend = Postgres(url, SERVICE, schema.Table.metadata, schema.VERSION, MIGRATIONS, term)
    async with Store.open(backend, name=SERVICE) as store:
        tables = [table for table in schema.Table.metadata.sorted_tables if table.name not in UNCHECKED]
        await store.read(partial(check_seals, tables=tables))
        of_reservations = select(func.coalesce(func.max(_RESERVATION.c.write_number), 0))
        of_others = select(_COUNTER.c.value).where(_COUNTER.c.name == LAST_WRITE)

        def last_write(connection: Connection) -> int:
            highest: int = connection.execute(of_reservations).scalar_one()
            return max(highest, connection.execute(of_others).scalar() or 0)

        yield AllocatorStore(store, Numbering(await store.read(last_write)), boot_id)
