"""The agent's page: its newest snapshot, statistics of collection, and XID errors since the agent started."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass

from gpuscale.api.types import v1 as types_api
from gpuscale.common import VERSION
from gpuscale.common.runtime.metrics_text import MetricsPage, labels
from gpuscale.common.runtime.tasks import Clock
from gpuscale.monitor.agent.collector import Broadcast
from gpuscale.monitor.agent.device import Collection
from gpuscale.monitor.agent.pci import Bus, pci_address
from gpuscale.monitor.agent.push import FleetPush
from gpuscale.monitor.exposition.snapshots import (
    NOBODY,
    Held,
    add_snapshot,
    dcgm_labels,
    own_labels,
    with_pods,
)
from gpuscale.monitor.model.nodes import STALE_PERIODS
from gpuscale.monitor.model.prometheus import Style, counter, gauge
from gpuscale.monitor.model.readings import EXCUSED, GpuEvent, GpuState, GpuView, ReadingStatus, Snapshot
from gpuscale.monitor.wire import to_snapshot

_WORKING = frozenset({GpuState.OK, GpuState.DEGRADED, GpuState.SLOW, GpuState.DIVIDED})


class CollectionMeter:
    """Measures the snapshots that `collect` takes, and compares them with the GPUs on the PCI `bus`.

    `duration`: seconds that `newest` took. `last_success`: Unix time of the last snapshot in which every expected GPU answered.
    `failures`: unexpectedly absent readings, by reason.
    """

    def __init__(self, collect: Callable[[], Awaitable[Snapshot]], clock: Clock, bus: Bus) -> None:
        self._collect = collect
        self._clock = clock
        self._bus = bus
        self.newest: Snapshot | None = None
        self.duration: float | None = None
        self.last_success: float | None = None
        self.failures: Counter[ReadingStatus] = Counter()

    async def collect(self) -> Snapshot:
        """Take a snapshot."""
        began = self._clock.now()
        snapshot = await self._collect()
        self.duration = self._clock.now() - began
        self.newest = snapshot
        self.failures.update(
            absent.status
            for view in snapshot.gpus
            for absent in view.reading.absent
            if absent.status not in EXCUSED
        )
        if self._bus.given_away or not (succeeded := self.succeeded()):
            await asyncio.to_thread(self._bus.look)
            succeeded = self.succeeded()
        if succeeded:
            self.last_success = snapshot.sample_time.timestamp()
        return snapshot

    def expected(self) -> int:
        """How many GPUs there should be: those on the bus, or those found if there are more."""
        return max(self._on_bus(), self._found())

    def succeeded(self) -> bool:
        """Whether every expected GPU is in the newest snapshot and answers."""
        if self.newest is None:
            return False
        all_given_away = bool(self._bus.gpus) and not self._on_bus()
        if self.newest.gpu_problem and not all_given_away:
            return False
        return self._found() >= self._on_bus() and all(view.state in _WORKING for view in self._views())

    def _on_bus(self) -> int:
        return len(self._bus.gpus - self._bus.given_away)

    def _found(self) -> int:
        return len({view.identity.pci_bus_id or view.identity.uuid for view in self._views()})

    def _views(self) -> Sequence[GpuView]:
        """The GPUs of the newest snapshot, without those given to virtual machines."""
        views, given_away = self.newest.gpus if self.newest is not None else (), self._bus.given_away
        there = (view for view in views if pci_address(view.identity.pci_bus_id) not in given_away)
        return [*there] if given_away else views


COUNT = counter("gpuscale_gpu_xid_errors_total", "XID errors of a GPU since the agent started, by code.")
TIME = gauge("gpuscale_gpu_xid_last_timestamp_seconds", "When a GPU last had that XID error.")
DCGM_LAST = gauge("DCGM_FI_DEV_XID_ERRORS", "Code of the last XID error.")


class Xids:
    """Counts XID errors by GPU and code, and keeps the time of the last one."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._last: dict[tuple[str, int], float] = {}

    def add_to(self, page: MetricsPage, snapshot: types_api.Snapshot, style: Style, held: Held) -> None:
        """Add the errors of the GPUs of a snapshot."""
        gpus, newest = {gpu.uuid: gpu for gpu in snapshot.gpus}, dict[str, int]()
        for (uuid, xid), seen in sorted(self._last.items(), key=lambda item: item[1]):
            if uuid in gpus:
                text = labels({**own_labels(snapshot, gpus[uuid], held), "xid": str(xid)})
                page.add(COUNT, text, self._counts[uuid, xid])
                page.add(TIME, text, round(seen, 3))
                newest[uuid] = xid
        for uuid, xid in newest.items() if style.names != "gpuscale" else ():
            page.add(DCGM_LAST, dcgm_labels(snapshot, gpus[uuid], style, held), xid)

    def note(self, event: GpuEvent) -> None:
        """Count an event of the driver."""
        self._counts[event.uuid, event.xid] += 1
        self._last[event.uuid, event.xid] = event.seen_time.timestamp()


INFO = gauge("gpuscale_agent_info", "The agent of a node; always 1.")
SUCCESS = gauge("gpuscale_collection_success", "1 while every expected GPU is found and answers.")
LAST_SUCCESS = gauge("gpuscale_collection_last_success_timestamp_seconds", "Unix time of the last success.")
AGE = gauge("gpuscale_collection_age_seconds", "Age of the newest snapshot, on the monotonic clock.")
DURATION = gauge("gpuscale_collection_duration_seconds", "Time that the newest snapshot took.")
SNAPSHOTS = counter("gpuscale_collection_snapshots_total", "Snapshots taken since the agent started.")
EXPECTED = gauge(
    "gpuscale_collection_gpus_expected",
    "GPUs on the PCI bus, or found if more, without those of virtual machines.",
)
HUNG = gauge("gpuscale_collection_hung_threads", "Threads stuck in the driver.")
ERRORS = counter("gpuscale_collection_reading_errors_total", "Failed readings of GPUs, by reason.")
DRIVER_CALLS = counter("gpuscale_collection_driver_calls_total", "Driver calls that read GPUs.")
DRIVER_ERRORS = counter(
    "gpuscale_collection_driver_call_errors_total",
    "Driver calls that read GPUs and failed; an unsupported reading is asked for once.",
)
OPENINGS = counter("gpuscale_collection_driver_openings_total", "Attempts to open the driver.")
INTERRUPTIONS = counter("gpuscale_collection_driver_interruptions_total", "Kills of a hung driver process.")
SUBSCRIBERS = gauge("gpuscale_watch_subscribers", "Open streams of snapshots.")
DROPPED = counter("gpuscale_watch_dropped_total", "Snapshots that slow subscribers missed.")


CONNECTED = gauge("gpuscale_agent_fleet_connected", "1 while the stream to the fleet is open.")
STREAMS_FAILED = counter(
    "gpuscale_agent_fleet_streams_failed_total", "Failed streams to the fleet, by reason."
)


async def add_push(push: FleetPush, page: MetricsPage) -> None:
    """Add the state of the stream to the fleet."""
    page.add(CONNECTED, "", int(push.connected))
    for reason, count in sorted(push.failures.items()):
        page.add(STREAMS_FAILED, labels({"reason": reason}), count)


@dataclass(frozen=True, slots=True)
class AgentPage:
    """What is on the agent's page beside the process and its calls."""

    meter: CollectionMeter
    snapshots: Broadcast[Snapshot]
    xids: Xids
    collection: Collection
    quarantined: Callable[[], Container[str] | None]  # lower-case UUIDs; None until the fleet reports them
    clock: Clock
    style: Style
    holders: Callable[[], Awaitable[Held]] | None = None

    async def add(self, page: MetricsPage) -> None:
        """Add the current series."""
        meter, snapshot = self.meter, self.meter.newest
        page.add(SUCCESS, "", int(meter.succeeded()))
        page.add(LAST_SUCCESS, "", meter.last_success)
        page.add(DURATION, "", meter.duration)
        page.add(EXPECTED, "", meter.expected())
        page.add(SNAPSHOTS, "", 0 if snapshot is None else snapshot.seq)
        for reason, count in sorted(meter.failures.items(), key=lambda item: item[0].name):
            page.add(ERRORS, labels({"reason": reason.name}), count)
        collection = self.collection
        page.add(DRIVER_CALLS, "", collection.calls)
        page.add(DRIVER_ERRORS, "", collection.refusals)
        page.add(OPENINGS, "", collection.openings)
        page.add(INTERRUPTIONS, "", collection.interruptions)
        page.add(SUBSCRIBERS, "", self.snapshots.followers)
        page.add(DROPPED, "", self.snapshots.dropped)
        if snapshot is not None:
            now = self.clock.now()
            age = now - snapshot.taken_at
            page.add(AGE, "", round(age, 3))
            page.add(INFO, labels({"node": snapshot.node, "version": VERSION}), 1)
            page.add(HUNG, "", sum(1 for view in snapshot.gpus if view.state is GpuState.HUNG))
            fresh = age <= STALE_PERIODS * snapshot.period
            message = to_snapshot(snapshot, now)
            held = NOBODY if self.holders is None else with_pods(await self.holders(), message.gpus)
            add_snapshot(page, message, self.style, fresh=fresh, quarantined=self.quarantined(), held=held)
            self.xids.add_to(page, message, self.style, held)
