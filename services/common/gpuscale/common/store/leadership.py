"""Leader election: of all processes of a service on one PostgreSQL database, exactly one leads.

The lead is a session-level advisory lock on a connection of its own. The server releases it when the connection ends: at once if
the process dies, or after `LEASE` seconds of silence if the process hangs or its host is gone (`idle_session_timeout`, which
needs no synchronized clocks). Each takeover ends the sessions of the previous leader and increments the epoch in the table
`leadership`. Every write transaction checks the epoch under a lock, so a late write of an earlier leader is refused. (Fencing
tokens: M. Kleppmann, "How to do distributed locking", 2016; etcd issue 15247 shows leases without them.)
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import sha256
from secrets import token_hex
from typing import Final

import psycopg
from psycopg.rows import TupleRow

from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, TaskScope, wait_at_most
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.postgres import (
    LEASE,
    connect_error,
    conninfo,
    in_schema,
    refused,
    store_application,
    too_old,
)
from gpuscale.common.store.term import Lead, Term, now

LOOK_PERIOD: Final = 0.2
"""Seconds between two attempts of a standby."""
PING_PERIOD: Final = 0.5
"""Seconds between two pings of a leader."""
ANSWER_LIMIT: Final = 10.0
"""Seconds for an answer of the server to a candidate."""

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS {}.leadership (id integer PRIMARY KEY, epoch bigint NOT NULL, address text NOT NULL)",
    "CREATE TABLE IF NOT EXISTS {}.forwarding (id bigint PRIMARY KEY, epoch bigint NOT NULL, secret text NOT NULL)",
)
_Connection = psycopg.AsyncConnection[TupleRow]
_log = get_logger(__name__)


class Candidate:
    """A process that leads whenever nobody else does; others reach it at `address`.

    `url` is the same for all processes of the service, which also names the schema.
    """

    def __init__(self, url: SecretUrl, service: str, address: str) -> None:
        self._url = url
        self._service = service
        self._address = address
        self.other: Lead | None = None
        """The other process that leads, if known."""
        self.problem = ""
        """Why the leader cannot be known now, for admins: it has the address of the database."""

    @property
    def leader(self) -> str:
        """Address of the other process that leads, if known, else ""."""
        return "" if self.other is None else self.other.address

    @asynccontextmanager
    async def term(self) -> AsyncGenerator[Term]:
        """Wait, without limit, until this process leads; leaving the block gives up the lead.

        Raises FailedPreconditionError: DATABASE_REFUSED, a retry cannot succeed.
        """
        connection, term = await self._win()

        async def watch() -> None:
            """Resign once the term is over; the driver would notice a lost connection 10 s later."""
            while term.leads():
                await wait_at_most(term.over, PING_PERIOD)
            term.resign()

        try:
            async with TaskScope() as tasks:
                tasks.start("hold the lead", self._ping(connection, term))
                tasks.start("watch the lead", watch())
                yield term
        finally:
            term.close()
            await connection.close()

    async def _win(self) -> tuple[_Connection, Term]:
        """Compete for the lead until this process wins, with a new connection after each failure."""
        backoff, trouble, told = Backoff(initial=0.2, cap=1.0), "", self.other
        while True:
            try:
                connection = await self._connect()
                async with AsyncExitStack() as failed:
                    failed.push_async_callback(connection.close)
                    while True:
                        term = await self._attempt(connection)
                        self.problem = ""
                        if term is not None:
                            failed.pop_all()
                            self.other = None
                            return connection, term
                        if self.other != told and (told := self.other) is not None:
                            trouble = ""
                            _log.info("another process leads", leader=told.address, epoch=told.epoch)
                        await asyncio.sleep(LOOK_PERIOD)
            except psycopg.errors.InsufficientPrivilege as error:
                raise refused(self._url, error) from None
            except (UnavailableError, psycopg.Error, TimeoutError) as error:
                self.other = told = None
                self.problem = f"PostgreSQL at {self._url} cannot be used, as its log says"
                if trouble != (trouble := " ".join(str(error).split()) or type(error).__name__):
                    _log.warning("cannot compete for the lead", service=self._service, problem=trouble)
            await asyncio.sleep(backoff.next())

    async def _attempt(self, connection: _Connection) -> Term | None:
        """Start a term; None if another process leads."""
        async with asyncio.timeout(ANSWER_LIMIT):
            if not await _ask(connection, "SELECT pg_try_advisory_lock(%s)", lock_key(self._service)):
                latest = in_schema(
                    "SELECT concat_ws(' ', epoch, secret, address) FROM {0}.leadership JOIN {0}.forwarding USING (epoch)",
                    self._service,
                ).as_string()
                other: Lead | None = None
                missing = (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName)
                with suppress(*missing):  # before the first term
                    if (found := await _ask(connection, latest)) is not None:
                        epoch, secret, address = str(found).split(" ", 2)
                        other = Lead(address, int(epoch), secret)
                self.other = other
                return None
            lead = await self._begin(connection)
            asked = now()
            await _ask(connection, "SELECT 1")
        return Term(lead, connection.fileno(), LEASE, asked)

    async def _connect(self) -> _Connection:
        try:
            connection = await psycopg.AsyncConnection.connect(
                conninfo(self._url, f"gpuscale-{self._service} leadership"), autocommit=True
            )
        except psycopg.Error as error:
            raise connect_error(self._url, error) from None
        if (problem := too_old(connection.info.server_version)) is not None:
            await connection.close()
            raise problem
        await _ask(
            connection,
            # If a crash of the server lost an epoch, it would be given twice.
            "SELECT set_config('idle_session_timeout', %s, false), set_config('synchronous_commit', 'on', false)",
            str(int(LEASE * 1000)),
        )
        return connection

    async def _begin(self, connection: _Connection) -> Lead:
        """Increment the epoch and set the secret by which standbys authenticate in this term.

        First ends leftover sessions of earlier leaders: one that hangs in a transaction would block the increment
        (`idle_in_transaction_session_timeout` does not apply after a pipeline: seen with version 15).
        """
        await _ask(
            connection,
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE application_name = %s AND datname = current_database() AND usename = current_user",
            store_application(self._service),
        )
        if await _ask(connection, "SELECT to_regnamespace(%s) IS NULL", self._service):
            await connection.execute(in_schema("CREATE SCHEMA {}", self._service))
        for table in _TABLES:
            await connection.execute(in_schema(table, self._service))
        secret = token_hex(32)
        cursor = await connection.execute(
            in_schema(
                "WITH begun AS (INSERT INTO {0}.leadership AS now (id, epoch, address) VALUES (1, 1, %s)"
                " ON CONFLICT (id) DO UPDATE SET epoch = now.epoch + 1, address = excluded.address RETURNING epoch)"
                " INSERT INTO {0}.forwarding (id, epoch, secret) SELECT 1, epoch, %s FROM begun"
                " ON CONFLICT (id) DO UPDATE SET epoch = excluded.epoch, secret = excluded.secret RETURNING epoch",
                self._service,
            ),
            (self._address, secret),
        )
        row = await cursor.fetchone()
        if row is None:
            raise UnavailableError("the epoch was not incremented", reason="STATE_UNAVAILABLE")
        return Lead(self._address, int(row[0]), secret)

    async def _ping(self, connection: _Connection, term: Term) -> None:
        """Keep the session and the term alive until one of them ends, or another term begins.

        Another term can begin only if a pooler shares this session between clients.
        """
        query = in_schema("SELECT epoch FROM {}.leadership", self._service).as_string()
        try:
            while term.leads():
                asked = now()
                async with asyncio.timeout(LEASE):
                    epoch = await _ask(connection, query)
                if epoch != term.epoch:
                    _log.warning(
                        "another term began although the lock is held: does a pooler share the session?",
                        epoch=epoch,
                        own=term.epoch,
                    )
                    return
                term.confirm(asked)
                await asyncio.sleep(PING_PERIOD)
        except (psycopg.Error, TimeoutError) as error:
            _log.warning("lost the connection that holds the lead", problem=" ".join(str(error).split()))
        finally:
            term.resign()


def lock_key(service: str) -> int:
    """Key of the advisory lock of a service, a signed 64-bit integer."""
    return int.from_bytes(sha256(f"gpuscale/{service}".encode()).digest()[:8], signed=True)


async def _ask(connection: _Connection, query: str, *values: object) -> object:
    """The single value that a query returns; None without a row."""
    row = await (await connection.execute(query.encode(), values or None)).fetchone()
    return None if row is None else row[0]
