"""Every call of an async client, unary and stream, raises errors of the tree, has a deadline, and can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import (
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
    UnimplementedError,
    connect_async,
)
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.security.auth import Authenticator

LIST = monitor_api.ListNodesRequest()
WATCH = monitor_api.WatchNodesRequest()
TELEMETRY = monitor_api.StreamTelemetryRequest(hello=monitor_api.Hello(node="n"))
FLEET = "gpuscale.api.monitor.v1.FleetService"


class AsyncFleet(monitor_api.FleetServiceServicer):
    """Answers, waits for ever, or fails after the first message."""

    def __init__(self) -> None:
        self.remaining: list[float | None] = []
        self.ended = asyncio.Event()

    async def ListNodes(self, request: Any, context: Any) -> Any:
        self.remaining.append(context.time_remaining())
        try:
            if request.page_size == 1:
                await asyncio.Event().wait()
        finally:
            self.ended.set()
        return monitor_api.ListNodesResponse()

    async def WatchNodes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield monitor_api.WatchNodesResponse(full=True)
            if request.HasField("min_interval"):
                await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise InvalidArgumentError("no more", field="min_interval")

    async def StreamTelemetry(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request.HasField("snapshot"):
                raise UnavailableError("full", reason="OVERLOADED", retry_after=2.0)
            yield monitor_api.StreamTelemetryResponse(acked_seq=-1)


@asynccontextmanager
async def serving(servicer: AsyncFleet) -> AsyncIterator[str]:
    server = Server(ServerOptions(), Authenticator())
    server.add(Registration(FLEET, partial(monitor_api.add_FleetServiceServicer_to_server, servicer)))
    address = server.bind()
    async with server:
        yield address


async def test_async_unary() -> None:
    fleet = AsyncFleet()
    async with serving(fleet) as address, connect_async(address, timeout=0.3) as client:
        await client.fleet.ListNodes(LIST)
        with pytest.raises(DeadlineExceededError):
            await client.fleet.ListNodes(monitor_api.ListNodesRequest(page_size=1))
        with pytest.raises(UnimplementedError):
            await client.endpoints.GetEndpoint(autoscaler_api.GetEndpointRequest(name="endpoints/x"))
        await client.fleet.ListNodes(LIST, timeout=50)
    assert [remaining is not None and remaining < 1 for remaining in fleet.remaining] == [
        True,
        True,
        False,
    ]


async def test_async_cancelling_a_waiting_task_cancels_the_call() -> None:
    fleet = AsyncFleet()
    async with serving(fleet) as address, connect_async(address) as client:
        async with asyncio.timeout(10):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.fleet.ListNodes(monitor_api.ListNodesRequest(page_size=1))
            await fleet.ended.wait()


async def test_async_streams() -> None:
    fleet = AsyncFleet()
    async with serving(fleet) as address, connect_async(address) as client:
        updates = aiter(client.fleet.WatchNodes(WATCH))
        assert (await anext(updates)).full
        with pytest.raises(InvalidArgumentError):
            await anext(updates)
        stream = client.fleet.WatchNodes(WATCH)
        first = await stream.read()
        assert isinstance(first, monitor_api.WatchNodesResponse)
        with pytest.raises(InvalidArgumentError):
            await stream.read()


async def test_async_a_reader_that_leaves_ends_the_stream() -> None:
    fleet = AsyncFleet()
    request = monitor_api.WatchNodesRequest()
    request.min_interval.seconds = 1
    async with serving(fleet) as address, connect_async(address) as client:
        stream = client.fleet.WatchNodes(request)
        async for _ in stream:
            break
        stream.cancel()
        async with asyncio.timeout(10):
            await fleet.ended.wait()


async def test_async_streams_in_both_directions() -> None:
    async with serving(AsyncFleet()) as address, connect_async(address) as client:
        stream = client.fleet.StreamTelemetry()
        await stream.write(TELEMETRY)
        answer = await stream.read()
        assert isinstance(answer, monitor_api.StreamTelemetryResponse)
        snapshot = monitor_api.StreamTelemetryRequest()
        snapshot.snapshot.SetInParent()
        await stream.write(snapshot)
        with pytest.raises(UnavailableError) as caught:
            await stream.read()
        assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 2.0)
