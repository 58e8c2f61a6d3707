"""`gpuscale-gateway`: the gateway as a program of its own."""

import asyncio
import sys
from contextlib import AsyncExitStack

from gpuscale.common.config.settings import run_program
from gpuscale.common.rpc.calls import CallMeter
from gpuscale.common.rpc.metrics_http import serve_metrics
from gpuscale.common.rpc.server import Server
from gpuscale.common.runtime.logs import get_logger
from gpuscale.gateway.app import open_gateway
from gpuscale.gateway.metrics import render
from gpuscale.gateway.settings import GatewaySettings

PROGRAM = "gpuscale-gateway"
DESCRIPTION = "One address for the fleet, the allocator and the autoscaler."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(GatewaySettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Raises:
        GpuscaleError: the address or a file of TLS cannot be used.
    """
    meter = CallMeter() if settings.metrics_listen else None
    options, authenticator = settings.server_options(), settings.authenticator()
    server = Server(options, authenticator, meter)
    address = server.bind()
    async with AsyncExitStack() as stack:
        forwarder, services = await stack.enter_async_context(open_gateway(settings))
        server.add_generic(forwarder, services)
        await stack.enter_async_context(server)
        if meter is not None:
            page = serve_metrics(settings.metrics_listen, options, authenticator, render(meter))
            _log.info("metrics are served", address=await stack.enter_async_context(page))
        _log.info("serving", address=address)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
