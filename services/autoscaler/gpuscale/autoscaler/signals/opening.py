"""The sources of signals put together, with the tasks that keep them current."""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import grpc

from gpuscale.autoscaler.domain.queues import QueueReading
from gpuscale.autoscaler.signals.fleet_metrics import FleetMetrics
from gpuscale.autoscaler.signals.polling import Poller
from gpuscale.autoscaler.signals.prometheus import PrometheusServer, PrometheusSettings
from gpuscale.autoscaler.signals.reported import ReportedMetrics
from gpuscale.autoscaler.signals.room import Room
from gpuscale.autoscaler.signals.sources import SignalSources
from gpuscale.autoscaler.signals.waiting import WaitingRequests
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.tasks import TaskScope


@asynccontextmanager
async def open_sources(
    reading: Callable[[str], QueueReading | None],
    prometheus: Mapping[str, PrometheusSettings],
    *,
    fleet: grpc.aio.Channel,
    allocator: grpc.aio.Channel,
    clock: Clock,
) -> AsyncGenerator[SignalSources]:
    """Every source, kept current until the context is left.

    Args:
        reading: what a queue watcher (by id) read last.
        prometheus: tables [prometheus.NAME] of the configuration.
        fleet: channel to the fleet.
        allocator: channel to the allocator.
        clock: what values are dated by.

    Raises:
        FailedPreconditionError: a Prometheus server is configured wrongly.
    """
    async with AsyncExitStack() as stack:
        servers = {name: PrometheusServer(name, settings) for name, settings in prometheus.items()}
        for server in servers.values():
            stack.push_async_callback(server.close)
        sources = SignalSources(
            reading=reading,
            reported=ReportedMetrics(),
            fleet=FleetMetrics(fleet, clock),
            prometheus={name: Poller(server.fetch, clock) for name, server in servers.items()},
            waiting=Poller(WaitingRequests(allocator).fetch, clock),
            room=Poller(Room(allocator).fetch, clock),
            clock=clock,
        )
        scope = await stack.enter_async_context(TaskScope())
        scope.spawn("follow the fleet", sources.fleet.run())
        scope.spawn("count waiting requests", sources.waiting.run())
        scope.spawn("ask for room", sources.room.run())
        for name, poller in sources.prometheus.items():
            scope.spawn(f"queries of prometheus {name}", poller.run())
        yield sources
