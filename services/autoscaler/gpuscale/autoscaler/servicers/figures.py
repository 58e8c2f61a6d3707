"""What the autoscaler shows of itself on `/metrics`: endpoints, adapters and queue watchers."""

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


class Figures:
    """The figures of one autoscaler; `file` is its database, where that is one."""

    def __init__(
        self, reconciler: Reconciler, hub: AdapterHub, watchers: QueueWatchers, file: Path | None
    ) -> None:
        self._reconciler = reconciler
        self._hub = hub
        self._watchers = watchers
        self._file = file

    async def add(self, page: MetricsPage) -> None:
        """Add them to a page."""
        for endpoint, counts, late in self._reconciler.counts():
            named = labels({"endpoint": endpoint})
            page.add(_DESIRED, named, counts.desired)
            page.add(_GRANTED, named, counts.granted)
            page.add(_READY, named, counts.ready)
            page.add(_LATE, named, round(late, 3))
        for live, count in sorted(Counter(facts.live for facts in self._hub.facts()).items()):
            page.add(_ADAPTERS, labels({"state": "LIVE" if live else "SILENT"}), count)
        for state, count in sorted(self._watchers.states().items()):
            page.add(_WATCHERS, labels({"state": state}), count)
        add_store(page, _PREFIX, self._file)
