"""Recordings of GPUs, which keep a few numbers per metric and GPU however long they run. Pure.

Times are seconds of the clock of samples. A recording takes a sample if it was read while the recording runs, and one interval
after the last (up to a quarter early, for jitter of the network).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import isnan

from gpuscale.common import errors
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

    def stats(self) -> list[tuple[Metric, Stats]]:
        """Statistics of each metric with a sample."""
        pairs = zip(GPU_METRICS, (tally.stats() for tally in self.tallies), strict=False)
        return [(metric, stats) for metric, stats in pairs if stats is not None]


@dataclass(slots=True)
class RecordedGpu:
    """One GPU in a recording, and what was sampled of it."""

    target: Target
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
        return max((gpu.figures.sample_count for gpu in self.gpus), default=0)

    def duration(self, now: float) -> float:
        """How long it has run."""
        return (now if self.ended_at is None else self.ended_at) - self.started_at

    def takes(self, gpu: RecordedGpu, at: float) -> bool:
        """Whether it takes a sample of one of its GPUs, read at `at`."""
        interval = self.order.interval
        due = gpu.figures.last_at + interval - EARLY * min(interval, gpu.target.period)
        return max(self.started_at, due) <= at <= self.last_moment


MOST_KEPT = 100
MOST_RECORDED = 10_240
"""Maximum number of GPUs in running recordings, one that is in several counted for each."""


class Recordings:
    """All recordings; `nodes` are those with a running one."""

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._all: dict[str, Recording] = {}
        self._taking: dict[
            str, dict[str, RecordedGpu]
        ] = {}  # by lower-case UUID, in running recordings by id
        self._nodes_of: dict[str, frozenset[str]] = {}
        self.nodes: frozenset[str] = frozenset()

    def all(self, now: float) -> list[Recording]:
        """All recordings, sorted by id."""
        self._expire(now)
        return [self._all[key] for key in sorted(self._all)]

    def get(self, key: str, now: float) -> Recording:
        """A recording by id. NotFoundError without one."""
        self._expire(now)
        return errors.NotFoundError.unless(self._all.get(key), f"recordings/{key}")

    def start(self, order: RecordingOrder, now: float) -> Recording:
        """Start a recording, or return the one of a repeated request. Drops the recording that ended first if there are too many."""
        self._expire(now)
        for recording in self._all.values():
            if recording.order.request_id != order.request_id:
                continue
            if recording.order.fingerprint != order.fingerprint:
                raise errors.request_id_reused(order.request_id)
            return recording
        if order.id in self._all:
            raise errors.AlreadyExistsError(
                f"recordings/{order.id} already exists", reason="RECORDING_EXISTS"
            )
        if sum(map(len, self._taking.values())) + len(order.targets) > MOST_RECORDED:
            raise errors.ResourceExhaustedError(
                f"all recordings together have {MOST_RECORDED} GPUs at most", reason="TOO_MANY_RECORDINGS"
            )
        if len(self._all) >= self._most_kept:
            ended = [recording for recording in self._all.values() if recording.ended_at is not None]
            if not ended:
                raise errors.ResourceExhaustedError(
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
                self._taking.setdefault(gpu.target.uuid.lower(), {})[recording.order.id] = gpu
            self._note_nodes()

    def stop(self, key: str, now: float) -> Recording:
        """Stop a recording unless it has ended. NotFoundError without one."""
        recording = self.get(key, now)
        if recording.state is RecordingState.RUNNING:
            self._end(recording, RecordingState.STOPPED, now)
        return recording

    def delete(self, key: str, now: float) -> None:
        """Stop a recording and drop it. NotFoundError without one."""
        self._forget(self.stop(key, now))

    def add(self, uuid: str, at: float, sample: Sample) -> None:
        """Add a sample of the GPU with that lower-case UUID, read at `at`."""
        for key, gpu in self._taking.get(uuid, {}).items():
            if self._all[key].takes(gpu, at):
                gpu.figures.add(at, sample)

    def _forget(self, recording: Recording) -> None:
        del self._all[recording.order.id], self._nodes_of[recording.order.id]

    def _expire(self, now: float) -> None:
        for recording in self._running():
            if now > recording.last_moment:
                self._end(recording, RecordingState.EXPIRED, recording.last_moment)

    def _end(self, recording: Recording, state: RecordingState, at: float) -> None:
        recording.state, recording.ended_at = state, at
        for gpu in recording.gpus:
            taking = self._taking[gpu.target.uuid.lower()]
            del taking[recording.order.id]
            if not taking:
                del self._taking[gpu.target.uuid.lower()]
        self._note_nodes()

    def _running(self) -> list[Recording]:
        return [recording for recording in self._all.values() if recording.state is RecordingState.RUNNING]

    def _note_nodes(self) -> None:
        self.nodes = frozenset().union(*(self._nodes_of[recording.order.id] for recording in self._running()))
