"""A server stops within its time, whatever its calls do, and tells them so."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Authenticator
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.throwaway import Allocator, Fleet, Served, read_to_the_end, serve
from tests.support.waiting import eventually


async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
    yield monitor_api.WatchNodesResponse()
    await asyncio.Event().wait()


def watch(served: Served) -> Any:
    return served.fleet.WatchNodes(monitor_api.WatchNodesRequest())


async def test_streams_end_at_once_and_say_why() -> None:
    """P23: 50 open streams of either side."""
    closed: list[str] = []

    async def nodes(request: Any, context: Any) -> AsyncIterator[Any]:
        yield monitor_api.WatchNodesResponse()
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("nodes")

    async def telemetry(requests: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for _ in requests:
                yield monitor_internal.StreamTelemetryResponse()
        finally:
            closed.append("telemetry")

    async with serve(fleet=Fleet(nodes, telemetry)) as served:
        calls = [watch(served) for _ in range(25)]
        for _ in range(25):
            call = served.telemetry.StreamTelemetry()
            await call.write(monitor_internal.StreamTelemetryRequest())
            calls.append(call)
        for call in calls:
            await call.read()
        begun = time.monotonic()
        await served.server.stop(grace=60.0)
        assert time.monotonic() - begun < 30.0
        for call in calls:
            with pytest.raises(errors.UnavailableError) as caught:
                await read_to_the_end(call)
            assert caught.value.reason == "SHUTTING_DOWN"
    assert sorted(closed) == ["nodes"] * 25 + ["telemetry"] * 25


async def test_unary_calls_finish_within_the_grace() -> None:
    """P23: 50 calls in flight; those that come meanwhile are turned away."""
    waiting, go_on = 0, asyncio.Event()

    async def work(request: Any, context: Any) -> Any:
        nonlocal waiting
        waiting += 1
        await go_on.wait()
        return Allocator.answer()

    async with serve(Allocator(work)) as served:
        calls = [asyncio.create_task(served.get()) for _ in range(50)]
        await eventually(lambda: waiting == 50)
        stopping = asyncio.create_task(served.server.stop(grace=60.0))
        await asyncio.sleep(0)
        for _ in range(3):
            with pytest.raises(errors.UnavailableError) as caught, rpc_errors():
                await served.get()
            assert caught.value.reason == "SHUTTING_DOWN"
        go_on.set()
        await asyncio.gather(*calls)
        await stopping


async def test_unary_calls_that_take_longer_are_told() -> None:
    begun = asyncio.Event()

    async def work(request: Any, context: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    async with serve(Allocator(work)) as served:
        call = asyncio.create_task(served.get())
        await begun.wait()
        started = time.monotonic()
        await served.server.stop(grace=0.3)
        assert 0.25 < time.monotonic() - started < 30.0
        with pytest.raises(errors.UnavailableError) as caught, rpc_errors():
            await call
    assert caught.value.reason == "SHUTTING_DOWN"


async def test_a_subscriber_that_does_not_read_holds_nothing_up() -> None:
    """The server waits in a write when it is told to stop."""
    written = 0

    async def nodes(request: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal written
        while True:
            yield monitor_api.WatchNodesResponse(nodes=[monitor_api.Node(name="x" * 1_000_000)])
            written += 1

    async with serve(fleet=Fleet(nodes)) as served:
        call = watch(served)
        await call.read()
        seen = -1

        def stuck() -> bool:
            nonlocal seen
            seen, before = written, seen
            return seen == before

        await eventually(stuck, interval=0.3)
        begun = time.monotonic()
        await served.server.stop(grace=1.0)
        assert time.monotonic() - begun < 30.0
        call.cancel()


async def test_a_handler_that_ignores_its_cancellation_holds_nothing_up() -> None:
    begun, released = asyncio.Event(), asyncio.Event()

    async def stubborn(request: Any, context: Any) -> Any:
        begun.set()
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return Allocator.answer()

    async with serve(Allocator(stubborn)) as served:
        call = asyncio.create_task(served.get())
        await begun.wait()
        started = time.monotonic()
        await served.server.stop(grace=0.2)
        assert time.monotonic() - started < 30.0
        with pytest.raises((errors.UnavailableError, errors.CancelledCallError)), rpc_errors():
            await call
        released.set()
        await asyncio.sleep(0)


async def test_stopping_twice_or_before_the_start_is_harmless() -> None:
    async with serve() as served:
        await served.get()
        await served.server.stop()
    await Server(ServerOptions(), Authenticator()).stop()
