"""The program `gpuscale-fleet`: takes in every agent's stream and answers for all nodes."""

import asyncio
import sys

from gpuscale.common.clock import SystemClock
from gpuscale.common.lifecycle import run
from gpuscale.common.logs import configure, get_logger
from gpuscale.common.server import Server
from gpuscale.common.settings import load
from gpuscale.monitor.fleet.app import open_fleet
from gpuscale.monitor.fleet.settings import FleetSettings

PROGRAM = "gpuscale-fleet"
_log = get_logger(__name__)


def main() -> None:
    """Run the fleet until SIGTERM or SIGINT."""
    settings = load(
        FleetSettings, None, program=PROGRAM, description="Collects what every agent tells of its node."
    )
    configure(settings.log_level, settings.log_format)
    sys.exit(run(lambda stop: serve(settings, stop), program=PROGRAM))


async def serve(settings: FleetSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    server = Server(settings.server_options(), settings.authenticator())
    address = server.bind()
    async with open_fleet(settings, clock=SystemClock()) as registrations:
        server.add(*registrations)
        async with server:
            _log.info("fleet serves", address=address)
            await stop.wait()
