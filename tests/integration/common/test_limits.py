"""Deadlines, sizes, and how many calls at once."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.rpc import channel as channels
from gpuscale.common.rpc import server as server_module
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.forwarder import Forwarder, Lanes, Upstream
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.store.postgres import LEASE
from gpuscale.common.wire import to_duration
from tests.support.throwaway import ALLOCATOR, Allocator, Fleet, serve
from tests.support.waiting import eventually

HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class Gate:
    """A handler that waits until it is told to go on."""

    def __init__(self) -> None:
        self.waiting = 0
        self.open = asyncio.Event()

    async def work(self, request: Any, context: Any) -> Any:
        self.waiting += 1
        await self.open.wait()
        return allocator_api.GetReservationResponse()

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.waiting += 1
        yield monitor_api.WatchNodesResponse()
        await self.open.wait()


async def test_a_unary_call_without_a_deadline_gets_one() -> None:
    gate = Gate()
    async with serve(Allocator(gate.work), options=ServerOptions(default_deadline=0.2)) as served:
        with pytest.raises(errors.DeadlineExceededError, match=r"no answer within 0\.2 s"), rpc_errors():
            await served.get(timeout=None)


async def test_a_handlers_own_timeout_is_not_taken_for_the_deadline() -> None:
    async def work(request: Any, context: Any) -> Any:
        raise TimeoutError("something inside")

    async with serve(Allocator(work)) as served:
        with pytest.raises(errors.InternalError), rpc_errors():
            await served.get(timeout=None)


async def test_a_deadline_of_the_caller_is_left_alone() -> None:
    async def work(request: Any, context: Any) -> Any:
        await asyncio.sleep(0.4)
        return allocator_api.GetReservationResponse()

    async with serve(Allocator(work), options=ServerOptions(default_deadline=0.1)) as served:
        await served.get(timeout=60.0)


async def test_a_call_that_waits_gets_a_deadline_after_its_wait() -> None:
    """Behind a gateway too, which does not read the request."""

    async def work(request: Any, context: Any) -> Any:
        await asyncio.sleep(0.6)
        return allocator_api.ReserveResponse()

    options = ServerOptions(default_deadline=0.2)
    wait = allocator_api.ReserveRequest(
        request_id=str(uuid.uuid4()), holder="me", ask=allocator_api.Ask(gpu_count=1), wait=to_duration(60)
    )
    async with serve(Allocator(work), options=options) as served:
        gateway = Server(options, Authenticator())
        upstream = Upstream("allocator", served.channel, Lanes(lambda: served.channel), private=True)
        gateway.add_generic(Forwarder({ALLOCATOR: upstream}), [ALLOCATOR])
        address = gateway.bind()
        async with gateway, open_channel(address) as channel:
            for stub in (served.allocator, allocator_api.AllocatorServiceStub(channel)):
                await stub.Reserve(wait)
                wait.wait.Clear()
                with (
                    pytest.raises(errors.DeadlineExceededError, match=r"no answer within 0\.2 s"),
                    rpc_errors(),
                ):
                    await stub.Reserve(wait)
                wait.wait.FromSeconds(60)


async def test_a_stream_gets_no_deadline() -> None:
    gate = Gate()
    async with serve(fleet=Fleet(gate.stream), options=ServerOptions(default_deadline=0.1)) as served:
        call = served.fleet.WatchNodes(monitor_api.WatchNodesRequest())
        await call.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call.code()), 0.4)
        gate.open.set()
        assert await call.code() == grpc.StatusCode.OK


async def test_too_many_unary_calls_are_turned_away() -> None:
    gate = Gate()
    async with serve(Allocator(gate.work), options=ServerOptions(max_concurrent_unary=2)) as served:
        calls = [asyncio.create_task(served.get()) for _ in range(2)]
        await eventually(lambda: gate.waiting == 2)
        with pytest.raises(errors.ResourceExhaustedError) as caught, rpc_errors():
            await served.get()
        assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 1.0)
        assert await served.channel.unary_unary(HEALTH_CHECK)(b"", timeout=60) == b"\x08\x01", (
            "health still answers"
        )
        gate.open.set()
        await asyncio.gather(*calls)
        await served.get()


async def test_calls_that_waited_for_a_busy_loop_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core's limit, of which the first one counts, is 0 s here in place of its default."""
    limit = ("grpc.server_max_unrequested_time_in_server", 0)
    monkeypatch.setattr(server_module, "SERVER_ARGUMENTS", (*server_module.SERVER_ARGUMENTS, limit))
    gate = Gate()
    gate.open.set()
    async with serve(Allocator(gate.work)) as served:
        await served.get()
        calls = [asyncio.create_task(served.get()) for _ in range(20)]
        while gate.waiting < 2:
            await asyncio.sleep(0)
            time.sleep(0.05)  # what has arrived waits meanwhile
        await asyncio.gather(*calls)


async def test_unknown_callers_have_a_few_small_calls_and_take_none_from_others() -> None:
    """Of methods that need no caller, whoever reaches the server may make any number."""
    gate = Gate()

    class Joining(monitor_api.JoinServiceServicer):
        async def Join(self, request: Any, context: Any) -> Any:
            await gate.work(request, context)
            return monitor_api.JoinResponse()

    def prepare(server: Server) -> None:
        add = partial(monitor_api.add_JoinServiceServicer_to_server, Joining())
        server.add(Registration("gpuscale.api.monitor.v1.JoinService", add))

    async with serve(prepare=prepare, options=ServerOptions(max_concurrent_unary=1)) as served:
        join: Any = served.channel.unary_unary("/gpuscale.api.monitor.v1.JoinService/Join")
        right = monitor_api.JoinRequest(token="a.b", node="gpu-1").SerializeToString()
        calls = [join(right, timeout=30) for _ in range(16)]
        await eventually(lambda: gate.waiting == 16)
        with pytest.raises(errors.ResourceExhaustedError) as caught, rpc_errors():
            await join(right, timeout=30)
        assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 1.0)
        await served.get()
        assert await served.channel.unary_unary(HEALTH_CHECK)(b"", timeout=60) == b"\x08\x01"
        gate.open.set()
        await asyncio.gather(*calls)
        await join(right, timeout=30)
        with pytest.raises(errors.InvalidArgumentError) as refused, rpc_errors():
            await join(b"\x1a" + b"x" * 16_384, timeout=30)
        assert refused.value.reason == "REQUEST_TOO_LARGE"


async def test_open_streams_do_not_starve_unary_calls() -> None:
    gate = Gate()
    async with serve(fleet=Fleet(gate.stream), options=ServerOptions(max_concurrent_unary=2)) as served:
        streams = [served.fleet.WatchNodes(monitor_api.WatchNodesRequest()) for _ in range(20)]
        for stream in streams:
            await stream.read()
        await asyncio.gather(served.get(), served.get())
        gate.open.set()
        for stream in streams:
            assert await stream.code() == grpc.StatusCode.OK


async def test_messages_above_4_mib_are_refused_both_ways() -> None:
    async def nodes(request: Any, context: Any) -> AsyncIterator[Any]:
        yield monitor_api.WatchNodesResponse(nodes=[monitor_api.Node(name="x" * (5 * 1024 * 1024))])

    async with serve(fleet=Fleet(nodes)) as served:
        call = served.channel.unary_unary("/gpuscale.api.allocator.v1.AllocatorService/GetReservation")
        with pytest.raises(errors.ResourceExhaustedError), rpc_errors():
            await call(b"\x0a" + b"x" * (4 * 1024 * 1024), timeout=30)
        with pytest.raises(errors.ResourceExhaustedError), rpc_errors():
            await served.fleet.WatchNodes(monitor_api.WatchNodesRequest(), timeout=30).read()
        await served.get()


async def test_metadata_above_16_kib_is_refused() -> None:
    async with serve() as served:
        await served.get(metadata=(("x-padding", "x" * 15_000),))
        with pytest.raises(errors.ResourceExhaustedError), rpc_errors():
            await served.get(metadata=(("x-padding", "x" * 17_000),))


async def test_the_refusal_of_a_hopeless_message_fits_into_the_answer() -> None:
    request = allocator_api.ReserveRequest(holder="x" * 3000)
    request.labels.update({"\n" * 1000 + str(index): "x" * 2000 for index in range(64)})
    async with serve() as served:
        with pytest.raises(errors.InvalidArgumentError) as caught, rpc_errors():
            await served.allocator.Reserve(request, timeout=30)
    assert [field for field, _ in caught.value.violations][:3] == ["request_id", "holder", "ask"]
    assert len(caught.value.violations) == 16


def test_clients_ping_less_often_than_servers_allow() -> None:
    server, client = dict(server_module.SERVER_ARGUMENTS), dict(channels.FOLLOWING_ARGUMENTS)
    assert client["grpc.keepalive_time_ms"] >= 2 * server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] + client["grpc.keepalive_timeout_ms"] <= LEASE * 1000
    usual = dict(channels.CHANNEL_ARGUMENTS)  # gRPC's own, 60 s, holds for a ping that data delays
    assert usual["grpc.http2.ping_timeout_ms"] == usual["grpc.keepalive_timeout_ms"]
    assert "grpc.http2.ping_timeout_ms" not in server, "who is stopped for half a minute keeps its place"
    assert server["grpc.keepalive_permit_without_calls"] == 1
