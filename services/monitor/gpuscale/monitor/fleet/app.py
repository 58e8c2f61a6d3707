"""Puts the fleet together: the index of nodes, the passing of time, the service."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.clock import Clock
from gpuscale.common.lifecycle import TaskScope
from gpuscale.common.server import Registration
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.servicer import FleetServicer
from gpuscale.monitor.fleet.settings import FleetSettings

SERVICE = "gpuscale.api.monitor.v1.FleetService"
# How late a watcher may learn that a node became STALE.
SWEEP_SECONDS = 0.25


@asynccontextmanager
async def open_fleet(
    settings: FleetSettings, *, clock: Clock
) -> AsyncGenerator[tuple[Registration, ...], None]:
    """Take in agents' streams until the block ends. The fleet keeps nothing: after a restart agents come again."""
    nodes = Nodes(clock, settings.max_nodes)
    async with TaskScope() as tasks:
        tasks.spawn("fleet sweep", _sweep(nodes))
        add = partial(monitor_api.add_FleetServiceServicer_to_server, FleetServicer(nodes, clock))
        yield (Registration(SERVICE, add),)


async def _sweep(nodes: Nodes) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        nodes.sweep()
