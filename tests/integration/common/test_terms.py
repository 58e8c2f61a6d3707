"""When a term is over, and that whoever leads knows it: a server that is silent, that warns, that is damaged."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import count

import psycopg
import pytest
from sqlalchemy import Connection

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.leadership import Candidate
from tests.integration.common.notes import add, held
from tests.integration.common.notes import count as notes_kept
from tests.integration.common.shared_notes import SERVICE, leading
from tests.support.postgresql import PostgresServer

LIMIT = 60.0


async def test_a_leader_whose_server_falls_silent_stands_down_when_its_lease_is_over(
    url: SecretUrl, postgresql: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stand, and its question stays open: to give that up takes the driver as long again and longer."""
    monkeypatch.setattr("gpuscale.common.store.leadership.LEASE", 5.0)
    async with Candidate(url, SERVICE, "here").term() as term:
        [(session,)] = postgresql.run(
            "SELECT pid FROM pg_stat_activity WHERE application_name LIKE '%leadership'"
            f" AND datname = '{url.path.strip('/')}'"
        )
        assert isinstance(session, int)
        os.kill(session, signal.SIGSTOP)
        try:
            async with asyncio.timeout(LIMIT):
                await term.over.wait()
            assert not term.leads()
            assert [task for task in asyncio.all_tasks() if task.get_name() == "hold the lead"], (
                "it still asks"
            )
        finally:
            os.kill(session, signal.SIGCONT)


async def test_a_leader_learns_of_a_later_term_though_nothing_took_its_lock(
    url: SecretUrl, postgresql: PostgresServer
) -> None:
    """As behind a pooler that gives one session to two of them; what it writes is refused anyway."""
    async with Candidate(url, SERVICE, "here").term() as term:
        postgresql.run(f"UPDATE {SERVICE}.leadership SET epoch = epoch + 1", url.path.strip("/"))
        async with asyncio.timeout(LIMIT):
            await term.over.wait()


async def test_the_epoch_is_counted_on_disk_whatever_the_database_says(
    url: SecretUrl, postgresql: PostgresServer
) -> None:
    postgresql.run(f"ALTER DATABASE {url.path.strip('/')} SET synchronous_commit = off")
    connection, term = await Candidate(url, SERVICE, "here")._win()
    mode = await (await connection.execute("SHOW synchronous_commit")).fetchone()
    term.close()
    await connection.close()
    assert mode == ("on",)


async def test_the_next_epoch_waits_for_a_write_that_cannot_be_ended(
    url: SecretUrl, postgresql: PostgresServer
) -> None:
    """As where the sessions of the leader before belong to another user: what it commits is there when the next one reads."""
    database = url.path.strip("/")
    raising = f"SET lock_timeout = '50ms'; UPDATE {SERVICE}.leadership SET epoch = epoch + 1"
    async with leading(url) as (notes, _):
        async with held(notes):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                await asyncio.to_thread(postgresql.run, raising, database)
        await asyncio.to_thread(postgresql.run, raising, database)


async def test_what_takes_longer_than_a_lease_to_read_or_to_migrate_ends_no_term(
    url: SecretUrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to make objects of all that an allocator keeps: else nobody could lead any more, once there is too much of it."""
    async with leading(url) as (notes, _):
        await notes.write(add(1))
    monkeypatch.setattr("gpuscale.common.store.postgres.LEASE", 0.3)

    def slow(connection: Connection) -> int:
        notes_kept(connection)
        time.sleep(0.5)
        return notes_kept(connection)

    def migrate(connection: Connection) -> None:
        slow(connection)

    async with leading(url, version=2, migrations={1: migrate}) as (notes, term):
        assert await notes.read(slow) == 1
        assert term.leads()


@asynccontextmanager
async def waiting_for_a_standby(server: PostgresServer) -> AsyncGenerator[None]:
    """The server acknowledges no commit before a standby has it, and there is none."""
    await asyncio.to_thread(set_standby, server, "nowhere")
    try:
        yield
    finally:
        await asyncio.to_thread(set_standby, server, "")


def set_standby(server: PostgresServer, name: str) -> None:
    server.run(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    server.run("SELECT pg_reload_conf()")


async def test_a_commit_that_somebody_cancels_while_it_waits_for_a_standby_is_not_acknowledged(
    url: SecretUrl, postgresql: PostgresServer
) -> None:
    """PostgreSQL answers it as done, with a warning: on the standby, which leads after the next failure, it is not."""
    cancel = f"SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'gpuscale-{SERVICE}' AND wait_event = 'SyncRep'"
    async with leading(url) as (notes, term), waiting_for_a_standby(postgresql):
        numbers = count()
        writing = asyncio.create_task(notes.write(add(next(numbers))))
        while not await asyncio.to_thread(postgresql.run, cancel):
            if writing.done():  # before the server had heard of the standby
                writing = asyncio.create_task(notes.write(add(next(numbers))))
        with pytest.raises(UnavailableError, match="in doubt") as caught:
            await writing
        assert caught.value.reason == "STATE_UNAVAILABLE"
        assert not term.leads()


def refused_at_commit(state: str) -> Callable[[Connection], None]:
    """A work whose transaction the server refuses when it is to be committed."""
    raising = f"BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END"
    late = "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON note DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"

    def work(connection: Connection) -> None:
        for statement in (
            f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ {raising} $$",
            f"{late} EXECUTE FUNCTION refuse()",
        ):
            connection.exec_driver_sql(statement)
        add(1)(connection)

    return work


async def test_a_commit_that_fails_ends_the_term_whatever_the_error_says(url: SecretUrl) -> None:
    async with leading(url) as (notes, term):
        with pytest.raises(UnavailableError):
            await notes.write(refused_at_commit("57014"))
        assert not term.leads()
    async with leading(url) as (notes, _):
        assert await notes.read(notes_kept) == 0


@pytest.mark.parametrize("state", ["XX001", "XX002"])
async def test_a_state_that_the_server_finds_damaged_is_unreadable_and_not_a_fault_of_ours(
    url: SecretUrl, state: str
) -> None:
    """As on SQLite: an error from elsewhere would end the program."""

    def damaged(connection: Connection) -> None:
        connection.exec_driver_sql(
            f"DO $$ BEGIN RAISE EXCEPTION 'invalid page' USING ERRCODE = '{state}'; END $$"
        )

    async with leading(url) as (notes, _):
        for call in (notes.write(damaged), notes.read(damaged)):
            with pytest.raises(FailedPreconditionError) as caught:
                await call
            assert caught.value.reason == "STATE_UNREADABLE"
        assert await notes.write(add(1)) == 1
