"""Runs fleet, allocator and autoscaler in one event loop, with simulated hosts and workers.

They call each other through an internal server; tests call another one, where calls can be made to fail.
"""

import inspect
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc

from gpuscale.allocator.app import open_parts, until_known
from gpuscale.allocator.domain.model import State
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.allocator.usecases.leases import Leases
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.autoscaler.app import open_autoscaler
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.client.listing import pages_async
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.interceptor import Handler, behavior_of, handler_of
from gpuscale.common.rpc.server import HandlerCollector, Registration, Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import SystemClock, TaskScope
from gpuscale.common.security.auth import Authenticator
from gpuscale.monitor.agent.servicers import WorkServicer
from gpuscale.monitor.agent.work import LeaseChecks, Work
from gpuscale.monitor.app.fleet import open_fleet
from gpuscale.monitor.app.settings import FleetSettings
from gpuscale.testing.doubles import FakeHost, FakeWorkers

TTL = 4.0
"""Default seconds of a lease; the allocator's own default is 300."""
_PAGE = 1000
Faults = Mapping[str, deque[GpuscaleError]]
"""Errors to answer the next calls with, by method name."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a fake server can do to its services; its methods run on their loop."""

    address: str  # where callers are served
    _hosts: Sequence[FakeHost]
    _workers: FakeWorkers
    _leases: Leases
    _own: grpc.aio.Channel

    async def reservations(self) -> list[allocator_api.Reservation]:
        """Every reservation so far, oldest first."""
        stub = allocator_api.AllocatorServiceStub(self._own)
        request = allocator_api.ListReservationsRequest(show_ended=True, page_size=_PAGE)
        found = [
            one async for page in pages_async(stub.ListReservations, request) for one in page.reservations
        ]
        return sorted(found, key=lambda one: one.fence)

    async def expire(self, reservation: str) -> None:
        """End it as EXPIRED."""
        await self._leases.end(reservation, State.EXPIRED, "not renewed in time")

    async def cancel(self, reservation: str, reason: str) -> None:
        """End it as CANCELLED."""
        await self._leases.end(reservation, State.CANCELLED, reason)

    async def lose(self, reservation: str) -> None:
        """Lose its first GPU."""
        stub = allocator_api.AllocatorServiceStub(self._own)
        request = allocator_api.GetReservationRequest(name=f"reservations/{reservation}")
        with rpc_errors():
            gpu = (await stub.GetReservation(request)).reservation.gpus[0]
        for host in self._hosts:
            host.lose(gpu.uuid)
        await self._leases.lose({reservation: [gpu.uuid]})

    async def set_ready(self, endpoint: str, replicas: int) -> None:
        """Make so many replicas READY."""
        stub = autoscaler_api.EndpointServiceStub(self._own)
        with rpc_errors():
            await stub.GetEndpoint(autoscaler_api.GetEndpointRequest(name=endpoint))
        self._workers.set_ready(endpoint, replicas)


@asynccontextmanager
async def open_site(hosts: Sequence[FakeHost], workers: FakeWorkers, faults: Faults) -> AsyncGenerator[Site]:
    """Run everything until the end of the block; yields once the allocator knows all hosts."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gpuscale-")))
        inside, outside = (Server(ServerOptions(), Authenticator()) for _ in range(2))
        own = await stack.enter_async_context(open_channel(inside.bind()))
        stack.push_async_callback(inside.stop, 0.0)  # after its internal callers
        address = outside.bind()
        allocator = await stack.enter_async_context(
            open_parts(_settings(AllocatorSettings, folder, default_ttl_seconds=TTL), fleet=own, clock=clock)
        )
        here = hosts[0]
        work = Work(lambda uuid: uuid in here.uuids.values(), LeaseChecks(own, here.node))
        registrations = (
            *await stack.enter_async_context(open_fleet(FleetSettings.model_validate({}), clock=clock)),
            *allocator.registrations,
            *await stack.enter_async_context(
                open_autoscaler(_settings(AutoscalerSettings, folder), fleet=own, allocator=own, clock=clock)
            ),
            Registration(  # admits work, like this host's agent
                "gpuscale.api.monitor.v1.WorkService",
                partial(monitor_api.add_WorkServiceServicer_to_server, WorkServicer(work)),
            ),
        )
        inside.add(*registrations)
        outside.add_generic(
            _Public(registrations, faults, workers), [service.service for service in registrations]
        )
        await inside.start()
        await outside.start()
        stack.push_async_callback(outside.stop, 0.0)
        scope = await stack.enter_async_context(TaskScope())
        for host in hosts:
            scope.spawn(f"report {host.node}", host.report(own))
        scope.spawn("workers", workers.run(own))
        await until_known(own, {f"nodes/{host.node}": len(host.uuids) for host in hosts})
        yield Site(address, hosts, workers, allocator.leases, own)


def _settings(kind: Any, folder: Path, **more: object) -> Any:
    return kind.model_validate({"data_dir": folder, **more})


class _Public(grpc.GenericRpcHandler):
    """The services as tests see them: calls fail as planned, and workers have every template asked for."""

    def __init__(self, services: Iterable[Registration], faults: Faults, workers: FakeWorkers) -> None:
        self._faults = faults
        self._workers = workers
        collector = HandlerCollector()
        for service in services:
            collector.add(service)
        self._handlers = {path: self._handler(path, handler) for path, handler in collector.handlers.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        """The handler of a method; None for an unknown method."""
        return self._handlers.get(handler_call_details.method)

    def _handler(self, path: str, handler: Handler) -> Handler:
        behaviour, method = behavior_of(handler), path.rpartition("/")[2]

        async def stream(request: Any, context: Any) -> AsyncGenerator[Any]:
            self._before(method, request)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        async def call(request: Any, context: Any) -> Any:
            self._before(method, request)
            return await behaviour(request, context)

        if not (inspect.isasyncgenfunction(behaviour) or inspect.iscoroutinefunction(behaviour)):
            return handler  # not implemented
        watched = stream if inspect.isasyncgenfunction(behaviour) else call
        streams = handler.request_streaming, handler.response_streaming
        return handler_of(*streams, watched, handler.request_deserializer, handler.response_serializer)

    def _before(self, method: str, request: Any) -> None:
        if self._faults[method]:
            raise self._faults[method].popleft()
        if method in {"CreateEndpoint", "UpdateEndpoint"}:
            spec = request.endpoint.spec
            sets = [each.template.template for each in spec.capability_sets]
            self._workers.offer([spec.template.template, *sets])
