"""What a test may do to the fake server, and what it sees then. All else is the real services' own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import grpc
import pytest

from gpuscale import client as library
from gpuscale.api.allocator import v1 as api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.testing import FakeServer
from gpuscale.testing.doubles import FakeHost
from tests.contract.descriptors import rpcs
from tests.support.waiting import eventually_sync

State = api.Reservation.State


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(gpus=2, nodes=2, memory="16GiB", model="Toy GPU") as running:
        yield running


def test_its_gpus_are_as_it_was_told(server: FakeServer) -> None:
    with server.connect() as client:
        nodes = client.fleet.ListNodes(monitor_api.ListNodesRequest()).nodes
        assert [node.name for node in nodes] == ["nodes/node-0", "nodes/node-1"]
        gpus = [gpu for node in nodes for gpu in node.snapshot.gpus]
        assert {(gpu.model, gpu.simulated, gpu.reading.memory_total_bytes) for gpu in gpus} == {
            ("Toy GPU", True, 16 << 30)
        }
        assert client.this_node() == "node-0"
        assert [gpu.milli for gpu in client.reserve(1, gpu_milli=500).gpus] == [500]
        gang = client.reserve(1, member_count=2, gang_strategy="strict_spread", anywhere=True)
        assert {gpu.node for gpu in gang.gpus} == {"node-0", "node-1"}
        with pytest.raises(library.ResourceExhaustedError):
            client.reserve(2)
        with pytest.raises(library.FailedPreconditionError):
            client.reserve(1, min_memory="17GiB")
        with pytest.raises(library.InvalidArgumentError):
            client.reserve(0)


def test_it_begins_once_all_nodes_have_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet tells of a node as soon as it is connected."""
    report = FakeHost.report

    async def late(host: FakeHost, fleet: grpc.aio.Channel) -> None:
        async def connects() -> AsyncIterator[monitor_internal.StreamTelemetryRequest]:
            yield monitor_internal.StreamTelemetryRequest(
                hello=monitor_internal.Hello(node=host.node, epoch=str(uuid4()))
            )
            await asyncio.sleep(0.0 if host.node == "node-0" else 0.2)

        async for _ in monitor_internal.TelemetryServiceStub(fleet).StreamTelemetry(connects()):
            pass
        await report(host, fleet)

    monkeypatch.setattr(FakeHost, "report", late)
    with FakeServer(gpus=1, nodes=2) as server, server.connect() as client:
        assert client.reserve(1, nodes=["nodes/node-1"]).gpus


def test_it_serves_what_a_site_serves_but_the_agent_of_a_host_and_an_audit_log(server: FakeServer) -> None:
    """By the services themselves, so that what they do is what it does."""
    unknown = set()
    with grpc.insecure_channel(server.address) as channel:
        for rpc in rpcs():
            call: Any = channel.unary_stream(rpc.path, lambda message: message.SerializeToString(), None)
            try:
                next(call(rpc.request_class(), timeout=30), None)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    unknown.add(rpc.path.split("/")[1].rpartition(".")[2])
    assert unknown == {"AgentService", "AuditService", "DriverService"}


@pytest.mark.parametrize(
    ("how", "state"),
    [("expire", State.STATE_EXPIRED), ("cancel", State.STATE_CANCELLED), ("lose", State.STATE_LOST)],
)
def test_a_reservation_is_ended_at_once(server: FakeServer, how: str, state: State.ValueType) -> None:
    with server.connect() as client:
        ended, other = client.reserve(1), client.reserve(1)
        getattr(server, how)(ended.name)
        with pytest.raises(library.FailedPreconditionError):
            ended.renew()
        other.renew()
        for unknown in ("reservations/none", "none"):
            with pytest.raises(library.NotFoundError):
                getattr(server, how)(unknown)
    assert [one.state for one in server.reservations] == [state, State.STATE_ACTIVE]
    assert server.reservations[0].end_reason


def test_a_gpu_that_is_lost_is_gone(server: FakeServer) -> None:
    with server.connect() as client:
        lease = client.reserve(1)
        server.lose(lease.name)

        def seen() -> set[str]:
            node = client.fleet.GetNode(monitor_api.GetNodeRequest(name="nodes/node-0")).node
            return {gpu.uuid for gpu in node.snapshot.gpus}

        eventually_sync(lambda: len(seen() - set(lease.gpu_uuids)) == len(seen()) == 1)


async def test_calls_fail_as_often_as_was_said(server: FakeServer) -> None:
    async def get(client: library.AsyncClient) -> None:
        await client.allocator.GetReservation(api.GetReservationRequest(name="reservations/none"))

    server.fail("GetReservation", library.InvalidArgumentError("no"), times=2)
    async with server.connect_async() as client:
        for kind in (library.InvalidArgumentError, library.InvalidArgumentError, library.NotFoundError):
            with pytest.raises(kind):
                await get(client)


def make(client: library.Client, name: str, template: str) -> str:
    wanted = autoscaler_api.ReplicaTemplate(template=template, gpu_count=1)
    spec = autoscaler_api.EndpointSpec(min_replicas=1, max_replicas=3, template=wanted)
    endpoint = autoscaler_api.Endpoint(name=f"endpoints/{name}", spec=spec)
    request = autoscaler_api.CreateEndpointRequest(endpoint=endpoint, request_id=str(uuid4()))
    return client.endpoints.CreateEndpoint(request).endpoint.name


def test_replicas_have_gpus_and_are_ready_at_once_unless_they_are_held_back(server: FakeServer) -> None:
    with server.connect() as client:
        first = make(client, "first", "any-template")
        assert library.wait_ready(client, first, timeout=60).status.ready_replicas == 1
        assert [len(one.gpus) for one in server.reservations] == [1]
        server.hold_back_replicas()
        second = make(client, "second", "another")
        eventually_sync(lambda: len(server.reservations) == 2, timeout=60)
        get = autoscaler_api.GetEndpointRequest(name=second)
        assert client.endpoints.GetEndpoint(get).endpoint.status.ready_replicas == 0
        server.set_ready(second, 1)
        assert library.wait_ready(client, second, timeout=60).status.ready_replicas == 1
        with pytest.raises(library.NotFoundError):
            server.set_ready("endpoints/none", 1)
