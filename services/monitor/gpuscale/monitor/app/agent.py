"""The program `gpuscale-agent`: reads one host and its GPUs, serves them, and streams them to the fleet."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import grpc

from gpuscale.common.config.frame import run_apart
from gpuscale.common.rpc.meter import CallMeter, ProgramMeter
from gpuscale.common.rpc.server import Registration, Server, registrations
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, SystemClock, TaskScope
from gpuscale.common.security.auth import Role
from gpuscale.monitor.agent import servicers
from gpuscale.monitor.agent.collector import Collector, Sampler
from gpuscale.monitor.agent.device import ReadDeadlines
from gpuscale.monitor.agent.events import FaultLog
from gpuscale.monitor.agent.gpus import LONGEST_EVENT_WAIT_SECONDS, Gpus
from gpuscale.monitor.agent.host import Pods, ProcHost
from gpuscale.monitor.agent.pci import Bus, find_gpus
from gpuscale.monitor.agent.push import FleetPush
from gpuscale.monitor.agent.sources import make_source
from gpuscale.monitor.agent.work import LeaseChecks, Work
from gpuscale.monitor.app.frame import AgentFrame, by_name
from gpuscale.monitor.exposition.agent import AgentPage, CollectionMeter, Xids, add_push
from gpuscale.monitor.exposition.snapshots import HolderLabels
from gpuscale.monitor.model.admission import Holders

LAG_PERIOD = 4.618
"""Rarer than of other programs, as each look wakes an idle agent; and not a multiple of usual periods of readings, so that
looks come at every phase of one and meet what it blocks: in step with it they would never, or always."""


@asynccontextmanager
async def open_agent(
    settings: AgentFrame,
    *,
    fleet: grpc.aio.Channel | None,
    clock: Clock,
    allocator: grpc.aio.Channel | None,
    calls: CallMeter | None = None,
) -> AsyncGenerator[tuple[Registration, ...], None]:
    """Read this host until the block ends, and stream to `fleet` if given.

    `allocator` confirms the leases of work; without it, none is admitted. `/metrics` shows `calls` too.
    FailedPreconditionError if this installation cannot read such GPUs.
    """
    source = make_source(
        settings.source,
        settings.node,
        settings.simulated_gpu_count,
        clock.now,
        isolate=settings.isolate,
        admitted=lambda: work.admissions,
    )
    host = ProcHost(clock.boot_id, clock.now)
    deadlines = ReadDeadlines(settings.soft_deadline_seconds, settings.hard_deadline_seconds)
    event_wait = min(LONGEST_EVENT_WAIT_SECONDS, settings.period_seconds)
    gpus = Gpus(source, clock, deadlines, event_wait, settings.node)
    work = Work(gpus.knows, LeaseChecks(allocator, settings.node))
    pods = Pods(settings.pod_resources_socket, clock)
    collector = Collector(
        node=settings.node,
        period=settings.period_seconds,
        gpus=gpus,
        read_host=host.read,
        identity=await asyncio.to_thread(host.identity),
        clock=clock,
        deadlines=deadlines,
        labels=by_name(settings.labels),
        admitted=lambda: work.admissions,
        holders=Holders(by_user=settings.processes_by_user),
        pods=lambda: pods.by_gpu,
    )
    on_bus = [] if settings.source == "simulated" else await asyncio.to_thread(find_gpus)
    meter = CollectionMeter(collector.collect, clock, Bus(on_bus))
    metrics = calls or ProgramMeter("agent", LAG_PERIOD)
    sampler = Sampler(meter.collect, settings.period_seconds, clock)
    xids = Xids()
    gpus.observers.append(xids.note)
    page = AgentPage(
        meter,
        sampler.snapshots,
        xids,
        gpus.collection,
        lambda: collector.quarantines,
        clock,
        settings.style(),
        HolderLabels(allocator, clock, settings.node).ask if settings.metrics_holders else None,
    )
    try:
        async with (
            work.kept_in(settings.state_dir, clock.boot_id),
            AsyncExitStack() as stack,
            settings.open_metrics(metrics),
            TaskScope() as tasks,
        ):
            stack.enter_context(metrics.showing(page.add))
            tasks.spawn("agent sampler", sampler.run())
            tasks.start("agent pods", pods.run())
            if fleet is not None:
                faults = FaultLog()
                gpus.observers.append(faults.note)
                why = partial(settings.why_unavailable, settings.fleet_address)
                push = FleetPush(fleet, sampler, collector, clock, faults, why)
                tasks.spawn("agent stream to the fleet", push.run())
                stack.enter_context(metrics.showing(partial(add_push, push)))
            if allocator is not None and (settings.killer_socket or settings.power_socket):
                from gpuscale.monitor.agent.helpers import Capping, Killing  # with messages, 0.3 MB

                if settings.killer_socket is not None:
                    killing = Killing(allocator, settings.killer_socket, settings.node, sampler, work)
                    tasks.spawn("agent kill orders", killing.run())
                if settings.power_socket is not None:
                    capping = Capping(allocator, settings.power_socket, settings.node, sampler, gpus)
                    tasks.spawn("agent power caps", capping.run())
            agent = servicers.AgentServicer(sampler, clock)
            yield tuple(
                registrations(agent, servicers.DriverServicer(gpus, clock), servicers.WorkServicer(work))
            )
    finally:
        await collector.close()


_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_apart(AgentFrame, "gpuscale.monitor.app.settings", serve, argv, program="gpuscale-agent")


async def serve(settings: AgentFrame, stop: asyncio.Event) -> None:
    """Serve until `stop` is set."""
    authenticator = settings.authenticator(socket_role=Role.AGENT)
    calls = CallMeter(settings.section, authenticator, LAG_PERIOD) if settings.metrics_listen else None
    server = Server(replace(settings.server_options(), socket=settings.work_socket), authenticator, calls)
    address = server.bind()
    async with AsyncExitStack() as stack:
        fleet = allocator = None
        if settings.fleet_address:
            fleet = allocator = await stack.enter_async_context(settings.open_channel(settings.fleet_address))
        if settings.allocator_address:
            allocator = await stack.enter_async_context(settings.open_channel(settings.allocator_address))
        agent = open_agent(settings, fleet=fleet, allocator=allocator, clock=SystemClock(), calls=calls)
        server.add(*await stack.enter_async_context(agent))
        if allocator is not None:
            server.add_generic(servicers.LeaseRelay(allocator), {servicers.ALLOCATOR_SERVICE})
        if settings.renew_certificate and fleet is not None and settings.cert_file and settings.ca_file:
            from gpuscale.common.rpc.certificate_renewal import renew_certificate  # takes 16 MB

            tasks = await stack.enter_async_context(TaskScope())
            tasks.spawn("agent certificate", renew_certificate(fleet, settings.cert_file, settings.ca_file))
        await stack.enter_async_context(server)
        _log.info("agent serves", address=address, node=settings.node, fleet=settings.fleet_address or None)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
