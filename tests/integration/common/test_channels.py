"""Channels: tokens, reconnecting, what they refuse; and one to two servers, which reaches the one that leads and never does a call twice."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import SecretStr

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.errors import GpuscaleError, UnavailableError
from gpuscale.common.rpc.channel import open_channel, open_sync_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import from_rpc_error, rpc_errors, to_rpc_status
from gpuscale.common.security.auth import Authenticator, current_principal
from gpuscale.common.store.postgres import LEASE
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.certificates import Authority
from tests.support.standby import Pair, two_servers
from tests.support.throwaway import Allocator, Fleet, Served, registrations, serve
from tests.support.tokens import authenticator, token
from tests.support.waiting import eventually

ALICE = SecretStr(token("alice"))


@pytest.mark.parametrize(
    "address", ["gpu-01:7070", "192.0.2.1:7070", "[2001:db8::1]:7070", "dns:///localhost:1"]
)
@pytest.mark.parametrize("open_one", [open_channel, open_sync_channel])
async def test_a_token_is_not_sent_over_plain_text(address: str, open_one: Any) -> None:
    with pytest.raises(errors.FailedPreconditionError) as caught:
        open_one(address, token=ALICE)
    assert caught.value.reason == "INSECURE_TRANSPORT"
    assert token("alice") not in caught.value.message


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/nowhere"])
async def test_a_token_may_be_sent_to_this_host(address: str) -> None:
    async with open_channel(address, token=ALICE):
        pass
    with open_sync_channel(address, token=ALICE):
        pass


async def test_a_token_goes_along_with_every_kind_of_call(tmp_path: Path) -> None:
    callers: list[str] = []
    more: list[bool] = []

    async def work(request: Any, context: Any) -> Any:
        callers.append(current_principal().name)
        more.append(("x-more", "metadata") in context.invocation_metadata())
        return Allocator.answer()

    async def nodes(request: Any, context: Any) -> AsyncIterator[Any]:
        callers.append(current_principal().name)
        yield monitor_api.WatchNodesResponse(full=True)

    async def telemetry(requests: Any, context: Any) -> AsyncIterator[Any]:
        callers.append(current_principal().name)
        async for _ in requests:
            yield monitor_internal.StreamTelemetryResponse(acked_seq=5)

    rooms = {"authenticator": authenticator(tmp_path, alice="operator")}
    async with serve(Allocator(work), Fleet(nodes, telemetry), **rooms) as served:  # type: ignore[arg-type]
        async with open_channel(served.address, token=ALICE) as channel:
            mine = Served(served.server, served.address, channel)
            await mine.release(metadata=(("x-more", "metadata"),))
            assert (await mine.fleet.WatchNodes(monitor_api.WatchNodesRequest()).read()).full
            stream = mine.telemetry.StreamTelemetry()
            await stream.write(monitor_internal.StreamTelemetryRequest())
            assert (await stream.read()).acked_seq == 5
            await stream.done_writing()
            assert await stream.code() == grpc.StatusCode.OK
        assert callers == ["alice"] * 3
        assert more == [True]
        await asyncio.to_thread(call_without_a_loop, served.address)
        assert callers == ["alice"] * 7


def call_without_a_loop(address: str) -> None:
    request = allocator_api.GetReservationRequest(name="reservations/r")
    with open_sync_channel(address, token=ALICE) as channel:
        allocator, fleet = allocator_api.AllocatorServiceStub(channel), monitor_api.FleetServiceStub(channel)
        allocator.GetReservation(request, timeout=30)
        allocator.GetReservation.with_call(request, timeout=30)
        allocator.GetReservation.future(request, timeout=30).result()
        assert [answer.full for answer in fleet.WatchNodes(monitor_api.WatchNodesRequest(), timeout=30)] == [
            True
        ]


async def test_a_channel_finds_its_server_again() -> None:
    async with serve() as served, open_channel(served.address) as channel:
        mine = Served(served.server, served.address, channel)
        await mine.get()
        await served.server.stop()
        with pytest.raises(errors.UnavailableError), rpc_errors():
            await mine.get()
        again = Server(ServerOptions(listen=served.address), Authenticator())
        again.add(*registrations(Allocator(), Fleet()))
        again.bind()
        async with again:
            await mine.get(wait_for_ready=True, timeout=30)


GET = allocator_api.GetReservationRequest(name="reservations/r")
WATCH = monitor_api.WatchNodesRequest()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with two_servers() as servers:
        yield servers


@pytest.fixture
async def channel(pair: Pair) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(pair.addresses) as opened:
        yield opened


def get(channel: grpc.aio.Channel | grpc.Channel, seconds: float = 60.0) -> Any:
    stub: Any = allocator_api.AllocatorServiceStub(channel)
    return stub.GetReservation(GET, timeout=seconds)


def watch(channel: grpc.aio.Channel) -> Any:
    return monitor_api.FleetServiceStub(channel).WatchNodes(WATCH)


async def test_a_unary_call_goes_to_the_leader_and_the_next_one_straight_there(
    pair: Pair, channel: grpc.aio.Channel
) -> None:
    pair.lead(pair.second)
    for _ in range(3):
        await get(channel)
    assert (pair.first.calls, pair.second.calls) == (["unary"], ["unary"] * 3)


async def test_a_server_that_is_gone_is_passed_over(pair: Pair, channel: grpc.aio.Channel) -> None:
    await get(channel)
    await pair.stop(pair.first)
    pair.lead(pair.second)
    async with open_channel(pair.addresses) as fresh:
        await get(fresh)
    await get(channel)

    def call() -> None:
        with open_sync_channel(pair.addresses) as fresh:
            get(fresh)

    await asyncio.to_thread(call)


async def test_a_call_under_way_when_its_server_dies_is_not_made_again(
    pair: Pair, channel: grpc.aio.Channel
) -> None:
    """It may have been done: the caller is told. The next call reaches the new leader."""
    pair.first.hold = True
    call = asyncio.ensure_future(get(channel))
    await pair.first.begun.wait()
    assert pair.first.served is not None
    await pair.first.served.server.stop(grace=0.0)
    pair.lead(pair.second)
    with pytest.raises(GpuscaleError), rpc_errors():
        await call
    assert pair.second.calls == []
    await get(channel)
    assert pair.second.calls == ["unary"]


@pytest.mark.parametrize("how", ["read", "iterate"])
async def test_a_stream_of_responses_goes_to_the_leader(
    pair: Pair, channel: grpc.aio.Channel, how: str
) -> None:
    pair.lead(pair.second)
    call = watch(channel)
    if how == "read":
        assert (await call.read()).full
        assert await call.read() is grpc.aio.EOF
    else:
        assert [message.full async for message in call] == [True]
    assert (pair.first.calls, pair.second.calls) == (["nodes"], ["nodes"])
    assert await call.code() is grpc.StatusCode.OK


async def test_a_stream_of_requests_fails_and_the_next_one_goes_to_the_leader(
    pair: Pair, channel: grpc.aio.Channel
) -> None:
    pair.lead(pair.second)
    stub: Any = monitor_internal.TelemetryServiceStub(channel)

    async def once() -> Any:
        call = stub.StreamTelemetry()
        await call.write(monitor_internal.StreamTelemetryRequest())
        answer = await call.read()
        call.cancel()
        return answer

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await once()
    assert from_rpc_error(caught.value).reason == "NOT_LEADER"
    assert (await once()).acked_seq == 7


@pytest.mark.parametrize("known", [False, True], ids=["the answer is not read yet", "the answer is read"])
async def test_a_write_after_the_answer_of_a_standby_says_so_and_moves_on(pair: Pair, *, known: bool) -> None:
    """GRPC's own `write` would say INTERNAL, here and to those who read."""
    status = to_rpc_status(UnavailableError("another leads", reason="NOT_LEADER", metadata=pair.second.told))
    handler = grpc.stream_stream_rpc_method_handler(lambda _, context: context.abort_with_status(status))
    service, method = "gpuscale.internal.monitor.v1.TelemetryService", "StreamTelemetry"
    handlers = grpc.method_handlers_generic_handler(service, {method: handler})
    standby = grpc.server(ThreadPoolExecutor(1), handlers=[handlers])  # answers while this loop stands still
    port = standby.add_insecure_port("127.0.0.1:0")
    standby.start()
    pair.lead(pair.second)
    async with open_channel(f"127.0.0.1:{port},{pair.second.address}") as channel:
        stub: Any = monitor_internal.TelemetryServiceStub(channel)
        call = stub.StreamTelemetry()
        with suppress(grpc.aio.AioRpcError):  # the answer may be there as soon as the connection is
            await call.wait_for_connection()
        time.sleep(0.2)
        if known:
            await call.code()
        for ask in (lambda: call.write(monitor_internal.StreamTelemetryRequest()), call.read):
            with pytest.raises(UnavailableError) as caught, rpc_errors():
                await ask()
            assert caught.value.reason == "NOT_LEADER"
        call = stub.StreamTelemetry()
        await call.write(monitor_internal.StreamTelemetryRequest())
        assert (await call.read()).acked_seq == 7
        call.cancel()
    standby.stop(None).wait()


async def test_a_cancelled_call_is_not_made_again(pair: Pair, channel: grpc.aio.Channel) -> None:
    """Neither by `cancel` nor through the task that awaits it, also while it looks for a leader."""
    pair.lead(None)
    call = get(channel)
    waiting = asyncio.ensure_future(call)
    while len(pair.second.calls) < 2:
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    waiting = asyncio.ensure_future(get(channel))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    pair.lead(pair.first)
    await get(channel)  # what was on its way when it was cancelled came before
    before = len(pair.first.calls)
    await get(channel)
    assert len(pair.first.calls) == before + 1


async def test_code_without_a_loop_follows_too(pair: Pair) -> None:
    pair.lead(pair.second)

    def calls() -> None:
        with open_sync_channel(pair.addresses) as channel:
            allocator = allocator_api.AllocatorServiceStub(channel)
            fleet = monitor_api.FleetServiceStub(channel)
            allocator.GetReservation(GET, timeout=60.0)
            pair.lead(pair.first)
            _, call = allocator.GetReservation.with_call(GET, timeout=60.0)
            assert call.code() is grpc.StatusCode.OK
            pair.lead(pair.second)
            assert [message.full for message in fleet.WatchNodes(WATCH)] == [True]
            assert allocator.GetReservation.future(GET, timeout=60.0).result() is not None

    await asyncio.to_thread(calls)
    assert pair.first.calls == ["unary", "unary", "nodes"]
    assert pair.second.calls == ["unary", "unary", "nodes", "unary"]


async def test_a_stream_that_another_thread_cancels_is_not_opened_again(pair: Pair) -> None:
    """Also while it looks for a leader, between two attempts."""
    pair.lead(None)
    with open_sync_channel(pair.addresses) as channel:
        stream = monitor_api.FleetServiceStub(channel).WatchNodes(WATCH)
        reading = asyncio.create_task(asyncio.to_thread(next, stream))
        while len(pair.second.calls) < 2:
            await asyncio.sleep(0.01)
        stream.cancel()
        pair.lead(pair.first)
        with pytest.raises(grpc.RpcError):
            await reading


async def test_each_server_is_known_by_its_own_name_over_tls(tmp_path: Path) -> None:
    """The certificate of each is checked against its own address, not against the first."""
    authority = Authority(tmp_path)
    options = ServerOptions(tls=authority.server())
    async with (
        serve(options=options) as served,
        open_channel(f"127.0.0.2:1,{served.address}", tls=authority.trust()) as channel,
    ):
        await get(channel)


@asynccontextmanager
async def silenced(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address that leads to another; once the event is set nothing passes, as from a frozen process."""
    frozen, (host, _, port) = asyncio.Event(), address.rpartition(":")
    writers = list[asyncio.StreamWriter]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while (data := await reader.read(65_536)) and not frozen.is_set():
            writer.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, forth = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, forth), pump(behind, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname()), frozen
    finally:
        for writer in writers:
            writer.close()
        server.close()


async def test_a_stream_leaves_a_frozen_leader_as_soon_as_another_leads(pair: Pair) -> None:
    """Else a watch stays on it until the keepalive of other channels ends, after 30 s."""
    pair.first.hold = True
    async with (
        silenced(pair.first.address) as (address, frozen),
        open_channel(f"{address},{pair.second.address}") as channel,
    ):
        call = watch(channel)
        assert (await call.read()).full
        frozen.set()
        with pytest.raises(UnavailableError), rpc_errors():
            await asyncio.wait_for(call.read(), 8 * LEASE)
        pair.lead(pair.second)
        assert (await watch(channel).read()).full
    assert pair.second.calls == ["nodes"]


async def test_a_server_of_the_first_release_is_pinged_less_often_once_it_has_called_that_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It permits a ping each 10 s: core only doubled the second between pings, and streams were cut four times."""
    paces, open_insecure = list[tuple[str, int]](), grpc.aio.insecure_channel

    def noted(target: str, options: Any) -> grpc.aio.Channel:
        paces.append((target, dict(options)["grpc.keepalive_time_ms"]))
        return open_insecure(target, options=options)

    async def silence(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return request

    old = grpc.aio.server(options=(("grpc.http2.min_ping_interval_without_data_ms", 10_000),))
    methods: dict[str, Any] = {"Watch": grpc.unary_unary_rpc_method_handler(silence)}
    old.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("old.Old", methods),))
    address = f"127.0.0.1:{old.add_insecure_port('127.0.0.1:0')}"
    await old.start()
    monkeypatch.setattr(grpc.aio, "insecure_channel", noted)
    async with open_channel(f"{address},127.0.0.2:1") as channel:
        ask: Any = channel.unary_unary("/old.Old/Watch")
        with pytest.raises(UnavailableError, match="Too many pings"), rpc_errors():
            await ask(b"")
        again = [asyncio.ensure_future(ask(b"", timeout=30)) for _ in range(2)]
        assert await eventually(lambda: paces[2:]) == [(address, 20_000)]
        for one in again:
            one.cancel()
    await old.stop(0)
