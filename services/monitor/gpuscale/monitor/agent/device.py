"""One GPU: its newest reading, a circuit breaker, and a thread of its own while it is slow.

A GPU whose call takes longer than the soft deadline is SLOW and keeps its last readings, with their age. From the hard deadline
on it is HUNG and its readings are absent, since showing old ones hides the fault (NVIDIA/dcgm-exporter#164, microsoft/pai#889).

After an answer beyond the hard deadline, a GPU is probed with one cheap call, after growing pauses, and read again once a probe
is answered in time. So at most one thread is ever stuck on it.
"""

import asyncio
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpuscale.common.runtime.tasks import Backoff, Clock
from gpuscale.monitor.agent.sources import GpuSource
from gpuscale.monitor.agent.threads import CallThread, Reader
from gpuscale.monitor.model.readings import (
    GPU_FIELDS,
    GpuIdentity,
    GpuReading,
    GpuSample,
    GpuState,
    GpuView,
    ReadingStatus,
    Timed,
)

_GONE = frozenset({GpuState.LOST, GpuState.RESET_REQUIRED})


@dataclass(frozen=True, slots=True)
class ReadDeadlines:
    """How many seconds reading a GPU may take: SLOW from `soft` on, HUNG from `hard` on."""

    soft: float = 2.0
    hard: float = 10.0


def view(
    identity: GpuIdentity,
    last: Timed[GpuSample] | None,
    *,
    ordered_at: float | None,
    now: float,
    deadlines: ReadDeadlines,
) -> GpuView:
    """The GPU as shown at `now`; `ordered_at` is when the pending call was made, None without one."""
    waiting = 0.0 if ordered_at is None else now - ordered_at
    read_at = last.read_at if last else None
    if waiting >= deadlines.hard:
        reading = GpuReading.nothing(ReadingStatus.TIMEOUT, f"no answer for {waiting:.0f} s")
        return GpuView(identity, GpuState.HUNG, reading, read_at)
    if last is None:
        reading = GpuReading.nothing(ReadingStatus.TIMEOUT, "no answer yet")
        return GpuView(identity, GpuState.SLOW, reading, None)
    state = last.value.state
    if state not in _GONE and max(waiting, last.read_at - last.ordered_at) >= deadlines.soft:
        state = GpuState.SLOW
    return GpuView(identity, state, last.value.reading, read_at)


# Reading a healthy GPU takes some milliseconds.
QUICK_SECONDS = 0.1
PROBE_INITIAL_SECONDS = 0.5
PROBE_CAP_SECONDS = 30.0

# In these states, a GPU that is divided is shown as DIVIDED.
_ANSWERS = frozenset({GpuState.OK, GpuState.DEGRADED, GpuState.SLOW})


@dataclass(slots=True)
class Breaker:
    """A circuit breaker: an answer beyond the hard deadline opens it, a probe answered in time closes it."""

    deadlines: ReadDeadlines
    backoff: Backoff
    open: bool = False
    retry_at: float = 0.0

    def answered(self, took: float, now: float, *, probe: bool) -> None:
        """Take in that a call took `took` seconds."""
        if took >= self.deadlines.hard or (probe and took >= self.deadlines.soft):
            self.open = True
            self.retry_at = now + self.backoff.next()
        elif probe:
            self.open = False
            self.backoff.reset()


@dataclass(slots=True)
class Collection:
    """Statistics of reading the driver, of all GPUs since the start."""

    openings: int = 0  # attempts to open the source
    interruptions: int = 0  # interruptions of a hung driver
    calls: int = 0  # driver calls that read GPUs
    refusals: int = 0  # of these, calls that failed, also because a GPU does not support them


class Device:
    """A GPU that was found at least once; `present` if the newest inventory has it. Counts in `collection`."""

    def __init__(
        self,
        identity: GpuIdentity,
        source: GpuSource,
        clock: Clock,
        deadlines: ReadDeadlines,
        collection: Collection,
    ) -> None:
        self.identity = identity
        self.present = True
        self._clock = clock
        self._deadlines = deadlines
        self._breaker = Breaker(deadlines, Backoff(PROBE_INITIAL_SECONDS, PROBE_CAP_SECONDS))
        self._worker: CallThread | None = None
        self._reader = Reader(partial(source.read, identity.uuid), clock)
        self._prober = Reader(partial(source.probe, identity.uuid), clock)
        self._judged: tuple[object, object] = (None, None)
        self._collection = collection

    @property
    def ordered_at(self) -> float | None:
        """When the pending call was ordered; None without one."""
        return self._reader.ordered_at if self._prober.ordered_at is None else self._prober.ordered_at

    @property
    def error(self) -> BaseException | None:
        """Why the newest call failed; None if it did not."""
        return self._prober.error if self._breaker.open else self._reader.error

    @property
    def hung(self) -> bool:
        """Whether a call is pending beyond the hard deadline, so that its thread is stuck."""
        ordered_at = self.ordered_at
        return ordered_at is not None and self._clock.now() - ordered_at >= self._deadlines.hard

    @property
    def answers(self) -> bool:
        """Whether nothing is known to be wrong; a call may be pending."""
        return not self.hung and self.error is None and not self.unusable()

    @property
    def read_at(self) -> float:
        """When it was last read; minus infinity if never."""
        return -math.inf if self._reader.last is None else self._reader.last.read_at

    @property
    def link_ends(self) -> tuple[str | None, ...]:
        """The other ends of its NVLinks, as far as known."""
        return () if self._reader.last is None else self._reader.last.value.link_ends

    @property
    def quick(self) -> bool:
        """Whether its last answer was quick, so that it may share a thread."""
        last = self._reader.last
        return not self._breaker.open and (last is None or last.read_at - last.ordered_at < QUICK_SECONDS)

    def due(self) -> "Reader[GpuSample] | Reader[None] | None":
        """The reading or probe that is due; None if a call is pending or nothing is due."""
        if self.ordered_at is not None:
            return None
        self._judge()
        if not self._breaker.open:
            return self._reader
        return self._prober if self._clock.now() >= self._breaker.retry_at else None

    def order(self, reader: "Reader[Any]") -> "asyncio.Future[None]":
        """Run a reading or probe in its own thread."""
        if self._worker is None:
            self._worker = CallThread(f"gpu-{self.identity.uuid}")
        return reader.order(self._worker)

    def unusable(self) -> bool:
        """Whether its newest reading shows that the source's handle no longer works."""
        last = self._reader.last
        if last is None:
            return False
        return last.value.state in _GONE or len(last.value.reading.absent) == len(GPU_FIELDS)

    def view(self, *, opening_since: float | None, lost: str | None, released: bool) -> GpuView:
        """The GPU as shown; problems of the source (opening since, `lost`, `released`) override its readings."""
        self._judge()
        last = self._reader.last
        read_at = last.read_at if last else None
        if released:
            reading = last.value.reading if last else GpuReading.nothing(ReadingStatus.STALE, "never read")
            return GpuView(self.identity, GpuState.RELEASED, reading, read_at)
        if lost is not None:
            reading = GpuReading.nothing(ReadingStatus.LOST, lost)
            return GpuView(self.identity, GpuState.LOST, reading, read_at)
        if self._breaker.open and not self.hung:
            reading = GpuReading.nothing(ReadingStatus.TIMEOUT, "it answered too late and is probed")
            return GpuView(self.identity, GpuState.HUNG, reading, read_at)
        ordered_at = opening_since if self.ordered_at is None else self.ordered_at
        shown = view(
            self.identity, last, ordered_at=ordered_at, now=self._clock.now(), deadlines=self._deadlines
        )
        if self.identity.divided and shown.state in _ANSWERS:
            return shown._replace(state=GpuState.DIVIDED)
        return shown

    def stop(self) -> None:
        """End its thread once that is idle."""
        if self._worker is not None:
            self._worker.stop()

    def _judge(self) -> None:
        read, probed = self._reader.last, self._prober.last
        if read is not None and read is not self._judged[0]:
            self._breaker.answered(read.read_at - read.ordered_at, self._clock.now(), probe=False)
            self._collection.calls += read.value.calls
            self._collection.refusals += read.value.refusals
        if probed is not None and probed is not self._judged[1]:
            self._breaker.answered(probed.read_at - probed.ordered_at, self._clock.now(), probe=True)
        self._judged = (read, probed)
