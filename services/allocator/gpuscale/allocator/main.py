"""`gpuscale-allocator`: the allocator as a program of its own."""

import asyncio
import sys

from gpuscale.allocator.app import open_allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.common.clock import SystemClock
from gpuscale.common.lock import DirectoryLock
from gpuscale.common.logs import get_logger
from gpuscale.common.program import run_program
from gpuscale.common.server import Server

PROGRAM = "gpuscale-allocator"
DESCRIPTION = "Grants, renews and ends reservations of GPUs."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(AllocatorSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: AllocatorSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Raises:
        GpuscaleError: the data directory, the stored state, or the address cannot be used.
    """
    server = Server(settings.server_options(), settings.authenticator())
    with DirectoryLock(settings.data_dir):
        address = server.bind()
        async with (
            settings.open_channel(settings.fleet_address) as fleet,
            open_allocator(settings, fleet=fleet, clock=SystemClock()) as registrations,
        ):
            server.add(*registrations)
            async with server:
                _log.info("serving", address=address, data_dir=str(settings.data_dir))
                await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
