"""`gpuscale-autoscaler`: the autoscaler as its own program."""

import asyncio
from functools import partial

from gpuscale.autoscaler.app import SERVICES, open_autoscaler
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.common.config.settings import run_program, serve_stateful
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.tasks import SystemClock

PROGRAM = "gpuscale-autoscaler"
DESCRIPTION = "Scales endpoints by their rules, and drives their replicas through worker adapters."


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(AutoscalerSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: AutoscalerSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; GpuscaleError if the directory, the state or the address is unusable."""
    with DirectoryLock(settings.data_dir):
        async with (
            settings.open_channel(settings.fleet_address) as fleet,
            settings.open_channel(settings.allocator_address) as allocator,
        ):
            act = partial(open_autoscaler, settings, fleet=fleet, allocator=allocator, clock=SystemClock())
            await serve_stateful(settings, services=SERVICES, act=act, stop=stop)
