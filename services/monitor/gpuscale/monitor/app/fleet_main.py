"""The program `gpuscale-fleet`: takes in every agent's stream and answers for all nodes."""

import asyncio
import sys
from contextlib import nullcontext

from gpuscale.common.config.settings import run_program
from gpuscale.common.rpc.server import Server
from gpuscale.common.runtime.clock import SystemClock
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.monitor.app.fleet import open_fleet
from gpuscale.monitor.app.fleet_settings import FleetSettings

PROGRAM = "gpuscale-fleet"
DESCRIPTION = "Collects what every agent tells of its node."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(FleetSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: FleetSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Raises:
        GpuscaleError: the data directory, what is in it, or the address cannot be used.
    """
    server = Server(settings.server_options(), settings.authenticator())
    with nullcontext() if settings.data_dir is None else DirectoryLock(settings.data_dir):
        address = server.bind()
        async with open_fleet(settings, clock=SystemClock()) as registrations:
            server.add(*registrations)
            async with server:
                _log.info("fleet serves", address=address)
                await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
