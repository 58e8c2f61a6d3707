"""The autoscaler put together: store, queue watchers, adapters, leases, reconciler, and the services that are registered."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TypeVar

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.loop.acting import Actor
from gpuscale.autoscaler.loop.hub import AdapterHub
from gpuscale.autoscaler.loop.leases import LeaseKeeper, Reservations
from gpuscale.autoscaler.loop.reconciler import Reconciler, Rooms
from gpuscale.autoscaler.loop.wakes import Followers, Wakes, WatcherUses
from gpuscale.autoscaler.servicers.adapter_servicer import AdapterServicer
from gpuscale.autoscaler.servicers.backtest_servicer import BacktestServicer, Runs
from gpuscale.autoscaler.servicers.decision_servicer import DecisionServicer, Evaluations
from gpuscale.autoscaler.servicers.endpoint_servicer import EndpointServicer, LogReading
from gpuscale.autoscaler.servicers.endpoints import Endpoints
from gpuscale.autoscaler.servicers.keda_servicer import SERVICE as KEDA_SERVICE
from gpuscale.autoscaler.servicers.keda_servicer import registration as keda_registration
from gpuscale.autoscaler.servicers.metric_servicer import MetricServicer
from gpuscale.autoscaler.servicers.preset_servicer import PresetServicer
from gpuscale.autoscaler.servicers.rule_servicer import EndpointRules, RuleServicer
from gpuscale.autoscaler.servicers.watcher_servicer import QueueWatcherServicer
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.signals.histories import Histories
from gpuscale.autoscaler.signals.sources import SignalSources, open_sources
from gpuscale.autoscaler.signals.watchers import QueueWatchers, open_watchers
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.decision_log import DecisionFile, DecisionLog, Repetitions, open_decision_file
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.rpc.server import Registration
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.common.store.store import Store
from gpuscale.common.store.term import Term

DATABASE = "autoscaler.db"
_NAME = "autoscaler"
_PACKAGE = "gpuscale.api.autoscaler.v1"
_OF_PACKAGE = (
    *("EndpointService", "RuleService", "PresetService", "BacktestService"),
    *("QueueWatcherService", "MetricService", "DecisionService", "AdapterService"),
)
SERVICES = (*(f"{_PACKAGE}.{name}" for name in _OF_PACKAGE), KEDA_SERVICE)
"""All that the autoscaler serves."""
_Servicer = TypeVar("_Servicer")


@asynccontextmanager
async def open_autoscaler(
    settings: AutoscalerSettings,
    *,
    fleet: grpc.aio.Channel,
    allocator: grpc.aio.Channel,
    clock: Clock,
    term: Term | None = None,
) -> AsyncGenerator[tuple[Registration, ...]]:
    """Run the autoscaler and yield what a server is to serve.

    The caller holds the lock on `settings.data_dir` and owns the channels to the fleet and the allocator. With `term`, in
    which this process leads, the state is in `settings.database`; else it is a file in the directory.

    Raises:
        FailedPreconditionError: the stored state is damaged or of another version, or a broker or Prometheus server is
            configured wrongly.
        UnavailableError: the stored state cannot be used now, or the term is over.
    """
    uses = WatcherUses()
    async with (
        _open_state(settings, term) as state,
        open_watchers(state, settings.brokers, clock, uses.of) as watchers,
        open_sources(
            watchers.reading, settings.prometheus, fleet=fleet, allocator=allocator, clock=clock
        ) as sources,
        open_decision_file(settings.decisions_file, settings.decisions_file_bytes) as file,
    ):
        starts = await _begin(state, clock, uses)
        histories, repetitions = Histories(watchers.reading, state), Repetitions(state)
        async with histories.kept(), repetitions.kept(), TaskScope() as scope:
            yield _assemble(
                state,
                watchers,
                sources,
                starts,
                allocator=allocator,
                clock=clock,
                uses=uses,
                scope=scope,
                file=file,
                histories=histories,
                repetitions=repetitions,
            )


def _open_state(settings: AutoscalerSettings, term: Term | None) -> AbstractAsyncContextManager[Store]:
    if settings.database is None:
        path = settings.data_dir / DATABASE
        return Store.open(
            path, store.METADATA, name=_NAME, version=store.VERSION, migrations=store.MIGRATIONS
        )
    if term is None:
        raise FailedPreconditionError(
            "only gpuscale-autoscaler keeps its state in PostgreSQL: leave database out here",
            reason="DATABASE_REFUSED",
        )
    from gpuscale.common.store.postgres import Postgres

    backend = Postgres(settings.database, _NAME, store.METADATA, store.VERSION, store.MIGRATIONS, term)
    return Store.on(backend, name=_NAME)


async def _begin(state: Store, clock: Clock, uses: WatcherUses) -> int:
    """Note this start; returns how many there were. What was measured on the clock of an earlier boot is dropped."""
    starts, rebooted = await state.write(partial(store.begin, boot_id=clock.boot_id))
    if rebooted:
        await state.write(partial(store.restart_rests, now=clock.now()))
        await state.write(store.forget_boot)
    for endpoint in await state.read(store.endpoints):
        uses.set(endpoint.id, endpoint.spec.watchers)
    return starts


def _assemble(
    state: Store,
    watchers: QueueWatchers,
    sources: SignalSources,
    starts: int,
    *,
    allocator: grpc.aio.Channel,
    clock: Clock,
    uses: WatcherUses,
    scope: TaskScope,
    file: DecisionFile,
    histories: Histories,
    repetitions: Repetitions,
) -> tuple[Registration, ...]:
    """Put the parts together and start their tasks."""
    wakes, followers = Wakes(), Followers()
    hub = AdapterHub(state, clock, starts, wakes)
    reservations = Reservations(allocator)
    keeper = LeaseKeeper(state, reservations, clock, hub, wakes)
    actor = Actor(state, clock, hub, reservations)
    rooms = Rooms(state, clock, sources, hub, actor, keeper, uses, followers, file, histories, repetitions)
    endpoints = Endpoints(
        state,
        clock,
        watcher_exists=lambda watcher: watchers.reading(watcher) is not None,
        prometheus=sources.prometheus.keys(),
        hub=hub,
        wakes=wakes,
        uses=uses,
        followers=followers,
        file=file,
        repetitions=repetitions,
    )
    scope.spawn("save counts of decisions", repetitions.run())
    scope.spawn("renew leases", keeper.renew_forever())
    scope.spawn("release leases", keeper.release_forever())
    reconciler = Reconciler(rooms, wakes)
    evaluations = Evaluations(
        state, clock, sources=sources, hub=hub, past=reconciler.past, samples=reconciler.samples
    )
    scope.spawn("reconcile endpoints", reconciler.run())
    return (
        *_of_endpoints(
            EndpointServicer(endpoints, LogReading(state, hub)),
            EndpointRules(endpoints, state, clock),
            BacktestServicer(Runs(), histories, state, clock),
        ),
        *_of_signals(QueueWatcherServicer(watchers, clock), MetricServicer(sources.reported, state, clock)),
        _registration(
            "DecisionService",
            api.add_DecisionServiceServicer_to_server,
            DecisionServicer(DecisionLog(state, repetitions), evaluations),
        ),
        _registration(
            "AdapterService", api.add_AdapterServiceServicer_to_server, AdapterServicer(hub, scope)
        ),
        keda_registration(state, followers),
    )


def _of_endpoints(
    endpoints: EndpointServicer, rules: EndpointRules, backtests: BacktestServicer
) -> tuple[Registration, ...]:
    """What says how endpoints scale, and tries it out."""
    return (
        _registration("EndpointService", api.add_EndpointServiceServicer_to_server, endpoints),
        _registration("RuleService", api.add_RuleServiceServicer_to_server, RuleServicer(rules)),
        _registration("PresetService", api.add_PresetServiceServicer_to_server, PresetServicer()),
        _registration("BacktestService", api.add_BacktestServiceServicer_to_server, backtests),
    )


def _of_signals(watchers: QueueWatcherServicer, metrics: MetricServicer) -> tuple[Registration, ...]:
    """Where signals get their values from."""
    return (
        _registration("QueueWatcherService", api.add_QueueWatcherServiceServicer_to_server, watchers),
        _registration("MetricService", api.add_MetricServiceServicer_to_server, metrics),
    )


def _registration(
    service: str, add: Callable[[_Servicer, grpc.aio.Server], None], servicer: _Servicer
) -> Registration:
    return Registration(f"{_PACKAGE}.{service}", partial(add, servicer))
