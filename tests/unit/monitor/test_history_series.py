"""History in tiers: what is kept for how long, that nothing is lost between tiers, and that memory is bounded."""

import sys
from array import array
from itertools import chain

import pytest

from gpuscale.monitor.history.history import (
    History,
    HistorySeries,
    Tier,
    combined,
    most_bytes,
    plan,
    shorter,
    spread,
    trend,
)
from gpuscale.monitor.history.ring import MOST_COUNTED, Bucket, Point, Ring, Rows
from gpuscale.monitor.model.metrics import GPU_METRICS, MetricTally
from tests.support.monitor_values import DEFAULT_TIERS

TIERS = (Tier(1.0, 20.0), Tier(5.0, 100.0), Tier(20.0, 400.0))
GPU = tuple(float(index) for index in range(len(GPU_METRICS)))


def filled(seconds: int) -> HistorySeries:
    """A series of one metric with a sample each second, which it shows."""
    series = HistorySeries(1, TIERS)
    for second in range(seconds):
        series.add(float(second), (float(second),))
    return series


def held_bytes(*rings: Ring) -> int:
    """Memory of all arrays of rings, each once."""
    several = (ring._packed if isinstance(ring._packed, Rows) else (ring._packed or b"",) for ring in rings)
    single = ((ring._numbers, ring._values) for ring in rings)
    arrays = {id(one): one for one in chain.from_iterable((*single, *several))}
    return sum(map(sys.getsizeof, arrays.values()))


def test_more_samples_than_a_bucket_counts_are_counted_as_the_most() -> None:
    """A count has 16 bits: a flood must neither be refused nor begin again at 0."""
    flood = HistorySeries(1, (Tier(1.0, 20.0), Tier(5.0, 100.0)))
    whole = Bucket([1.0], [2.0], [3.0], [MOST_COUNTED - 5])
    for number in range(3):
        flood._append(0, number, whole)
    for at in range(50):
        flood.add(3.0 + at / 100, (2.0,))
    assert list(combined(whole, array("f", [2.0] * 50), 1).counts) == [MOST_COUNTED]
    flood.add(5.0, (2.0,))
    flood.add(6.0, (2.0,))
    [point, *_] = flood.points(0, 1, 0.0, 100.0)
    assert (point.min, point.max, point.samples) == (1.0, 3.0, MOST_COUNTED)


def test_the_oldest_that_is_kept_is_that_of_the_tier_that_reaches_back_furthest() -> None:
    assert HistorySeries(1, TIERS).oldest() is None
    series = HistorySeries(1, TIERS)
    series.add(7.5, (1.0,))
    assert series.oldest() == 7.0
    assert filled(90).oldest() == 0.0
    assert filled(1_000).oldest() == 580.0


def test_memory_stays_below_what_is_stated_however_long_it_runs() -> None:
    tiers = (Tier(1.0, 60.0), Tier(10.0, 600.0), Tier(60.0, 6000.0))
    series = HistorySeries(len(GPU_METRICS), tiers)
    for second in range(20_000):
        series.add(float(second), GPU)
    arrays = held_bytes(*series._rings)
    assert 0.6 * most_bytes(len(GPU_METRICS), tiers) < arrays < most_bytes(len(GPU_METRICS), tiers)


def test_minima_means_and_maxima_are_kept_apart_only_while_a_bucket_has_several_samples() -> None:
    ring = Ring(1, 100)

    def add(*numbers: int) -> None:
        ring.extend(array("i", numbers), array("f", map(float, numbers)))

    add(*range(99))
    folded = held_bytes(ring)
    ring.append(99, Bucket([1.0], [2.0], [3.0], [2]))
    add(100, 101)
    assert held_bytes(ring) > 1.5 * folded
    last = [(98.0, 98.0, 98.0, 1), (1.0, 2.0, 3.0, 2), (100.0,) * 3 + (1,), (101.0,) * 3 + (1,)]
    assert [point[1:] for point in ring.points(0, 1.0, 98.0, 1e6)] == last
    add(*range(102, 305))
    assert held_bytes(ring) <= 1.2 * folded
    assert [point[1:] for point in ring.points(0, 1.0, 0.0, 1e6)] == [
        (float(number),) * 3 + (1,) for number in range(205, 305)
    ]


def test_a_gpu_takes_at_most_a_mebibyte_and_a_half_by_default() -> None:
    assert most_bytes(len(GPU_METRICS), DEFAULT_TIERS) < 1.5 * 1024**2


def test_history_beyond_the_budget_is_not_begun_and_ended_series_make_room() -> None:
    *_, least = shorter(TIERS)
    size = most_bytes(len(GPU_METRICS), least)
    history = History(TIERS, budget_bytes=2 * size)
    for uuid in ("a", "b", "c"):
        history.add(uuid, 100.0, GPU)
    assert (len(history), history.get("c"), history.used_bytes) == (2, None, 2 * size)
    assert history.left_out == 1
    (off := History(TIERS, 0)).add("a", 100.0, GPU)
    assert off.left_out == 0, "history that nobody wants"
    history.add("b", 450.0, GPU)
    assert history.get("a") is not None
    history.forget_ended(520.0)
    history.add("c", 520.0, GPU)
    assert history.get("a") is None
    assert history.get("c") is not None


def test_a_thousand_gpus_in_a_gibibyte_and_their_node_all_have_history() -> None:
    """As many as `up` has room for by default are 728; the finest tier goes first, and then a part of the coarsest."""
    history = History(DEFAULT_TIERS, 1 << 30)
    uuids = [f"gpu-{number}" for number in range(1000)]
    for number, uuid in enumerate(uuids):
        history.add(uuid, 100.0, GPU)
        if number == 0:
            assert history.kept == DEFAULT_TIERS
    history.add("nodes/alpha", 100.0, (1.0, 2.0, 3.0, 4.0))
    assert history.get("nodes/alpha") is not None
    assert all(history.get(uuid) for uuid in uuids)
    assert history.used_bytes <= 1 << 30
    assert [tier.retention for tier in history.kept] == [20.0, 120.0, 0.75 * 7 * 86_400.0]


def test_what_is_shortened_keeps_its_newest_and_goes_on_as_the_others_do() -> None:
    whole, short = filled(130), filled(130)
    *_, tiers = shorter(TIERS)
    short.shorten(tiers)
    for second in range(130, 260):
        for one in (whole, short):
            one.add(float(second), (float(second),))
    assert short.points(0, 2, 0.0, 1e9) == whole.points(0, 2, 0.0, 1e9)
    assert [point.start for point in short.points(0, 0, 0.0, 1e9)] == [float(s) for s in range(249, 260)]


@pytest.mark.parametrize(
    ("span", "step", "most", "tier", "expected"),
    [
        (600, 0, 10_000, 0, 1.0),
        (600, 0, 101, 0, 6.0),
        (600, 30, 10_000, 1, 30.0),
        (3600, 0, 10_000, 1, 10.0),
        (3600, 3, 10_000, 1, 10.0),
        (3600, 90, 10_000, 2, 120.0),
        (86_400, 0, 1000, 2, 120.0),
        (30 * 86_400, 0, 100_000, 2, 60.0),
    ],
)
def test_the_tier_reaches_back_and_points_stay_few(
    span: float, step: float, most: int, tier: int, expected: float
) -> None:
    found = plan(DEFAULT_TIERS, span, span, step, most)
    assert (found.tier, found.step) == (tier, expected)
    assert span / found.step <= most


def test_a_coarser_step_keeps_every_sample() -> None:
    points = filled(20).points(0, 0, 0.0, 100.0)
    assert spread(points, 7.0) == [
        Point(0.0, 0.0, 3.0, 6.0, 7),
        Point(7.0, 7.0, 10.0, 13.0, 7),
        Point(14.0, 14.0, 16.5, 19.0, 6),
    ]


def test_a_trend_is_the_slope_in_an_hour() -> None:
    rising = trend([Point(10.0 * step, step, step, step, 1 + step % 3) for step in range(50)])
    assert rising is not None
    assert rising.slope_per_hour == pytest.approx(360.0)
    assert (rising.stats.min, rising.stats.max) == (0, 49)
    level = trend([Point(60.0 * at, 5.0, 5.0, 5.0, 1) for at in range(9)])
    assert level is not None
    assert level.slope_per_hour == 0.0
    single = trend([Point(1.0, 2.0, 3.0, 4.0, 5)])
    assert single is not None
    assert single.slope_per_hour is None
    assert trend([]) is None


def test_a_mean_never_leaves_minimum_and_maximum() -> None:
    tally = MetricTally()
    for _ in range(3):
        tally.add(0.1)
    stats = tally.stats()
    assert stats is not None
    assert stats.min <= stats.mean <= stats.max
