"""`gpuscale-gateway`: the gateway as a program of its own."""

import asyncio
import sys
from functools import partial

from gpuscale.common import logs
from gpuscale.common.lifecycle import run
from gpuscale.common.logs import get_logger
from gpuscale.common.server import Server
from gpuscale.common.settings import load
from gpuscale.gateway.app import open_gateway
from gpuscale.gateway.settings import GatewaySettings

PROGRAM = "gpuscale-gateway"
DESCRIPTION = "One address for the fleet, the allocator and the autoscaler."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    settings = load(GatewaySettings, argv, program=PROGRAM, description=DESCRIPTION)
    logs.configure(settings.log_level, settings.log_format)
    return run(partial(serve, settings), program=PROGRAM)


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
