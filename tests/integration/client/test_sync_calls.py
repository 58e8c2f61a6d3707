"""Every call of a sync client, unary and stream, raises errors of the tree and has a deadline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import (
    CancelledCallError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    connect,
    pages,
)
from tests.support.canned_gateway import canned_gateway, fail
from tests.support.ports import free_port

LIST = monitor_api.ListNodesRequest()
WATCH = monitor_api.WatchNodesRequest()
TELEMETRY = monitor_api.StreamTelemetryRequest(hello=monitor_api.Hello(node="n"))


class Fleet(monitor_api.FleetServiceServicer):
    """Answers slowly, or with an error after the first message."""

    def __init__(self) -> None:
        self.remaining: list[float | None] = []
        self.ended = threading.Event()

    def ListNodes(self, request: Any, context: Any) -> Any:
        self.remaining.append(context.time_remaining())
        if request.page_size == 1:
            threading.Event().wait(1.0)
        return monitor_api.ListNodesResponse(next_page_token="" if request.page_token else "more")

    def GetNode(self, request: Any, context: Any) -> Any:
        fail(context, NotFoundError("no such node", metadata={"name": request.name}))

    def WatchNodes(self, request: Any, context: Any) -> Any:
        self.remaining.append(context.time_remaining())
        context.add_callback(self.ended.set)
        yield monitor_api.WatchNodesResponse(full=True)
        if request.HasField("min_interval"):
            self.ended.wait(10)
        fail(context, InvalidArgumentError("no more", field="min_interval"))

    def StreamTelemetry(self, requests: Any, context: Any) -> Any:
        for request in requests:
            if request.HasField("snapshot"):
                fail(context, UnavailableError("full", reason="OVERLOADED", retry_after=2.0))
            yield monitor_api.StreamTelemetryResponse(acked_seq=-1)


@contextmanager
def served(servicer: Fleet) -> Iterator[str]:
    with futures.ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool)
        monitor_api.add_FleetServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def address(fleet: Fleet) -> Iterator[str]:
    with served(fleet) as where:
        yield where


def test_unary_errors_are_of_the_tree(address: str) -> None:
    with connect(address) as client, pytest.raises(NotFoundError) as caught:
        client.fleet.GetNode(monitor_api.GetNodeRequest(name="nodes/x"))
    assert caught.value.metadata == {"name": "nodes/x"}
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_with_call_and_future(address: str) -> None:
    with connect(address) as client:
        response, call = client.fleet.ListNodes.with_call(LIST)
        assert response.next_page_token == "more"
        assert call.code() is grpc.StatusCode.OK
        with pytest.raises(NotFoundError):
            client.fleet.GetNode.with_call(monitor_api.GetNodeRequest(name="nodes/x"))
        assert client.fleet.ListNodes.future(LIST).result().next_page_token == "more"


def test_stream_errors_are_of_the_tree(address: str) -> None:
    with connect(address) as client:
        stream = client.fleet.WatchNodes(WATCH)
        assert next(stream).full
        with pytest.raises(InvalidArgumentError) as caught:
            next(stream)
    assert caught.value.violations[0].field == "min_interval"


def test_streams_in_both_directions(address: str) -> None:
    with connect(address) as client:
        snapshot = monitor_api.StreamTelemetryRequest()
        snapshot.snapshot.SetInParent()
        stream = client.fleet.StreamTelemetry(iter([TELEMETRY, snapshot]))
        assert next(stream).acked_seq == -1
        with pytest.raises(UnavailableError) as caught:
            next(stream)
    assert (caught.value.reason, caught.value.retry_after) == ("OVERLOADED", 2.0)


def test_a_stream_can_be_cancelled(address: str, fleet: Fleet) -> None:
    request = monitor_api.WatchNodesRequest()
    request.min_interval.seconds = 1
    with connect(address) as client:
        stream = client.fleet.WatchNodes(request)
        next(stream)
        stream.cancel()
        with pytest.raises(CancelledCallError):
            next(stream)
    assert fleet.ended.wait(10)


def test_deadlines(address: str, fleet: Fleet) -> None:
    """A unary call gets the client's, unless it has its own; a stream has none."""
    with connect(address, timeout=0.3) as client:
        with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.3 s"):
            client.fleet.ListNodes(monitor_api.ListNodesRequest(page_size=1))
        client.fleet.ListNodes(LIST, timeout=50)
        next(client.fleet.WatchNodes(WATCH))
    first, second, stream = fleet.remaining
    assert first is not None
    assert first < 0.4
    assert second is not None
    assert 40 < second < 51
    assert stream is None or stream > 10_000


def test_pages(address: str) -> None:
    with connect(address) as client:
        assert len(list(pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()))) == 2


def test_nothing_listens() -> None:
    with connect(f"127.0.0.1:{free_port()}") as client, pytest.raises(UnavailableError) as caught:
        client.fleet.ListNodes(LIST)
    assert caught.value.reason == "NO_ANSWER"


def test_a_closed_client(address: str) -> None:
    client = connect(address)
    client.close()
    with pytest.raises(CancelledCallError, match="closed"):
        client.fleet.ListNodes(LIST)
    with pytest.raises(CancelledCallError, match="closed"):
        client.fleet.WatchNodes(WATCH)


def test_address_and_token_come_from_the_environment(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("GPUSCALE_ADDRESS", address)
    with connect() as client:
        assert client.address == address
        client.fleet.ListNodes(LIST)
    monkeypatch.delenv("GPUSCALE_ADDRESS")
    assert connect().address == "127.0.0.1:7070"
    monkeypatch.setenv("GPUSCALE_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(FailedPreconditionError, match="cannot read the token file"):
        connect()


def test_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    with canned_gateway() as (address, world), connect(address) as client:
        assert client.reserve(2, "me", ttl=60, min_memory_bytes=8 << 30).fence == 41
    assert world.requests[-1].ask.gpu_count == 2
