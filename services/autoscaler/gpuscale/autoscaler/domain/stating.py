"""The inputs of an evaluation: what is stated, laid over what the live system shows. Pure.

A stated value becomes a sample of its signal, and is judged as any other: by its age, and by whether it is a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpuscale.autoscaler.domain.model import (
    NO_SETS,
    EndpointSpec,
    ObservationStatus,
    QueueCount,
    QueueSignal,
    SetState,
    Signal,
    TaskReport,
)
from gpuscale.autoscaler.domain.pace import Memory
from gpuscale.autoscaler.domain.policies.outcome import Inputs
from gpuscale.autoscaler.domain.remembered import Remembered, kept_seconds
from gpuscale.autoscaler.domain.replicas import Moment
from gpuscale.autoscaler.domain.series import LARGEST, Series, series_of
from gpuscale.autoscaler.domain.signals import Sample, observe
from gpuscale.autoscaler.domain.whatif import Question

ALWAYS = Memory(-math.inf)
"""Nothing has been asked for, and that has been known for ever."""


@dataclass(frozen=True, slots=True)
class StatedSignal:
    """What a signal is to show.

    Attributes:
        value: None where it is missing.
        age: of the value, in seconds.
        status: whether it can be had.
        points: earlier values with their ages; where there are none, it has always shown its value.
        silent_count: sources that said nothing.
        proven_empty: whether it shows that no work is left; None where that follows from the counts.
        tasks: of a signal of tasks, what they need.
    """

    value: float | None = None
    age: float = 0.0
    status: ObservationStatus = ObservationStatus.OK
    points: tuple[tuple[float, float], ...] = ()
    silent_count: int = 0
    proven_empty: bool | None = None
    tasks: TaskReport | None = None


@dataclass(frozen=True, slots=True)
class Stated:
    """What is stated of an evaluation; None, and a signal that is not there, is not."""

    signals: Mapping[str, StatedSignal] = field(default_factory=dict[str, StatedSignal])
    before: int | None = None
    ready: int | None = None
    unknown: int | None = None
    memory: Memory | None = None
    last_changes: Mapping[str, float] | None = None
    startup: float | None = None
    wall: datetime | None = None
    gpu_limit: int | None = None
    sets: Mapping[str, SetState] = field(default_factory=lambda: NO_SETS)


@dataclass(frozen=True, slots=True)
class Live:
    """What holds where nothing is stated: of a live endpoint, or of one that does not exist."""

    before: int
    ready: int
    unknown: int = 0
    samples: Mapping[str, Sample] = field(default_factory=dict[str, Sample])
    past: Remembered = field(default_factory=lambda: Remembered(memory=ALWAYS))
    last_changes: Mapping[str, float] = field(default_factory=dict[str, float])
    startup: float | None = None
    gpu_limit: int | None = None
    sets: Mapping[str, SetState] = field(default_factory=lambda: NO_SETS)


def question(spec: EndpointSpec, stated: Stated, live: Live, at: Moment) -> Question:
    """All that an evaluation of the spec goes by."""
    empty = _emptied(spec.signals, stated.signals)
    samples = dict(live.samples)
    series = {**live.past.series}
    for signal in spec.signals:
        if signal.id in stated.signals:
            one = stated.signals[signal.id]
            samples[signal.id] = _sample(signal, one, at.now, proven_empty=signal.id in empty)
            series[signal.id] = _series(one, at.now, kept_seconds(spec))
        elif signal.id not in samples:
            samples[signal.id] = Sample(problem="it is not stated")
    observations = {
        signal.id: observe(signal, samples[signal.id], at.now, series.get(signal.id))
        for signal in spec.signals
    }
    sets = {**live.sets, **stated.sets}
    before = live.before if stated.before is None else stated.before
    ready = live.ready if stated.before is None else before
    memory = live.past.memory if stated.memory is None else stated.memory
    inputs = Inputs(
        before=before,
        ready=ready if stated.ready is None else stated.ready,
        now=at.now,
        wall=stated.wall or at.wall,
        observations=observations,
        series=series,
        last_changes=live.last_changes if stated.last_changes is None else stated.last_changes,
        bursts=live.past.bursts,
        startup=live.startup if stated.startup is None else stated.startup,
        gpu_limit=live.gpu_limit if stated.gpu_limit is None else stated.gpu_limit,
        sets={one.id: found for one in spec.capability_sets if (found := sets.get(one.id)) is not None},
    )
    unknown = live.unknown if stated.unknown is None else stated.unknown
    return Question(spec, inputs, Memory(at.now) if memory is None else memory, unknown)


def _sample(signal: Signal, stated: StatedSignal, now: float, *, proven_empty: bool) -> Sample:
    at = now - stated.age
    match stated.status:
        case ObservationStatus.MISSING:
            return Sample(at=at, problem="it is stated to be missing")
        case ObservationStatus.INVALID:
            return Sample((math.nan,), at)
        case ObservationStatus.STALE:
            at = min(at, now - signal.oldest - 1.0)
        case ObservationStatus.OK:
            pass
    if stated.value is None:
        return Sample(problem="it is stated to be missing")
    empty = proven_empty or (stated.tasks is not None and not stated.tasks.total)
    return Sample(
        (stated.value,), at, silent_count=stated.silent_count, proven_empty=empty, tasks=stated.tasks
    )


def _series(stated: StatedSignal, now: float, keep: float) -> Series:
    """Its points, one at a moment, or the one value as far back as anybody looks."""
    at = now - stated.age
    told = {now - age: value for age, value in stated.points if abs(value) <= LARGEST}
    past = sorted(told.items())
    if stated.value is not None and abs(stated.value) <= LARGEST:
        past = [*(one for one in past if one[0] < at), (at, stated.value)]
        if not stated.points:
            past = [(at - keep, stated.value), *past]
    return series_of(past)


def _emptied(signals: Sequence[Signal], stated: Mapping[str, StatedSignal]) -> set[str]:
    """Ids of the signals that show that no work is left: as stated, or since all that they count is stated as 0."""
    zero: dict[str, set[QueueCount]] = {}
    queues = {one.id: one.source for one in signals if isinstance(one.source, QueueSignal)}
    for name, source in queues.items():
        if name in stated and stated[name].value == 0:
            zero.setdefault(source.watcher, set()).add(source.count)
    whole = {QueueCount.READY, QueueCount.UNACKED}
    empty = {watcher for watcher, counts in zero.items() if QueueCount.TOTAL in counts or whole <= counts}
    found = {name for name, source in queues.items() if source.watcher in empty}
    counting = {one.id for one in signals if one.counts_work}
    found |= {
        name for name in counting & stated.keys() if stated[name].value == 0 and not stated[name].silent_count
    }
    return {name for name, one in stated.items() if _told(one.proven_empty, name in found)}


def _told(stated: bool | None, found: bool) -> bool:
    return found if stated is None else stated


def replaced_spec(own: EndpointSpec, spec: EndpointSpec, live: Live) -> Live:
    """What a live endpoint shows to another spec: signals that differ from its own are not read."""
    same = {one.id for one in spec.signals if one in own.signals}
    samples = {name: one for name, one in live.samples.items() if name in same}
    series = {name: one for name, one in live.past.series.items() if name in same}
    return replace(live, samples=samples, past=replace(live.past, series=series))
