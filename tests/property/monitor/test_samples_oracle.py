"""What an observer of samples keeps is what it would if it took each GPU alone, read from whole snapshots."""

from dataclasses import dataclass, field
from math import isnan
from random import Random
from typing import Any

import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.history.history import History, Tier, metrics_of, most_bytes, shorter
from gpuscale.monitor.history.ring import Point
from gpuscale.monitor.model.metrics import ABSENT, GPU_METRICS, Metric
from gpuscale.monitor.observing.samples import SampleObserver, gpu_sample
from gpuscale.monitor.recording import RecordingOrder, Recordings, Target
from gpuscale.monitor.wire import Change, Picture

NODES = ("alpha", "beta")
TIERS = (Tier(1.0, 60.0), Tier(10.0, 300.0), Tier(60.0, 7_200.0))
WIDTH = len(GPU_METRICS)
FIELDS = (
    *(one.name.lower() for one in GPU_METRICS if one is not Metric.MEMORY_USED_PERCENT),
    "memory_total_bytes",
)
NUMBERS = {name: types_api.GpuReading.DESCRIPTOR.fields_by_name[name].number for name in (*FIELDS, "age")}
UNKNOWN = 1_000
"""A field of GpuReading that only later versions know."""


@dataclass
class Alone:
    """The history and recordings of GPUs that are each taken alone, and when their last readings were made."""

    history: History
    recordings: Recordings = field(default_factory=Recordings)
    kept: set[str] = field(default_factory=set[str])
    newest: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    def observe(self, truth: types_api.Snapshot, now: float) -> None:
        node = truth.node
        if node in self.kept or self.history.make_room():
            self.kept.add(node)
        elif node not in self.recordings.nodes:
            self.history.leave_out()
            self.newest = {key: at for key, at in self.newest.items() if key[0] != node}
            return
        uuids = {gpu.uuid.lower() for gpu in truth.gpus} | {""}
        self.newest = {key: at for key, at in self.newest.items() if key[0] != node or key[1] in uuids}
        for gpu in truth.gpus:
            at, sample = self._new(node, gpu.uuid.lower(), gpu.reading, now), gpu_sample(gpu.reading)
            if at is not None and not all(map(isnan, sample)):
                self.history.add(gpu.uuid.lower(), at, sample)
                self.recordings.add(gpu.uuid.lower(), at, sample)
        if (at := self._new(node, "", truth.host_reading, now)) is not None:
            used = [gpu_sample(gpu.reading)[0] for gpu in truth.gpus]
            used = [value for value in used if not isnan(value)]
            mean = sum(used) / len(used) if used else ABSENT
            self.history.add(f"nodes/{node}", at, (truth.host_reading.cpu_percent, ABSENT, ABSENT, mean))

    def _new(
        self, node: str, key: str, reading: types_api.GpuReading | types_api.HostReading, now: float
    ) -> float | None:
        """When a reading was made; None if never, or if it is an old one."""
        at = now - reading.age.ToTimedelta().total_seconds()
        if not reading.HasField("age") or at - self.newest.get((node, key), float("-inf")) < 0.25:
            return None
        self.newest[node, key] = at
        return at


@dataclass
class Agent:
    """A node that sends whole snapshots and changes of them, and what they come to."""

    source: Random
    truth: types_api.Snapshot
    picture: Picture

    @classmethod
    def of(cls, source: Random, node: str) -> "Agent":
        truth = types_api.Snapshot(node=node, period=to_duration(1.0))
        truth.host_reading.MergeFrom(types_api.HostReading(cpu_percent=5.0, age=to_duration(0.0)))
        for number in source.sample(range(4), source.choice((2, 3, 3, 3))):
            truth.gpus.add(uuid=f"GPU-{node}-{number}", reading=types_api.GpuReading(age=to_duration(0.0)))
        for gpu in truth.gpus:
            for name in FIELDS:
                setattr(gpu.reading, name, source.randrange(1, 1000))
        copy = types_api.Snapshot()
        copy.CopyFrom(truth)
        return cls(source, truth, Picture(copy))

    def change(self) -> Change:
        """Numbers of some fields, of all GPUs or of one, or what a GPU has lost; of nothing at times."""
        source, delta, gpus = self.source, monitor_internal.SnapshotDelta(), self.truth.gpus
        place, what = source.randrange(len(gpus)), source.random()
        if what < 0.7:
            delta.numbers.places.extend([] if what < 0.55 else [place])
            for name in source.sample((*FIELDS, "unknown"), source.randrange(1, 4)):
                delta.numbers.fields.append(NUMBERS.get(name, UNKNOWN))
                for gpu in gpus if what < 0.55 else [gpus[place]]:
                    value = source.randrange(1, 1000)
                    delta.numbers.values.append(value)
                    if name in NUMBERS:
                        setattr(gpu.reading, name, value)
        elif what < 0.85:
            cleared = source.choice(((), FIELDS[:1], FIELDS, ("age",)))
            age = None if cleared == ("age",) else to_duration(source.choice((0.0, 0.0, 0.0, 0.5, 2.0)))
            delta.gpus.add(place=place, cleared_fields=[NUMBERS[name] for name in cleared])
            readings: list[Any] = [delta.gpus[0].reading, gpus[place].reading]
            for reading in readings:
                for name in cleared:
                    reading.ClearField(name)
                reading.MergeFrom(types_api.GpuReading(age=age))
        if source.random() < 0.1:
            delta.host.reading.cpu_percent = self.truth.host_reading.cpu_percent = source.randrange(100)
        change = Change.of(delta)
        self.picture.merge(change)
        return change


def told(history: History) -> dict[str, list[list[Point]]]:
    found = {key: history.get(key) for key, _ in history.all()}
    return {
        key: [
            one.points(metric, tier, -1e9, 1e9)
            for metric in range(len(metrics_of(key)))
            for tier in range(len(TIERS))
        ]
        for key, one in found.items()
        if one is not None
    }


@pytest.mark.parametrize("seed", range(16))
def test_what_is_kept_is_what_each_gpu_alone_would_leave(seed: int) -> None:
    """Whatever comes in between: ages that differ, nothing read, readings that repeat, another list of GPUs, recordings, ended series, little memory."""
    source = Random(seed)
    room = source.choice((1 << 30, source.randrange(2, 12) * most_bytes(WIDTH, TIERS)))
    alone, history, recordings = Alone(History(TIERS, room)), History(TIERS, room), Recordings()
    observer, now, agents = SampleObserver(history, recordings), 1_000.0, dict[str, Agent]()
    for step in range(source.randrange(30, 200)):
        now += source.choice((0.1, 1.0, 1.0, 1.0, 1.0, 1.0, 12.0, 70.0 if source.random() < 0.2 else 1.0))
        if source.random() < 0.02:
            now += 8_000.0  # longer than a series without samples is kept
            history.forget_ended(now)
            alone.history.forget_ended(now)
        if source.random() < 0.04:
            name, key = source.choice(NODES), str(step)
            targets = [
                Target(f"nodes/{name}/gpus/{one}", f"gpu-{name}-{one}", one, "", 1.0) for one in range(4)
            ]
            order = RecordingOrder(key, key, "f", 1.0, source.choice((5.0, 20.0)), targets)
            recordings.start(order, now)
            alone.recordings.start(order, now)
        for one in (recordings, alone.recordings):
            one.all(now)  # ends those whose time is up
        for name in NODES:
            change = None
            if name not in agents or source.random() < 0.03:
                agents[name] = Agent.of(source, name)
            else:
                change = agents[name].change()
            observer.observe(name, agents[name].picture, now, change)
            alone.observe(agents[name].truth, now)
        if source.random() < 0.1:
            assert told(history) == told(alone.history)
        assert (history.left_out, history.kept) == (alone.history.left_out, alone.history.kept)
    assert [repr(one) for one in recordings.all(now)] == [repr(one) for one in alone.recordings.all(now)]


def test_what_waits_together_is_shortened_where_it_is_kept() -> None:
    """Nobody need read a series for its memory to be given back."""
    history = History(TIERS, 1 << 30)
    observer, agent, now = SampleObserver(history, Recordings()), Agent.of(Random(1), "alpha"), 1_000.0
    for _ in range(100):
        now += 1.0
        observer.observe("alpha", agent.picture, now, Change.of(monitor_internal.SnapshotDelta()))
    history.kept = next(iter(shorter(TIERS)))
    for _ in range(32):
        now += 1.0
        observer.observe("alpha", agent.picture, now, Change.of(monitor_internal.SnapshotDelta()))
    long = [key for key, series in history.all() if len(series.points(0, 0, 0.0, 1e9)) > 40]
    assert not long
