"""Each recording comes to what it would alone, however many of a GPU there are."""

from dataclasses import dataclass, field
from math import isnan
from random import Random

import pytest

from gpuscale.monitor.model.metrics import ABSENT, GPU_METRICS, Sample
from gpuscale.monitor.recording import Recording, RecordingOrder, Recordings, RecordingState, Target
from gpuscale.monitor.state.saver import recording_from_text, recording_to_text

GPUS = ("GPU-A", "GPU-B", "GPU-C")


def order(
    key: str, interval: float, most: float, uuids: tuple[str, ...], period: float = 1.0
) -> RecordingOrder:
    targets = [Target(f"nodes/n{uuid}/gpus/{uuid.lower()}", uuid, 0, "H100", period) for uuid in uuids]
    return RecordingOrder(key, f"request of {key}", "same", interval, most, targets)


@dataclass
class Alone:
    """A recording, and the samples that it should have taken in."""

    order: RecordingOrder
    started_at: float
    taken: dict[str, list[tuple[float, Sample]]] = field(default_factory=lambda: {uuid: [] for uuid in GPUS})
    ended_at: float = float("inf")

    def add(self, target: Target, at: float, sample: Sample) -> None:
        taken = self.taken[target.uuid]
        early = 0.25 * min(self.order.interval, target.period)
        apart = not taken or at >= taken[-1][0] + self.order.interval - early
        if apart and self.started_at <= at <= min(self.ended_at, self.started_at + self.order.max_duration):
            taken.append((at, sample))

    def check(self, found: Recording) -> None:
        assert found.sample_count == max(len(self.taken[one.uuid]) for one in self.order.targets)
        for gpu in found.gpus:
            figures, taken = gpu.figures, self.taken[gpu.target.uuid]
            assert figures.sample_count == len(taken)
            assert figures.last_at == (taken[-1][0] if taken else float("-inf"))
            stats = dict(figures.stats())
            for place, metric in enumerate(GPU_METRICS):
                values = [sample[place] for _, sample in taken if not isnan(sample[place])]
                assert (metric in stats) == bool(values)
                if values:
                    one = stats[metric]
                    assert (one.min, one.max, one.count) == (min(values), max(values), len(values))
                    assert one.mean == pytest.approx(sum(values) / len(values))


class Site:
    """Recordings that come and go, over restarts, while samples come in."""

    def __init__(self, source: Random) -> None:
        self.source, self.now, self.begun = source, 100.0, 0
        self.recordings = Recordings()
        self.alone: dict[str, Alone] = {}

    def second(self) -> None:
        self.now += self.source.choice((0.875, 1.0, 1.125))
        if self.source.random() < 0.5:
            self.end_those_over()
        if len(self.alone) < 25 and self.source.random() < 0.4:
            self.end_those_over()
            self.start()
        if self.alone and self.source.random() < 0.1:
            self.end_those_over()
            key = self.source.choice(list(self.alone))
            if self.recordings.get(key, self.now).state is RecordingState.RUNNING:
                self.recordings.stop(key, self.now)
                self.alone[key].ended_at = float("-inf")
        if self.alone and self.source.random() < 0.05:
            self.end_those_over()
            key = self.source.choice(list(self.alone))
            self.recordings.delete(key, self.now)
            del self.alone[key]
        if self.source.random() < 0.02:
            self.end_those_over()
            texts = ["".join(recording_to_text(one, 50.0)) for one in self.recordings.all(self.now)]
            self.recordings = Recordings()
            for text in texts:
                self.recordings.restore(recording_from_text(text, 50.0))
        for uuid in GPUS:
            if self.source.random() < 0.9:
                self.add(uuid)

    def end_those_over(self) -> None:
        """Whoever asks after recordings ends those that are over, and for good: no late sample changes them."""
        self.recordings.all(self.now)
        for one in self.alone.values():
            if self.now > one.started_at + one.order.max_duration:
                one.ended_at = float("-inf")

    def start(self) -> None:
        for _ in range(self.source.choice((1, 1, 4))):
            self.begun += 1
            uuids = tuple(self.source.sample(GPUS, self.source.randrange(1, len(GPUS) + 1)))
            interval = self.source.choice((1.0, 1.0, 1.0, 0.5, 3.0))
            most = self.source.choice((5.0, 30.0, 1e4))
            asked = order(f"r{self.begun}", interval, most, uuids, self.source.choice((1.0, 1.0, 0.25)))
            self.recordings.start(asked, self.now)
            self.alone[asked.id] = Alone(asked, self.now)

    def add(self, uuid: str) -> None:
        at = self.now - self.source.choice((0.0, 0.125, 0.25))
        absent = self.source.random() < 0.1
        dice = self.source.random
        sample = tuple(ABSENT if absent or dice() < 0.1 else dice() * 100 for _ in GPU_METRICS)
        self.recordings.add(uuid.lower(), at, sample)
        for one in self.alone.values():
            for target in one.order.targets:
                if target.uuid == uuid:
                    one.add(target, at, sample)

    def check(self) -> None:
        self.end_those_over()
        found = {one.order.id: one for one in self.recordings.all(self.now)}
        assert found.keys() == self.alone.keys()
        for key, one in self.alone.items():
            assert (found[key].state is RecordingState.RUNNING) == (one.ended_at > 0)
            one.check(found[key])


@pytest.mark.parametrize("seed", range(8))
def test_each_comes_to_what_it_would_alone(seed: int) -> None:
    site = Site(Random(seed))
    for _ in range(150):
        site.second()
        if site.source.random() < 0.1:
            site.check()
    site.check()


def test_nothing_is_kept_of_gpus_whose_recordings_are_over() -> None:
    recordings = Recordings()
    for number in range(6):
        recordings.start(order(f"r{number}", 1.0, 10.0, GPUS), 0.0)
        recordings.add("gpu-a", 0.5 + number, (1.0,) * 7)
    recordings.stop("r0", 7.0)
    recordings.delete("r1", 7.0)
    assert recordings._taking.keys() == {"gpu-a", "gpu-b", "gpu-c"}
    found = recordings.all(100.0)
    assert (recordings._taking, recordings.nodes) == ({}, frozenset())
    assert [one.sample_count for one in found] == [6, 4, 3, 2, 1]
