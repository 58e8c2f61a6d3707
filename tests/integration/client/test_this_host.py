"""Which node this host is, and what a client asks to know it."""

from __future__ import annotations

import asyncio
import os
import pickle
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuscale import client as library
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.client.this_host import ThisHost, admit, only_here
from gpuscale.common.rpc.channel import open_sync_channel
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.runtime.tasks import network_namespace, read_boot_id
from gpuscale.common.security.auth import Authenticator, Role
from gpuscale.monitor.agent.host import ProcHost
from gpuscale.testing import FakeServer
from tests.contract.cli.canned_gateway import canned_gateway
from tests.support.cli import run_cli
from tests.support.ports import free_port
from tests.support.tokens import authenticator

OTHER = ["nodes/node-1"]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Two nodes, of which the first is this host."""
    with FakeServer(gpus=2, nodes=2) as running:
        yield running


def node(name: str, *, boot_id: str = "", namespace: int = 0) -> monitor_api.Node:
    host = types_api.Host(boot_id=boot_id or read_boot_id(), network_namespace=namespace)
    return monitor_api.Node(name=f"nodes/{name}", snapshot=types_api.Snapshot(node=name, host=host))


ELSEWHERE = "00000000-0000-4000-8000-000000000001"
OWN = network_namespace()


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([], None),
        ([node("a", boot_id=ELSEWHERE)], None),
        ([node("a", boot_id=ELSEWHERE), node("b")], "b"),
        ([node("a", namespace=OWN + 1)], "a"),
        ([node("a", namespace=OWN + 1), node("b", namespace=OWN)], "b"),
        ([node("a"), node("b")], library.FailedPreconditionError),
        ([node("a", namespace=OWN), node("b", namespace=OWN)], library.FailedPreconditionError),
        ([node("a", namespace=OWN + 1), node("b", namespace=OWN + 2)], library.FailedPreconditionError),
    ],
    ids=["no node", "other kernel", "one", "a container's", "namespaces", "older agents", "alike", "neither"],
)
def test_the_node_that_this_host_is(nodes: list[monitor_api.Node], found: Any) -> None:
    if not isinstance(found, type):
        assert ThisHost().find(nodes) == found
        return
    with pytest.raises(library.FailedPreconditionError, match=r"any of a, b.*GPUSCALE_NODE=a") as caught:
        ThisHost().find(nodes)
    assert caught.value.reason == "NODE_AMBIGUOUS"


def test_an_agent_tells_the_namespace_that_clients_beside_it_are_in() -> None:
    assert ProcHost("boot").identity().network_namespace == OWN != 0


def test_what_is_said_counts_unless_the_agent_here_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCALE_NODE", "nodes/b")
    assert ThisHost().find([node("a"), node("b")]) == "b"
    assert ThisHost().find([node("a", boot_id=ELSEWHERE)]) == "b"
    with pytest.raises(library.FailedPreconditionError, match="is configured as c, but its agent reports a"):
        ThisHost("c").find([node("a")])
    with pytest.raises(library.FailedPreconditionError, match="is configured as b, but its agent reports a"):
        ThisHost("b").find([node("a", namespace=OWN), node("b", namespace=OWN + 1)])
    monkeypatch.setenv("GPUSCALE_NODE", "No Node")
    with pytest.raises(
        library.InvalidArgumentError, match="GPUSCALE_NODE: 'No Node' is not the id of a node"
    ):
        library.connect()


def test_gpus_are_of_this_host_unless_it_is_said_otherwise(server: FakeServer) -> None:
    with server.connect() as client:
        with client.reserve(2) as lease:
            assert {gpu.node for gpu in lease.gpus} == {"node-0"}
            with pytest.raises(
                library.ResourceExhaustedError, match=r"only this host, node-0, was asked.*anywhere"
            ) as no:
                client.reserve(1)
            assert len(traceback.format_exception(no.value)) == 4, "a refusal is the call and its message"
            assert {gpu.node for gpu in client.reserve(1, anywhere=True).gpus} == {"node-1"}
        assert client.this_node() == "node-0"


@pytest.mark.parametrize(("obstacle", "elsewhere"), [("NO_CAPACITY", True), ("QUOTA_EXCEEDED", False)])
def test_other_hosts_are_named_where_they_could_help(obstacle: str, elsewhere: bool) -> None:
    late = library.ResourceExhaustedError(
        "not served", reason="WAIT_TIMEOUT", metadata={"last_reason": obstacle}
    )
    assert ("only this host" in only_here(late, "a", "ask all").message) == elsewhere


def refused(lease: library.Lease | library.AsyncLease) -> library.FailedPreconditionError:
    with pytest.raises(library.FailedPreconditionError) as caught:
        lease.env()
    with pytest.raises(library.FailedPreconditionError):
        assert lease.cuda_visible_devices
    assert str(pickle.loads(pickle.dumps(caught.value))) == caught.value.message
    return caught.value


def test_gpus_of_another_host_are_for_work_that_starts_there(server: FakeServer) -> None:
    with server.connect() as client, client.reserve(1, nodes=OTHER) as lease:
        assert refused(lease).reason == "GPUS_ELSEWHERE"
        assert lease.env({}, node="node-1")["CUDA_VISIBLE_DEVICES"] == lease.gpu_uuids[0]
        with pytest.raises(ValueError, match="no GPU of node-0"):
            lease.env(node="node-0")


async def test_an_event_loop_asks_beforehand(server: FakeServer) -> None:
    async with server.connect_async() as client, client.reserve(1, nodes=OTHER) as lease:
        assert refused(lease).reason == "NODE_NOT_ASKED"
        assert await client.this_node() == "node-0"
        assert refused(lease).reason == "GPUS_ELSEWHERE"
        async with client.reserve(1) as own:
            assert own.cuda_visible_devices == own.gpu_uuids[0]


def lists(world: Any) -> int:
    return sum(isinstance(one, monitor_api.ListNodesRequest) for one in world.requests)


def test_the_fleet_is_asked_once_and_only_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(client: library.Client, times: int, **options: Any) -> None:
        for _ in range(times):
            client.reserve(1, **options)

    with canned_gateway() as (address, world):
        world.overrides["ListNodes"] = lambda request, context: monitor_api.ListNodesResponse(
            nodes=[node("host-1")]
        )
        with library.connect(address) as client:
            reserve(client, 2, nodes=["nodes/host-1"])
            reserve(client, 2, anywhere=True)
            assert lists(world) == 0
            reserve(client, 2)
            client.reserve(1).env()
            assert lists(world) == 1
            assert list(world.requests[-1].ask.nodes) == ["nodes/host-1"]
        monkeypatch.setenv("GPUSCALE_NODE", "host-1")
        with library.connect(address) as client:
            reserve(client, 2)
            client.reserve(1).env()
        with library.connect(address, node="host-2") as client:
            assert refused(client.reserve(1)).reason == "GPUS_ELSEWHERE"
        assert lists(world) == 1


async def test_an_async_client_that_is_told_where_asks_nothing() -> None:
    with canned_gateway() as (address, world):
        async with library.connect_async(address) as client:
            await client.reserve(1, nodes=["host-1"])
            await client.reserve(1, anywhere=True)
        assert lists(world) == 0


@pytest.mark.parametrize("this_node", ["", "near"], ids=["no agent here", "granted elsewhere"])
def test_a_command_does_not_start_beside_gpus_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, this_node: str
) -> None:
    """It goes where they are, by ssh; what was granted is given back where that fails."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\nexit 255\n')
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GPUSCALE_NODE", this_node)
    with canned_gateway() as (address, world):
        nodes = [node("far", boot_id=ELSEWHERE)]
        world.overrides["ListNodes"] = lambda request, context: monitor_api.ListNodesResponse(nodes=nodes)
        command = ("touch", str(tmp_path / "ran"))
        ran = run_cli("--address", address, "run", "--gpus", "1", "--wait", "0s", "--", *command)
    assert (ran.code, "no supervisor came up on host-1, so nothing was started there" in ran.err) == (
        7,
        True,
    ), ran.err
    changed = [
        type(one).__name__ for one in world.requests if not isinstance(one, monitor_api.ListNodesRequest)
    ]
    assert changed == ["ReserveRequest", "ReleaseReservationRequest"]
    assert (tmp_path / "called").read_text().endswith(" -- host-1 gpuscalectl supervise\n")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def unadmitted(monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said where no agent answers, as here."""
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("GPUSCALE_WORK_ADDRESS", address)
    return f"as the holder of its GPUs: nothing answers at {address} (connection refused)"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith("gpuscale.client.")]


async def test_where_no_agent_answers_leases_go_on_and_each_client_says_so_once(
    server: FakeServer, unadmitted: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as client:
        for _ in range(2):
            with client.reserve(1) as lease:
                lease.check()
    async with server.connect_async() as client:
        for _ in range(2):
            async with client.reserve(1) as lease:
                lease.check()
    assert warnings_of(caplog) == [f"the agent does not count this process {unadmitted}"] * 2


def test_where_no_agent_answers_a_command_runs_and_it_is_said(server: FakeServer, unadmitted: str) -> None:
    environment = {"GPUSCALE_WORK_ADDRESS": os.environ["GPUSCALE_WORK_ADDRESS"]}
    ran = run_cli("--address", server.address, "run", "--gpus", "1", "--", "true", environment=environment)
    why = unadmitted.partition(": ")[2]
    assert (ran.code, ran.err.count(f"as the holder of its GPUs: {why}")) == (0, 1), ran.err
    assert [one.state for one in server.reservations] == [allocator_api.Reservation.STATE_RELEASED]


@dataclass
class AgentHere(monitor_api.WorkServiceServicer):
    refusal: library.GpuscaleError | None = None
    asked: list[monitor_api.AdmitWorkRequest] = field(default_factory=list[monitor_api.AdmitWorkRequest])

    async def AdmitWork(
        self, request: monitor_api.AdmitWorkRequest, context: Any
    ) -> monitor_api.AdmitWorkResponse:
        self.asked.append(request)
        if self.refusal is not None:
            raise self.refusal
        return monitor_api.AdmitWorkResponse()


@asynccontextmanager
async def agent_here(socket: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AgentHere]:
    monkeypatch.setattr("gpuscale.client.this_host.AGENT_SOCKET", socket)
    served = Server(ServerOptions(socket=socket), Authenticator(socket_role=Role.AGENT))
    agent = AgentHere()
    add = partial(monitor_api.add_WorkServiceServicer_to_server, agent)
    served.add(Registration("gpuscale.api.monitor.v1.WorkService", add))
    served.bind()
    async with served:
        yield agent


async def test_the_agent_on_the_socket_of_this_host_admits_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the lease token, which whoever listens on the port of an agent is not sent. A refusal is no note: nothing starts."""
    work = monitor_api.AdmitWorkRequest(
        gpu_uuids=["GPU-a"], fence=7, reservation="reservations/r", lease_token="of r"
    )
    elsewhere = "gateway.example:7070"
    async with agent_here(tmp_path / "agent.sock", monkeypatch) as agent:
        assert await asyncio.to_thread(admit, work, None, elsewhere) == ""
        assert agent.asked == [work]
        agent.refusal = library.FailedPreconditionError("it holds other GPUs", reason="GPU_NOT_HELD")
        with pytest.raises(library.FailedPreconditionError, match="it holds other GPUs"):
            await asyncio.to_thread(admit, work, None, elsewhere)
        agent.refusal = library.PermissionDeniedError("it is another's", reason="LEASE_TOKEN_INVALID")
        with pytest.raises(library.PermissionDeniedError, match="it is another's"):
            await asyncio.to_thread(admit, work, None, elsewhere)


async def test_a_service_that_asks_for_tokens_admits_by_the_lease_token(tmp_path: Path) -> None:
    """`up --tokens-file` has no socket for work, and the supervisor of a command none of its user's credentials."""
    served = Server(ServerOptions(), authenticator(tmp_path, ann="operator"))
    add = partial(monitor_api.add_WorkServiceServicer_to_server, AgentHere())
    served.add(Registration("gpuscale.api.monitor.v1.WorkService", add))
    address = served.bind()
    work = monitor_api.AdmitWorkRequest(
        gpu_uuids=["GPU-a"], fence=7, reservation="reservations/r", lease_token="A" * 43
    )
    async with served:
        with open_sync_channel(address) as channel:
            own = monitor_api.WorkServiceStub(channel)
            assert await asyncio.to_thread(admit, work, own, address) == ""
            work.ClearField("lease_token")
            assert await asyncio.to_thread(admit, work, own, address) == "a bearer token is required"
