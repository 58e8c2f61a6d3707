"""Recordings: which GPUs, how often, for how long, and what came of it. Pure: times are arguments, in seconds.

However long a recording runs, it takes a few numbers for each metric of each GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isnan

from gpuscale.monitor.history.metrics import GPU_METRICS, Metric, Sample, Stats, Tally


class RecordingState(Enum):
    """Whether a recording takes in samples."""

    RUNNING = auto()
    STOPPED = auto()
    EXPIRED = auto()


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to record: its resource name, its UUID, its place and product name at that moment, its agent's period."""

    name: str
    uuid: str
    index: int
    model: str
    period: float


@dataclass(slots=True)
class RecordedGpu:
    """One GPU in a recording."""

    target: Target
    sample_count: int = 0
    last_at: float = float("-inf")
    tallies: list[Tally] = field(default_factory=lambda: [Tally() for _ in GPU_METRICS])

    def add(self, at: float, sample: Sample) -> None:
        """Take in what was read at `at`."""
        self.last_at = at
        self.sample_count += 1
        for tally, value in zip(self.tallies, sample, strict=True):
            if not isnan(value):
                tally.add(value)

    def stats(self) -> list[tuple[Metric, Stats]]:
        """The figures of each metric that was read at least once."""
        pairs = zip(GPU_METRICS, (tally.stats() for tally in self.tallies), strict=True)
        return [(metric, stats) for metric, stats in pairs if stats is not None]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be recorded. `fingerprint` tells a repeated request from another one with the same id."""

    id: str
    request_id: str
    fingerprint: str
    interval: float
    max_duration: float
    targets: Sequence[Target]


@dataclass(slots=True)
class Recording:
    """One recording; `ended_at` is None while it runs."""

    order: Order
    started_at: float
    gpus: list[RecordedGpu]
    state: RecordingState = RecordingState.RUNNING
    ended_at: float | None = None

    @property
    def last_moment(self) -> float:
        """When it ends by itself."""
        return self.started_at + self.order.max_duration

    @property
    def sample_count(self) -> int:
        """Samples of the GPU that has most of them."""
        return max((gpu.sample_count for gpu in self.gpus), default=0)

    def duration(self, now: float) -> float:
        """How long it has run, or ran."""
        return (now if self.ended_at is None else self.ended_at) - self.started_at
