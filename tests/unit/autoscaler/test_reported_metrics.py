"""Reported metrics: the newest value of each, gone with its replica, and never more than are kept."""

from itertools import islice
from typing import Any

import pytest

from gpuscale.autoscaler.signals import sources as reported
from gpuscale.autoscaler.signals.sources import KEPT_SECONDS, MAX_METRICS_OF_ONE, ReportedMetrics, Value
from gpuscale.common.errors import ResourceExhaustedError
from tests.support.autoscaler_values import NOW

OLDEST = 15.0


def told(
    metrics: ReportedMetrics, replica: str, value: float, *, age: float = 0.0, metric: str = "m"
) -> None:
    metrics.report(("e", replica), {metric: Value(value, NOW - age)}, NOW)


def test_a_metric_of_the_endpoint_is_the_value_that_was_reported_last() -> None:
    metrics = ReportedMetrics()
    assert "nobody has reported m" in metrics.of_endpoint("e", "m").problem
    told(metrics, "", 3.0, age=2.0)
    told(metrics, "", 9.0, age=5.0)  # measured before the one above
    sample = metrics.of_endpoint("e", "m")
    assert (sample.values, sample.at) == ((3.0,), NOW - 2.0)
    told(metrics, "", 4.0, age=1.0)
    assert metrics.of_endpoint("e", "m").values == (4.0,)
    assert not metrics.of_endpoint("e", "m").proven_empty


def test_only_zero_from_everybody_proves_that_no_work_is_left() -> None:
    metrics = ReportedMetrics()
    told(metrics, "", 0.0)
    told(metrics, "r1", 0.0)
    told(metrics, "r2", 2.0)
    assert metrics.of_endpoint("e", "m").proven_empty
    for replicas, proven in ((["r1"], True), (["r1", "r2"], False), (["r1", "r3"], False)):
        assert metrics.of_replicas("e", "m", replicas, NOW, OLDEST).proven_empty is proven


def test_replicas_that_say_nothing_are_counted_and_not_averaged() -> None:
    metrics = ReportedMetrics()
    told(metrics, "r1", 10.0, age=3.0)
    told(metrics, "r2", 20.0, age=1.0)
    told(metrics, "r3", 99.0, age=OLDEST + 1)  # too old: as good as silent
    told(metrics, "r4", 99.0, metric="other")
    sample = metrics.of_replicas("e", "m", ["r1", "r2", "r3", "r4", "r5"], NOW, OLDEST)
    assert (sample.values, sample.at, sample.silent_count) == ((10.0, 20.0), NOW - 3.0, 3)


def test_where_all_values_are_too_old_their_age_shows() -> None:
    metrics = ReportedMetrics()
    told(metrics, "r1", 10.0, age=60.0)
    sample = metrics.of_replicas("e", "m", ["r1"], NOW, OLDEST)
    assert (sample.values, sample.at) == ((10.0,), NOW - 60.0)


def test_no_value_of_any_replica_and_no_replica_at_all_are_problems() -> None:
    metrics = ReportedMetrics()
    assert metrics.of_replicas("e", "m", [], NOW, OLDEST).problem == "no replica is ready"
    silent = metrics.of_replicas("e", "m", ["r1", "r2"], NOW, OLDEST)
    assert (silent.values, silent.silent_count) == ((), 2)
    assert "none of 2 replicas" in silent.problem


def test_what_a_replica_reported_goes_with_it() -> None:
    metrics = ReportedMetrics()
    for replica in ("", "r1", "r2"):
        told(metrics, replica, 1.0)
    metrics.keep("e", {"r2"})
    assert [subject for subject, _, _ in metrics.list("e")] == [("e", ""), ("e", "r2")]
    metrics.forget("e")
    assert list(metrics.list()) == []


class Counted(dict[str, dict[str, Value]]):
    """Counts what is looked up."""

    looked_at = 0

    def get(self, *key: Any) -> Any:
        Counted.looked_at += 1
        return super().get(*key)


@pytest.mark.parametrize("count", [100, 3000])
def test_a_page_looks_at_what_is_on_it_however_many_there_are(count: int) -> None:
    metrics = ReportedMetrics()
    for number in range(count):
        for metric in ("a", "b"):
            told(metrics, f"r{number:05}", 1.0, metric=metric)
    every = [(*subject, metric) for subject, metric, _ in metrics.list()]
    assert every == sorted(every)
    metrics._values["e"] = Counted(metrics._values["e"])
    for place in (0, count, 2 * count - 11):
        Counted.looked_at = 0
        page = islice(metrics.list(after=every[place]), 10)
        assert [(*subject, metric) for subject, metric, _ in page] == every[place + 1 : place + 11]
        assert Counted.looked_at <= 6


def test_one_subject_has_so_many_metrics_at_most_and_a_refused_report_changes_nothing() -> None:
    metrics = ReportedMetrics()
    full = {f"m{number}": Value(1.0, NOW) for number in range(MAX_METRICS_OF_ONE)}
    metrics.report(("e", ""), full, NOW)
    metrics.report(("e", ""), {"m0": Value(2.0, NOW + 1)}, NOW + 1)
    with pytest.raises(ResourceExhaustedError) as caught:
        metrics.report(("e", ""), {"m0": Value(3.0, NOW + 2), "new": Value(1.0, NOW + 2)}, NOW + 2)
    assert caught.value.reason == "TOO_MANY_METRICS"
    assert metrics.of_endpoint("e", "m0").values == (2.0,)
    later = NOW + KEPT_SECONDS + 2
    metrics.report(("e", ""), {"new": Value(1.0, later)}, later)
    assert [metric for _, metric, _ in metrics.list()] == ["new"]


def test_of_so_many_subjects_are_metrics_kept_until_old_ones_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reported, "MAX_SOURCES", 2)
    metrics = ReportedMetrics()
    told(metrics, "r1", 1.0)
    told(metrics, "r2", 1.0)
    with pytest.raises(ResourceExhaustedError):
        told(metrics, "r3", 1.0)
    later = NOW + KEPT_SECONDS + 1
    metrics.report(("e", "r3"), {"m": Value(1.0, later)}, later)
    assert [subject for subject, _, _ in metrics.list()] == [("e", "r3")]
