"""How the values of several sources, or of a window, become one, and what stands for a value that cannot be had."""

import math

import pytest

from gpuscale.autoscaler.domain.inputs import Aggregation, Observation, ObservationStatus
from gpuscale.autoscaler.domain.signals import EndpointPast, Sample, observe
from gpuscale.autoscaler.domain.spec import GpuSignal, HostSignal, OnMissing, PushedSignal, Signal, Source
from gpuscale.autoscaler.wire.specs import spec_violations
from tests.support.autoscaler_values import NOW, spec


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
        (Aggregation.AVG, 10.5),
        (Aggregation.MIN, 1.0),
        (Aggregation.MAX, 20.0),
        (Aggregation.SUM, 210.0),
        (Aggregation.P95, 19.0),
    ],
)
def test_values_of_several_sources_become_one(across: Aggregation, value: float) -> None:
    sample = Sample(tuple(float(one) for one in range(20, 0, -1)), NOW)
    assert observe(Signal("s", PushedSignal("m"), across=across), sample, NOW).value == value


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
