"""The gateway forwards every kind of call as it is, in both directions, and says which upstream is away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from gpuscale.common.errors import GpuscaleError, UnavailableError
from gpuscale.common.rpc import forwarder as forwarding
from gpuscale.common.rpc import server as servers
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.forwarder import Forwarder, Lanes, Upstream
from gpuscale.common.rpc.interceptor import VERSION
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import REQUEST_ID_KEY, VIA_KEY, from_rpc_error
from gpuscale.common.rpc.wrapped_channel import sending
from gpuscale.common.security.auth import CALLER_KEY, Authenticator
from gpuscale.gateway.main import open_gateway
from gpuscale.gateway.settings import GatewaySettings
from tests.integration.gateway.raw_service import (
    BOTH_STREAMS,
    CLIENT_STREAM,
    FLEET,
    SERVER_STREAM,
    TELEMETRY,
    UNARY,
    UPLOADS,
    RawService,
    ending,
)
from tests.support.ports import free_port
from tests.support.waiting import eventually

ALLOCATOR_METHOD = "/gpuscale.api.allocator.v1.AllocatorService/ListReservations"
MEBIBYTE = 1 << 20


@dataclass
class Chain:
    """A caller's channel to the gateway, and one past it to the upstream."""

    through: grpc.aio.Channel
    direct: grpc.aio.Channel
    upstream: RawService


@asynccontextmanager
async def served(handler: grpc.GenericRpcHandler, *services: str) -> AsyncIterator[grpc.aio.Channel]:
    server = Server(ServerOptions(), Authenticator())
    server.add_generic(handler, services)
    address = server.bind()
    async with server, open_channel(address) as channel:
        yield channel


@asynccontextmanager
async def gateway(fleet_address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a gateway in front of that fleet; nothing runs where its other upstreams should be."""
    settings = GatewaySettings(
        listen="127.0.0.1:0",
        fleet_address=fleet_address,
        allocator_address=f"127.0.0.1:{free_port()}",
        autoscaler_address=f"127.0.0.1:{free_port()}",
    )
    async with open_gateway(settings) as (forwarder, services), served(forwarder, *services) as channel:
        yield channel


@pytest.fixture
async def chain() -> AsyncIterator[Chain]:
    upstream = RawService()
    fleet = Server(ServerOptions(), Authenticator())
    fleet.add_generic(upstream, [FLEET, TELEMETRY, UPLOADS])
    address = fleet.bind()
    async with fleet, open_channel(address) as direct, gateway(address) as through:
        yield Chain(through, direct, upstream)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call, unary or stream, ends with."""
    error = await ending(call)
    assert error is not None
    return error


def why(error: grpc.aio.AioRpcError) -> tuple[type[GpuscaleError], str, dict[str, str]]:
    found = from_rpc_error(error)
    return type(found), found.reason, dict(found.metadata)


async def test_unary(chain: Chain) -> None:
    """Bytes, deadline and metadata go there; bytes and trailing metadata come back."""
    metadata = (("x-trace", "t1"), ("authorization", "Bearer abc"))
    call: Any = chain.through.unary_unary(UNARY)(b"\xff\x00 no message", timeout=30, metadata=metadata)
    assert await call == b"echo \xff\x00 no message"
    assert dict(await call.trailing_metadata()) == {"x-end": "there", VIA_KEY: VERSION}
    seen = chain.upstream
    assert (seen.metadata["x-trace"], seen.metadata["authorization"]) == ("t1", "Bearer abc")
    assert seen.time_remaining is not None
    assert 20 < seen.time_remaining < 31


@pytest.mark.parametrize("sent", [(), (("x-request-id", "r-1"),), (("gpuscale-request-id", "no id!"),)])
async def test_a_call_has_one_id_here_and_there(chain: Chain, sent: tuple[tuple[str, str], ...]) -> None:
    """That which the gateway says, so that its lines and the upstream's are found together."""
    direct: Any = chain.through.unary_unary(UNARY)(b"x", timeout=30, metadata=sent)
    await direct
    there = chain.upstream.metadata[REQUEST_ID_KEY]
    assert (there == "r-1") is (sent == (("x-request-id", "r-1"),))
    assert len(there) == 16 or there == "r-1"
    away: Any = chain.through.unary_unary(ALLOCATOR_METHOD)(b"", timeout=60, metadata=sent)
    assert dict((await failure(away)).trailing_metadata())[REQUEST_ID_KEY]


async def test_what_a_caller_says_of_whom_it_calls_for_stays_here(chain: Chain) -> None:
    """The gateway alone says it, of whom it recognised: whoever calls from its host is nobody to the upstream."""
    call: Any = chain.through.unary_unary(UNARY)(b"x", timeout=30, metadata=((CALLER_KEY, "admin/root"),))
    await call
    assert CALLER_KEY not in chain.upstream.metadata


@pytest.mark.parametrize("request_", [b"invalid", b"stopping"])
async def test_an_error_comes_back_unchanged(chain: Chain, request_: bytes) -> None:
    """Code, text and details; an upstream's own UNAVAILABLE stays its own."""
    for path, call in ((UNARY, "unary_unary"), (SERVER_STREAM, "unary_stream")):
        request = request_ if path == UNARY else b"2 1 " + request_
        direct, through = [
            await failure(getattr(channel, call)(path)(request, timeout=60))
            for channel in (chain.direct, chain.through)
        ]
        assert (through.code(), through.details()) == (direct.code(), direct.details())
        assert tuple(through.trailing_metadata()) == tuple(direct.trailing_metadata())


async def test_client_stream(chain: Chain) -> None:
    forwarder = Forwarder(
        {UPLOADS: Upstream("uploads", chain.direct, Lanes(lambda: chain.direct), private=True)}
    )
    async with served(forwarder, UPLOADS) as through:
        call: Any = through.stream_unary(CLIENT_STREAM)(iter([b"a", b"b"]), timeout=30)
        assert await call == b"a+b"
        assert dict(await call.trailing_metadata()) == {"x-end": "there"}  # no page, so no version
    assert chain.upstream.time_remaining is not None
    assert 20 < chain.upstream.time_remaining < 31


async def test_server_stream(chain: Chain) -> None:
    call: Any = chain.through.unary_stream(SERVER_STREAM)(b"100 8", timeout=60)
    numbers = [int.from_bytes(message[:4], "big") async for message in call]
    assert numbers == list(range(100))


async def test_a_frame_arrives_before_the_next_is_sent(chain: Chain) -> None:
    """Streams are forwarded unbuffered: the one message of a stream that then hangs is there, however small."""
    call: Any = chain.through.unary_stream(SERVER_STREAM)(b"1 4 hang", timeout=60)
    assert await call.read() == (0).to_bytes(4, "big")
    assert not chain.upstream.cancelled.is_set()
    call.cancel()


async def test_streams_in_both_directions(chain: Chain) -> None:
    """Each message is echoed before the next is sent; the upstream ends the call while the caller still could write."""
    call: Any = chain.through.stream_stream(BOTH_STREAMS)(timeout=60)
    for message in (b"a", b"b"):
        await call.write(message)
        assert await call.read() == message
    await call.write(b"end")
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_a_caller_that_is_done_writing_ends_the_upstreams_reading(chain: Chain) -> None:
    call: Any = chain.through.stream_stream(BOTH_STREAMS)(iter([b"a", b"b"]), timeout=60)
    assert [message async for message in call] == [b"a", b"b"]


async def test_an_error_in_the_middle_of_streams(chain: Chain) -> None:
    call: Any = chain.through.stream_stream(BOTH_STREAMS)(timeout=60)
    await call.write(b"a")
    await call.read()
    await call.write(b"invalid")
    assert why(await failure(call))[1:] == ("INVALID_ARGUMENT", {"why": "test"})


async def test_a_refusal_while_requests_are_sent_is_told_as_it_is(chain: Chain) -> None:
    """Not as INTERNAL of gRPC, whose own writer says so of requests larger than the window of a stream."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"invalid"
        while True:
            yield bytes(MEBIBYTE)

    for _ in range(10):
        call: Any = chain.through.stream_stream(BOTH_STREAMS)(timeout=60)
        async with sending(call, requests()):
            assert why(await failure(call))[1:] == ("INVALID_ARGUMENT", {"why": "test"})


@pytest.mark.parametrize(
    ("path", "call", "request_"),
    [
        (UNARY, "unary_unary", b"hang"),
        (SERVER_STREAM, "unary_stream", b"1 1 hang"),
        (BOTH_STREAMS, "stream_stream", [b"mute"]),
    ],
)
async def test_a_cancelled_call_is_cancelled_upstream(
    chain: Chain, path: str, call: str, request_: Any
) -> None:
    under_way: Any = getattr(chain.through, call)(path)(request_, timeout=60)
    async with asyncio.timeout(60):
        await chain.upstream.hanging.wait()
        under_way.cancel()
        await chain.upstream.cancelled.wait()


async def test_a_deadline_ends_the_call_on_both_sides(chain: Chain) -> None:
    limit = 0.3
    while not chain.upstream.hanging.is_set():  # on a busy machine a call may end before it is there
        error = await failure(chain.through.unary_unary(UNARY)(b"hang", timeout=limit))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        limit *= 2
    async with asyncio.timeout(60):
        await chain.upstream.cancelled.wait()


async def test_a_slow_reader_slows_the_upstream(chain: Chain) -> None:
    """1 GiB is on offer; what the caller has not read is neither sent nor kept, but for windows and buffers.

    gRPC's windows grow with the round trip, so that on a busy machine they hold 50 MiB where 10 do otherwise.
    """
    call: Any = chain.through.unary_stream(SERVER_STREAM)(b"1024 %d" % MEBIBYTE, timeout=120)
    await call.read()
    before = -1
    while before != chain.upstream.sent:  # until it stands still
        before = chain.upstream.sent
        await asyncio.sleep(0.3)
    assert chain.upstream.sent < 512
    for _ in range(100):
        await call.read()
    assert chain.upstream.sent >= 100
    call.cancel()


async def test_more_streams_than_a_connection_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes to the upstream at once, and so does a unary call beside them; room that is free is used again."""
    each = 2
    limit = ("grpc.max_concurrent_streams", each)
    others = tuple(pair for pair in servers.SERVER_ARGUMENTS if pair[0] != limit[0])
    with monkeypatch.context() as patch:
        patch.setattr(servers, "SERVER_ARGUMENTS", (*others, limit))
        fleet = Server(ServerOptions(), Authenticator())
    fleet.add_generic(RawService(), [FLEET])
    address = fleet.bind()
    monkeypatch.setattr(forwarding, "STREAMS", each)
    opened: list[grpc.aio.Channel] = []

    def lane() -> grpc.aio.Channel:
        opened.append(open_channel(address))
        return opened[-1]

    async with fleet, open_channel(address) as unary, forwarding.Lanes(lane) as lanes:
        forwarder = Forwarder({FLEET: Upstream("fleet", unary, lanes, private=True)})
        async with served(forwarder, FLEET) as through:
            for connections in (3, 3):
                calls: list[Any] = [
                    through.unary_stream(SERVER_STREAM)(b"1 4 hang", timeout=60) for _ in range(5)
                ]
                for call in calls:
                    assert await call.read() == bytes(4)
                assert await through.unary_unary(UNARY)(b"a", timeout=60) == b"echo a"
                assert len(opened) == connections
                for call in calls:
                    call.cancel()
                await eventually(lambda: not any(lanes._streams.values()))


async def test_an_upstream_that_is_away_is_named(chain: Chain) -> None:
    error = await failure(chain.through.unary_unary(ALLOCATOR_METHOD)(b"", timeout=60))
    assert why(error) == (UnavailableError, "UPSTREAM_UNAVAILABLE", {"service": "allocator"})
    assert error.details() == "the allocator does not answer"


@pytest.mark.parametrize(
    ("path", "call", "request_"),
    [(UNARY, "unary_unary", b"closing"), (SERVER_STREAM, "unary_stream", b"1 1 closing")],
)
async def test_an_upstream_that_closes_is_away(chain: Chain, path: str, call: str, request_: bytes) -> None:
    """Who cancelled nothing is not told that the call was cancelled, which no client repeats."""
    error = await failure(getattr(chain.through, call)(path)(request_, timeout=60))
    assert why(error) == (UnavailableError, "UPSTREAM_UNAVAILABLE", {"service": "fleet"})


async def test_an_upstream_that_is_killed_in_the_middle() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.gateway.raw_service"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.to_thread(process.stdout.readline)).strip()
        async with gateway(address) as through:
            stream: Any = through.unary_stream(SERVER_STREAM)(b"1 1 hang", timeout=30)
            assert await stream.read()
            both: Any = through.stream_stream(BOTH_STREAMS)(timeout=30)
            await both.write(b"a")
            assert await both.read() == b"a"
            unary = asyncio.ensure_future(failure(through.unary_unary(UNARY)(b"hang", timeout=30)))
            await asyncio.sleep(0.2)
            process.kill()
            for error in (await failure(stream), await failure(both), await unary):
                assert why(error) == (UnavailableError, "UPSTREAM_UNAVAILABLE", {"service": "fleet"})
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("path", [f"/{FLEET}/NoSuchMethod", "/no.such.Service/Method"])
async def test_an_unknown_method(chain: Chain, path: str) -> None:
    error = await failure(chain.through.unary_unary(path)(b"", timeout=60))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_nothing_is_left_when_the_upstream_ends_first(chain: Chain) -> None:
    before = len(asyncio.all_tasks())
    for _ in range(20):
        call: Any = chain.through.stream_stream(BOTH_STREAMS)(timeout=60)
        await call.write(b"end")
        assert await call.read() is grpc.aio.EOF
    await eventually(lambda: len(asyncio.all_tasks()) <= before + 1)
