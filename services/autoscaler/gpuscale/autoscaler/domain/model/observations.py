"""What signals showed. An age is in seconds; `None` means "unknown", and is never zero."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gpuscale.autoscaler.domain.model.capabilities import TaskReport
from gpuscale.autoscaler.domain.series import Aggregation


class ObservationStatus(Enum):
    """Whether the value of a signal counts."""

    OK = "OK"
    MISSING = "MISSING"
    STALE = "STALE"
    INVALID = "INVALID"


@dataclass(frozen=True, slots=True)
class Observation:
    """What a signal showed.

    `proven_empty`: a fresh reading shows that no work is left, waiting or in hand. `ignored`: it cannot be had, and is to
    be left out then. `silent_count`: sources, such as replicas, that said nothing and are not to be left out;
    `told_count`: those that did. `across`: how their values became one. `tasks`: of a signal of tasks, what they need.
    """

    signal: str
    status: ObservationStatus
    value: float | None = None
    age: float | None = None
    detail: str = ""
    proven_empty: bool = False
    ignored: bool = False
    silent_count: int = 0
    told_count: int = 0
    across: Aggregation = Aggregation.AVG
    tasks: TaskReport | None = None

    def with_silent_at(self, value: float) -> float:
        """What it would show if the silent ones said `value`; of a 95th percentile, the most that could be."""
        own = 0.0 if self.value is None else self.value
        silent, told = self.silent_count, self.told_count
        match self.across:
            case Aggregation.AVG:
                return (own * told + value * silent) / (told + silent)
            case Aggregation.SUM:
                return own + value * silent
            case Aggregation.MIN:
                return min(own, value)
            case Aggregation.MAX | Aggregation.P95:
                return max(own, value)
