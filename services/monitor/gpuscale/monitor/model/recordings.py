"""Recordings of GPUs, which keep a few numbers per metric and GPU however long they run. Pure. Times are seconds of a clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isnan

from gpuscale.monitor.model.metrics import GPU_METRICS, Metric, MetricTally, Sample, Stats

NEVER = float("-inf")


class RecordingState(Enum):
    """The state of a recording."""

    RUNNING = auto()
    STOPPED = auto()
    EXPIRED = auto()


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to record, as it was at the start, with the period of its agent."""

    name: str
    uuid: str
    index: int
    model: str
    period: float


@dataclass(slots=True)
class Figures:
    """Statistics of the samples of a GPU. `tallies`: one per metric of `GPU_METRICS`, none before the first sample."""

    sample_count: int = 0
    last_at: float = NEVER
    tallies: list[MetricTally] = field(default_factory=list[MetricTally])

    def add(self, at: float, sample: Sample) -> None:
        """Add a sample read at `at`."""
        if not self.tallies:
            self.tallies = [MetricTally() for _ in GPU_METRICS]
        self.last_at = at
        self.sample_count += 1
        for tally, value in zip(self.tallies, sample, strict=True):
            if not isnan(value):
                tally.add(value)

    def with_later(self, later: "Figures") -> "Figures":
        """These and later samples together; neither is modified."""
        if not later.sample_count:
            return self
        pairs = zip(self.tallies or _NONE, later.tallies, strict=True)
        count = self.sample_count + later.sample_count
        return Figures(count, later.last_at, [before.joined(after) for before, after in pairs])

    def stats(self) -> list[tuple[Metric, Stats]]:
        """Statistics of each metric with a sample."""
        pairs = zip(GPU_METRICS, (tally.stats() for tally in self.tallies), strict=False)
        return [(metric, stats) for metric, stats in pairs if stats is not None]


_NONE = [MetricTally() for _ in GPU_METRICS]


@dataclass(slots=True, eq=False)
class RecordedGpu:
    """One GPU in a recording."""

    target: Target
    own: Figures = field(default_factory=Figures)  # before `span`; replaced on each change
    span: "SharedSpan | None" = None  # current samples, shared with other recordings
    until: float = NEVER  # later samples are ignored

    @property
    def sample_count(self) -> int:
        """The number of samples."""
        return self.own.sample_count + (0 if self.span is None else self.span.figures.sample_count)

    def figures(self) -> Figures:
        """Statistics of all samples so far."""
        return self.own if self.span is None else self.own.with_later(self.span.figures)

    def end(self) -> None:
        """Ignore further samples; it leaves its span with the next one."""
        self.until = NEVER
        if self.span is not None:
            self.span.until = NEVER

    def leave(self) -> None:
        """Leave the span and keep its statistics."""
        if self.span is not None:
            self.own = self.figures()
            self.span.members.discard(self)
            self.span = None


@dataclass(slots=True, eq=False)
class SharedSpan:
    """Samples of a GPU that several recordings share and count once."""

    pace: float  # least time between samples
    due: float  # least time of the next sample
    until: float  # when its first member ends
    members: set[RecordedGpu]
    figures: Figures = field(default_factory=Figures)


@dataclass(frozen=True, slots=True)
class RecordingOrder:
    """What to record. `fingerprint` distinguishes a repeated request from another with the same id."""

    id: str
    request_id: str
    fingerprint: str
    interval: float
    max_duration: float
    targets: Sequence[Target]


@dataclass(slots=True)
class Recording:
    """A recording; `ended_at` is None while it runs."""

    order: RecordingOrder
    started_at: float
    gpus: list[RecordedGpu]
    state: RecordingState = RecordingState.RUNNING
    ended_at: float | None = None

    @property
    def last_moment(self) -> float:
        """When it expires."""
        return self.started_at + self.order.max_duration

    @property
    def sample_count(self) -> int:
        """The highest sample count of its GPUs."""
        return max((gpu.sample_count for gpu in self.gpus), default=0)

    def duration(self, now: float) -> float:
        """How long it has run."""
        return (now if self.ended_at is None else self.ended_at) - self.started_at
