"""A standby answers callers that do not look for the leader: what passes through it, what it adds, and what it refuses."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import GpuscaleError, NotFoundError, ResourceExhaustedError, UnavailableError
from gpuscale.common.names import LEASE_KEY
from gpuscale.common.rpc.audit import AuditOptions
from gpuscale.common.rpc.channel import ClientTls, open_channel
from gpuscale.common.rpc.meter import CallMeter
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.rpc.standby import LeaderMethods, Relay, not_leader, serve_by_turns
from gpuscale.common.rpc.status import from_rpc_error, rpc_errors
from gpuscale.common.security.auth import CALLER_KEY, FORWARDED_KEY, Authenticator, find_principal
from gpuscale.common.security.signed_callers import seal
from gpuscale.common.store.leadership import Candidate
from gpuscale.common.store.term import Lead, Term
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.certificates import Authority
from tests.support.postgresql import PostgresServer
from tests.support.throwaway import ALLOCATOR, SERVICES, Allocator, Fleet, Served, registrations
from tests.support.tokens import bearer, write_tokens
from tests.support.waiting import eventually

SPIFFE = "spiffe://example.org/gpuscale"
RELEASE = f"/{ALLOCATOR}/ReleaseReservation"


@dataclass
class Seen:
    """What the leader saw of its last call, and how often it was called."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    caller: Any = None
    remaining: float | None = None
    calls: int = 0
    failure: GpuscaleError | None = None

    def note(self, context: Any) -> None:
        self.calls += 1
        self.metadata = dict(context.invocation_metadata() or ())
        self.caller, self.remaining = find_principal(), context.time_remaining()
        context.set_trailing_metadata((("x-end", "there"),))
        if self.failure is not None:
            raise self.failure

    async def work(self, request: Any, context: Any) -> Any:
        self.note(context)
        return Allocator.answer()

    async def nodes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.note(context)
        yield monitor_api.WatchNodesResponse(full=True)
        await asyncio.Event().wait()

    async def telemetry(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        self.note(context)
        number = 0
        async for _ in requests:
            number += 1
            yield monitor_internal.StreamTelemetryResponse(acked_seq=number)


@dataclass
class Process:
    served: Served
    audit: Path
    meter: CallMeter

    def noted(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self.audit.read_text().splitlines()] if self.audit.exists() else []
        )


class Site:
    """Two processes on one database, the first leading, with mutual TLS and tokens."""

    def __init__(self, folder: Path, postgresql: PostgresServer) -> None:
        self._folder, self._url = folder, postgresql.database()
        self.authority = Authority(folder)
        roles = {"alice": "operator", "bob": "viewer", "service": "operator", "gate": "gateway"}
        self.issued = {
            name: self.authority.client(f"{SPIFFE}/{role}/{name}", name) for name, role in roles.items()
        }
        self._tokens = write_tokens(folder / "tokens.toml", carol="operator")
        with self._tokens.open("a") as file:
            file.write(
                'tenants = ["ml", "vision"]\nmax_priority = 7\n[certificates.alice]\ntenants = ["art"]\n'
            )
        self.seen = Seen()

    def channel(self, process: Process, who: ClientTls) -> grpc.aio.Channel:
        return open_channel(process.served.address, tls=who)

    @asynccontextmanager
    async def process(self, name: str) -> AsyncGenerator[Process]:
        tls, audit = self.authority.server(name, client_ca=self.authority), self._folder / f"{name}.jsonl"
        authenticator = Authenticator(tokens_file=self._tokens, accept_certificates=True)
        meter = CallMeter("throwaway", authenticator)
        server = Server(ServerOptions(tls=tls, audit=AuditOptions(audit, 1 << 20)), authenticator, meter)
        address, stop = server.bind(), asyncio.Event()
        leader = partial(open_channel, tls=self.issued["service"])

        @asynccontextmanager
        async def act(term: Term) -> AsyncGenerator[Sequence[Registration]]:
            servicers = Allocator(self.seen.work), Fleet(self.seen.nodes, self.seen.telemetry)  # pyright: ignore[reportAbstractUsage]
            yield registrations(*servicers)

        candidate = Candidate(self._url, "throwaway", address)
        serving = asyncio.create_task(serve_by_turns(server, candidate, SERVICES, act, stop, leader))
        try:
            async with leader(address) as channel:
                yield Process(Served(server, address, channel), audit, meter)
        finally:
            stop.set()
            await serving


@pytest.fixture
async def site(tmp_path: Path, postgresql: PostgresServer) -> Site:
    return Site(tmp_path, postgresql)


@asynccontextmanager
async def two(site: Site) -> AsyncGenerator[tuple[Process, Process]]:
    async with AsyncExitStack() as stack:
        leader = await stack.enter_async_context(site.process("first"))
        await eventually(lambda: answers(leader))
        standby = await stack.enter_async_context(site.process("second"))
        await eventually(lambda: answers(standby))
        site.seen.calls = 0
        yield leader, standby


async def answers(process: Process) -> bool:
    try:
        await process.served.get()
    except grpc.RpcError as error:
        if from_rpc_error(error).reason not in {"NOT_LEADER", "LEAD_LOST"}:
            raise
        return False
    return True


async def test_every_kind_of_call_passes_with_its_caller_and_its_metadata(site: Site) -> None:
    async with two(site) as (_, standby), site.channel(standby, site.issued["alice"]) as channel:
        through = Served(standby.served.server, standby.served.address, channel)
        more = (("x-mine", "kept"), ("gpuscale-request-id", "mine-1"))
        call = through.allocator.GetReservation(request(), timeout=30, metadata=more)
        await call
        assert dict(await call.trailing_metadata()) == {"x-end": "there"}
        assert (site.seen.caller.name, site.seen.caller.kind) == ("alice", "certificate")
        assert site.seen.caller.tenants == ("art",)
        assert (site.seen.metadata["x-mine"], site.seen.metadata["gpuscale-request-id"]) == ("kept", "mine-1")
        assert site.seen.remaining is not None
        assert 20 < site.seen.remaining < 31
        watch = through.fleet.WatchNodes(monitor_api.WatchNodesRequest(), timeout=30)
        assert (await watch.read()).full
        watch.cancel()
        both = standby.served.telemetry.StreamTelemetry(timeout=30)
        for number in (1, 2):
            await both.write(monitor_internal.StreamTelemetryRequest())
            assert (await both.read()).acked_seq == number
        await both.done_writing()
        assert await both.read() is grpc.aio.EOF
        assert site.seen.caller.name == "service"


def request() -> Any:
    return allocator_api.GetReservationRequest(name="reservations/r")


async def test_tokens_and_gateways_count_at_the_standby_and_give_no_other_rights(site: Site) -> None:
    async with two(site) as (leader, standby):
        async with site.channel(standby, site.issued["bob"]) as plain:
            by_token = Served(standby.served.server, standby.served.address, plain)
            await by_token.get(metadata=bearer("carol"))
            caller = site.seen.caller
            assert (caller.name, caller.kind, caller.tenants) == ("carol", "token", ("ml", "vision"))
            assert caller.limits.max_priority == 7
            assert "authorization" not in site.seen.metadata, "the token goes no further than it must"
        async with site.channel(standby, site.issued["gate"]) as gate:
            by_gateway = Served(standby.served.server, standby.served.address, gate)
            await by_gateway.get(metadata=((CALLER_KEY, "viewer/dave"),))
            caller = site.seen.caller
            assert (caller.name, caller.role.name, caller.via) == ("dave", "VIEWER", "gate")
            with pytest.raises(GpuscaleError, match="needs role operator"), rpc_errors():
                await by_gateway.release(metadata=((CALLER_KEY, "viewer/dave"),))
        await standby.served.release(metadata=((LEASE_KEY, "lease-1"),))
        assert (site.seen.caller.kind, site.seen.caller.lease_token) == ("lease", "lease-1")
        async with site.channel(leader, site.issued["bob"]) as bob:
            forged = Served(leader.served.server, leader.served.address, bob)
            guess = seal(1, "guess", RELEASE, site.seen.caller)
            for value, reason in ((guess, "NOT_A_GATEWAY"), ("", "NOT_A_GATEWAY"), ("9 x y", "NOT_LEADER")):
                with pytest.raises(GpuscaleError) as caught, rpc_errors():
                    await forged.release(metadata=((FORWARDED_KEY, value),))
                assert caught.value.reason == reason


async def test_an_error_keeps_its_details_and_a_call_is_counted_once(site: Site) -> None:
    async with two(site) as (leader, standby):
        await standby.served.release()
        site.seen.failure = NotFoundError("no such", reason="GONE", metadata={"name": "r"})
        with pytest.raises(NotFoundError) as caught, rpc_errors():
            await standby.served.release()
        assert (caught.value.reason, caught.value.metadata) == ("GONE", {"name": "r"})
        assert site.seen.calls == 2
        await eventually(lambda: asyncio.sleep(0, len(leader.noted()) == 2))
        assert [line["result"] for line in leader.noted()] == ["OK", "NOT_FOUND"]
        assert standby.noted() == []
        counted = [
            sum(n for (path, _), n in p.meter.ended.items() if path == RELEASE) for p in (leader, standby)
        ]
        assert counted == [2, 0]
        assert standby.meter.open == 0


async def test_a_standby_refuses_streams_beyond_its_share(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.common.rpc.standby.MOST_STREAMS", 2)
    async with two(site) as (_, standby):
        watches = [
            standby.served.fleet.WatchNodes(monitor_api.WatchNodesRequest(), timeout=30) for _ in range(2)
        ]
        for watch in watches:
            assert (await watch.read()).full
        with pytest.raises(ResourceExhaustedError) as caught, rpc_errors():
            await standby.served.fleet.WatchNodes(monitor_api.WatchNodesRequest(), timeout=30).read()
        assert caught.value.reason == "OVERLOADED"


async def test_two_that_take_each_other_for_the_leader_forward_once(tmp_path: Path) -> None:
    """Neither leads; each relays to the other, and the second of them refuses."""
    hops = list[str]()
    async with AsyncExitStack() as stack:
        addresses, relays = list[str](), list[Relay]()
        for name in ("first", "second"):
            server = Server(ServerOptions(), Authenticator())
            methods = LeaderMethods(SERVICES, lambda: not_leader(""))
            other = Relay(SERVICES, open_channel)

            def divert(details: Any, *, name: str = name, other: Relay = other) -> Any:
                hops.append(name)
                return other.handler(details)

            server.add(*methods.registrations)
            server.forward(divert, methods.open_forwarded)
            addresses.append(server.bind())
            relays.append(other)
            await stack.enter_async_context(server)
            stack.push_async_callback(other.end)
        for one, address in zip(relays, reversed(addresses), strict=True):
            await one.follow(Lead(address, 1, "secret"))
        served = Served(server, addresses[0], await stack.enter_async_context(open_channel(addresses[0])))
        with pytest.raises(UnavailableError) as caught, rpc_errors():
            await served.get()
        assert (caught.value.reason, hops) == ("NOT_LEADER", ["first", "second"])


async def test_a_call_that_comes_while_another_takes_the_lead_may_be_made_again() -> None:
    relay = Relay(SERVICES, open_channel)
    async with AsyncExitStack() as stack:
        server = Server(ServerOptions(), Authenticator())
        methods = LeaderMethods(SERVICES, lambda: not_leader(""))
        found: list[Any] = []

        def divert(details: Any) -> Any:
            found[:] = found or [relay.handler(details)]
            return found[0]

        server.add(*methods.registrations)
        server.forward(divert, methods.open_forwarded)
        address = server.bind()
        await stack.enter_async_context(server)
        served = Served(server, address, await stack.enter_async_context(open_channel(address)))
        await relay.follow(Lead("127.0.0.1:9", 1, "secret"))
        for reason in ("NOT_LEADER", "LEAD_LOST"):
            with pytest.raises(UnavailableError) as caught, rpc_errors():
                await served.get()
            assert caught.value.reason == reason
            await relay.end()
