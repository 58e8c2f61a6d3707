"""Of two processes on one database one leads and one stands by: who answers what, and what happens when they change."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.rpc.standby import LeaderMethods, Opening, not_leader, serve_by_turns
from gpuscale.common.rpc.status import LEADER_KEY, from_rpc_error, rpc_errors
from gpuscale.common.rpc.wrapped_channel import FOLLOWS
from gpuscale.common.runtime.tasks import Backoff
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.store.leadership import Candidate
from gpuscale.common.store.term import Term
from tests.support.postgresql import PostgresServer
from tests.support.throwaway import ALLOCATOR, FLEET, SERVICES, Allocator, Fleet, Served, registrations
from tests.support.tokens import authenticator, bearer
from tests.support.waiting import eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def endless(request: Any, context: Any) -> AsyncIterator[monitor_api.WatchNodesResponse]:
    yield monitor_api.WatchNodesResponse(full=True)
    await asyncio.Event().wait()


class Actor:
    """Acts in each term of a process, and remembers the epochs."""

    def __init__(self, allocator: Allocator | None = None) -> None:
        self.epochs: list[int] = []
        self.acting = False
        self._allocator = allocator or Allocator()

    @asynccontextmanager
    async def __call__(self, term: Term) -> AsyncGenerator[Sequence[Registration]]:
        self.epochs.append(term.epoch)
        self.acting = True
        try:
            yield registrations(self._allocator, Fleet(nodes=endless))
        finally:
            self.acting = False


@asynccontextmanager
async def process(
    url: SecretUrl, actor: Opening, authenticator: Authenticator | None = None
) -> AsyncGenerator[Served]:
    """One process of the service, and a channel to it."""
    server, stop = Server(ServerOptions(), authenticator or Authenticator()), asyncio.Event()
    address = server.bind()
    serving = asyncio.create_task(
        serve_by_turns(server, Candidate(url, "throwaway", address), SERVICES, actor, stop, open_channel)
    )
    try:
        async with open_channel(address) as channel:
            yield Served(server, address, channel)
    finally:
        stop.set()
        await serving


@asynccontextmanager
async def two(url: SecretUrl, first: Actor, second: Actor) -> AsyncGenerator[tuple[Served, Served]]:
    """A leader and a standby that knows it."""
    async with AsyncExitStack() as stack:
        leader = await stack.enter_async_context(process(url, first))
        await eventually(lambda: asyncio.sleep(0, first.acting))
        standby = await stack.enter_async_context(process(url, second))
        await eventually(lambda: knows(standby, leader.address))
        yield leader, standby


async def refused(served: Served, *metadata: tuple[str, str]) -> errors.GpuscaleError:
    with pytest.raises(errors.UnavailableError) as caught, rpc_errors():
        await served.get(metadata=(FOLLOWS, *metadata))
    return caught.value


async def knows(served: Served, leader: str) -> bool:
    """Whether it turns calls away to this leader."""
    return (await refused(served)).metadata == {"leader": leader}


async def health(served: Served, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)).status


async def test_a_standby_tells_clients_that_follow_who_leads(postgresql: PostgresServer) -> None:
    """And answers name the leader to an admin, also those that come through the standby."""

    async def named(asked: Served) -> object:
        request = allocator_api.GetReservationRequest(name="reservations/r")
        call = asked.allocator.GetReservation(request, timeout=30)
        with rpc_errors():
            await call
        return dict(await call.trailing_metadata())[LEADER_KEY]

    async with two(postgresql.database(), Actor(), Actor()) as (leader, standby):
        assert await named(leader) == leader.address
        through = await eventually(lambda: named(standby), retry_on=(errors.UnavailableError,))
        assert through == leader.address
        error = await refused(standby)
        assert (error.reason, error.metadata) == ("NOT_LEADER", {"leader": leader.address})
        assert error.retry_after == pytest.approx(0.2)
        for call in (
            standby.fleet.WatchNodes(monitor_api.WatchNodesRequest(), timeout=30, metadata=(FOLLOWS,)),
            standby.telemetry.StreamTelemetry(iter(()), timeout=30, metadata=(FOLLOWS,)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await call.read()
            assert from_rpc_error(caught.value).reason == "NOT_LEADER"
        with pytest.raises(errors.InvalidArgumentError), rpc_errors():
            await standby.get("no such name")
        assert [await health(standby, name) for name in ("", ALLOCATOR, FLEET)] == [
            SERVING,
            NOT_SERVING,
            NOT_SERVING,
        ]
        assert [await health(leader, name) for name in ("", ALLOCATOR, FLEET)] == [SERVING] * 3


async def test_a_standby_says_who_leads_and_why_it_does_not_know(
    postgresql: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says too that all is well again: else its last word would be of the trouble."""
    caplog.set_level("INFO")
    url = postgresql.database()
    async with Candidate(url, "throwaway", "here:1").term(), process(url, Actor()) as standby:
        await eventually(lambda: knows(standby, "here:1"))
        postgresql.run(f"ALTER DATABASE {url.path.strip('/')} ALLOW_CONNECTIONS false")
        cut_standby(postgresql, url)
        error = await eventually(lambda: without_leader(standby))
        assert error.message == (
            "this process does not lead; the leader is not known:"
            f" PostgreSQL at {url} cannot be used, as its log says"
        )
        postgresql.run(f"ALTER DATABASE {url.path.strip('/')} ALLOW_CONNECTIONS true")
        await eventually(lambda: knows(standby, "here:1"))
        words = [one.msg for one in caplog.records if one.name == "gpuscale.common.store.leadership"]
        told = [(one["event"], one.get("leader")) for one in words if isinstance(one, dict)]
        assert (told[0], told[-1]) == (("another process leads", "here:1"),) * 2
        assert ("cannot compete for the lead", None) in told


@pytest.mark.parametrize(
    ("role", "why"),
    [
        ("admin", "PostgreSQL at postgresql://127.0.0.1:1/x cannot be used, as its log says"),
        ("viewer", "its database cannot be used"),
    ],
)
async def test_only_an_admin_reads_where_the_database_is(tmp_path: Path, role: str, why: str) -> None:
    nowhere = SecretUrl("postgresql://127.0.0.1:1/x")
    async with process(nowhere, Actor(), authenticator(tmp_path, one=role)) as standby:
        error = await eventually(lambda: with_cause(standby, *bearer("one")))
    assert error.message.endswith(f"; the leader is not known: {why}")


async def with_cause(served: Served, *metadata: tuple[str, str]) -> errors.GpuscaleError | None:
    """The error of a call, once it says why no leader is known."""
    error = await refused(served, *metadata)
    return error if "not known: " in error.message else None


async def without_leader(served: Served) -> errors.GpuscaleError | None:
    """The error of a call, once it names no leader."""
    error = await refused(served)
    return None if error.metadata else error


async def test_a_leader_that_is_cut_off_ends_its_calls_and_stands_by(postgresql: PostgresServer) -> None:
    begun = asyncio.Event()

    async def stuck(request: Any, context: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    url, first, second = postgresql.database(), Actor(Allocator(work=stuck)), Actor()
    async with two(url, first, second) as (old, new):
        watch = old.fleet.WatchNodes(monitor_api.WatchNodesRequest(), timeout=60)
        assert (await watch.read()).full
        waiting = asyncio.create_task(old.get(timeout=60))
        await begun.wait()
        await asyncio.to_thread(cut_leader, postgresql, url)
        for open_call in (watch.read(), waiting):
            with pytest.raises(grpc.RpcError) as caught:
                await open_call
            assert from_rpc_error(caught.value).reason == "LEAD_LOST"
        await eventually(lambda: asyncio.sleep(0, second.acting))
        assert not first.acting
        await new.get()
        await eventually(lambda: knows(old, new.address))
        assert await health(old, ALLOCATOR) == NOT_SERVING
        assert (first.epochs, second.epochs) == ([1], [2])


def cut_leader(postgresql: PostgresServer, url: SecretUrl) -> None:
    """End the session that holds the lock, and no other."""
    postgresql.run(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
        f" WHERE locktype = 'advisory' AND granted AND datname = '{url.path.strip('/')}'"
    )


def cut_standby(postgresql: PostgresServer, url: SecretUrl) -> None:
    """End the session of the one that waits for the lock."""
    postgresql.run(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE application_name LIKE '%leadership'"
        f" AND datname = '{url.path.strip('/')}' AND pid NOT IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')"
    )


async def test_a_leader_answers_nothing_from_the_moment_its_session_ends(postgresql: PostgresServer) -> None:
    """Before its next question to the server could tell it."""
    url, methods = postgresql.database(), LeaderMethods(SERVICES, lambda: not_leader(""))
    async with Candidate(url, "throwaway", "here").term() as term:
        methods.begin(term, registrations(Allocator(), Fleet()))
        assert term.leads()
        assert methods._find(f"/{ALLOCATOR}/GetReservation")
        cut_leader(postgresql, url)  # blocks the event loop, so nothing else has run when we look
        assert not term.leads()
        with pytest.raises(errors.UnavailableError, match="does not lead"):
            methods._find(f"/{ALLOCATOR}/GetReservation")


async def test_a_term_that_cannot_begin_is_tried_again_ever_later(
    postgresql: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where PostgreSQL has too few connections: two processes would log four lines in each fifth of a second."""
    waits = list[float]()

    class Noted(Backoff):
        def next(self) -> float:
            waits.append(self._ceiling)
            super().next()
            return 0.0

    monkeypatch.setattr("gpuscale.common.rpc.standby.Backoff", Noted)
    actor, begun = Actor(), 0

    @asynccontextmanager
    async def at_the_fourth(term: Term) -> AsyncGenerator[Sequence[Registration]]:
        nonlocal begun
        begun += 1
        if begun < 4:
            raise errors.UnavailableError("too many connections", reason="STATE_UNAVAILABLE")
        async with actor(term) as registrations:
            yield registrations

    url = postgresql.database()
    async with process(url, at_the_fourth):
        await eventually(lambda: asyncio.sleep(0, actor.epochs == [4]))
        cut_leader(postgresql, url)
        await eventually(lambda: asyncio.sleep(0, actor.epochs == [4, 5]))
    assert waits == [0.2, 0.4, 0.8, 0.2]


async def test_an_act_that_cannot_begin_ends_the_program(postgresql: PostgresServer) -> None:
    @asynccontextmanager
    async def unreadable(term: Term) -> AsyncGenerator[Sequence[Registration]]:
        raise errors.FailedPreconditionError("of a newer version", reason="STATE_VERSION")
        yield ()

    server = Server(ServerOptions(), Authenticator())
    candidate = Candidate(postgresql.database(), "throwaway", server.bind())
    with pytest.raises(errors.FailedPreconditionError, match="newer") as caught:
        await serve_by_turns(server, candidate, SERVICES, unreadable, asyncio.Event(), open_channel)
    assert not hasattr(caught.value, "__notes__"), "an operator's to mend: one line, and no traceback"
