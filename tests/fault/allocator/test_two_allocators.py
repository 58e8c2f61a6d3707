"""Two allocators on one PostgreSQL: leaders die and freeze, sessions end, the server crashes. No promise may break, for clients too that know nothing of leaders.

GPUSCALE_TROUBLE_ROUNDS sets how often each kind of trouble comes, and that another leads within 5 s is asked for then only,
since a busy machine says nothing of it; otherwise a leader dies and the server crashes, once.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.status import from_rpc_error
from tests.fault.allocator.allocator_pair import Pair, pair, plain, reached, settled
from tests.fault.allocator.reservation_traffic import Traffic
from tests.support.postgresql import PostgresServer
from tests.support.waiting import eventually

ROUNDS = int(os.environ.get("GPUSCALE_TROUBLE_ROUNDS", "0"))
CALLERS = 8
SEED = 5
PATIENCE = 2.0
"""Seconds for which a caller waits for an answer; a frozen leader gives none."""
WAIT = 90.0
TAKEOVER = 5.0
"""Seconds from the death of a leader until the other one leads."""
_STORE, _LEAD = "gpuscale-allocator", "gpuscale-allocator leadership"
pytestmark = pytest.mark.timeout(480 + 60 * ROUNDS)

Trouble = Callable[[Pair, PostgresServer], Awaitable[None]]


async def a_leader_dies(both: Pair, server: PostgresServer) -> None:
    """Another process begins in its place, and stands by."""
    place, now = await both.leader(), asyncio.get_running_loop().time
    died = now()
    os.kill(both.at(place).pid, signal.SIGKILL)
    await eventually(lambda: both.leads(1 - place), timeout=WAIT)
    assert not ROUNDS or now() - died < TAKEOVER
    both.start(place)


async def a_leader_freezes(both: Pair, server: PostgresServer) -> None:
    """It wakes up when another one leads, with calls and writes of its own under way."""
    frozen = await both.leader()
    os.kill(both.at(frozen).pid, signal.SIGSTOP)
    try:
        await eventually(lambda: both.leads(1 - frozen), timeout=WAIT)
    finally:
        os.kill(both.at(frozen).pid, signal.SIGCONT)


async def the_sessions_that_write_end(both: Pair, server: PostgresServer) -> None:
    await asyncio.to_thread(server.cut, _STORE)


async def the_sessions_that_lead_end(both: Pair, server: PostgresServer) -> None:
    await asyncio.to_thread(server.cut, _LEAD)


async def the_server_crashes(both: Pair, server: PostgresServer) -> None:
    """A process of it dies, and it ends all others and recovers."""
    query = f"SELECT pid FROM pg_stat_activity WHERE application_name = '{_STORE}'"
    sessions = await asyncio.to_thread(server.run, query)
    for (session,) in sessions[:1]:
        assert isinstance(session, int)
        os.kill(session, signal.SIGKILL)


async def the_server_restarts(both: Pair, server: PostgresServer) -> None:
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)


TROUBLES: tuple[Trouble, ...] = (
    a_leader_dies,
    a_leader_freezes,
    the_sessions_that_write_end,
    the_sessions_that_lead_end,
    the_server_crashes,
    the_server_restarts,
)


async def test_no_promise_breaks_whatever_happens_to_leaders_sessions_and_the_server(
    tmp_path: Path, postgresql_private: PostgresServer
) -> None:
    troubles = list(TROUBLES) * ROUNDS or [a_leader_dies, the_server_crashes]
    Random(SEED).shuffle(troubles)
    async with pair(tmp_path, postgresql_private.database(), gpus=12) as both:
        both.client.timeout = PATIENCE
        both.start(0)
        both.start(1)
        await both.leader()
        await reached(both.client, 12)
        traffic = Traffic(both.client, SEED)
        async with traffic.of(CALLERS):
            for trouble in troubles:
                await granted(traffic, CALLERS)
                await trouble(both, postgresql_private)
            await granted(traffic, CALLERS)
        assert traffic.history.violations() == []


async def granted(traffic: Traffic, count: int) -> None:
    """Wait until so many more were asked for and granted: work is under way."""
    now = asyncio.get_running_loop().time()
    await eventually(
        lambda: sum(one.sent > now for one in traffic.history.grants[-10 * count :]) >= count, timeout=WAIT
    )


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


async def drained(watch: Any) -> None:
    """Read a stream to its end."""
    while await watch.read() is not grpc.aio.EOF:
        pass


async def test_what_a_leader_did_before_it_died_is_not_done_again_through_the_standby(
    tmp_path: Path, postgresql: PostgresServer
) -> None:
    """It dies with its answers unsent: callers repeat their calls at the standby, under the same request ids."""
    dies = "allocator.reserve.before_reply=kill"
    async with settled(tmp_path, postgresql, dies) as both, plain(both.addresses[1]) as client:
        watch = client.stub.WatchReservations(allocator_api.WatchReservationsRequest(), timeout=60)
        assert await watch.read() is not grpc.aio.EOF
        refusals, ids = list[str](), [str(uuid4()) for _ in range(8)]

        async def insist(number: int) -> allocator_api.Reservation:
            while True:
                try:
                    return await client.reserve(request_id=ids[number], ttl=600)
                except UnavailableError as error:
                    refusals.append(error.reason)
                    await asyncio.sleep(error.retry_after or 0.2)

        calls = [asyncio.create_task(insist(number)) for number in range(8)]
        granted = await asyncio.gather(*calls)
        assert (await both.at(0).ended())[0] == -9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(drained(watch), 60)
        assert from_rpc_error(caught.value).reason == "LEAD_LOST"
        assert "LEAD_LOST" in refusals
        assert set(refusals) <= {"LEAD_LOST", "NOT_LEADER", "NO_TELEMETRY"}
        live = await eventually(lambda: client.live(), timeout=60.0, retry_on=(UnavailableError,))
        assert sorted(one.name for one in live) == sorted(one.name for one in granted)
        assert len({one.name for one in granted}) == 8
