"""What a reading of a queue says, and when it says nothing."""

import pytest

from gpuscale.autoscaler.domain.inputs import Observation, ObservationStatus
from gpuscale.autoscaler.domain.queues import QueueReading, QueueState
from gpuscale.autoscaler.domain.signals import SAMPLES_KEPT, Samples, Shown, noted
from gpuscale.autoscaler.domain.spec import QueueCount
from tests.support.autoscaler_values import NOW, observe, reading, signal


@pytest.mark.parametrize(
    ("count", "value"), [(QueueCount.READY, 7), (QueueCount.UNACKED, 2), (QueueCount.TOTAL, 9)]
)
def test_counts_what_the_signal_names(count: QueueCount, value: float) -> None:
    observation = observe(signal(count=count), reading(7, 2), NOW)
    assert (observation.status, observation.value, observation.age) == (ObservationStatus.OK, value, 1.0)


@pytest.mark.parametrize("state", [state for state in QueueState if state is not QueueState.OK])
def test_a_queue_that_cannot_be_read_is_missing_at_once(state: QueueState) -> None:
    """However young the last count is: a lost broker says nothing about its queue."""
    observation = observe(signal(), reading(0, 0, age=0.1, state=state), NOW)
    assert observation.status is ObservationStatus.MISSING
    assert (observation.value, observation.proven_empty) == (None, False)
    assert state.value in observation.detail


def test_no_such_watcher_is_missing() -> None:
    observation = observe(signal(watcher="gone"), None, NOW)
    assert observation.status is ObservationStatus.MISSING
    assert "gone" in observation.detail


@pytest.mark.parametrize(
    ("age", "status"),
    [(15.0, ObservationStatus.OK), (15.001, ObservationStatus.STALE), (1e6, ObservationStatus.STALE)],
)
def test_a_reading_older_than_max_age_is_stale(age: float, status: ObservationStatus) -> None:
    observation = observe(signal(), reading(0, 0, age=age), NOW)
    assert observation.status is status
    assert observation.proven_empty is (status is ObservationStatus.OK)


def test_max_age_is_the_signals_own() -> None:
    assert observe(signal(max_age=1.0), reading(age=1.1), NOW).status is ObservationStatus.STALE
    assert observe(signal(max_age=60.0), reading(age=59), NOW).status is ObservationStatus.OK


def test_unacked_that_are_not_told_are_unknown_and_not_zero() -> None:
    blind = reading(0, None)
    for count in (QueueCount.UNACKED, QueueCount.TOTAL):
        assert observe(signal(count=count), blind, NOW).status is ObservationStatus.MISSING
    ready = observe(signal(count=QueueCount.READY), blind, NOW)
    assert (ready.status, ready.value, ready.proven_empty) == (ObservationStatus.OK, 0, False)


def test_empty_is_proven_only_by_ready_and_unacked_together() -> None:
    assert observe(signal(count=QueueCount.READY), reading(0, 0), NOW).proven_empty
    assert not observe(signal(count=QueueCount.READY), reading(0, 3), NOW).proven_empty
    assert not observe(signal(count=QueueCount.UNACKED), reading(3, 0), NOW).proven_empty


def test_a_negative_count_is_invalid() -> None:
    assert observe(signal(count=QueueCount.READY), reading(-1, 0), NOW).status is ObservationStatus.INVALID


def test_a_reading_without_a_time_is_missing() -> None:
    assert observe(signal(), QueueReading(QueueState.OK, 1, 1), NOW).status is ObservationStatus.MISSING


def test_samples_in_a_row_that_read_the_same_are_one_and_the_oldest_go_first() -> None:
    ok, missing = ObservationStatus.OK, ObservationStatus.MISSING
    kept: dict[str, Samples] = {}
    for at, value in enumerate((5.0, 5.0, 7.0, None, None, 5.0)):
        one = Observation("depth", missing if value is None else ok, value)
        kept = noted(kept, [one], float(at))
    assert list(kept["depth"]) == [
        Shown(0, 1, 5.0, ok),
        Shown(2, 2, 7.0, ok),
        Shown(3, 4, None, missing),
        Shown(5, 5, 5.0, ok),
    ]
    for at in range(SAMPLES_KEPT):
        kept = noted(kept, [Observation("depth", ok, float(at))], 10.0 + at)
    assert [one.value for one in kept["depth"]] == list(range(SAMPLES_KEPT))
    assert noted(kept, [Observation("other", ok, 1.0)], 2000.0).keys() == {"other"}
