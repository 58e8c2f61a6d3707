"""Composition of the allocator, and its program: store, ledger, fleet view, sweeper, gRPC services, and the figures on `/metrics`."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from gpuscale.allocator.domain.ledger import Ledger, Tokens, rebased
from gpuscale.allocator.domain.model import Node
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.queueing.model import QueueWorld
from gpuscale.allocator.queueing.queue import Queue
from gpuscale.allocator.servicers.operator_servicers import (
    BookingServicer,
    CapacityServicer,
    NodeServicer,
    QuotaServicer,
)
from gpuscale.allocator.servicers.policy_servicers import (
    NotificationServicer,
    PolicyServicer,
    PowerServicer,
    to_budget,
    to_policy,
    to_target,
)
from gpuscale.allocator.servicers.servicer import AllocatorServicer
from gpuscale.allocator.servicers.usage_servicer import UsageServicer
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.allocator.state.archive import Archive, EndedStore, Totals
from gpuscale.allocator.state.commits import Changes, Commits
from gpuscale.allocator.state.operators import BookingStore, CordonStore, QuotaStore
from gpuscale.allocator.state.policies import PolicyStore
from gpuscale.allocator.state.store import AllocatorStore, Saved, open_shared_store, open_store
from gpuscale.allocator.state.usage_ledger import UsageLedger
from gpuscale.allocator.usecases.accounting import Accounting, FairShare
from gpuscale.allocator.usecases.booking import Calendar
from gpuscale.allocator.usecases.capacity import Capacity
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.allocator.usecases.endings import Forgetting, Losses, Sweeper
from gpuscale.allocator.usecases.fleet import FleetFollower, FleetView
from gpuscale.allocator.usecases.leases import Leases, Records
from gpuscale.allocator.usecases.notifying import open_notifying
from gpuscale.allocator.usecases.policing import DryRuns, KillOrders, open_policing
from gpuscale.allocator.usecases.powering import Powering, open_powering
from gpuscale.allocator.usecases.quotas import Quotas
from gpuscale.allocator.usecases.rebalancing import Rebalancing
from gpuscale.allocator.usecases.reserving import Reserving, Waiting
from gpuscale.allocator.usecases.restarting import Restarting
from gpuscale.api.allocator import v1 as api
from gpuscale.common.config.settings import run_program, serve_stateful
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.meter import CallMeter
from gpuscale.common.rpc.server import Registration, registrations
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.metrics_text import AT_ONCE, Family, MetricsPage, labels
from gpuscale.common.runtime.tasks import Clock, SystemClock, TaskScope, in_slices
from gpuscale.common.store.store import add_store
from gpuscale.common.store.term import Term

DATABASE = "allocator.db"
SERVICES = tuple(
    f"gpuscale.api.allocator.v1.{name}Service"
    for name in (
        "Allocator",
        "Quota",
        "Node",
        "Capacity",
        "Booking",
        "Policy",
        "Notification",
        "Power",
        "Usage",
    )
)
"""All services of the allocator."""
KNOWN_INTERVAL = 0.01
"""Seconds between checks of whether it knows nodes."""


@dataclass(frozen=True, slots=True)
class Allocator:
    """A running allocator: the services for a server to register, the use cases that end leases, and the figures it exports."""

    registrations: tuple[Registration, ...]
    leases: Leases
    figures: Callable[[Path | None, MetricsPage], Awaitable[None]]


@asynccontextmanager
async def open_allocator(
    settings: AllocatorSettings,
    *,
    fleet: grpc.aio.Channel,
    clock: Clock,
    term: Term | None = None,
    meter: CallMeter | None = None,
) -> AsyncGenerator[tuple[Registration, ...]]:
    """Open the allocator like `open_parts`, yield its services, and add its figures to `meter`. Raises the same errors."""
    file = settings.data_dir / DATABASE if settings.database is None else None
    async with open_parts(settings, fleet=fleet, clock=clock, term=term) as allocator:
        with nullcontext() if meter is None else meter.showing(partial(allocator.figures, file)):
            yield allocator.registrations


async def until_known(services: grpc.aio.Channel, gpus: Mapping[str, int]) -> None:
    """Wait until the allocator knows at least so many GPUs of each node: it learns of a node before its first snapshot."""
    capacity = api.CapacityServiceStub(services)
    while True:
        with suppress(UnavailableError), rpc_errors():  # no contact with the fleet yet
            nodes = (await capacity.RankNodes(api.RankNodesRequest())).nodes
            known = {one.name: one.gpu_count for one in nodes}
            if all(known.get(node, -1) >= least for node, least in gpus.items()):
                return
        await asyncio.sleep(KNOWN_INTERVAL)


@asynccontextmanager
async def open_parts(
    settings: AllocatorSettings, *, fleet: grpc.aio.Channel, clock: Clock, term: Term | None = None
) -> AsyncGenerator[Allocator]:
    """Run the allocator.

    The caller holds the lock on `settings.data_dir` and owns the channel to the fleet. With `term`, during which this process
    leads, state is stored in `settings.database`; without it, in a file in `data_dir`.

    Raises:
        FailedPreconditionError: the stored state is damaged, inconsistent, or of another version.
        UnavailableError: the stored state is not available now, or the term is over.
    """
    async with _open_state(settings, clock, term) as store, TaskScope() as tasks:
        # State: reservations, ended reservations, the fleet.
        saved = await store.load()
        accounting = await _restore(saved, settings, store, clock)
        ledger, view = accounting.ledger, accounting.view
        tokens = Tokens(await store.lease_key())
        limits = Totals(settings.ended_max_records, settings.ended_max_mib << 20)
        archive = Archive(ledger, EndedStore(store, clock.boot_id, clock.now()), limits, clock)
        await archive.open()
        placer, changes, kept = Placer(ledger.use), Changes(), PolicyStore(store, clock.boot_id)
        changes.on_change(accounting.note)
        notifying = await open_notifying(kept, to_target, clock, *settings.notifying())
        commits = Commits(ledger, store, changes, notifying.of_changes, notifying.posted)

        # The queue and its quotas. Reservations that keep their place rejoin it now; other waiting callers ask again.
        quota_store, booking_store = QuotaStore(store), BookingStore(store)
        by_tenant = {quota.tenant: quota for quota in await quota_store.load()}
        bookings = await booking_store.load(settings.booking_horizon_seconds)
        fair = FairShare(accounting.usage, clock, settings.past_use_half_life_days)
        world = QueueWorld(ledger, placer, by_tenant, bookings, clock.now, clock.wall, fair.past)
        world.months, world.durations = accounting.months, accounting.durations
        queue = Queue(world, settings.queue_rules())
        held, waits, grace = ledger.use.tenants, queue.waiting, settings.preemption_grace_seconds
        quotas = Quotas(quota_store, by_tenant, changes, held, waits, fair.past, world.month)
        waiting = Waiting(queue, ledger=ledger, commits=commits, grace=grace, clock=clock)
        changes.on_room(waiting.changed)
        changes.on_change(waiting.note, ends=True)
        for one in [one for one in ledger.reservations(ended=False) if one.waiting]:
            waiting.keep(one)
        # Background work, and the one place that passes fleet changes on.
        leases = Leases(ledger, commits, archive, clock, tokens)
        losses = Losses(ledger, leases, clock, settings.lost_after_seconds)
        forgetting = Forgetting(ledger, view, placer, store, clock)
        seen, renewed = _eyes(placer, changes, [forgetting.seen, losses.seen, notifying.seen])
        follower = FleetFollower(fleet, view, clock, store.save_ranks, seen, renewed)
        seen(view.nodes)
        tasks.spawn("write changes", commits.run())
        tasks.spawn("serve who waits", waiting.run())
        tasks.spawn("follow the fleet", follower.run())
        tasks.spawn("end what ran out", Sweeper(ledger, store, commits, clock).run())
        tasks.spawn("archive what ended", archive.run())
        tasks.spawn("end what vanished", losses.run(lambda: not follower.problem))
        tasks.spawn("forget nodes", forgetting.run())
        tasks.spawn("look at past use", fair.run())

        # Use cases.
        maintenance = Maintenance(
            ledger, view, placer, CordonStore(store, clock.boot_id), commits, leases, changes, clock
        )
        await maintenance.resume()
        calendar = Calendar(bookings, booking_store, world, view, leases, changes, by_tenant, clock)
        tasks.spawn("look at bookings", calendar.run())
        records = Records(ledger, archive, view, clock, tokens)
        capacity = Capacity(placer, waiting, view, follower, ledger, maintenance, clock)
        changes.on_room(capacity.changed)
        orders, dry_runs = KillOrders(view), DryRuns(records, world, accounting, fleet)
        policing = await open_policing(kept, to_policy, records, world, maintenance, notifying, orders)
        restarting = Restarting(leases, waiting, queue, placer, changes)
        powering = await open_powering(kept, to_budget, records, placer, changes)
        moves = Rebalancing(capacity, world, queue, leases, restarting, powering, *settings.rebalancing())
        own, capacity.reconsider = calendar.expect_own, moves.refusal
        reserving = Reserving(ledger, waiting, view, follower, commits, archive, clock, own, moves.refusal)
        of_leases = AllocatorServicer(reserving, restarting, records, settings, clock, tokens, policing.notes)
        accounting.tell, accounting.turn = of_leases.note, partial(changes.room, ())
        tasks.spawn("account for use", accounting.run())
        of_nodes, of_quotas = NodeServicer(maintenance, clock), QuotaServicer(quotas)
        of_policies, of_targets = PolicyServicer(policing, dry_runs, clock), NotificationServicer(notifying)
        tasks.spawn("keep power budgets", powering.run())
        tasks.spawn("carry out use policies", policing.run(of_leases.note))
        tasks.spawn("send notifications", notifying.run(lambda: not follower.problem))
        tasks.spawn("look after moves", moves.run())
        of_bookings = BookingServicer(calendar, settings)
        for of in (of_nodes, of_quotas, of_bookings):
            tasks.spawn(f"tell of changes to {type(of).__name__}", of.feed.run())
        of_room = CapacityServicer(capacity, moves, settings)
        all_of_them = (of_leases, of_quotas, of_nodes, of_room, of_bookings, of_policies, of_targets)
        served = registrations(*all_of_them, PowerServicer(powering, moves), UsageServicer(accounting))
        yield Allocator(tuple(served), leases, partial(add_figures, accounting, queue, powering))


def _eyes(
    placer: Placer, changes: Changes, others: Sequence[Callable[[Sequence[Node]], None]]
) -> tuple[Callable[[Sequence[Node]], None], Callable[[Sequence[str]], None]]:
    """The callbacks for nodes that reported a change, and for those that reported none."""

    def seen(nodes: Sequence[Node]) -> None:
        eased = [node.id for node in nodes if placer.apply_node(node)]
        for one in others:
            one(nodes)
        if eased:
            changes.room(eased)

    def renewed(node_ids: Sequence[str]) -> None:
        if eased := [one for one in node_ids if placer.renew_node(one)]:
            changes.room(eased)

    return seen, renewed


def _open_state(
    settings: AllocatorSettings, clock: Clock, term: Term | None
) -> AbstractAsyncContextManager[AllocatorStore]:
    if (shared := settings.shared(term)) is None:
        return open_store(settings.data_dir / DATABASE, clock.boot_id)
    return open_shared_store(*shared, clock.boot_id)


async def _restore(
    saved: Saved, settings: AllocatorSettings, store: AllocatorStore, clock: Clock
) -> Accounting:
    """Restore the ledger and its accounts from disk; deadlines of an earlier boot restart, once, and are written back."""
    ledger = Ledger(max(saved.fence, settings.fences_above))
    view, keep = FleetView(saved.ranks), settings.usage_keep_days
    accounting = Accounting(ledger, view, UsageLedger(store), clock, keep)
    now, boot_id = clock.now(), clock.boot_id
    current = [one if boot == boot_id else rebased(one, now) for one, boot in saved.reservations]
    await accounting.restore(saved.reservations, current)
    store.beside = accounting.beside
    if moved := [one for one, (_, boot) in zip(current, saved.reservations, strict=True) if boot != boot_id]:
        await store.save([], moved)
    ledger.restore(current)
    return accounting


_PREFIX = "gpuscale_allocator"
_LIVE = Family(f"{_PREFIX}_reservations", "gauge", "Reservations that hold GPUs, by state.")
_KEPT = Family(f"{_PREFIX}_reservations_ended_kept", "gauge", "Ended reservations that are kept in memory.")
_ON_NODE = Family(f"{_PREFIX}_node_reservations", "gauge", "Reservations that hold GPUs of a node.")
_HELD = Family(f"{_PREFIX}_gpus_held", "gauge", "GPUs and MIG instances that are held at least in part.")
_SHARE = Family(
    f"{_PREFIX}_gpu_held_ratio", "gauge", "Share of a GPU that a reservation holds, by who holds it."
)
_LEFT_OUT = Family(
    f"{_PREFIX}_gpus_left_out", "gauge", "GPUs held beyond the maximum number of series by holder."
)
_FENCE = Family(f"{_PREFIX}_grants_total", "counter", "Reservations ever granted: the highest fence.")
_WAITING = Family(f"{_PREFIX}_queue_length", "gauge", "Requests waiting for GPUs, by tenant.")
_LONGEST = Family(
    f"{_PREFIX}_queue_longest_wait_seconds", "gauge", "How long the oldest waiting request has waited."
)
_NODES = Family(f"{_PREFIX}_nodes", "gauge", "Nodes known to placement, by state.")

_MOST_SHARES = 20_000
"""Most shares of GPUs with a series each."""
_GPU_SECONDS = Family(
    f"{_PREFIX}_gpu_seconds_total",
    "counter",
    "GPU time granted, used and unused, by tenant: at most 100 of them, then other.",
)
_BUDGET = Family("gpuscale_power_budget_watts", "gauge", "Watts that the GPUs of a sum may draw.")
_DRAWN = Family(
    "gpuscale_power_budget_drawn_watts", "gauge", "Watts that they draw; unknown draws count as their limits."
)
_CAPS = Family("gpuscale_power_caps", "gauge", "GPUs with a cap.")


async def add_figures(
    accounting: Accounting, queue: Queue, powering: Powering, file: Path | None, page: MetricsPage
) -> None:
    """Add the figures to a page; `file` is the database, if it is a file."""
    ledger, view, clock = accounting.ledger, accounting.view, accounting.clock
    states, on_nodes, shares = Counter[str](), Counter[str](), 0
    async for one in in_slices([*ledger.reservations(ended=False)], AT_ONCE):
        states[one.state.name] += 1
        on_nodes.update({gpu.node for gpu in one.gpus})
        shares += len(one.gpus)
        for gpu in one.gpus if shares <= _MOST_SHARES else ():
            whose = {"reservation": one.id, "holder": one.holder, "tenant": one.tenant}
            page.add(_SHARE, labels({"node": gpu.node, "uuid": gpu.uuid} | whose), gpu.milli / 1000)
    page.add(_LEFT_OUT, "", max(0, shares - _MOST_SHARES))
    for name, count in sorted(states.items()):
        page.add(_LIVE, labels({"state": name}), count)
    for node, count in sorted(on_nodes.items()):
        page.add(_ON_NODE, labels({"node": node}), count)
    page.add(_KEPT, "", ledger.ended_count)
    page.add(_HELD, "", len(ledger.use))
    page.add(_FENCE, "", ledger.fence)
    for tenant, count in sorted(queue.waiting().items()) or [("", 0)]:
        page.add(_WAITING, labels({"tenant": tenant}), count)
    page.add(_LONGEST, "", round(queue.longest_wait(clock.now()), 3))
    for state, count in sorted(Counter(node.state.name for node in view.nodes).items()):
        page.add(_NODES, labels({"state": state}), count)
    for tenant, total in sorted(accounting.totals.items()):
        for state in ("granted", "busy", "idle"):
            seconds = getattr(total, state) / 1_000_000
            page.add(_GPU_SECONDS, labels({"tenant": tenant, "state": state}), seconds)
    page.add(_CAPS, "", len(powering.found.caps))
    for found in powering.found.sums:
        of = labels({"budget": found.budget, "sum": found.name})
        page.add(_BUDGET, of, found.watts)
        if found.drawn is not None:
            page.add(_DRAWN, of, found.drawn)
    add_store(page, _PREFIX, file)


PROGRAM = "gpuscale-allocator"
DESCRIPTION = "Grants, renews and ends reservations of GPUs."


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(AllocatorSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: AllocatorSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set; GpuscaleError if the directory, the state or the address is unusable."""
    with DirectoryLock(settings.data_dir):
        async with settings.open_channel(settings.fleet_address) as fleet:
            act = partial(open_allocator, settings, fleet=fleet, clock=SystemClock())
            await serve_stateful(settings, services=SERVICES, act=act, stop=stop)
