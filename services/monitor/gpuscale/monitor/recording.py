"""Recordings of GPUs, which keep a few numbers per metric and GPU however long they run. Pure.

Times are seconds of the clock of samples. A recording takes a sample if it was read while the recording runs, and one interval
after the last (up to a quarter early, for jitter of the network).

Recordings of a GPU that took the same sample and have the same interval take the same samples from then on. They share a span,
so that the cost of a sample does not grow with the number of recordings.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isnan

from gpuscale.common.errors import AlreadyExistsError, NotFoundError, ResourceExhaustedError
from gpuscale.monitor.model.metrics import GPU_METRICS, Metric, MetricTally, Sample, Stats

NEVER = float("-inf")
EARLY = 0.25
"""How early a sample may be, as a share of the interval or the agent's period, whichever is shorter."""


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


class Spans:
    """The running recordings of one GPU."""

    def __init__(self) -> None:
        self._all: list[SharedSpan] = []
        self._apart = 0  # samples counted more than once since spans were last joined

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, recording: Recording, gpu: RecordedGpu) -> None:
        """Start a recording of this GPU."""
        interval = recording.order.interval
        pace = interval - EARLY * min(interval, gpu.target.period)
        gpu.until = recording.last_moment
        gpu.span = SharedSpan(pace, max(recording.started_at, gpu.own.last_at + pace), gpu.until, {gpu})
        self._all.append(gpu.span)

    def add(self, at: float, sample: Sample) -> None:
        """Add a sample read at `at`."""
        due: defaultdict[float, list[SharedSpan]] = defaultdict(list)
        for span in [span for span in self._all if at >= span.due]:
            if at > span.until:
                for member in [member for member in span.members if member.until < at]:
                    member.leave()
                span.until = min((member.until for member in span.members), default=NEVER)
                self.tidy()
            if span.members:
                due[span.pace].append(span)
        for spans in due.values():
            # Join spans of one pace once counting each has cost as much as joining.
            new = [span for span in spans if not span.figures.sample_count]
            old = [span for span in spans if span.figures.sample_count]
            apart = [*old, self._joined(new)] if len(new) > 1 else spans
            for span in apart:
                span.due = at + span.pace
                span.figures.add(at, sample)
            self._apart += len(apart) - 1
            if len(apart) > 1 and self._apart >= sum(len(span.members) for span in apart):
                self._joined(apart)
                self._apart = 0

    def tidy(self) -> None:
        """Drop spans without members."""
        self._all = [span for span in self._all if span.members]

    def _joined(self, spans: Sequence[SharedSpan]) -> SharedSpan:
        """Replace spans that are due at the same time by one."""
        members = {member for span in spans for member in span.members}
        until = min(member.until for member in members)
        joined = SharedSpan(spans[0].pace, spans[0].due, until, members)
        for member in members:
            member.leave()
            member.span = joined
        self.tidy()
        self._all.append(joined)
        return joined


MOST_KEPT = 100


class Recordings:
    """All recordings; `nodes` are those with a running one."""

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._all: dict[str, Recording] = {}
        self._spans: dict[str, Spans] = {}
        self._nodes_of: dict[str, frozenset[str]] = {}
        self.nodes: frozenset[str] = frozenset()

    def all(self, now: float) -> list[Recording]:
        """All recordings, sorted by id."""
        self._expire(now)
        return [self._all[key] for key in sorted(self._all)]

    def get(self, key: str, now: float) -> Recording:
        """A recording by id. NotFoundError without one."""
        self._expire(now)
        found = self._all.get(key)
        if found is None:
            raise NotFoundError(f"there is no recordings/{key}", metadata={"name": f"recordings/{key}"})
        return found

    def start(self, order: RecordingOrder, now: float) -> Recording:
        """Start a recording, or return the one of a repeated request. Drops the recording that ended first if there are too many."""
        self._expire(now)
        for recording in self._all.values():
            if recording.order.request_id != order.request_id:
                continue
            if recording.order.fingerprint != order.fingerprint:
                raise AlreadyExistsError(
                    "request_id was used with other arguments", reason="REQUEST_ID_REUSED"
                )
            return recording
        if order.id in self._all:
            raise AlreadyExistsError(f"recordings/{order.id} already exists", reason="RECORDING_EXISTS")
        if len(self._all) >= self._most_kept:
            ended = [recording for recording in self._all.values() if recording.ended_at is not None]
            if not ended:
                raise ResourceExhaustedError(
                    f"{self._most_kept} recordings run already", reason="TOO_MANY_RECORDINGS"
                )
            self._forget(min(ended, key=lambda recording: recording.ended_at or 0.0))
        recording = Recording(order, now, [RecordedGpu(target) for target in order.targets])
        self.restore(recording)
        return recording

    def restore(self, recording: Recording) -> None:
        """Add a recording; a running one continues."""
        self._all[recording.order.id] = recording
        names = {target.name for target in recording.order.targets}
        self._nodes_of[recording.order.id] = frozenset(name.split("/")[1] for name in names)
        if recording.state is RecordingState.RUNNING:
            for gpu in recording.gpus:
                self._spans.setdefault(gpu.target.uuid.lower(), Spans()).begin(recording, gpu)
            self._note_nodes()

    def stop(self, key: str, now: float) -> Recording:
        """Stop a recording unless it has ended. NotFoundError without one."""
        recording = self.get(key, now)
        if recording.state is RecordingState.RUNNING:
            _end(recording, RecordingState.STOPPED, now)
            self._note_nodes()
        return recording

    def delete(self, key: str, now: float) -> None:
        """Stop a recording and drop it. NotFoundError without one."""
        self._forget(self.stop(key, now))

    def add(self, uuid: str, at: float, sample: Sample) -> None:
        """Add a sample of the GPU with that lower-case UUID, read at `at`."""
        spans = self._spans.get(uuid)
        if spans is not None:
            spans.add(at, sample)
            if not spans:
                del self._spans[uuid]

    def _forget(self, recording: Recording) -> None:
        del self._all[recording.order.id], self._nodes_of[recording.order.id]
        for gpu in recording.gpus:
            gpu.leave()
            uuid = gpu.target.uuid.lower()
            spans = self._spans.get(uuid)
            if spans is not None:
                spans.tidy()
                if not spans:
                    del self._spans[uuid]

    def _expire(self, now: float) -> None:
        over = [recording for recording in self._running() if now > recording.last_moment]
        for recording in over:
            _end(recording, RecordingState.EXPIRED, recording.last_moment)
        if over:
            self._note_nodes()

    def _running(self) -> list[Recording]:
        return [recording for recording in self._all.values() if recording.state is RecordingState.RUNNING]

    def _note_nodes(self) -> None:
        self.nodes = frozenset().union(*(self._nodes_of[recording.order.id] for recording in self._running()))


def _end(recording: Recording, state: RecordingState, at: float) -> None:
    recording.state, recording.ended_at = state, at
    for gpu in recording.gpus:
        gpu.end()
