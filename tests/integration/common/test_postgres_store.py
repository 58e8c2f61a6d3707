"""The store on PostgreSQL: what is acknowledged is on disk, an earlier leader writes nothing, and passwords stay secret."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import psycopg
import pytest
from sqlalchemy import Connection, insert, text
from sqlalchemy.exc import DBAPIError

from gpuscale.common.errors import FailedPreconditionError, InternalError, UnavailableError
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.leadership import Candidate
from gpuscale.common.store.postgres import Postgres
from gpuscale.common.store.store import Prepared, Store
from tests.integration.common.notes import METADATA, NOTES, add, as_group, count
from tests.integration.common.shared_notes import SERVICE, leading
from tests.support.postgresql import PASSWORD, USER, PostgresServer


def setting(name: str) -> Callable[[Connection], object]:
    return lambda connection: connection.execute(text(f"SHOW {name}")).scalar_one()


def ignoring_an_error(connection: Connection) -> None:
    """A work that goes on after a statement of it failed."""
    add(5)(connection)
    with suppress(DBAPIError):
        connection.exec_driver_sql("SELECT * FROM nowhere")


@pytest.fixture
async def weak(url: SecretUrl) -> SecretUrl:
    """A database whose sessions acknowledge before the disk has it."""
    async with await psycopg.AsyncConnection.connect(url.reveal(), autocommit=True) as connection:
        await connection.execute(
            f"ALTER DATABASE {url.path.strip('/')} SET synchronous_commit = off".encode()
        )
    return url


async def test_a_commit_waits_for_the_disk_even_where_the_server_would_not(weak: SecretUrl) -> None:
    async with leading(weak) as (notes, _):
        assert await notes.write(setting("synchronous_commit")) == "on"
        assert await notes.write(setting("idle_in_transaction_session_timeout")) == "3s"


async def test_a_database_without_an_encoding_is_as_good_as_any(postgresql: PostgresServer) -> None:
    """So makes initdb one where no locale is set; the driver gives bytes for texts there unless it is told better."""
    async with leading(postgresql.database(encoding="SQL_ASCII")) as (notes, _):
        assert await notes.read(lambda found: found.execute(text("SELECT 'Grüße'")).scalar_one()) == "Grüße"


async def test_a_work_that_ignores_a_failed_statement_is_never_acknowledged(url: SecretUrl) -> None:
    """PostgreSQL answers the COMMIT of a failed transaction without an error, and undoes it."""
    async with leading(url) as (notes, _):
        with pytest.raises(InternalError):
            await notes.write(ignoring_an_error)
        results = await as_group(notes, add(1), ignoring_an_error)
        assert all(isinstance(result, Exception) for result in results)
        assert await notes.read(count) == 0
        assert await notes.write(add(1)) == 1


async def test_a_write_of_an_earlier_term_is_refused_whatever_it_believes(url: SecretUrl) -> None:
    async with leading(url) as (notes, term):
        await notes.write(add(1))
        async with await psycopg.AsyncConnection.connect(url.reveal(), autocommit=True) as other:
            await other.execute("UPDATE notes.leadership SET epoch = epoch + 1")
        assert term.leads(), "it has not heard of it"
        with pytest.raises(UnavailableError) as caught:
            await notes.write(add(2))
        assert caught.value.reason == "LEAD_LOST"
        assert not term.leads()
        with pytest.raises(UnavailableError, match="no longer leads") as caught:
            await notes.read(count)
        assert caught.value.reason == "LEAD_LOST", "not NOT_LEADER: a call may write first and read then"


async def test_who_takes_over_ends_a_write_under_way(url: SecretUrl, postgresql: PostgresServer) -> None:
    """Else a leader that stands still within a transaction would keep all others from leading.

    The server's own limit for idle transactions does not count after statements in a pipeline, as those of `Prepared`.
    """
    begun, go = threading.Event(), threading.Event()
    put = Prepared(insert(NOTES))

    def slow(connection: Connection) -> None:
        put.run(connection, [{"id": 1, "text": "late"}])
        begun.set()
        assert go.wait(60)

    async with leading(url) as (notes, _):
        writing = asyncio.create_task(notes.write(slow))
        await asyncio.to_thread(begun.wait, 30)
        await asyncio.to_thread(postgresql.cut, f"%{SERVICE} leadership")
        assert await next_term(url) == 0
        go.set()
        with pytest.raises(UnavailableError) as caught:
            await writing
        assert caught.value.reason == "STATE_UNAVAILABLE"
    assert await next_term(url) == 0


async def next_term(url: SecretUrl) -> int:
    """What the next leader finds."""
    async with leading(url) as (notes, _):
        return await notes.read(count)


async def test_a_connection_that_fails_ends_the_term(url: SecretUrl, postgresql: PostgresServer) -> None:
    """Whether the last commit came through only the database knows: it is read anew."""
    async with leading(url) as (notes, term):
        await asyncio.to_thread(postgresql.cut, f"gpuscale-{SERVICE}")
        with pytest.raises(UnavailableError) as caught:
            await notes.write(add(1))
        assert caught.value.reason == "STATE_UNAVAILABLE"
        async with asyncio.timeout(30):
            await term.over.wait()


async def test_a_frozen_leader_loses_the_lead_and_its_open_transaction(url: SecretUrl) -> None:
    """Nobody but the server has to notice: a session that is silent for 3 s is ended."""
    begun, go = threading.Event(), threading.Event()

    def frozen(connection: Connection) -> None:
        add(1)(connection)
        begun.set()
        assert go.wait(60)

    first = Candidate(url, SERVICE, "127.0.0.1:1")
    connection, term = await first._win()  # nobody pings
    async with Store.open(Postgres(url, SERVICE, METADATA, 1, {}, term), name=SERVICE) as notes:
        writing = asyncio.create_task(notes.write(frozen))
        await asyncio.to_thread(begun.wait, 30)
        assert await next_term(url) == 0
        go.set()
        with pytest.raises(UnavailableError):
            await writing
        assert not term.leads()
    term.close()
    await connection.close()


@pytest.mark.parametrize("place", ["password", "half a password", "database"])
async def test_who_is_not_let_in_is_told_at_once_and_without_the_password(
    postgresql: PostgresServer, place: str
) -> None:
    wrong = {
        "password": postgresql.url(password="secret-1234"),
        "half a password": SecretUrl(f"postgresql://{USER}:me@secret-1234@127.0.0.1:1/x"),
        "database": postgresql.url("nowhere"),
    }[place]
    with pytest.raises(FailedPreconditionError) as caught:
        async with Candidate(wrong, SERVICE, "here").term():
            pass
    assert caught.value.reason == "DATABASE_REFUSED"
    told = repr(caught.value) + caught.value.message + repr(caught.value.__cause__)
    assert "secret-1234" not in told
    assert PASSWORD not in told


async def test_a_user_that_may_make_nothing_there_is_told_at_once(postgresql: PostgresServer) -> None:
    url = postgresql.database()
    await asyncio.to_thread(postgresql.run, "CREATE ROLE reader_only LOGIN PASSWORD 'x'")
    reader = SecretUrl(url.reveal().replace(f"{USER}:{PASSWORD}@", "reader_only:x@"))
    with pytest.raises(FailedPreconditionError, match="permission denied") as caught:
        async with Candidate(reader, SERVICE, "here").term():
            pass
    assert caught.value.reason == "DATABASE_REFUSED"
    await asyncio.to_thread(postgresql.run, "DROP ROLE reader_only")


async def test_a_url_that_the_library_refuses_is_not_shown(url: SecretUrl) -> None:
    odd = SecretUrl(f"{url.reveal()}?nonsense=hidden-1234")
    with pytest.raises(FailedPreconditionError) as caught:
        async with Candidate(odd, SERVICE, "here").term():
            pass
    assert "hidden-1234" not in caught.value.message + repr(caught.value.__cause__)


async def test_a_server_that_comes_later_is_waited_for(postgresql_private: PostgresServer) -> None:
    url = postgresql_private.database()
    await asyncio.to_thread(postgresql_private.stop)
    winning = asyncio.create_task(next_term(url))
    await asyncio.sleep(0.3)
    assert not winning.done()
    await asyncio.to_thread(postgresql_private.start)
    assert await asyncio.wait_for(winning, 60) == 0
