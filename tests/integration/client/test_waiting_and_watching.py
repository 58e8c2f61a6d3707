"""Waiters end when they should, and watches outlive a restart of their server."""

from __future__ import annotations

import threading
from uuid import uuid4

import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import (
    Client,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    wait_ready,
    wait_ready_async,
    watch,
    watch_async,
)
from gpuscale.client import listing as watching
from gpuscale.testing import FakeServer

ENDPOINT = "endpoints/jobs"


def make_endpoint(client: Client) -> None:
    template = autoscaler_api.ReplicaTemplate(template="worker")
    spec = autoscaler_api.EndpointSpec(min_replicas=2, max_replicas=4, template=template)
    endpoint = autoscaler_api.Endpoint(name=ENDPOINT, spec=spec)
    request = autoscaler_api.CreateEndpointRequest(endpoint=endpoint, request_id=str(uuid4()))
    client.endpoints.CreateEndpoint(request)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuscale.client.retries.PERIOD", 0.01)
    monkeypatch.setattr(watching, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(watching, "_LONGEST_WAIT", 0.01)


async def test_an_endpoint_is_waited_for() -> None:
    with FakeServer() as server, server.connect() as client:
        server.hold_back_replicas()
        make_endpoint(client)
        with pytest.raises(DeadlineExceededError, match="0 of 2 replicas ready") as caught:
            wait_ready(client, ENDPOINT, timeout=0.05)
        assert caught.value.reason == "NOT_READY"
        server.fail("GetEndpoint", UnavailableError("restarting", retry_after=0.01), times=2)
        threading.Timer(0.05, server.set_ready, (ENDPOINT, 2)).start()
        assert wait_ready(client, ENDPOINT, timeout=60).status.ready_replicas == 2
        async with server.connect_async() as async_client:
            with pytest.raises(DeadlineExceededError):
                await wait_ready_async(async_client, ENDPOINT, replicas=3, timeout=0.05)
            assert (await wait_ready_async(async_client, ENDPOINT, timeout=60)).name == ENDPOINT
        with pytest.raises(NotFoundError):
            wait_ready(client, "endpoints/none", timeout=60)


def test_a_watch_begins_anew_where_its_server_went_away() -> None:
    request = monitor_api.WatchNodesRequest()
    with FakeServer() as server, server.connect() as client:
        server.fail("WatchNodes", UnavailableError("restarting"), times=3)
        updates = watch(client.fleet.WatchNodes, request)
        assert next(updates).full
        updates.close()
        server.fail("WatchNodes", InvalidArgumentError("wrong"))
        with pytest.raises(InvalidArgumentError):
            next(watch(client.fleet.WatchNodes, request))


async def test_an_async_watch_begins_anew_too() -> None:
    with FakeServer() as server:
        async with server.connect_async() as client:
            server.fail("WatchNodes", UnavailableError("restarting"), times=2)
            async for update in watch_async(client.fleet.WatchNodes, monitor_api.WatchNodesRequest()):
                assert update.full
                break
