"""The program `gpuscale-dashboard`."""

from __future__ import annotations

import asyncio
import sys

from gpuscale.common.config.settings import run_program
from gpuscale.common.rpc import meter as rpc_meter
from gpuscale.common.runtime import logs
from gpuscale.dashboard import figures, web
from gpuscale.dashboard.settings import DashboardSettings

PROGRAM = "gpuscale-dashboard"
DESCRIPTION = "Shows the fleet, reservations, endpoints, recordings and health in a browser."


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(DashboardSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: DashboardSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises GpuscaleError: the address, a file of TLS or the token cannot be used."""
    meter = rpc_meter.ProgramMeter(figures.SERVICE)
    async with web.open_dashboard(settings, meter) as url, settings.observed(meter):
        logs.get_logger(__name__).info("serving", url=url, gateway=settings.gateway_address)
        if settings.listen.startswith("fd:"):  # the pipe closes when the parent ends
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
