"""Puts the agent together: source, collector, sampler, stream to the fleet, service."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.clock import Clock
from gpuscale.common.lifecycle import TaskScope
from gpuscale.common.server import Registration
from gpuscale.monitor.agent.collector import Collector
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.host import PsutilHost
from gpuscale.monitor.agent.push import FleetPush
from gpuscale.monitor.agent.sampler import Sampler
from gpuscale.monitor.agent.servicer import AgentServicer
from gpuscale.monitor.agent.settings import AgentSettings
from gpuscale.monitor.agent.sources import make_source

SERVICE = "gpuscale.api.monitor.v1.AgentService"


@asynccontextmanager
async def open_agent(
    settings: AgentSettings, *, fleet: grpc.aio.Channel | None, clock: Clock
) -> AsyncGenerator[tuple[Registration, ...], None]:
    """Read this host until the block ends, and stream to the fleet if there is a channel to one.

    Raises:
        FailedPreconditionError: the GPUs that the settings ask for cannot be read by this installation.
    """
    source = make_source(settings.source, settings.node, settings.simulated_gpu_count, clock.now)
    host = PsutilHost(clock.boot_id, clock.now)
    deadlines = settings.deadlines()
    collector = Collector(
        node=settings.node,
        period=settings.period_seconds,
        gpus=Gpus(source, clock, deadlines),
        host=host,
        identity=await asyncio.to_thread(host.identity),
        clock=clock,
        deadlines=deadlines,
    )
    sampler = Sampler(collector.collect, settings.period_seconds, clock)
    servicer = AgentServicer(sampler, clock)
    try:
        async with TaskScope() as tasks:
            tasks.spawn("agent sampler", sampler.run())
            if fleet is not None:
                push = FleetPush(fleet, sampler, collector, clock)
                tasks.spawn("agent stream to the fleet", push.run())
            add = partial(monitor_api.add_AgentServiceServicer_to_server, servicer)
            yield (Registration(SERVICE, add),)
    finally:
        await collector.close()
