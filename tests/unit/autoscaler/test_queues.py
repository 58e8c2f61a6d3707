"""Readings of queues and their sums, sweeps, and patterns of names."""

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.inputs import ObservationStatus
from gpuscale.autoscaler.domain.signals import (
    PENDING,
    NamePattern,
    QueueFailure,
    QueueReading,
    QueueState,
    Rates,
    combined,
    failed,
    next_sweep,
    of_totals,
    pattern_problem,
)
from gpuscale.autoscaler.domain.spec import QueueCount
from gpuscale.autoscaler.servicers.watcher_servicer import to_status
from tests.support.autoscaler_values import NOW, observe, signal


def test_a_failure_drops_the_counts_and_keeps_when_they_were_read() -> None:
    before = QueueReading(QueueState.OK, 3, 4, 5, observed_at=100.0)
    after = failed(before, QueueFailure(QueueState.TIMEOUT, "frozen"))
    assert after == QueueReading(QueueState.TIMEOUT, observed_at=100.0, message="frozen")
    assert failed(PENDING, QueueFailure(QueueState.ERROR, "x")).observed_at is None


def test_totals_come_with_the_consumers_or_with_why_they_are_unknown() -> None:
    assert of_totals(2, 3, 9.0, 0) == QueueReading(QueueState.OK, 2, 3, 0, 9.0)
    assert of_totals(2, 3, 9.0, "no AMQP") == QueueReading(QueueState.OK, 2, 3, None, 9.0, "no AMQP")


def test_queues_of_one_interval_are_due_together_whenever_they_were_read_last() -> None:
    assert next_sweep(10.1, 1.0) == next_sweep(10.9, 1.0) == next_sweep(10.0, 1.0) == 11.0


def test_on_the_wire_unknown_counts_are_unset_and_zero_is_zero() -> None:
    unknown = to_status(QueueReading(QueueState.OK, ready=0, observed_at=5.0), now=7.5)
    assert unknown.HasField("ready_count")
    assert unknown.ready_count == 0
    assert not unknown.HasField("unacked_count")
    assert not unknown.HasField("consumer_count")
    assert unknown.age.ToMilliseconds() == 2500
    assert not to_status(PENDING, now=7.5).HasField("age")


@pytest.mark.parametrize("state", QueueState)
def test_every_state_has_its_name_on_the_wire(state: QueueState) -> None:
    name = api.QueueWatcherStatus.State.Name(to_status(QueueReading(state), now=0.0).state)
    assert name == f"STATE_{state.name}"


@pytest.mark.parametrize(
    ("pattern", "matches", "not_these"),
    [
        (r"jobs-.*", ["jobs-", "jobs-a.b"], ["my-jobs-1", "jobs"]),
        (r"jobs\.(small|large)\.\d+", ["jobs.small.12"], ["jobs.small.", "jobsxsmall.1"]),
        (r"[a-z]+-[0-9]{1,3}", ["a-1", "gpu-123"], ["a-1234", "A-1"]),
        (r"(a|b)[\]x]?", ["a", "b]", "ax"], ["c"]),
        (r"a{}b{x}c{1,2,}", ["a{}b{x}c{1,2,}"], ["a", "ab"]),
        (r"(a|b|c|d)-.*-(e|f|g|h)-.*[0-9]?", ["a-1-h-", "d--e-7"], ["a-e", "e-1-h-"]),
        (r"(?i)(team-)?(jobs|große?)+", ["JOBS", "team-jobsGroß"], ["jobs-1"]),
    ],
)
def test_a_pattern_matches_whole_names(pattern: str, matches: list[str], not_these: list[str]) -> None:
    assert pattern_problem(pattern) == ""
    found = NamePattern(pattern)
    for _ in range(2):
        assert found.of([*matches, *not_these]) == matches
    assert found.of(not_these) == []


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"(a)\1", "invalid escape sequence"),
        ("(?=a)a", "invalid perl operator"),
        ("jobs[", "missing ]"),
        ("jobs)", "unexpected )"),
        ("a{2000}", "invalid repetition"),
        ("((a{1000}){1000}){1000}", "invalid repetition"),
        ("(a?){500}" * 20, "pattern too large"),
    ],
)
def test_a_pattern_that_is_none_or_too_large_is_refused(pattern: str, said: str) -> None:
    assert pattern_problem(pattern).startswith("must be a regular expression of RE2: ")
    assert said in pattern_problem(pattern)
    with pytest.raises(ValueError, match="must"):
        NamePattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(a|a|a|a)(a|a|a|a)a*a*a*b", "(a+)+b", "(a|a)*b", "(a*)*(a*)*b", "a*" * 50 + "b", "(a?){500}a{300}b"],
)
def test_no_pattern_takes_long_over_400_names_of_the_greatest_length(pattern: str) -> None:
    """A matcher that goes back and tries again takes from 22 s for the first to longer than anybody waits."""
    names = [f"{'a' * 252}{number:03}" for number in range(400)]
    began = time.thread_time()
    assert NamePattern(pattern).of(names) == []
    assert time.thread_time() - began < 5.0


@given(st.text(alphabet="ab()[]{}*+?|\\.^$,01", max_size=20))
def test_any_text_is_a_pattern_or_has_a_problem(text: str) -> None:
    if not pattern_problem(text):
        NamePattern(text).of(["", "a", "ab1"])


def reading(
    ready: int | None = 1, unacked: int | None = 2, *, at: float = NOW, rates: Rates | None = None
) -> QueueReading:
    return QueueReading(QueueState.OK, ready, unacked, 3, at, rates=rates)


def test_the_counts_of_several_queues_are_added_up_and_as_old_as_the_oldest() -> None:
    found = combined(
        [
            reading(1, 2, rates=Rates(1.0, 2.0, NOW)),
            reading(10, 20, at=NOW - 5, rates=Rates(0.5, 0.5, NOW - 9)),
        ]
    )
    assert found == QueueReading(
        QueueState.OK, 11, 22, 6, NOW - 5, rates=Rates(1.5, 2.5, NOW - 9), queue_count=2
    )


@pytest.mark.parametrize(
    ("queues", "oldest"),
    [
        ([(1, 30.0), (2, 90.0)], 90.0),
        ([(1, 30.0), (0, None)], 30.0),
        ([(1, 30.0), (2, None)], None),
        ([(0, None), (0, None)], None),
    ],
    ids=["the oldest of all", "an empty queue has none", "one is unknown", "no message at all"],
)
def test_the_oldest_message_of_several_queues(
    queues: list[tuple[int, float | None]], oldest: float | None
) -> None:
    found = combined([reading(ready, 0, rates=Rates(0.0, 0.0, NOW, age)) for ready, age in queues])
    assert found.rates == Rates(0.0, 0.0, NOW, oldest)


def test_the_age_of_the_oldest_message_is_a_signal_and_never_zero_for_want_of_one() -> None:
    waits = reading(rates=Rates(0.0, 0.0, NOW - 2, 30.0))
    seen = observe(signal(count=QueueCount.OLDEST_AGE), waits, NOW)
    assert (seen.status, seen.value, seen.age) == (ObservationStatus.OK, 30.0, 2.0)
    for unknown in (reading(0, 0, rates=Rates(0.0, 0.0, NOW)), reading(3, 0)):
        seen = observe(signal(count=QueueCount.OLDEST_AGE), unknown, NOW)
        assert (seen.status, seen.value) == (ObservationStatus.MISSING, None)


def test_a_sum_is_unknown_where_a_part_of_it_is() -> None:
    found = combined([reading(1, None), reading(2, 2, rates=Rates(1.0, 1.0, NOW))])
    assert (found.ready, found.unacked, found.total, found.rates) == (3, None, None, None)


def test_one_queue_that_cannot_be_read_is_enough() -> None:
    lost = QueueReading(QueueState.NOT_FOUND, observed_at=NOW - 60, message="there is no queue 'b'")
    found = combined([reading(), lost, PENDING])
    assert (found.state, found.message, found.ready) == (QueueState.NOT_FOUND, lost.message, None)
    assert found.observed_at is None
    assert combined([lost]) is lost


def test_a_rate_is_a_signal_as_old_as_it_is_and_missing_where_it_is_unknown() -> None:
    known = reading(rates=Rates(4.0, 3.0, NOW - 8))
    for count, value in ((QueueCount.RATE_IN, 4.0), (QueueCount.RATE_OUT, 3.0)):
        seen = observe(signal(count=count), known, NOW)
        assert (seen.status, seen.value, seen.age) == (ObservationStatus.OK, value, 8.0)
        unknown = observe(signal(count=count), reading(), NOW)
        assert (unknown.status, unknown.value) == (ObservationStatus.MISSING, None)
        assert "rates are unknown" in unknown.detail


@given(now=st.floats(0, 1e9), interval=st.floats(0.001, 3600))
@example(now=9811624.5, interval=2.7)  # whose next multiple, rounded, is this very moment
def test_the_next_sweep_is_later_and_no_later_than_two_intervals(now: float, interval: float) -> None:
    assert now < next_sweep(now, interval) <= now + 2 * interval
