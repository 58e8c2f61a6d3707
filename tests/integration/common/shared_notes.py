"""A store of notes in PostgreSQL, opened by the process that leads."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.leadership import Candidate
from gpuscale.common.store.postgres import Postgres
from gpuscale.common.store.store import Migrations, Store
from gpuscale.common.store.term import Term
from tests.integration.common.notes import METADATA

SERVICE = "notes"


@asynccontextmanager
async def leading(
    url: SecretUrl, *, version: int = 1, migrations: Migrations | None = None
) -> AsyncGenerator[tuple[Store, Term]]:
    """Win the lead, and open the store for the term."""
    async with Candidate(url, SERVICE, "127.0.0.1:1").term() as term:
        backend = Postgres(url, SERVICE, METADATA, version, migrations or {}, term)
        async with Store.open(backend, name=SERVICE) as store:
            yield store, term


@asynccontextmanager
async def leading_store(url: SecretUrl, *, version: int, migrations: Migrations) -> AsyncGenerator[Store]:
    """The same, for those who do not look at the term."""
    async with leading(url, version=version, migrations=migrations) as (store, _):
        yield store
