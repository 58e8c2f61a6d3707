"""`gpuscale-gateway`: the gateway as a program of its own."""

import asyncio
import sys

from gpuscale.common.logs import get_logger
from gpuscale.common.program import run_program
from gpuscale.common.server import Server
from gpuscale.gateway.app import open_gateway
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
    server = Server(settings.server_options(), settings.authenticator())
    address = server.bind()
    async with open_gateway(settings) as (forwarder, services):
        server.add_generic(forwarder, services)
        async with server:
            _log.info("serving", address=address)
            await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
