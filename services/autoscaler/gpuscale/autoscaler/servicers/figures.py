"""The autoscaler's own figures on `/metrics`: endpoints, adapters and queue watchers."""

from collections import Counter
from pathlib import Path

from gpuscale.autoscaler.loop.hub import AdapterHub
from gpuscale.autoscaler.loop.reconciler import Reconciler
from gpuscale.autoscaler.signals.watchers import QueueWatchers
from gpuscale.common.runtime.metrics_text import Family, MetricsPage, labels
from gpuscale.common.store.store import add_store

_PREFIX = "gpuscale_autoscaler"
_DESIRED = Family(f"{_PREFIX}_endpoint_desired", "gauge", "Replicas that are wanted of an endpoint.")
_GRANTED = Family(f"{_PREFIX}_endpoint_granted", "gauge", "Replicas of an endpoint that have their GPUs.")
_READY = Family(f"{_PREFIX}_endpoint_ready", "gauge", "Replicas of an endpoint that are ready.")
_LATE = Family(f"{_PREFIX}_endpoint_late_seconds", "gauge", "How late an evaluation of an endpoint is.")
_ADAPTERS = Family(f"{_PREFIX}_adapters", "gauge", "Worker adapters, by whether they are heard of.")
_WATCHERS = Family(f"{_PREFIX}_watchers", "gauge", "Queue watchers, by the state of their last reading.")


async def add_figures(
    reconciler: Reconciler, hub: AdapterHub, watchers: QueueWatchers, file: Path | None, page: MetricsPage
) -> None:
    """Add the figures to a page; `file` is the database, if it is a file."""
    for endpoint, counts, late in reconciler.counts():
        named = labels({"endpoint": endpoint})
        page.add(_DESIRED, named, counts.desired)
        page.add(_GRANTED, named, counts.granted)
        page.add(_READY, named, counts.ready)
        page.add(_LATE, named, round(late, 3))
    for live, count in sorted(Counter(facts.live for facts in hub.facts()).items()):
        page.add(_ADAPTERS, labels({"state": "LIVE" if live else "SILENT"}), count)
    for state, count in sorted(watchers.states().items()):
        page.add(_WATCHERS, labels({"state": state}), count)
    add_store(page, _PREFIX, file)
