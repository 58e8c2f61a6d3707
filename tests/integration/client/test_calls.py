"""Every call of a client, sync and async, unary and stream, raises errors of the tree, has a deadline, and can be cancelled."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from gpuscale import client as library
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.contract.cli.canned_gateway import fail
from tests.support.waiting import eventually

LIST = monitor_api.ListNodesRequest()
WATCH = monitor_api.WatchNodesRequest()
TELEMETRY = monitor_internal.StreamTelemetryRequest(hello=monitor_internal.Hello(node="n"))


class Fleet(monitor_api.FleetServiceServicer, monitor_internal.TelemetryServiceServicer):
    """Answers slowly, or with an error after the first message."""

    def __init__(self) -> None:
        self.remaining: list[float | None] = []
        self.ended = threading.Event()

    def ListNodes(self, request: Any, context: Any) -> Any:
        self.remaining.append(context.time_remaining())
        if request.page_size == 1:
            context.add_callback(self.ended.set)
            self.ended.wait(60)
        return monitor_api.ListNodesResponse(next_page_token="" if request.page_token else "more")

    def GetNode(self, request: Any, context: Any) -> Any:
        fail(context, library.NotFoundError("no such node", metadata={"name": request.name}))

    def WatchNodes(self, request: Any, context: Any) -> Any:
        self.remaining.append(context.time_remaining())
        context.add_callback(self.ended.set)
        yield monitor_api.WatchNodesResponse(full=True)
        if request.HasField("min_interval"):
            self.ended.wait(60)
        fail(context, library.InvalidArgumentError("no more", field="min_interval"))

    def StreamTelemetry(self, requests: Any, context: Any) -> Any:
        for request in requests:
            if request.HasField("snapshot"):
                fail(context, library.UnavailableError("full", reason="OVERLOADED", retry_after=2.0))
            yield monitor_internal.StreamTelemetryResponse(acked_seq=-1)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def address(fleet: Fleet) -> Iterator[str]:
    with futures.ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        monitor_api.add_FleetServiceServicer_to_server(fleet, server)
        monitor_internal.add_TelemetryServiceServicer_to_server(fleet, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def test_unary_errors_are_of_the_tree(address: str) -> None:
    with library.connect(address) as client, pytest.raises(library.NotFoundError) as caught:
        client.fleet.GetNode(monitor_api.GetNodeRequest(name="nodes/x"))
    assert caught.value.metadata == {"name": "nodes/x"}
    assert isinstance(caught.value.__context__, grpc.RpcError)
    assert "RpcError" not in "".join(traceback.format_exception(caught.value))


def test_with_call_and_future(address: str) -> None:
    with library.connect(address) as client:
        response, call = client.fleet.ListNodes.with_call(LIST)
        assert response.next_page_token == "more"
        assert call.code() is grpc.StatusCode.OK
        with pytest.raises(library.NotFoundError):
            client.fleet.GetNode.with_call(monitor_api.GetNodeRequest(name="nodes/x"))
        assert client.fleet.ListNodes.future(LIST).result().next_page_token == "more"


def test_stream_errors_are_of_the_tree(address: str) -> None:
    with library.connect(address) as client:
        stream = client.fleet.WatchNodes(WATCH)
        assert next(stream).full
        with pytest.raises(library.InvalidArgumentError) as caught:
            next(stream)
    assert caught.value.violations[0].field == "min_interval"


def test_a_stream_can_be_cancelled(address: str, fleet: Fleet) -> None:
    request = monitor_api.WatchNodesRequest()
    request.min_interval.seconds = 1
    with library.connect(address) as client:
        stream = client.fleet.WatchNodes(request)
        next(stream)
        stream.cancel()
        with pytest.raises(library.CancelledCallError):
            next(stream)
    assert fleet.ended.wait(60)


def test_deadlines(address: str, fleet: Fleet) -> None:
    """A unary call gets the client's, unless it has its own; a stream has none."""
    with library.connect(address, timeout=1.5) as client:
        client.fleet.ListNodes(LIST, timeout=50)
        for _ in range(20):  # on a busy machine a call may end before it is there
            if len(fleet.remaining) > 1:
                break
            with pytest.raises(library.DeadlineExceededError, match=r"no answer within 1\.5 s"):
                client.fleet.ListNodes(monitor_api.ListNodesRequest(page_size=1))
        next(client.fleet.WatchNodes(WATCH))
    own, *default, stream = fleet.remaining
    assert own is not None
    assert 10 < own < 51
    assert all(one is not None and one < 1.6 for one in default)
    assert stream is None or stream > 10_000


def test_a_closed_client(address: str) -> None:
    client = library.connect(address)
    client.close()
    with pytest.raises(library.CancelledCallError, match="closed"):
        client.fleet.ListNodes(LIST)
    with pytest.raises(library.CancelledCallError, match="closed"):
        client.fleet.WatchNodes(WATCH)


def test_address_and_token_come_from_the_environment(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("GPUSCALE_ADDRESS", address)
    with library.connect() as client:
        assert client.address == address
        client.fleet.ListNodes(LIST)
    monkeypatch.delenv("GPUSCALE_ADDRESS")
    assert library.connect().address == "127.0.0.1:7070"
    monkeypatch.setenv("GPUSCALE_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(library.FailedPreconditionError, match="No such file or directory"):
        library.connect()


async def test_async_unary(address: str, fleet: Fleet) -> None:
    async with library.connect_async(address, timeout=1.5) as client:
        await client.fleet.ListNodes(LIST, timeout=50)
        for _ in range(20):
            if len(fleet.remaining) > 1:
                break
            with pytest.raises(library.DeadlineExceededError):
                await client.fleet.ListNodes(monitor_api.ListNodesRequest(page_size=1))
        with pytest.raises(library.UnimplementedError):
            await client.endpoints.GetEndpoint(
                autoscaler_api.GetEndpointRequest(name="endpoints/x"), timeout=50
            )
    assert [one is not None and one < 2 for one in fleet.remaining[:2]] == [False, True]


async def test_async_cancelling_a_waiting_task_cancels_the_call(address: str, fleet: Fleet) -> None:
    async with library.connect_async(address) as client:
        asked = monitor_api.ListNodesRequest(page_size=1)
        waiting = asyncio.ensure_future(client.fleet.ListNodes(asked, timeout=60))
        await eventually(lambda: fleet.remaining)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await eventually(fleet.ended.is_set)


async def test_async_streams(address: str) -> None:
    async with library.connect_async(address) as client:
        updates = aiter(client.fleet.WatchNodes(WATCH))
        assert (await anext(updates)).full
        with pytest.raises(library.InvalidArgumentError):
            await anext(updates)
        stream = client.fleet.WatchNodes(WATCH)
        first = await stream.read()
        assert isinstance(first, monitor_api.WatchNodesResponse)
        with pytest.raises(library.InvalidArgumentError):
            await stream.read()


async def test_async_a_reader_that_leaves_ends_the_stream(address: str, fleet: Fleet) -> None:
    request = monitor_api.WatchNodesRequest()
    request.min_interval.seconds = 1
    async with library.connect_async(address) as client:
        stream = client.fleet.WatchNodes(request)
        async for _ in stream:
            break
        stream.cancel()
        await eventually(fleet.ended.is_set)


async def test_async_streams_in_both_directions(address: str) -> None:
    async with library.connect_async(address) as client:
        stream = monitor_internal.TelemetryServiceStub(client._channel).StreamTelemetry()
        await stream.write(TELEMETRY)
        answer = await stream.read()
        assert isinstance(answer, monitor_internal.StreamTelemetryResponse)
        snapshot = monitor_internal.StreamTelemetryRequest()
        snapshot.snapshot.SetInParent()
        await stream.write(snapshot)
        with pytest.raises(library.UnavailableError) as caught:
            await stream.read()
        assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 2.0)
