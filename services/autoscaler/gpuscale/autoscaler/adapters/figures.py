"""What a worker adapter shows of itself on `/metrics`: its engine, its replicas, and whether the autoscaler is heard of."""

from collections import Counter
from dataclasses import dataclass

from gpuscale.autoscaler.adapters.connection import AutoscalerConnection
from gpuscale.autoscaler.adapters.crew import EngineCrew
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale.common.runtime.metrics_text import Family, MetricsPage, labels

SERVICE = "adapter"
"""Begins the names of the series of every engine's adapter."""
_PREFIX = f"gpuscale_{SERVICE}"
_INFO = Family(f"{_PREFIX}_info", "gauge", "1; which adapter it is, of which engine.")
_SECONDS = Family(
    f"{_PREFIX}_engine_seconds", "histogram", "Time that the engine took, by what was asked of it."
)
_FAILURES = Family(f"{_PREFIX}_engine_failures_total", "counter", "What the engine did not do, by reason.")
_REPLICAS = Family(f"{_PREFIX}_replicas", "gauge", "Replicas that are not forgotten, by state.")
_KNOWN = Family(f"{_PREFIX}_engine_known", "gauge", "1 while the state of the engine is known.")
_SILENT = Family(
    f"{_PREFIX}_autoscaler_silent_seconds", "gauge", "How long the autoscaler is not heard of; 0 while it is."
)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one adapter; `named` says which it is."""

    crew: EngineCrew
    connection: AutoscalerConnection
    named: dict[str, str]

    async def add(self, page: MetricsPage) -> None:
        """Add them to a page."""
        page.add(_INFO, labels(self.named), 1)
        for operation, histogram in sorted(self.crew.spent.items()):
            page.add_histogram(_SECONDS, {"operation": operation}, histogram)
        for (operation, reason), count in sorted(self.crew.failures.items()):
            page.add(_FAILURES, labels({"operation": operation, "reason": reason}), count)
        reports = self.crew.reports()
        page.add(_KNOWN, "", int(reports is not None))
        if reports is not None:
            states = Counter(report.state for report in reports.values())
            for state in ReplicaState:
                page.add(_REPLICAS, labels({"state": state.name}), states[state])
        page.add(_SILENT, "", round(self.connection.silence(), 3))
