"""Recordings: what counts as a sample, when they end, and that few are kept."""

import pytest

from gpuscale.common.errors import AlreadyExistsError, NotFoundError, ResourceExhaustedError
from gpuscale.monitor.history.metrics import ABSENT, Metric, Sample, Stats
from gpuscale.monitor.recording.model import Order, Recording, RecordingState, Target
from gpuscale.monitor.recording.recordings import Recordings

NOTHING: Sample = (ABSENT,) * 7


def order(
    key: str = "r1",
    *,
    request: str | None = None,
    fingerprint: str = "same",
    interval: float = 1.0,
    most: float = 100.0,
) -> Order:
    targets = [Target(f"nodes/alpha/gpus/gpu-{i}", f"GPU-{i}", i, "Test GPU", period=1.0) for i in range(2)]
    return Order(key, request or f"request of {key}", fingerprint, interval, most, targets)


def busy(percent: float) -> Sample:
    return (percent, *NOTHING[1:])


def stats(recording: Recording, gpu: int = 0) -> dict[Metric, Stats]:
    return dict(recording.gpus[gpu].stats())


def test_samples_become_minimum_maximum_mean_and_count() -> None:
    recordings = Recordings()
    recording = recordings.start(order(), 10.0)
    for second, percent in enumerate((20.0, 60.0, 40.0)):
        recordings.add("gpu-0", 10.5 + second, busy(percent))
    assert stats(recording) == {Metric.UTILIZATION_PERCENT: Stats(20.0, 60.0, 40.0, 3)}
    assert recording.sample_count == 3
    assert stats(recording, 1) == {}
    assert recording.gpus[1].sample_count == 0


def test_an_absent_reading_is_no_sample_of_its_metric() -> None:
    recordings = Recordings()
    recording = recordings.start(order(), 10.0)
    recordings.add("gpu-0", 11.0, busy(50.0))
    recordings.add("gpu-0", 12.0, (ABSENT, 7.0, *NOTHING[2:]))
    assert recording.gpus[0].sample_count == 2
    assert {metric: one.count for metric, one in stats(recording).items()} == {
        Metric.UTILIZATION_PERCENT: 1,
        Metric.MEMORY_UTILIZATION_PERCENT: 1,
    }


def test_only_readings_made_while_it_runs_count() -> None:
    recordings = Recordings()
    recording = recordings.start(order(most=5.0), 10.0)
    for at in (9.9, 12.0, 15.1):
        recordings.add("gpu-0", at, busy(1.0))
    assert recording.sample_count == 1
    recordings.stop("r1", 13.0)
    recordings.add("gpu-0", 14.0, busy(1.0))
    assert recording.sample_count == 1


@pytest.mark.parametrize(("interval", "expected"), [(0.5, 10), (1.0, 10), (2.0, 5), (5.0, 2)])
def test_samples_are_an_interval_apart_also_when_they_arrive_unevenly(interval: float, expected: int) -> None:
    recordings = Recordings()
    recording = recordings.start(order(interval=interval), 0.0)
    for second in range(10):
        recordings.add("gpu-0", second + (0.2 if second % 2 else 0.0), busy(1.0))
    assert recording.sample_count == expected


def test_it_ends_by_itself_at_its_longest_duration() -> None:
    recordings = Recordings()
    recordings.start(order(most=5.0), 10.0)
    assert recordings.get("r1", 15.0).state is RecordingState.RUNNING
    found = recordings.get("r1", 99.0)
    assert (found.state, found.ended_at, found.duration(99.0)) == (RecordingState.EXPIRED, 15.0, 5.0)
    assert recordings.stop("r1", 100.0).state is RecordingState.EXPIRED


def test_stopping_twice_changes_nothing() -> None:
    recordings = Recordings()
    recordings.start(order(), 10.0)
    assert recordings.stop("r1", 12.0).duration(12.0) == 2.0
    assert recordings.stop("r1", 50.0).duration(50.0) == 2.0


def test_the_same_request_gives_the_same_recording_and_another_one_with_its_id_is_refused() -> None:
    recordings = Recordings()
    first = recordings.start(order("r1", request="one"), 10.0)
    assert recordings.start(order("r2", request="one"), 11.0) is first
    with pytest.raises(AlreadyExistsError):
        recordings.start(order("r2", request="one", fingerprint="other"), 11.0)
    with pytest.raises(AlreadyExistsError):
        recordings.start(order("r1", request="two"), 11.0)


def test_the_one_that_ended_first_makes_room_and_running_ones_never_do() -> None:
    recordings = Recordings(most_kept=2)
    recordings.start(order("a"), 1.0)
    recordings.start(order("b"), 1.0)
    with pytest.raises(ResourceExhaustedError):
        recordings.start(order("c"), 2.0)
    recordings.stop("b", 3.0)
    recordings.start(order("c"), 4.0)
    assert [one.order.id for one in recordings.all(4.0)] == ["a", "c"]


def test_a_deleted_recording_is_gone_and_takes_nothing_in() -> None:
    recordings = Recordings()
    recordings.start(order(), 1.0)
    recordings.delete("r1", 2.0)
    recordings.add("gpu-0", 3.0, busy(1.0))
    with pytest.raises(NotFoundError):
        recordings.get("r1", 3.0)
    with pytest.raises(NotFoundError):
        recordings.delete("r1", 3.0)


def test_two_recordings_of_one_gpu_do_not_disturb_each_other() -> None:
    recordings = Recordings()
    recordings.start(order("a"), 0.0)
    recordings.start(order("b"), 0.0)
    recordings.add("gpu-0", 1.0, busy(1.0))
    recordings.stop("a", 1.5)
    recordings.add("gpu-0", 2.0, busy(1.0))
    assert [one.sample_count for one in recordings.all(3.0)] == [1, 2]
