"""The program `gpuscale-gateway`: a channel to each upstream, the forwarder over them, and `/metrics`."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from gpuscale.common.config.settings import run_program
from gpuscale.common.rpc.channel import split_addresses
from gpuscale.common.rpc.forwarder import Forwarder, Lanes, Upstream
from gpuscale.common.rpc.meter import CallMeter
from gpuscale.common.rpc.server import Server, parse_listen
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.gateway.settings import GatewaySettings

SERVICES: Mapping[str, tuple[str, ...]] = {
    "fleet": (
        "gpuscale.api.monitor.v1.FleetService",
        "gpuscale.api.monitor.v1.RecordingService",
        "gpuscale.api.monitor.v1.HistoryService",
        "gpuscale.api.monitor.v1.HealthService",
        "gpuscale.api.monitor.v1.JoinService",
        "gpuscale.api.monitor.v1.LoginService",
        "gpuscale.internal.monitor.v1.TelemetryService",
    ),
    "allocator": (
        "gpuscale.api.allocator.v1.AllocatorService",
        "gpuscale.api.allocator.v1.CapacityService",
        "gpuscale.api.allocator.v1.NodeService",
        "gpuscale.api.allocator.v1.QuotaService",
        "gpuscale.api.allocator.v1.BookingService",
        "gpuscale.api.allocator.v1.PolicyService",
        "gpuscale.api.allocator.v1.NotificationService",
        "gpuscale.api.allocator.v1.PowerService",
        "gpuscale.api.allocator.v1.UsageService",
    ),
    "autoscaler": (
        "gpuscale.api.autoscaler.v1.EndpointService",
        "gpuscale.api.autoscaler.v1.QueueWatcherService",
        "gpuscale.api.autoscaler.v1.DecisionService",
        "gpuscale.api.autoscaler.v1.MetricService",
        "gpuscale.api.autoscaler.v1.PresetService",
        "gpuscale.api.autoscaler.v1.RuleService",
        "gpuscale.api.autoscaler.v1.BacktestService",
        "gpuscale.api.autoscaler.v1.AdapterService",
        "gpuscale.internal.autoscaler.v1.AdapterStreamService",
        "externalscaler.ExternalScaler",
    ),
}
"""The services of each program. The agents' service is left out, as there is one on every host."""


@asynccontextmanager
async def open_gateway(settings: GatewaySettings) -> AsyncGenerator[tuple[Forwarder, tuple[str, ...]], None]:
    """The forwarder and the names of its services; channels stay open until the block ends.

    Raises:
        FailedPreconditionError: a file of TLS cannot be read.
        InvalidArgumentError: invalid address of an upstream.
    """
    addresses = {
        "fleet": settings.fleet_address,
        "allocator": settings.allocator_address,
        "autoscaler": settings.autoscaler_address,
    }
    upstreams: dict[str, Upstream] = {}
    async with AsyncExitStack() as stack:
        for name, address in addresses.items():
            here = (one.startswith("unix:") or parse_listen(one).loopback for one in split_addresses(address))
            private = settings.ca_file is not None or all(here)
            channel = await stack.enter_async_context(settings.open_channel(address))
            streams = await stack.enter_async_context(Lanes(partial(settings.open_channel, address)))
            upstreams.update(dict.fromkeys(SERVICES[name], Upstream(name, channel, streams, private)))
        yield Forwarder(upstreams), tuple(upstreams)


PROGRAM = "gpuscale-gateway"
DESCRIPTION = "One address for the fleet, the allocator and the autoscaler."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(GatewaySettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises GpuscaleError: the address or a file of TLS cannot be used."""
    authenticator = settings.authenticator()
    meter = CallMeter(settings.section, authenticator)
    server = Server(settings.server_options(), authenticator, meter if settings.metrics_listen else None)
    address = server.bind()
    async with AsyncExitStack() as stack:
        forwarder, services = await stack.enter_async_context(open_gateway(settings))
        server.add_generic(forwarder, services)
        if settings.fleet_files_dir is not None:
            from gpuscale.common.rpc.certificate_renewal import follow_fleet  # whose import takes 16 MB

            fleet = await stack.enter_async_context(settings.open_channel(settings.fleet_address))
            tasks = await stack.enter_async_context(TaskScope())
            tasks.spawn("files of the fleet", follow_fleet(fleet, settings.fleet_files_dir))
        await stack.enter_async_context(server)
        await stack.enter_async_context(settings.open_metrics(meter))
        _log.info("serving", address=address)
        await stop.wait()
