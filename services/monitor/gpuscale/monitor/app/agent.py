"""Puts the agent together: source, collector, sampler, stream to the fleet, service."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.rpc.server import Registration
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.monitor.agent.admission import Holders
from gpuscale.monitor.agent.bus import Bus, find_gpus
from gpuscale.monitor.agent.collector import Collector
from gpuscale.monitor.agent.driver_servicer import DriverServicer
from gpuscale.monitor.agent.faults import Faults
from gpuscale.monitor.agent.feed import SnapshotFeed
from gpuscale.monitor.agent.gpus import LONGEST_EVENT_WAIT_SECONDS, Gpus
from gpuscale.monitor.agent.host import ProcHost
from gpuscale.monitor.agent.lease_checks import LeaseChecks
from gpuscale.monitor.agent.push import FleetPush
from gpuscale.monitor.agent.sampler import Sampler
from gpuscale.monitor.agent.servicer import SERVICE, AgentServicer, add_agent
from gpuscale.monitor.agent.sources import make_source
from gpuscale.monitor.agent.work import Work
from gpuscale.monitor.agent.work_servicer import WorkServicer
from gpuscale.monitor.app.agent_settings import AgentSettings
from gpuscale.monitor.app.exposition import open_metrics
from gpuscale.monitor.exposition.agent import AgentPage
from gpuscale.monitor.exposition.meter import CollectionMeter
from gpuscale.monitor.exposition.xids import Xids

DRIVER_SERVICE = "gpuscale.api.monitor.v1.DriverService"
WORK_SERVICE = "gpuscale.api.monitor.v1.WorkService"


@asynccontextmanager
async def open_agent(
    settings: AgentSettings,
    *,
    fleet: grpc.aio.Channel | None,
    clock: Clock,
    allocator: grpc.aio.Channel | None = None,
) -> AsyncGenerator[tuple[Registration, ...], None]:
    """Read this host until the block ends, and stream to the fleet if there is a channel to one.

    Work is admitted for leases that the allocator at the end of that channel confirms; without one, for none.

    Raises:
        FailedPreconditionError: the GPUs that the settings ask for cannot be read by this installation.
    """
    source = make_source(
        settings.source, settings.node, settings.simulated_gpu_count, clock.now, isolate=settings.isolate
    )
    host = ProcHost(clock.boot_id, clock.now)
    deadlines = settings.deadlines()
    event_wait = min(LONGEST_EVENT_WAIT_SECONDS, settings.period_seconds)
    gpus = Gpus(source, clock, deadlines, event_wait, settings.node)
    work = Work(gpus.knows, LeaseChecks(allocator, settings.node))
    collector = Collector(
        node=settings.node,
        period=settings.period_seconds,
        gpus=gpus,
        host=host,
        identity=await asyncio.to_thread(host.identity),
        clock=clock,
        deadlines=deadlines,
        labels=settings.labels_by_name(),
        admitted=lambda: work.admissions,
        holders=Holders(by_user=settings.processes_by_user),
    )
    on_bus = [] if settings.source == "simulated" else await asyncio.to_thread(find_gpus)
    meter = CollectionMeter(collector.collect, clock, Bus(on_bus))
    sampler = Sampler(meter.collect, settings.period_seconds, clock)
    xids = Xids()
    page = AgentPage(
        meter,
        sampler.snapshots,
        xids,
        gpus.collection,
        lambda: collector.quarantines,
        clock,
        settings.style(),
    )
    feed = SnapshotFeed(sampler.snapshots, clock, settings.dead_bands(), settings.full_every_seconds)
    servicer = AgentServicer(sampler, feed, clock)
    try:
        async with (
            work.kept_in(settings.state_dir, clock.boot_id),
            open_metrics(settings, page.render),
            TaskScope() as tasks,
        ):
            tasks.spawn("agent sampler", sampler.run())
            tasks.spawn("agent XID counts", xids.follow(gpus.events))
            if fleet is not None:
                faults = Faults()
                tasks.spawn("agent faults", faults.follow(gpus.events))
                bands, full_every = settings.dead_bands(), settings.full_every_seconds
                why = partial(settings.why_unavailable, settings.fleet_address)
                push = FleetPush(fleet, sampler, collector, clock, bands, full_every, faults, why)
                tasks.spawn("agent stream to the fleet", push.run())
            yield (Registration(SERVICE, partial(add_agent, servicer)), *_host_services(gpus, work, clock))
    finally:
        await collector.close()


def _host_services(gpus: Gpus, work: Work, clock: Clock) -> tuple[Registration, ...]:
    """What is asked of the agent on its own host."""
    driver, worker = DriverServicer(gpus, clock), WorkServicer(work)
    return (
        Registration(
            DRIVER_SERVICE, lambda server: monitor_api.add_DriverServiceServicer_to_server(driver, server)
        ),
        Registration(
            WORK_SERVICE, lambda server: monitor_api.add_WorkServiceServicer_to_server(worker, server)
        ),
    )
