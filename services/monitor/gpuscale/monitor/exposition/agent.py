"""The agent's page: its newest snapshot, and how collecting goes."""

from collections.abc import AsyncGenerator, Callable, Container
from importlib.metadata import version

from gpuscale.api.types import v1 as types_api
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.metrics_text import Family, Page, labels
from gpuscale.monitor.agent.collection import Collection
from gpuscale.monitor.agent.translate import to_snapshot
from gpuscale.monitor.agent.watch import Broadcast
from gpuscale.monitor.exposition.meter import CollectionMeter
from gpuscale.monitor.exposition.process import add_process
from gpuscale.monitor.exposition.snapshots import add_snapshot, dcgm_labels, own_labels
from gpuscale.monitor.exposition.style import Style
from gpuscale.monitor.exposition.xids import Xids
from gpuscale.monitor.model.readings import GpuState, Snapshot

STALE_PERIODS = 3

INFO = Family("gpuscale_agent_info", "gauge", "The agent of a node; always 1.")
SUCCESS = Family(
    "gpuscale_collection_success", "gauge", "1 while every GPU that is expected is found and answers."
)
LAST_SUCCESS = Family(
    "gpuscale_collection_last_success_timestamp_seconds", "gauge", "When that was last so, since the epoch."
)
AGE = Family(
    "gpuscale_collection_age_seconds", "gauge", "How old the newest snapshot is, on the monotonic clock."
)
DURATION = Family(
    "gpuscale_collection_duration_seconds", "gauge", "How long taking the newest snapshot took."
)
SNAPSHOTS = Family(
    "gpuscale_collection_snapshots_total", "counter", "Snapshots taken since the agent started."
)
EXPECTED = Family(
    "gpuscale_collection_gpus_expected",
    "gauge",
    "GPUs on the host's PCI bus, or found if those are more, but for those given to virtual machines.",
)
HUNG = Family("gpuscale_collection_hung_threads", "gauge", "Threads that are stuck in the driver.")
ERRORS = Family(
    "gpuscale_collection_reading_errors_total",
    "counter",
    "Readings of GPUs that should have been there and failed, by reason.",
)
DRIVER_CALLS = Family(
    "gpuscale_collection_driver_calls_total", "counter", "Calls of the driver to read GPUs."
)
DRIVER_ERRORS = Family(
    "gpuscale_collection_driver_call_errors_total",
    "counter",
    "Calls of the driver to read GPUs that gave an error; what a GPU does not support is asked once.",
)
OPENINGS = Family(
    "gpuscale_collection_driver_openings_total", "counter", "How often the driver was opened, failures too."
)
INTERRUPTIONS = Family(
    "gpuscale_collection_driver_interruptions_total",
    "counter",
    "How often the process that reads the driver was killed because it did not answer.",
)
SUBSCRIBERS = Family("gpuscale_watch_subscribers", "gauge", "Open streams that get every new snapshot.")
DROPPED = Family(
    "gpuscale_watch_dropped_total", "counter", "Snapshots that subscribers read too slowly to see."
)


class AgentPage:
    """Makes the agent's page.

    Args:
        meter: has the newest snapshot, and how collecting goes.
        snapshots: whom each snapshot is told to.
        xids: what the driver has reported.
        collection: how reading the driver goes.
        quarantined: the GPUs in quarantine, by UUID in lower case; None while the fleet has not told.
        clock: what tells the time.
        style: which names to use.
    """

    def __init__(
        self,
        meter: CollectionMeter,
        snapshots: Broadcast[Snapshot],
        xids: Xids,
        collection: Callable[[], Collection],
        quarantined: Callable[[], Container[str] | None],
        clock: Clock,
        style: Style,
    ) -> None:
        self._meter = meter
        self._snapshots = snapshots
        self._xids = xids
        self._collection = collection
        self._quarantined = quarantined
        self._clock = clock
        self._style = style

    async def render(self) -> AsyncGenerator[bytes]:
        """The page of this moment: a few hundred lines, so all at once."""
        page = Page()
        self._add_collection(page)
        snapshot = self._meter.newest
        if snapshot is not None:
            now = self._clock.now()
            age = now - snapshot.taken_at
            page.add(AGE, "", round(age, 3))
            page.add(INFO, labels({"node": snapshot.node, "version": version("gpuscale")}), 1)
            page.add(HUNG, "", sum(1 for view in snapshot.gpus if view.state is GpuState.HUNG))
            fresh = age <= STALE_PERIODS * snapshot.period
            message = to_snapshot(snapshot, now)
            add_snapshot(page, message, self._style, fresh=fresh, quarantined=self._quarantined())
            self._add_xids(page, message)
        add_process(page)
        for chunk in page.chunks():
            yield chunk

    def _add_xids(self, page: Page, snapshot: types_api.Snapshot) -> None:
        dcgm = self._style.names != "gpuscale"
        self._xids.add_to(
            page,
            [
                (gpu.uuid, own_labels(snapshot, gpu), dcgm_labels(snapshot, gpu, self._style) if dcgm else "")
                for gpu in snapshot.gpus
            ],
        )

    def _add_collection(self, page: Page) -> None:
        meter = self._meter
        page.add(SUCCESS, "", int(meter.succeeded()))
        page.add(LAST_SUCCESS, "", meter.last_success)
        page.add(DURATION, "", meter.duration)
        page.add(EXPECTED, "", meter.expected())
        page.add(SNAPSHOTS, "", 0 if meter.newest is None else meter.newest.seq)
        for reason, count in sorted(meter.failures.items(), key=lambda item: item[0].name):
            page.add(ERRORS, labels({"reason": reason.name}), count)
        collection = self._collection()
        page.add(DRIVER_CALLS, "", collection.calls)
        page.add(DRIVER_ERRORS, "", collection.refusals)
        page.add(OPENINGS, "", collection.openings)
        page.add(INTERRUPTIONS, "", collection.interruptions)
        page.add(SUBSCRIBERS, "", len(self._snapshots))
        page.add(DROPPED, "", self._snapshots.dropped)
