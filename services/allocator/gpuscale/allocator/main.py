"""`gpuscale-allocator`: the allocator as its own program."""

import asyncio
from functools import partial

from gpuscale.allocator.app import SERVICES, open_allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.common.config.settings import run_program, serve_stateful
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.tasks import SystemClock

PROGRAM = "gpuscale-allocator"
DESCRIPTION = "Grants, renews and ends reservations of GPUs."


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(AllocatorSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: AllocatorSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; GpuscaleError if the directory, the state or the address is unusable."""
    with DirectoryLock(settings.data_dir):
        async with settings.open_channel(settings.fleet_address) as fleet:
            act = partial(open_allocator, settings, fleet=fleet, clock=SystemClock())
            await serve_stateful(settings, services=SERVICES, act=act, stop=stop)
