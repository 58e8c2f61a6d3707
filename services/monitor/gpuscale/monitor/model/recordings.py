"""Recordings: which GPUs, how often, for how long, and what came of it. Pure: times are arguments, in seconds.

However long a recording runs, it takes a few numbers for each metric of each GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isnan

from gpuscale.monitor.model.metrics import GPU_METRICS, Metric, MetricTally, Sample, Stats

NEVER = float("-inf")


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
class Figures:
    """What samples of one GPU came to. `tallies`: one for each of `GPU_METRICS`, or none before the first sample."""

    sample_count: int = 0
    last_at: float = NEVER
    tallies: list[MetricTally] = field(default_factory=list[MetricTally])

    def add(self, at: float, sample: Sample) -> None:
        """Take in what was read at `at`."""
        if not self.tallies:
            self.tallies = [MetricTally() for _ in GPU_METRICS]
        self.last_at = at
        self.sample_count += 1
        for tally, value in zip(self.tallies, sample, strict=True):
            if not isnan(value):
                tally.add(value)

    def with_later(self, later: "Figures") -> "Figures":
        """These and later samples together; neither is changed."""
        if not later.sample_count:
            return self
        pairs = zip(self.tallies or _NONE, later.tallies, strict=True)
        count = self.sample_count + later.sample_count
        return Figures(count, later.last_at, [before.joined(after) for before, after in pairs])

    def stats(self) -> list[tuple[Metric, Stats]]:
        """The figures of each metric that was read at least once."""
        pairs = zip(GPU_METRICS, (tally.stats() for tally in self.tallies), strict=False)
        return [(metric, stats) for metric, stats in pairs if stats is not None]


_NONE = [MetricTally() for _ in GPU_METRICS]


@dataclass(slots=True, eq=False)
class RecordedGpu:
    """One GPU in a recording."""

    target: Target
    own: Figures = field(
        default_factory=Figures
    )  # of its samples before `span`; another object after each change
    span: "SharedSpan | None" = None  # what it takes in now together with other recordings, if anything
    until: float = NEVER  # it takes in no sample that was read later

    @property
    def sample_count(self) -> int:
        """How many samples it has."""
        return self.own.sample_count + (0 if self.span is None else self.span.figures.sample_count)

    def figures(self) -> Figures:
        """What all its samples came to so far."""
        return self.own if self.span is None else self.own.with_later(self.span.figures)

    def end(self) -> None:
        """It takes in nothing more; it leaves its span with the next sample."""
        self.until = NEVER
        if self.span is not None:
            self.span.until = NEVER

    def leave(self) -> None:
        """Leave the span, with what it came to."""
        if self.span is not None:
            self.own = self.figures()
            self.span.members.discard(self)
            self.span = None


@dataclass(slots=True, eq=False)
class SharedSpan:
    """Samples of one GPU that several recordings take in, the same of each: they are counted once for all."""

    pace: float  # how far apart the samples are, at least
    due: float  # when the next one may be read
    until: float  # when the first of its members ends
    members: set[RecordedGpu]
    figures: Figures = field(default_factory=Figures)


@dataclass(frozen=True, slots=True)
class RecordingOrder:
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

    order: RecordingOrder
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
