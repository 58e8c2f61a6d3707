"""The monitor room in this process: GPU sources that a test drives, and real servers around the apps."""

import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.meter import CallMeter
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.runtime.tasks import Clock, SystemClock
from gpuscale.common.security.auth import Authenticator
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent.collector import Collector
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.app.agent import open_agent
from gpuscale.monitor.app.fleet import open_fleet
from gpuscale.monitor.app.settings import AgentSettings, FleetSettings
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.model import readings
from tests.support.monitor_values import identity, sample
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from gpuscale.api.monitor.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub
    from gpuscale.internal.monitor.v1.telemetry_service_pb2_grpc import TelemetryServiceAsyncStub


@dataclass
class FakeGpus:
    """A GPU source whose GPUs answer, block or fail as the test says. `problem` makes it fail to open."""

    gpus: list[readings.GpuIdentity] = field(default_factory=lambda: [identity(0), identity(1)])
    simulated: bool = False
    problem: GpuSourceError | None = None
    samples: dict[str, readings.GpuSample] = field(default_factory=dict[str, readings.GpuSample])
    errors: dict[str, Exception] = field(default_factory=dict[str, Exception])
    opened: int = 0
    closed: int = 0
    reads: dict[str, int] = field(default_factory=dict[str, int])
    gates: dict[str, threading.Event] = field(default_factory=dict[str, threading.Event])
    outdated: bool = False
    interruptible: bool = False
    interrupted: bool = False
    has_events: bool = False
    probes: int = 0
    happened: "queue.SimpleQueue[readings.DriverEvent]" = field(default_factory=lambda: queue.SimpleQueue())

    def block(self, uuid: str) -> threading.Event:
        """Let reads of a GPU (or "open") wait until the event is set."""
        gate = self.gates[uuid] = threading.Event()
        return gate

    def open(self) -> readings.Inventory:
        self.opened += 1
        self.interrupted = False
        self._wait("open")
        if self.problem is not None:
            raise self.problem
        self.outdated = False
        return readings.Inventory(tuple(self.gpus), driver_version="1.2.3", has_events=self.has_events)

    def read(self, uuid: str) -> readings.GpuSample:
        self.reads[uuid] = self.reads.get(uuid, 0) + 1
        self._wait(uuid)
        if uuid in self.errors:
            raise self.errors[uuid]
        return self.samples.get(uuid, sample())

    def probe(self, uuid: str) -> None:
        self.probes += 1
        self._wait(f"probe {uuid}")

    def wait_event(self, timeout: float) -> readings.DriverEvent | None:
        try:
            return self.happened.get(timeout=timeout)
        except queue.Empty:
            return None

    def interrupt(self) -> bool:
        self.interrupted = self.interruptible
        for gate in self.gates.values() if self.interruptible else ():
            gate.set()
        return self.interruptible

    def close(self) -> None:
        self.closed += 1

    def _wait(self, what: str) -> None:
        gate = self.gates.get(what)
        if gate is not None:
            gate.wait(30.0)
        if self.interrupted:
            raise GpuSourceError("interrupted")


class FakeHost:
    def identity(self) -> readings.HostIdentity:
        return readings.HostIdentity("fake", "Fake OS", "boot")

    def read(self) -> readings.HostReading:
        return readings.HostReading(cpu_percent=12.5)


async def collected(
    source: FakeGpus, quarantines: Mapping[str, readings.Quarantine] | None = None, **more: Any
) -> readings.Snapshot:
    """A snapshot of these GPUs, by a collector with `more` that it takes."""
    clock, host = SystemClock(), FakeHost()
    gpus = Gpus(source, clock, ReadDeadlines())
    collector = Collector("alpha", 1.0, gpus, host.read, host.identity(), clock, ReadDeadlines(), **more)
    collector.quarantines = quarantines or {}
    try:
        return await collector.collect()
    finally:
        await collector.close()


@asynccontextmanager
async def serve(
    *registrations: Registration, listen: str = "127.0.0.1:0", authenticator: Authenticator | None = None
) -> AsyncGenerator[str, None]:
    """A real server with these services; yields its address."""
    server = Server(ServerOptions(listen=listen), authenticator or Authenticator())
    address = server.bind()
    server.add(*registrations)
    async with server:
        yield address


@dataclass
class RunningFleet:
    address: str
    stub: "FleetServiceAsyncStub"
    telemetry: "TelemetryServiceAsyncStub"

    @classmethod
    def over(cls, address: str, channel: grpc.aio.Channel) -> "RunningFleet":
        """The one that a channel leads to."""
        stub = monitor_api.FleetServiceStub(channel)
        telemetry = monitor_internal.TelemetryServiceStub(channel)
        return cls(address, stub, telemetry)

    async def node(self, node: str) -> monitor_api.Node:
        request = monitor_api.GetNodeRequest(name=f"nodes/{node}")
        return (await self.stub.GetNode(request, timeout=30)).node

    async def until(
        self, node: str, state: monitor_api.NodeState, *, above_seq: int = -1
    ) -> monitor_api.Node:
        """Wait until a node has that state and a snapshot above that seq."""

        async def check() -> monitor_api.Node | None:
            listed = await self.stub.ListNodes(monitor_api.ListNodesRequest(), timeout=30)
            for one in listed.nodes:
                if one.name == f"nodes/{node}" and one.state == state and one.snapshot.seq > above_seq:
                    return one
            return None

        found = await eventually(check)
        assert found is not None
        return found


@asynccontextmanager
async def told_of(nodes: Nodes) -> AsyncGenerator[Callable[[], Awaitable[list[str]]]]:
    """Waits for the next message of a watch of these nodes, and names those in it; the first round is over."""
    async with aclosing(nodes.feed.stream(monitor_api.WatchNodesRequest())) as stream:

        async def told() -> list[str]:
            found = monitor_api.WatchNodesResponse.FromString(await anext(stream))
            return [node.name.removeprefix("nodes/") for node in found.nodes]

        await told()
        yield told


@asynccontextmanager
async def running_fleet(
    *,
    listen: str = "127.0.0.1:0",
    clock: Clock | None = None,
    authenticator: Authenticator | None = None,
    data_dir: Path | None = None,
    allocator: grpc.aio.Channel | None = None,
    **settings: Any,
) -> AsyncGenerator[RunningFleet, None]:
    async with AsyncExitStack() as stack:
        chosen = FleetSettings(data_dir=data_dir, **settings)
        fleet = open_fleet(chosen, clock=clock or SystemClock(), allocator=allocator)
        server = serve(*await stack.enter_async_context(fleet), listen=listen, authenticator=authenticator)
        address = await stack.enter_async_context(server)
        yield RunningFleet.over(address, await stack.enter_async_context(open_channel(address)))


class _Confirms(allocator_api.AllocatorServiceServicer):
    async def CheckLease(self, request: Any, context: Any) -> allocator_api.CheckLeaseResponse:
        return allocator_api.CheckLeaseResponse()


@asynccontextmanager
async def confirming_allocator() -> AsyncGenerator[grpc.aio.Channel]:
    """An allocator that gave every fence there is: for what is about the agent's own memory."""
    add = partial(allocator_api.add_AllocatorServiceServicer_to_server, _Confirms())
    service = Registration("gpuscale.api.allocator.v1.AllocatorService", add)
    async with serve(service) as address, open_channel(address) as channel:
        yield channel


@asynccontextmanager
async def serving_agent(
    fleet_address: str | None = None,
    clock: Clock | None = None,
    allocator: grpc.aio.Channel | None = None,
    calls: CallMeter | None = None,
    **settings: object,
) -> AsyncGenerator[str]:
    """The address of an agent, with simulated GPUs and four snapshots a second unless settings say otherwise."""
    merged = {"node": "alpha", "source": "simulated", "period_seconds": 0.25} | settings
    if fleet_address is not None:
        merged["fleet_address"] = fleet_address
    async with AsyncExitStack() as stack:
        fleet = None
        if fleet_address is not None:
            fleet = await stack.enter_async_context(open_channel(fleet_address))
        chosen = AgentSettings.model_validate(merged)
        clock = clock or SystemClock()
        agent = open_agent(chosen, fleet=fleet, allocator=allocator, clock=clock, calls=calls)
        address = await stack.enter_async_context(serve(*await stack.enter_async_context(agent)))
        if chosen.source == "simulated" and chosen.simulated_gpu_count:
            stub: Any = monitor_api.AgentServiceStub(await stack.enter_async_context(open_channel(address)))
            # On a busy machine the first snapshots may come before the GPUs were looked for.
            await eventually(
                lambda: stub.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=60),
                lambda found: found.snapshot.gpus,
            )
        yield address


@asynccontextmanager
async def running_agent(
    *fleet_address: str, **settings: Any
) -> AsyncGenerator["AgentServiceAsyncStub", None]:
    """The same, and a stub to it."""
    async with serving_agent(*fleet_address, **settings) as address, open_channel(address) as channel:
        yield monitor_api.AgentServiceStub(channel)
