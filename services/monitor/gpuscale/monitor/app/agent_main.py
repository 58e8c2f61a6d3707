"""The program `gpuscale-agent`: reads one host and its GPUs, serves them, and streams them to the fleet."""

import asyncio
import sys
from contextlib import AsyncExitStack

from gpuscale.common.config.settings import run_program
from gpuscale.common.rpc.server import Server
from gpuscale.common.runtime.clock import SystemClock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.monitor.app.agent import open_agent
from gpuscale.monitor.app.agent_settings import AgentSettings

PROGRAM = "gpuscale-agent"
DESCRIPTION = "Reads the GPUs and the host it runs on."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(AgentSettings, serve, argv, program=PROGRAM, description=DESCRIPTION, quiet=True)


async def serve(settings: AgentSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    server = Server(settings.server_options(), settings.authenticator())
    address = server.bind()
    async with AsyncExitStack() as stack:
        fleet = allocator = None
        if settings.fleet_address:
            fleet = allocator = await stack.enter_async_context(settings.open_channel(settings.fleet_address))
        if settings.allocator_address:
            allocator = await stack.enter_async_context(settings.open_channel(settings.allocator_address))
        agent = open_agent(settings, fleet=fleet, allocator=allocator, clock=SystemClock())
        server.add(*await stack.enter_async_context(agent))
        await stack.enter_async_context(server)
        _log.info("agent serves", address=address, node=settings.node, fleet=settings.fleet_address or None)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
