"""Composition of the autoscaler, and its program: store, queue watchers, adapters, leases, reconciler, gRPC services, and figures."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import grpc

from gpuscale.autoscaler.loop.hub import AdapterHub, Followers, Wakes
from gpuscale.autoscaler.loop.leases import Actor, LeaseKeeper, Reservations
from gpuscale.autoscaler.loop.precedence import Precedence
from gpuscale.autoscaler.loop.reconciler import Dependencies, Reconciler
from gpuscale.autoscaler.servicers.adapter_servicer import AdapterServicer, adapter_to_wire
from gpuscale.autoscaler.servicers.adapting import Adapting
from gpuscale.autoscaler.servicers.backtests import Backtests, BacktestServicer
from gpuscale.autoscaler.servicers.decision_servicer import DecisionServicer
from gpuscale.autoscaler.servicers.endpoint_servicer import EndpointServicer, RuleServicer
from gpuscale.autoscaler.servicers.endpoints import Endpoints
from gpuscale.autoscaler.servicers.feeds import Feeds
from gpuscale.autoscaler.servicers.keda_servicer import SERVICE as KEDA_SERVICE
from gpuscale.autoscaler.servicers.keda_servicer import registration as keda_registration
from gpuscale.autoscaler.servicers.preset_servicer import PresetServicer
from gpuscale.autoscaler.servicers.watcher_servicer import (
    MetricServicer,
    QueueWatcherServicer,
    watchers_to_wire,
)
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.signals.sources import Histories, SignalSources, WatcherUses, open_sources
from gpuscale.autoscaler.signals.watchers import QueueWatchers, open_watchers
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.decision_log import DecisionLog, Repetitions
from gpuscale.common.config.settings import run_program, serve_stateful
from gpuscale.common.rpc.meter import CallMeter
from gpuscale.common.rpc.server import Registration, registrations
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.metrics_text import AT_ONCE, Family, MetricsPage, labels
from gpuscale.common.runtime.tasks import Clock, SystemClock, TaskScope, in_slices
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Backend, Store, add_store
from gpuscale.common.store.term import Term

DATABASE = "autoscaler.db"
_NAME = "autoscaler"
_PACKAGE = "gpuscale.api.autoscaler.v1"
_OF_PACKAGE = (
    *("EndpointService", "RuleService", "PresetService", "BacktestService"),
    *("QueueWatcherService", "MetricService", "DecisionService", "AdapterService"),
)
_STREAM_SERVICE = "gpuscale.internal.autoscaler.v1.AdapterStreamService"
SERVICES = (*(f"{_PACKAGE}.{name}" for name in _OF_PACKAGE), _STREAM_SERVICE, KEDA_SERVICE)
"""All services of the autoscaler."""
_PREFIX = "gpuscale_autoscaler"
_DESIRED = Family(f"{_PREFIX}_endpoint_desired", "gauge", "Desired replicas of an endpoint.")
_GRANTED = Family(f"{_PREFIX}_endpoint_granted", "gauge", "Replicas of an endpoint that have their GPUs.")
_READY = Family(f"{_PREFIX}_endpoint_ready", "gauge", "Replicas of an endpoint that are ready.")
_BACK_OFF = Family(
    f"{_PREFIX}_endpoint_back_off_seconds", "gauge", "Wait before the next replica, after failures."
)
_LATE = Family(f"{_PREFIX}_endpoint_late_seconds", "gauge", "How late an evaluation of an endpoint is.")
_ADAPTERS = Family(f"{_PREFIX}_adapters", "gauge", "Worker adapters, live or silent.")
_WATCHERS = Family(f"{_PREFIX}_watchers", "gauge", "Queue watchers, by the state of their last reading.")
_UNANSWERED = Family(f"{_PREFIX}_prometheus_unanswered", "gauge", "Queries without an answer.")


@asynccontextmanager
async def open_autoscaler(
    settings: AutoscalerSettings,
    *,
    fleet: grpc.aio.Channel,
    allocator: grpc.aio.Channel,
    clock: Clock,
    term: Term | None = None,
    meter: CallMeter | None = None,
) -> AsyncGenerator[tuple[Registration, ...]]:
    """Run the autoscaler and yield the services for a server to register.

    The caller holds the lock on `settings.data_dir` and owns the channels to the fleet and the allocator. With `term`, during
    which this process leads, state is stored in `settings.database`; without it, in a file in `data_dir`. `meter` exports
    figures. FailedPreconditionError if the state is damaged or of another version, InvalidArgumentError if a broker or Prometheus
    server is misconfigured.
    """
    schema = store.METADATA, store.VERSION, store.MIGRATIONS
    if (shared := settings.shared(term)) is None:
        backend: Backend = Sqlite(settings.data_dir / DATABASE, *schema)
    else:
        from gpuscale.common.store.postgres import Postgres

        url, term = shared
        backend = Postgres(url, _NAME, *schema, term)
    uses, wakes, followers = WatcherUses(), Wakes(), Followers()
    async with (
        Store.open(backend, name=_NAME) as state,
        open_watchers(state, settings.brokers, clock, uses.of) as watchers,
        open_sources(
            watchers.reading, settings.prometheus, fleet=fleet, allocator=allocator, clock=clock
        ) as sources,
    ):
        starts, rebooted = await state.write(partial(store.begin, boot_id=clock.boot_id), frees=True)
        if rebooted:  # measurements on the clock of an earlier boot are dropped
            await state.write(partial(store.restart_rests, now=clock.now()), frees=True)
            await state.write(store.forget_boot, frees=True)
        for endpoint in await state.read(store.endpoints):
            uses.set(endpoint.id, endpoint.spec.watchers)
        hub = AdapterHub(state, clock, starts, wakes)
        histories, repetitions = Histories(watchers.reading, state), Repetitions(state)
        reservations = Reservations(allocator, wakes)
        keeper = LeaseKeeper(state, reservations, clock, hub, wakes)
        actor = Actor(state, clock, hub, reservations)
        precedence = Precedence(state, clock, hub, allocator, wakes, sources.busy)
        deps = Dependencies(
            state, clock, sources, hub, actor, keeper, uses, followers, histories, repetitions, precedence
        )
        reconciler = Reconciler(deps, wakes)
        endpoints = Endpoints(
            deps,
            wakes,
            watcher_exists=lambda watcher: watchers.reading(watcher) is not None,
            prometheus=sources.prometheus.keys(),
        )
        async with histories.kept(), repetitions.kept(), AsyncExitStack() as shown, TaskScope() as scope:
            scope.spawn("save counts of decisions", repetitions.run())
            scope.spawn("renew leases", keeper.renew_forever())
            scope.spawn("release leases", keeper.release_forever())
            scope.spawn("follow revocations", keeper.follow_revocations())
            scope.spawn("stand in the queue", reservations.places.run())
            scope.spawn("reconcile endpoints", reconciler.run())
            backtests = Backtests(state, histories, clock)
            await backtests.load()
            scope.spawn("run backtests", backtests.run())
            scope.spawn("choose policies", Adapting(deps, endpoints, backtests).run())
            feeds = Feeds(
                deps, lambda: map(adapter_to_wire, hub.views()), partial(watchers_to_wire, watchers, clock)
            )
            scope.spawn("tell watchers", feeds.run())
            if meter is not None:
                database = settings.data_dir / DATABASE if settings.database is None else None
                figures = partial(add_figures, reconciler, hub, watchers, sources, database)
                shown.enter_context(meter.showing(figures))
            yield (
                *registrations(
                    EndpointServicer(endpoints, deps, feeds),
                    RuleServicer(endpoints, state, clock),
                    PresetServicer(),
                    BacktestServicer(backtests),
                    QueueWatcherServicer(watchers, clock, feeds),
                    MetricServicer(sources.reported, state, clock),
                    DecisionServicer(deps, reconciler, DecisionLog(state, repetitions), feeds),
                    AdapterServicer(hub, scope, feeds, sources.servers),
                ),
                keda_registration(state, followers),
            )


async def add_figures(
    reconciler: Reconciler,
    hub: AdapterHub,
    watchers: QueueWatchers,
    sources: SignalSources,
    file: Path | None,
    page: MetricsPage,
) -> None:
    """Add the figures to a page; `file` is the database, if it is a file."""
    async for endpoint, counts, late in in_slices(reconciler.counts(), AT_ONCE):
        named = labels({"endpoint": endpoint})
        page.add(_DESIRED, named, counts.desired)
        page.add(_GRANTED, named, counts.granted)
        page.add(_READY, named, counts.ready)
        page.add(_BACK_OFF, named, round(counts.back_off, 3))
        page.add(_LATE, named, round(late, 3))
    for live, count in sorted(Counter(facts.live for facts in hub.facts()).items()):
        page.add(_ADAPTERS, labels({"state": "LIVE" if live else "SILENT"}), count)
    for state, count in sorted(watchers.states().items()):
        page.add(_WATCHERS, labels({"state": state}), count)
    for server, poller in sorted(sources.prometheus.items()):
        page.add(_UNANSWERED, labels({"server": server}), poller.unanswered)
    add_store(page, _PREFIX, file)


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
