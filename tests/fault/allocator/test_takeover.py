"""Two allocators on one PostgreSQL: the leader freezes within a write, and the other one takes over."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gpuscale.common.errors import UnavailableError
from tests.fault.allocator.allocator_pair import Pair, pair, reached
from tests.support.postgresql import PostgresServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(480)


async def test_what_a_frozen_leader_was_about_to_commit_is_refused_when_it_wakes_up(
    tmp_path: Path, postgresql: PostgresServer
) -> None:
    """The write of an earlier leader, with its transaction open: the one GPU there is has been given to another by then."""
    database = postgresql.database()
    async with pair(tmp_path, database, gpus=1) as both:
        old = both.start(0)
        await reached(both.clients[0], 1)
        await both.clients[0].release(await both.clients[0].reserve())
        await both.at(0).kill()
        old = both.start(0, "allocator.store.before_commit=sleep:4")
        await eventually(lambda: both.leads(0), timeout=60.0)
        both.start(1)
        await both.leader()
        late = asyncio.create_task(slow_reserve(both))
        name = database.path.strip("/")
        await asyncio.to_thread(until_writing, postgresql, name)
        os.kill(old.pid, signal.SIGSTOP)
        await asyncio.to_thread(
            postgresql.run,
            "SELECT pg_terminate_backend(l.pid, 30000) FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            f" WHERE l.locktype = 'advisory' AND l.granted AND d.datname = '{name}'",
        )
        await eventually(lambda: both.leads(1), timeout=60.0)
        granted = await eventually(
            lambda: both.clients[1].reserve(ttl=600), timeout=60.0, retry_on=(UnavailableError,)
        )
        os.kill(old.pid, signal.SIGCONT)
        with pytest.raises(UnavailableError):
            await late
        assert await both.leader() == 1
        live = await both.client.live()
        assert [(one.name, one.fence) for one in live] == [(granted.name, granted.fence)]


async def slow_reserve(both: Pair) -> object:
    """A call to the first process that waits for longer than it is frozen."""
    client = both.clients[0]
    client.timeout = 120.0
    while True:
        try:
            return await client.reserve()
        except UnavailableError as error:
            if error.reason != "NO_TELEMETRY":
                raise
            await asyncio.sleep(0.05)


def until_writing(postgresql: PostgresServer, database: str) -> None:
    """Wait until the leader's transaction is open."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'"
        f" AND application_name = 'gpuscale-allocator' AND datname = '{database}'"
    )
    while postgresql.run(query) == [(0,)]:
        pass
