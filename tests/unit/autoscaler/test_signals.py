"""What a reading of a queue or of several sources says, when it says nothing, and what stands for it then; patterns of names."""

import math
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.inputs import Aggregation, Observation, ObservationStatus
from gpuscale.autoscaler.domain.signals import (
    PENDING,
    SAMPLES_KEPT,
    EndpointPast,
    NamePattern,
    QueueFailure,
    QueueReading,
    QueueState,
    Rates,
    Sample,
    Samples,
    Shown,
    combined,
    failed,
    next_sweep,
    noted,
    of_totals,
    pattern_problem,
)
from gpuscale.autoscaler.domain.signals import observe as observe_sample
from gpuscale.autoscaler.domain.spec import (
    GpuSignal,
    HostSignal,
    OnMissing,
    PushedSignal,
    QueueCount,
    Signal,
    Source,
)
from gpuscale.autoscaler.servicers.watcher_servicer import to_status
from gpuscale.autoscaler.wire.specs import spec_violations
from tests.support.autoscaler_values import NOW, observe, reading, signal, spec


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
    of = [(0, 1, 5.0, ok), (2, 2, 7.0, ok), (3, 4, None, missing), (5, 5, 5.0, ok)]
    assert list(kept["depth"]) == [Shown(*one) for one in of]
    for at in range(SAMPLES_KEPT):
        kept = noted(kept, [Observation("depth", ok, float(at))], 10.0 + at)
    assert [one.value for one in kept["depth"]] == list(range(SAMPLES_KEPT))
    assert noted(kept, [Observation("other", ok, 1.0)], 2000.0).keys() == {"other"}


def seen(one: Signal, *samples: Sample, now: float) -> Observation:
    """What a signal shows at `now`, after these samples in turn."""
    wanted, past = spec(signals=[one]), EndpointPast()
    for sample in samples:
        past = past.with_samples(wanted, {one.id: sample})
    return past.observations(wanted, {one.id: samples[-1]}, now)[one.id]


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (GpuSignal("utilisation_percent"), "gpu.metric"),
        (HostSignal("utilization_percent"), "host.metric"),
        (GpuSignal("recovery_action"), "gpu.metric"),
        (GpuSignal("power_watts", frozenset({"n1"}), own_replicas=True), "gpu.nodes"),
    ],
)
def test_a_metric_that_nobody_reads_is_refused_by_its_field(source: Source, field: str) -> None:
    [found] = spec_violations(spec(signals=[Signal("s", source)]))
    assert found.field == f"endpoint.spec.signals[0].{field}"


def test_every_number_that_agents_read_can_be_named_and_a_refusal_says_what_was_meant() -> None:
    sources = [GpuSignal("memory_used_percent"), GpuSignal("power_watts"), HostSignal("load_1m_per_core")]
    assert spec_violations(spec(signals=[Signal(one.metric, one) for one in sources])) == []
    [found] = spec_violations(spec(signals=[Signal("s", GpuSignal("utilisation_percent"))]))
    assert found.description.endswith("did you mean utilization_percent?")


@pytest.mark.parametrize(
    ("across", "value"),
    [
        (Aggregation.AVG, 10.5), (Aggregation.MIN, 1.0), (Aggregation.MAX, 20.0), (Aggregation.SUM, 210.0),
        (Aggregation.P95, 19.0),
    ],
)  # fmt: skip
def test_values_of_several_sources_become_one(across: Aggregation, value: float) -> None:
    sample = Sample(tuple(float(one) for one in range(20, 0, -1)), NOW)
    assert observe_sample(Signal("s", PushedSignal("m"), across=across), sample, NOW).value == value


@pytest.mark.parametrize("across", Aggregation)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_no_number_makes_all_invalid(across: Aggregation, bad: float) -> None:
    """The largest of 1 and NaN would be 1, by their order; and two infinities have no sum."""
    one = Signal("s", PushedSignal("m"), across=across)
    for values in ((1.0, bad), (bad, 1.0), (math.inf, bad, -math.inf)):
        found = seen(one, Sample(values, NOW), now=NOW)
        assert (found.status, found.value) == (ObservationStatus.INVALID, None)


def test_a_sum_that_is_too_large_is_invalid() -> None:
    found = seen(
        Signal("s", PushedSignal("m"), across=Aggregation.SUM), Sample((1.7e308, 1.7e308), NOW), now=NOW
    )
    assert found.status is ObservationStatus.INVALID


@pytest.mark.parametrize(
    ("over_window", "value"), [(Aggregation.AVG, 20.0), (Aggregation.MAX, 30.0), (Aggregation.P95, 30.0)]
)
def test_the_values_of_a_window_become_one(over_window: Aggregation, value: float) -> None:
    one = Signal("s", PushedSignal("m"), window=20.0, over_window=over_window)
    samples = [Sample((given,), NOW + at) for at, given in ((0, 99.0), (10, 10.0), (20, 20.0), (30, 30.0))]
    assert seen(one, *samples, now=NOW + 30).value == value


LOST = Sample(at=NOW, problem="the server is gone")
GOOD = Sample((7.0,), NOW)


def test_by_default_nothing_stands_for_a_value_that_cannot_be_had() -> None:
    found = seen(Signal("s", PushedSignal("m")), GOOD, LOST, now=NOW + 1)
    assert (found.status, found.value, found.ignored) == (ObservationStatus.MISSING, None, False)
    assert found.detail == "the server is gone"


def test_the_last_value_stands_for_as_long_as_it_may() -> None:
    one = Signal("s", PushedSignal("m"), max_age=15.0, on_missing=OnMissing.LAST, last_ttl=60.0)
    found = seen(one, GOOD, LOST, now=NOW + 75)
    assert (found.status, found.value, found.age) == (ObservationStatus.OK, 7.0, 75.0)
    assert seen(one, GOOD, LOST, now=NOW + 75.1).status is ObservationStatus.MISSING
    assert seen(one, LOST, now=NOW).status is ObservationStatus.MISSING


def test_zero_stands_for_it_where_that_was_asked_for_and_proves_nothing() -> None:
    found = seen(Signal("s", PushedSignal("m"), on_missing=OnMissing.ZERO), LOST, now=NOW)
    assert (found.status, found.value, found.proven_empty) == (ObservationStatus.OK, 0.0, False)


def test_a_signal_can_be_left_out() -> None:
    found = seen(Signal("s", PushedSignal("m"), on_missing=OnMissing.IGNORE), LOST, now=NOW)
    assert (found.status, found.ignored) == (ObservationStatus.MISSING, True)


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


def part(
    ready: int | None = 1, unacked: int | None = 2, *, at: float = NOW, rates: Rates | None = None
) -> QueueReading:
    return QueueReading(QueueState.OK, ready, unacked, 3, at, rates=rates)


def test_the_counts_of_several_queues_are_added_up_and_as_old_as_the_oldest() -> None:
    found = combined(
        [part(1, 2, rates=Rates(1.0, 2.0, NOW)), part(10, 20, at=NOW - 5, rates=Rates(0.5, 0.5, NOW - 9))]
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
    found = combined([part(ready, 0, rates=Rates(0.0, 0.0, NOW, age)) for ready, age in queues])
    assert found.rates == Rates(0.0, 0.0, NOW, oldest)


def test_the_age_of_the_oldest_message_is_a_signal_and_never_zero_for_want_of_one() -> None:
    waits = part(rates=Rates(0.0, 0.0, NOW - 2, 30.0))
    seen = observe(signal(count=QueueCount.OLDEST_AGE), waits, NOW)
    assert (seen.status, seen.value, seen.age) == (ObservationStatus.OK, 30.0, 2.0)
    for unknown in (part(0, 0, rates=Rates(0.0, 0.0, NOW)), part(3, 0)):
        seen = observe(signal(count=QueueCount.OLDEST_AGE), unknown, NOW)
        assert (seen.status, seen.value) == (ObservationStatus.MISSING, None)


def test_a_sum_is_unknown_where_a_part_of_it_is() -> None:
    found = combined([part(1, None), part(2, 2, rates=Rates(1.0, 1.0, NOW))])
    assert (found.ready, found.unacked, found.total, found.rates) == (3, None, None, None)


def test_one_queue_that_cannot_be_read_is_enough() -> None:
    lost = QueueReading(QueueState.NOT_FOUND, observed_at=NOW - 60, message="there is no queue 'b'")
    found = combined([part(), lost, PENDING])
    assert (found.state, found.message, found.ready) == (QueueState.NOT_FOUND, lost.message, None)
    assert found.observed_at is None
    assert combined([lost]) is lost


def test_a_rate_is_a_signal_as_old_as_it_is_and_missing_where_it_is_unknown() -> None:
    known = part(rates=Rates(4.0, 3.0, NOW - 8))
    for count, value in ((QueueCount.RATE_IN, 4.0), (QueueCount.RATE_OUT, 3.0)):
        seen = observe(signal(count=count), known, NOW)
        assert (seen.status, seen.value, seen.age) == (ObservationStatus.OK, value, 8.0)
        unknown = observe(signal(count=count), part(), NOW)
        assert (unknown.status, unknown.value) == (ObservationStatus.MISSING, None)
        assert "rates are unknown" in unknown.detail


@given(now=st.floats(0, 1e9), interval=st.floats(0.001, 3600))
@example(now=9811624.5, interval=2.7)  # whose next multiple, rounded, is this very moment
def test_the_next_sweep_is_later_and_no_later_than_two_intervals(now: float, interval: float) -> None:
    assert now < next_sweep(now, interval) <= now + 2 * interval
