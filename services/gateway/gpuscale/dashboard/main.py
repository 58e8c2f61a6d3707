"""`gpuscale-dashboard`: the dashboard as a program of its own."""

import asyncio
import sys

from gpuscale.common.config.settings import run_program
from gpuscale.common.runtime.logs import get_logger
from gpuscale.dashboard.app import open_dashboard
from gpuscale.dashboard.settings import DashboardSettings

PROGRAM = "gpuscale-dashboard"
DESCRIPTION = "Shows the fleet, reservations, endpoints, recordings and health in a browser."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(DashboardSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: DashboardSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Raises:
        GpuscaleError: the address, a file of TLS or the token cannot be used.
    """
    async with open_dashboard(settings) as url:
        _log.info("serving", url=url, gateway=settings.gateway_address)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
