"""Throwaway services on a real server: what they do is given by each test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Authenticator
from gpuscale.internal.monitor import v1 as monitor_internal

ALLOCATOR = "gpuscale.api.allocator.v1.AllocatorService"
FLEET = "gpuscale.api.monitor.v1.FleetService"
TELEMETRY = "gpuscale.internal.monitor.v1.TelemetryService"
SERVICES = (ALLOCATOR, FLEET, TELEMETRY)

Unary = Callable[[Any, Any], Awaitable[Any]]
Stream = Callable[[Any, Any], AsyncIterator[Any]]


async def _no_reservation(request: Any, context: Any) -> allocator_api.GetReservationResponse:
    return allocator_api.GetReservationResponse()


async def _no_nodes(request: Any, context: Any) -> AsyncIterator[monitor_api.WatchNodesResponse]:
    yield monitor_api.WatchNodesResponse(full=True)


async def _no_telemetry(
    requests: Any, context: Any
) -> AsyncIterator[monitor_internal.StreamTelemetryResponse]:
    async for _ in requests:
        yield monitor_internal.StreamTelemetryResponse()


@dataclass
class Allocator(allocator_api.AllocatorServiceServicer):
    """GetReservation (viewer), Reserve and ReleaseReservation (operator) do the same: `work`."""

    work: Unary = _no_reservation

    @staticmethod
    def answer() -> allocator_api.GetReservationResponse:
        """An answer that will do for each of them: all of these messages are empty."""
        return allocator_api.GetReservationResponse()

    async def GetReservation(self, request: Any, context: Any) -> Any:
        return await self.work(request, context)

    async def Reserve(self, request: Any, context: Any) -> Any:
        return await self.work(request, context)

    async def ReleaseReservation(self, request: Any, context: Any) -> Any:
        return await self.work(request, context)


@dataclass
class Fleet(monitor_api.FleetServiceServicer, monitor_internal.TelemetryServiceServicer):
    """WatchNodes (viewer) and StreamTelemetry (agent)."""

    nodes: Stream = _no_nodes
    telemetry: Stream = _no_telemetry

    async def WatchNodes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self.nodes(request, context):
            yield response

    async def StreamTelemetry(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self.telemetry(requests, context):
            yield response


@dataclass
class Served:
    """A running server and a channel to it."""

    server: Server
    address: str
    channel: grpc.aio.Channel
    allocator: Any = field(init=False)
    fleet: Any = field(init=False)
    telemetry: Any = field(init=False)

    def __post_init__(self) -> None:
        self.allocator = allocator_api.AllocatorServiceStub(self.channel)
        self.fleet = monitor_api.FleetServiceStub(self.channel)
        self.telemetry = monitor_internal.TelemetryServiceStub(self.channel)

    async def get(self, name: str = "reservations/r", **call: Any) -> Any:
        """One GetReservation call, with a timeout unless one is given."""
        return await self.allocator.GetReservation(
            allocator_api.GetReservationRequest(name=name), **{"timeout": 10.0, **call}
        )

    async def release(self, **call: Any) -> Any:
        request = allocator_api.ReleaseReservationRequest(name="reservations/r", fence=1)
        return await self.allocator.ReleaseReservation(request, **{"timeout": 10.0, **call})


def registrations(allocator: Allocator, fleet: Fleet) -> tuple[Registration, ...]:
    """The services, as rooms hand them over."""
    return (
        Registration(ALLOCATOR, partial(allocator_api.add_AllocatorServiceServicer_to_server, allocator)),
        Registration(FLEET, partial(monitor_api.add_FleetServiceServicer_to_server, fleet)),
        Registration(TELEMETRY, partial(monitor_internal.add_TelemetryServiceServicer_to_server, fleet)),
    )


@asynccontextmanager
async def serve(
    allocator: Allocator | None = None,
    fleet: Fleet | None = None,
    *,
    options: ServerOptions | None = None,
    authenticator: Authenticator | None = None,
    prepare: Callable[[Server], None] = lambda _: None,
) -> AsyncIterator[Served]:
    """A server on a free port of 127.0.0.1 with these services, and a plain channel to it."""
    server = Server(options or ServerOptions(), authenticator or Authenticator())
    server.add(*registrations(allocator or Allocator(), fleet or Fleet()))
    prepare(server)
    address = server.bind()
    async with server, open_channel(address) as channel:
        yield Served(server, address, channel)


async def read_to_the_end(call: Any) -> None:
    with rpc_errors():
        while await call.read():
            pass
