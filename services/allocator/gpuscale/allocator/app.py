"""The allocator put together: store, ledger, view of the fleet, sweeper, and the service that is registered."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import grpc

from gpuscale.allocator.commits import Commits
from gpuscale.allocator.ledger import Ledger, rebased
from gpuscale.allocator.service import Allocator
from gpuscale.allocator.servicer import AllocatorServicer
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.allocator.store import AllocatorStore, Saved, open_store
from gpuscale.allocator.sweeper import Sweeper
from gpuscale.allocator.telemetry import FleetFollower
from gpuscale.allocator.view import FleetView
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.clock import Clock
from gpuscale.common.lifecycle import TaskScope
from gpuscale.common.server import Registration

DATABASE = "allocator.db"
SERVICE = "gpuscale.api.allocator.v1.AllocatorService"


@asynccontextmanager
async def open_allocator(
    settings: AllocatorSettings, *, fleet: grpc.aio.Channel, clock: Clock
) -> AsyncGenerator[tuple[Registration, ...]]:
    """Run the allocator and yield what a server is to serve.

    The caller holds the lock on `settings.data_dir` and owns the channel to the fleet.

    Raises:
        FailedPreconditionError: the stored state is damaged, inconsistent, or of another version.
        UnavailableError: the stored state cannot be used now.
    """
    async with open_store(settings.data_dir / DATABASE, clock.boot_id) as store, TaskScope() as tasks:
        saved = await store.load()
        ledger = await _restore(saved, store, clock)
        view = FleetView(saved.ranks)
        follower = FleetFollower(fleet, view, clock, store.save_ranks)
        commits = Commits(ledger, store, tasks)
        allocator = Allocator(
            ledger=ledger, view=view, follower=follower, store=store, commits=commits, clock=clock
        )
        tasks.spawn("follow the fleet", follower.run())
        tasks.spawn("end leases that ran out", Sweeper(ledger, store, commits, clock).run())
        servicer = AllocatorServicer(allocator, settings, clock)
        add = partial(allocator_api.add_AllocatorServiceServicer_to_server, servicer)
        yield (Registration(SERVICE, add),)


async def _restore(saved: Saved, store: AllocatorStore, clock: Clock) -> Ledger:
    """The ledger of what is on disk; deadlines of an earlier boot start anew, and are written so."""
    now = clock.now()
    of_this_boot = [one if boot == clock.boot_id else rebased(one, now) for one, boot in saved.reservations]
    moved = [one for one, (old, _) in zip(of_this_boot, saved.reservations, strict=True) if one is not old]
    if moved:
        await store.change(moved)
    ledger = Ledger(saved.fence)
    ledger.restore(of_this_boot)
    return ledger
