"""The fleet's page: every node, and statistics of their streams."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpuscale.common.runtime.metrics_text import MetricsPage, labels
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.store.store import add_store
from gpuscale.monitor.exposition.snapshots import NOBODY, Held, add_snapshot, with_pods
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.health.checks import Event
from gpuscale.monitor.history.history import History
from gpuscale.monitor.model.nodes import NodeState
from gpuscale.monitor.model.prometheus import Style, counter, gauge
from gpuscale.monitor.state.saver import Saver
from gpuscale.monitor.state.store import DATABASE

NODES = gauge("gpuscale_fleet_nodes", "Nodes, by state.")
NODE_STATE = gauge("gpuscale_node_state", "1 for the current state of a node; other states have no series.")
NODE_AGE = gauge("gpuscale_node_snapshot_age_seconds", "Age of the last snapshot of a node.")
NODE_REJECTED = counter("gpuscale_node_snapshots_rejected_total", "Refused snapshots of a node.")
SNAPSHOTS = counter("gpuscale_fleet_snapshots_total", "Accepted snapshots, whole or as changes.")
STREAMS = gauge("gpuscale_fleet_streams", "Open streams from agents.")
WATCHERS = gauge("gpuscale_fleet_watchers", "Open streams of WatchNodes.")
LEFT_OUT = gauge(
    "gpuscale_fleet_gpus_left_out", "GPUs without series, as there are more than metrics_max_gpus."
)
SAVES_FAILED = counter(
    "gpuscale_fleet_saves_failed_total", "Failed writes of recordings, health events and history."
)
HISTORY_LEFT_OUT = counter(
    "gpuscale_fleet_history_left_out_total", "Samples left out of history to save memory."
)
HEALTH = gauge("gpuscale_health_event", "1 for each unresolved health event.")


async def add_history(history: History, saver: Saver | None, state: Path | None, page: MetricsPage) -> None:
    """Add failed writes, the database and its disk, and samples left out of history."""
    if state is not None:
        add_store(page, "gpuscale_fleet", state / DATABASE)
    page.add(SAVES_FAILED, "", 0 if saver is None else saver.failed)
    page.add(HISTORY_LEFT_OUT, "", history.left_out)


@dataclass(frozen=True, slots=True)
class FleetPage:
    """What is on the fleet's page beside the process and its calls. With more GPUs than `most_gpus`, there are no series of single GPUs."""

    nodes: Nodes
    lasting_events: Callable[[], Iterable[Event]]
    clock: Clock
    style: Style
    most_gpus: int
    holders: Callable[[], Awaitable[Held]] | None = None

    async def add(self, page: MetricsPage) -> None:
        """Add the current series, node by node, so that other tasks can run."""
        records = [*self.nodes.all()]
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
        for kind in sorted(kinds):  # those with equal labels share a series
            page.add(HEALTH, kind, 1)
        held = await self.holders() if shown and self.holders is not None else NOBODY
        for record in records:
            now, node, snapshot = self.clock.now(), labels({"node": record.node}), record.snapshot
            state = record.state(now)
            page.add(NODE_STATE, labels({"node": record.node, "state": state.name}), 1)
            page.add(NODE_REJECTED, node, record.rejected_count)
            if record.sample is not None:
                page.add(NODE_AGE, node, round(now - record.sample.sampled_at, 3))
            if snapshot is not None:
                add_snapshot(
                    page,
                    snapshot,
                    self.style,
                    fresh=state is NodeState.ONLINE,
                    elapsed=now - record.received_at,
                    gpus=shown,
                    quarantined=record.quarantines,
                    held=held if self.holders is None else with_pods(held, snapshot.gpus),
                )
            await asyncio.sleep(0)
