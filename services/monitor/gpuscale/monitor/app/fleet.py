"""Puts the fleet together: the index of nodes, the passing of time, the service."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from gpuscale.common.rpc.server import Registration
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.monitor.app.exposition import open_metrics
from gpuscale.monitor.app.fleet_settings import FleetSettings
from gpuscale.monitor.app.observing import Observing
from gpuscale.monitor.exposition.fleet import FleetPage
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.servicer import SERVICE, FleetServicer, add_fleet
from gpuscale.monitor.keeping.keeper import open_keeper
from gpuscale.monitor.recording.servicer import Keep, forget

# How late a watcher may learn that a node became STALE.
SWEEP_SECONDS = 0.25
MIB = 1024**2


@asynccontextmanager
async def open_fleet(
    settings: FleetSettings, *, clock: Clock
) -> AsyncGenerator[tuple[Registration, ...], None]:
    """Take in agents' streams until the block ends. Of nodes nothing is kept: after a restart agents come again.

    The caller holds the lock on `settings.data_dir`, where there is one.

    Raises:
        FailedPreconditionError: what is in it is damaged, or of another version.
        UnavailableError: it cannot be used now.
    """
    nodes = Nodes(clock, settings.max_nodes)
    observing = Observing(nodes, clock, settings.history_tiers(), settings.history_memory_mib * MIB)
    style = settings.style(many_nodes=True)
    page = FleetPage(nodes, observing.lasting_events, clock, style, settings.metrics_max_gpus)
    async with (
        _keep(settings, observing, clock) as keep,
        open_metrics(settings, page.render),
        TaskScope() as tasks,
    ):
        tasks.spawn("fleet sweep", _sweep(nodes))
        tasks.spawn("fleet health", observing.run())
        fleet = Registration(SERVICE, partial(add_fleet, FleetServicer(nodes, clock)))
        yield (fleet, *observing.registrations(keep))


@asynccontextmanager
async def _keep(settings: FleetSettings, observing: Observing, clock: Clock) -> AsyncGenerator[Keep, None]:
    """What makes recordings last; nothing does without a directory for them."""
    if settings.data_dir is None:
        yield forget
        return
    async with open_keeper(
        settings.data_dir, observing.history, observing.recordings, observing.events, clock
    ) as keeper:
        observing.resume()
        yield keeper.save_recording


async def _sweep(nodes: Nodes) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        nodes.sweep()
