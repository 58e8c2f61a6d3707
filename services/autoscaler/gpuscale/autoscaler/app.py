"""The autoscaler put together: store, queue watchers, adapters, leases, reconciler, and the services that are registered."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import grpc

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler import replica_store, store
from gpuscale.autoscaler.acting import Actor
from gpuscale.autoscaler.adapter_servicer import AdapterServicer
from gpuscale.autoscaler.decision_log import DecisionLog
from gpuscale.autoscaler.decision_servicer import DecisionServicer
from gpuscale.autoscaler.endpoint_servicer import EndpointServicer
from gpuscale.autoscaler.endpoints import Endpoints
from gpuscale.autoscaler.hub import AdapterHub
from gpuscale.autoscaler.leases import LeaseKeeper
from gpuscale.autoscaler.queues.watcher_servicer import QueueWatcherServicer
from gpuscale.autoscaler.queues.watcher_uses import WatcherUses
from gpuscale.autoscaler.queues.watchers import QueueWatchers, open_watchers
from gpuscale.autoscaler.reconciler import Reconciler, Rooms
from gpuscale.autoscaler.reservations import Reservations
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.wakes import Wakes
from gpuscale.common.clock import Clock
from gpuscale.common.lifecycle import TaskScope
from gpuscale.common.server import Registration
from gpuscale.common.store import Store

DATABASE = "autoscaler.db"
_PACKAGE = "gpuscale.api.autoscaler.v1"


@asynccontextmanager
async def open_autoscaler(
    settings: AutoscalerSettings, *, allocator: grpc.aio.Channel, clock: Clock
) -> AsyncGenerator[tuple[Registration, ...]]:
    """Run the autoscaler and yield what a server is to serve.

    The caller holds the lock on `settings.data_dir` and owns the channel to the allocator.

    Raises:
        FailedPreconditionError: the stored state is damaged or of another version, or a broker is configured wrongly.
        UnavailableError: the stored state cannot be used now.
    """
    path = settings.data_dir / DATABASE
    uses = WatcherUses()
    async with (
        Store.open(path, store.METADATA, name="autoscaler", version=store.VERSION) as state,
        open_watchers(state, settings.brokers, clock, uses.of) as watchers,
    ):
        starts = await _begin(state, clock, uses)
        async with TaskScope() as scope:
            yield _assemble(state, watchers, starts, allocator=allocator, clock=clock, uses=uses, scope=scope)


async def _begin(state: Store, clock: Clock, uses: WatcherUses) -> int:
    """Note this start; returns how many there were. What was measured on the clock of an earlier boot is dropped."""
    starts, rebooted = await state.write(partial(store.begin, boot_id=clock.boot_id))
    if rebooted:
        await state.write(partial(store.restart_rests, now=clock.now()))
        await state.write(replica_store.forget_boot)
    for endpoint in await state.read(store.endpoints):
        uses.set(endpoint.id, endpoint.spec.watchers)
    return starts


def _assemble(
    state: Store,
    watchers: QueueWatchers,
    starts: int,
    *,
    allocator: grpc.aio.Channel,
    clock: Clock,
    uses: WatcherUses,
    scope: TaskScope,
) -> tuple[Registration, ...]:
    """Put the parts together and start their tasks."""
    wakes = Wakes()
    hub = AdapterHub(state, clock, starts, wakes)
    reservations = Reservations(allocator)
    keeper = LeaseKeeper(state, reservations, clock, hub, wakes)
    actor = Actor(state, clock, hub, reservations)
    rooms = Rooms(state, clock, watchers.reading, hub, actor, keeper, uses)
    endpoints = Endpoints(
        state,
        clock,
        watcher_exists=lambda watcher: watchers.reading(watcher) is not None,
        hub=hub,
        wakes=wakes,
        uses=uses,
    )
    scope.spawn("renew leases", keeper.renew_forever())
    scope.spawn("release leases", keeper.release_forever())
    scope.spawn("reconcile endpoints", Reconciler(rooms, wakes).run())
    return (
        Registration(
            f"{_PACKAGE}.EndpointService",
            partial(autoscaler_api.add_EndpointServiceServicer_to_server, EndpointServicer(endpoints)),
        ),
        Registration(
            f"{_PACKAGE}.QueueWatcherService",
            partial(
                autoscaler_api.add_QueueWatcherServiceServicer_to_server,
                QueueWatcherServicer(watchers, clock),
            ),
        ),
        Registration(
            f"{_PACKAGE}.DecisionService",
            partial(
                autoscaler_api.add_DecisionServiceServicer_to_server, DecisionServicer(DecisionLog(state))
            ),
        ),
        Registration(
            f"{_PACKAGE}.AdapterService",
            partial(autoscaler_api.add_AdapterServiceServicer_to_server, AdapterServicer(hub, scope)),
        ),
    )
