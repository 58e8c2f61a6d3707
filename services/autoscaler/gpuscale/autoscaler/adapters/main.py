"""`gpuscale-adapter`: the process adapter as a program of its own."""

import asyncio
import sys
from contextlib import AsyncExitStack

from gpuscale.autoscaler.adapters.engines.process.app import open_process_adapter
from gpuscale.autoscaler.adapters.engines.process.settings import AdapterSettings
from gpuscale.common.config.program import run_program
from gpuscale.common.runtime.clock import SystemClock
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.secrets import hide_memory

PROGRAM = "gpuscale-adapter"
DESCRIPTION = "Starts and stops replicas as processes of this host."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(AdapterSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: AdapterSettings, stop: asyncio.Event) -> None:
    """Run replicas until `stop` is set.

    Raises:
        GpuscaleError: the data directory, or what stands in it, cannot be used.
    """
    hide_memory()
    with DirectoryLock(settings.data_dir):
        async with AsyncExitStack() as stack:
            autoscaler = await stack.enter_async_context(settings.open_channel(settings.autoscaler_address))
            agent = None
            if settings.agent_address:
                agent = await stack.enter_async_context(settings.open_channel(settings.agent_address))
            await stack.enter_async_context(
                open_process_adapter(settings, autoscaler=autoscaler, agent=agent, clock=SystemClock())
            )
            _log.info("running", adapter=settings.adapter_id, autoscaler=settings.autoscaler_address)
            await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
