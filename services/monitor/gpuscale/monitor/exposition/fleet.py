"""The fleet's page: every node, and how taking in their streams goes."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from gpuscale.common.rpc.meter import CallMeter, add_connections, add_process
from gpuscale.common.runtime.metrics_text import MetricsPage, labels
from gpuscale.common.runtime.tasks import Clock
from gpuscale.monitor.exposition.snapshots import NOBODY, Held, add_snapshot, with_pods
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import NodeRecord
from gpuscale.monitor.history.history import History
from gpuscale.monitor.model.health import Event
from gpuscale.monitor.model.nodes import NodeState
from gpuscale.monitor.model.prometheus import Style, counter, gauge
from gpuscale.monitor.state.saver import Saver

NODES = gauge("gpuscale_fleet_nodes", "Nodes, by state.")
NODE_STATE = gauge("gpuscale_node_state", "1 for the state that a node is in; other states have no series.")
NODE_AGE = gauge("gpuscale_node_snapshot_age_seconds", "How old the last snapshot of a node is.")
NODE_REJECTED = counter("gpuscale_node_snapshots_rejected_total", "Snapshots of a node that were refused.")
SNAPSHOTS = counter("gpuscale_fleet_snapshots_total", "Snapshots, whole or as changes, that were taken in.")
STREAMS = gauge("gpuscale_fleet_streams", "Open streams of agents.")
WATCHERS = gauge("gpuscale_fleet_watchers", "Open streams that get every change of a node.")
LEFT_OUT = gauge(
    "gpuscale_fleet_gpus_left_out", "GPUs that have no series here because they are more than the limit."
)
SAVES_FAILED = counter(
    "gpuscale_fleet_saves_failed_total",
    "How often recordings, health events and history could not be written.",
)
HISTORY_LEFT_OUT = counter(
    "gpuscale_fleet_history_left_out_total", "Samples of which no history is kept for want of memory."
)
HEALTH = gauge("gpuscale_health_event", "1 for each health event that is not resolved.")


async def add_history(history: History, saver: Saver | None, page: MetricsPage) -> None:
    """Add what is not kept, or not written."""
    page.add(SAVES_FAILED, "", 0 if saver is None else saver.failed)
    page.add(HISTORY_LEFT_OUT, "", history.left_out)


@dataclass(frozen=True, slots=True)
class FleetPage:
    """Makes the fleet's page. With more GPUs than `most_gpus`, nodes have their series and GPUs have none.

    `calls` are those of its server, where somebody counts them; `holders` tells the labels of those who hold GPUs.
    """

    nodes: Nodes
    lasting_events: Callable[[], Iterable[Event]]
    clock: Clock
    style: Style
    most_gpus: int
    calls: CallMeter | None = None
    holders: Callable[[], Awaitable[Held]] | None = None

    async def render(self) -> AsyncGenerator[bytes]:
        """The page, node by node: other tasks run in between."""
        page = MetricsPage()
        records = self.nodes.all()
        gpus = sum(len(record.picture.uuids) for record in records if record.picture is not None)
        shown = gpus <= self.most_gpus
        now = self.clock.now()
        states = Counter(record.state(now) for record in records)
        for state in NodeState:
            page.add(NODES, labels({"state": state.name}), states[state])
        page.add(SNAPSHOTS, "", self.nodes.taken_count)
        page.add(STREAMS, "", sum(1 for record in records if record.stream is not None))
        page.add(WATCHERS, "", self.nodes.feed.reader_count)
        page.add(LEFT_OUT, "", 0 if shown else gpus)
        self._add_events(page)
        held = await self.holders() if shown and self.holders is not None else NOBODY
        for record in records:
            self._add_node(page, record, held, gpus=shown)
            await asyncio.sleep(0)
        add_process(page)
        add_connections(page, "fleet")
        if self.calls is not None:
            await self.calls.add(page)
        for chunk in page.chunks():
            yield chunk

    def _add_events(self, page: MetricsPage) -> None:
        """One series for each kind of event of a GPU or node, however often it is there."""
        kinds = {
            labels(
                {
                    "node": event.node,
                    "uuid": event.uuid,
                    "check": event.check.name,
                    "severity": event.finding.severity.name,
                    "action": event.finding.action.name,
                    "fatal": "true" if event.finding.fatal else "false",
                    "xid": "" if event.xid is None else str(event.xid),
                }
            )
            for event in self.lasting_events()
        }
        for kind in sorted(kinds):
            page.add(HEALTH, kind, 1)

    def _add_node(self, page: MetricsPage, record: NodeRecord, held: Held, *, gpus: bool) -> None:
        now = self.clock.now()
        state = record.state(now)
        node = labels({"node": record.node})
        page.add(NODE_STATE, labels({"node": record.node, "state": state.name}), 1)
        page.add(NODE_REJECTED, node, record.rejected_count)
        if record.sample is not None:
            page.add(NODE_AGE, node, round(now - record.sample.sampled_at, 3))
        snapshot = record.snapshot
        if snapshot is not None:
            add_snapshot(
                page,
                snapshot,
                self.style,
                fresh=state is NodeState.ONLINE,
                elapsed=now - record.received_at,
                gpus=gpus,
                quarantined=record.quarantines,
                held=held if self.holders is None else with_pods(held, snapshot.gpus),
            )
