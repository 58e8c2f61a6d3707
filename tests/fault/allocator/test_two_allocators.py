"""Two allocators on one PostgreSQL: leaders die and freeze, sessions end, the server crashes. No promise may break, for clients too that know nothing of leaders.

What a leader that froze with its transaction open was about to commit: tests/integration/common/test_postgres_store.py.
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


async def drained(watch: Any) -> None:
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
