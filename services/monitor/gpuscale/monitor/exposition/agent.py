"""The agent's page: its newest snapshot, how collecting goes, and the XID errors since the agent started."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable
from dataclasses import dataclass

from gpuscale.common import VERSION
from gpuscale.common.rpc.meter import CallMeter, add_connections, add_process
from gpuscale.common.runtime.metrics_text import MetricsPage, labels
from gpuscale.common.runtime.tasks import Clock
from gpuscale.monitor.agent.gpus import Collection
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
from gpuscale.monitor.wire.snapshots import to_snapshot
from gpuscale.monitor.wire.watch import Broadcast

_WORKING = frozenset({GpuState.OK, GpuState.DEGRADED, GpuState.SLOW, GpuState.DIVIDED})


class CollectionMeter:
    """Times each snapshot that `collect` takes; `bus` tells which GPUs are on the PCI bus, whatever NVIDIA's driver says.

    The `newest` took `duration` seconds; `last_success` is when the last was taken that had every GPU, each of them answering,
    since the epoch. `failures` counts readings that should have been there and were not, by reason.
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
        if self._bus.given_away or not self.succeeded():
            await asyncio.to_thread(self._bus.look)
        if self.succeeded():
            self.last_success = snapshot.sample_time.timestamp()
        return snapshot

    def expected(self) -> int:
        """How many GPUs there should be: those on the bus, or those found if more."""
        return max(self._on_bus(), self._found())

    def succeeded(self) -> bool:
        """Whether the newest snapshot has every GPU that is expected, and each answers."""
        if self.newest is None:
            return False
        all_given_away = bool(self._bus.gpus) and not self._on_bus()
        if self.newest.gpu_problem and not all_given_away:
            return False
        return self._found() >= self._on_bus() and all(view.state in _WORKING for view in self._views())

    def _on_bus(self) -> int:
        return len(self._bus.gpus - self._bus.given_away)

    def _found(self) -> int:
        """How many GPUs of the bus the newest snapshot has; MIG instances are on the bus as their GPU."""
        return len({view.identity.pci_bus_id or view.identity.uuid for view in self._views()})

    def _views(self) -> list[GpuView]:
        """The GPUs of the newest snapshot, but for those that are given away."""
        views = self.newest.gpus if self.newest is not None else ()
        return [view for view in views if pci_address(view.identity.pci_bus_id) not in self._bus.given_away]


COUNT = counter("gpuscale_gpu_xid_errors_total", "XID errors of a GPU since the agent started, by code.")
TIME = gauge("gpuscale_gpu_xid_last_timestamp_seconds", "When a GPU last had that XID error.")
DCGM_LAST = gauge("DCGM_FI_DEV_XID_ERRORS", "Code of the last XID error.")


class Xids:
    """Counts XID errors. The time beside each count shows the first one as well as any other."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()
        self._last: dict[tuple[str, int], float] = {}

    def add_to(self, page: MetricsPage, gpus: Iterable[tuple[str, dict[str, str], str]]) -> None:
        """Add the errors of these GPUs: UUID, our own labels, and the text of DCGM's, empty for none."""
        whose = {uuid: (own, dcgm) for uuid, own, dcgm in gpus}
        newest: dict[str, int] = {}
        for (uuid, xid), seen in sorted(self._last.items(), key=lambda item: item[1]):
            if uuid not in whose:
                continue
            text = labels({**whose[uuid][0], "xid": str(xid)})
            page.add(COUNT, text, self._counts[uuid, xid])
            page.add(TIME, text, round(seen, 3))
            newest[uuid] = xid
        for uuid, xid in newest.items():
            if whose[uuid][1]:
                page.add(DCGM_LAST, whose[uuid][1], xid)

    def note(self, event: GpuEvent) -> None:
        """Count an event, if it is an XID error."""
        if event.xid is not None:
            self._counts[event.uuid, event.xid] += 1
            self._last[event.uuid, event.xid] = event.seen_time.timestamp()


INFO = gauge("gpuscale_agent_info", "The agent of a node; always 1.")
SUCCESS = gauge("gpuscale_collection_success", "1 while every GPU that is expected is found and answers.")
LAST_SUCCESS = gauge(
    "gpuscale_collection_last_success_timestamp_seconds", "When that was last so, since the epoch."
)
AGE = gauge("gpuscale_collection_age_seconds", "How old the newest snapshot is, on the monotonic clock.")
DURATION = gauge("gpuscale_collection_duration_seconds", "How long taking the newest snapshot took.")
SNAPSHOTS = counter("gpuscale_collection_snapshots_total", "Snapshots taken since the agent started.")
EXPECTED = gauge(
    "gpuscale_collection_gpus_expected",
    "GPUs on the host's PCI bus, or found if those are more, but for those given to virtual machines.",
)
HUNG = gauge("gpuscale_collection_hung_threads", "Threads that are stuck in the driver.")
ERRORS = counter(
    "gpuscale_collection_reading_errors_total",
    "Readings of GPUs that should have been there and failed, by reason.",
)
DRIVER_CALLS = counter("gpuscale_collection_driver_calls_total", "Calls of the driver to read GPUs.")
DRIVER_ERRORS = counter(
    "gpuscale_collection_driver_call_errors_total",
    "Calls of the driver to read GPUs that gave an error; what a GPU does not support is asked once.",
)
OPENINGS = counter(
    "gpuscale_collection_driver_openings_total", "How often the driver was opened, failures too."
)
INTERRUPTIONS = counter(
    "gpuscale_collection_driver_interruptions_total",
    "How often the process that reads the driver was killed because it did not answer.",
)
SUBSCRIBERS = gauge("gpuscale_watch_subscribers", "Open streams that get every new snapshot.")
DROPPED = counter("gpuscale_watch_dropped_total", "Snapshots that subscribers read too slowly to see.")


CONNECTED = gauge("gpuscale_agent_fleet_connected", "1 while the fleet takes in the stream of this agent.")
STREAMS_FAILED = counter(
    "gpuscale_agent_fleet_streams_failed_total",
    "Streams to the fleet that ended or did not begin, by reason.",
)


async def add_push(push: FleetPush, page: MetricsPage) -> None:
    """Add how the stream to the fleet stands."""
    page.add(CONNECTED, "", int(push.connected))
    for reason, count in sorted(push.failures.items()):
        page.add(STREAMS_FAILED, labels({"reason": reason}), count)


@dataclass(frozen=True, slots=True)
class AgentPage:
    """Makes the agent's page."""

    meter: CollectionMeter
    snapshots: Broadcast[Snapshot]  # whom each snapshot is told to
    xids: Xids
    collection: Callable[[], Collection]
    # the GPUs in quarantine, by UUID in lower case; None while the fleet has not told
    quarantined: Callable[[], Container[str] | None]
    clock: Clock
    style: Style
    calls: CallMeter | None = None  # those of its server, where somebody counts them
    holders: Callable[[], Awaitable[Held]] | None = None  # who holds the GPUs, where series are to say so

    async def render(self) -> AsyncGenerator[bytes]:
        """The current page: a few hundred lines, so all at once."""
        page, meter = MetricsPage(), self.meter
        snapshot = meter.newest
        page.add(SUCCESS, "", int(meter.succeeded()))
        page.add(LAST_SUCCESS, "", meter.last_success)
        page.add(DURATION, "", meter.duration)
        page.add(EXPECTED, "", meter.expected())
        page.add(SNAPSHOTS, "", 0 if snapshot is None else snapshot.seq)
        for reason, count in sorted(meter.failures.items(), key=lambda item: item[0].name):
            page.add(ERRORS, labels({"reason": reason.name}), count)
        collection = self.collection()
        page.add(DRIVER_CALLS, "", collection.calls)
        page.add(DRIVER_ERRORS, "", collection.refusals)
        page.add(OPENINGS, "", collection.openings)
        page.add(INTERRUPTIONS, "", collection.interruptions)
        page.add(SUBSCRIBERS, "", len(self.snapshots))
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
            quarantined = self.quarantined()
            add_snapshot(page, message, self.style, fresh=fresh, quarantined=quarantined, held=held)
            dcgm = self.style.names != "gpuscale"
            gpus = [
                (
                    gpu.uuid,
                    own_labels(message, gpu, held),
                    dcgm_labels(message, gpu, self.style, held) if dcgm else "",
                )
                for gpu in message.gpus
            ]
            self.xids.add_to(page, gpus)
        add_process(page)
        add_connections(page, "agent")
        if self.calls is not None:
            await self.calls.add(page)
        for chunk in page.chunks():
            yield chunk
