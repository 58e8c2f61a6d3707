"""History that is stored and brought back is the same history, and goes on as if nothing had been."""

import sys
import tracemalloc
from array import array
from collections.abc import Callable
from functools import partial
from random import Random
from types import FrameType

import pytest

from gpuscale.monitor.history.history import TURNS, History, HistorySeries, Tier, metrics_of
from gpuscale.monitor.history.ring import CHUNK, Bucket, Ring, Rows, chunks, unpack
from gpuscale.monitor.model.metrics import GPU_METRICS
from gpuscale.monitor.state.store import BootTimeline, continued

TIERS = (Tier(1.0, 120.0), Tier(10.0, 600.0), Tier(60.0, 30 * 60.0))
WIDTH = len(GPU_METRICS)
HOUR, DAY = 3600.0, 86_400.0


def stored(series: HistorySeries, shift: int) -> Rows:
    """What comes back of a series that was written in chunks."""
    found = Rows.empty()
    for _, body in chunks(series.coarsest(-(2**31)), WIDTH, shift):
        found.extend(unpack([body], WIDTH, shift))
    return found


def test_numbers_before_this_boot_are_below_zero_and_in_order() -> None:
    before, again = HistorySeries(WIDTH, TIERS), HistorySeries(WIDTH, TIERS)
    for second in range(0, 1200, 5):
        before.add(float(second), (50.0,) * WIDTH)
    parts = [unpack([body], WIDTH, 100) for _, body in chunks(before.coarsest(-(2**31)), WIDTH, 0)]
    rows = Rows.empty()
    for part in parts:
        rows.extend(part)
    again.restore(rows)
    again.add(30.0, (60.0,) * WIDTH)
    starts = [point.start for point in again.points(0, 2, -1e9, 1e9)]
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (-6000.0, 30.0)


def test_only_the_newest_fit_where_the_retention_became_shorter() -> None:
    before = HistorySeries(WIDTH, TIERS)
    for second in range(0, 6000, 10):
        before.add(float(second), (50.0,) * WIDTH)
    again = HistorySeries(WIDTH, (*TIERS[:2], Tier(60.0, 600.0)))
    again.restore(stored(before, 0))
    assert next(point.start for point in again.points(0, 2, 0.0, 1e9)) == 6000.0 - 660.0


@pytest.mark.parametrize("first", range(CHUNK - 9, CHUNK - 5))
def test_a_chunk_may_begin_and_end_anywhere(first: int) -> None:
    rows = Rows.empty()
    for number in range(first, first + CHUNK + 3, 2):
        rows.add(number, Bucket([1.0], [2.0], [3.0], [number]))
    found = {number: unpack([body], 1, 7) for number, body in chunks(rows, 1, 7)}
    assert [list(one.numbers) for one in found.values()] == [
        [number for number in rows.numbers if (number + 7) // CHUNK == chunk]
        for chunk in sorted({(number + 7) // CHUNK for number in rows.numbers})
    ]
    assert list(found) == sorted({(number + 7) // CHUNK for number in rows.numbers})
    assert [count for one in found.values() for count in one.counts] == list(rows.numbers)


@pytest.mark.parametrize("size", [13, 4 + WIDTH * 14], ids=["no rows", "a row that is none"])
def test_bytes_that_are_no_rows_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"not rows|invalid number"):
        unpack([b"\x80" * size], WIDTH, 28_000_000)


def test_what_there_is_no_memory_for_is_not_brought_back() -> None:
    before = HistorySeries(WIDTH, TIERS)
    for second in range(200):
        before.add(float(second), (50.0,) * WIDTH)
    rows = stored(before, 0)
    assert History(TIERS, 1 << 30).restore("gpu-1", rows)
    assert not History(TIERS, 100).restore("gpu-1", rows)
    assert len(metrics_of("nodes/a")) != len(metrics_of("gpu-1"))


def test_the_count_goes_on_through_a_boot_by_the_wall_clock() -> None:
    first = continued(None, 0.0, "a", now=100.0, wall=1_000_000.0)
    assert abs(first.stored(100.0) - 1_000_000.0) < 60.0
    assert continued(first, first.stored(5_000.0), "a", now=6_000.0, wall=0.0) is first, (
        "a set clock is no boot"
    )
    newest = first.stored(5_000.0)
    second = continued(first, newest, "b", now=10.0, wall=1_000_000.0 + 2 * DAY)
    assert abs(second.clock(newest) - (10.0 - (2 * DAY - 4_900.0))) < 60.0
    assert second.offset % 60.0 == 0.0


@pytest.mark.parametrize("wall", [0.0, 1_000_000.0 - HOUR])
def test_the_count_never_goes_back_whatever_the_wall_clock_says(wall: float) -> None:
    first = BootTimeline("a", 1_000_020.0)
    newest = first.stored(500.0)
    second = continued(first, newest, "b", now=3.0, wall=wall)
    assert second.stored(3.0) >= newest


def test_series_that_began_together_settle_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands at once would hold up every stream for seconds. Who reads them all does not bring them together."""
    settled, settle = list[HistorySeries](), HistorySeries._settle
    monkeypatch.setattr(HistorySeries, "_settle", lambda one: (settled.append(one), settle(one))[1])
    history, counts = History(TIERS, 1 << 30), list[int]()
    for second in range(4 * TURNS):
        for number in range(2 * TURNS):
            history.add(f"gpu-{number}", float(second), (50.0,) * WIDTH)
        counts.append(len(settled))
        if second == TURNS + 7:
            assert {series.oldest() for _, series in history.all()} == {0.0}
        settled.clear()
    assert counts == [2] * 4 * TURNS


def test_samples_do_not_wait_with_a_series_that_has_ended() -> None:
    history = History(TIERS, 1 << 30)
    together = history.together(("gpu-0", "gpu-1"))
    assert together is not None
    together.add(5.0, array("d", [1.0] * 2 * len(GPU_METRICS)))
    assert [series.newest() for series in together.series] == [5.0, 5.0]
    history.forget_ended(1e9)
    assert (list(together.series), len(history)) == ([], 0)
    assert History(TIERS, 0).together(("gpu-0",)) is None


def test_a_young_history_takes_little_more_than_its_samples() -> None:
    """Arrays of a few numbers each were most of a node in the fleet: 3 KB a GPU for half a KB of samples."""
    history, seconds, gpus = History(TIERS, 1 << 30), 18, 800
    tracemalloc.start()
    for node in range(gpus // 8):
        together = history.together([f"gpu-{node}-{place}" for place in range(8)])
        assert together is not None
        for second in range(seconds):
            together.add(float(second), array("d", [1.0] * 8 * WIDTH))
    held = tracemalloc.get_traced_memory()[0] / gpus
    tracemalloc.stop()
    assert held < 1.9 * seconds * WIDTH * 4 + 700, held


def calls(work: Callable[[], object]) -> int:
    """How many calls, of Python and C, some work takes: a machine that is busy counts the same."""
    found = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal found
        found += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def test_a_second_of_a_node_takes_few_calls() -> None:
    """The fleet pays for thousands of nodes. There were 94 while packed buckets were moved by columns to be merged, and more often."""
    together = History(TIERS, 1 << 30).together([f"gpu-{place}" for place in range(8)])
    assert together is not None
    steps = (partial(together.add, float(second), array("d", [1.0] * 8 * WIDTH)) for second in range(1_200))
    assert sum([*map(calls, steps)][600:]) / 600 < 70


def test_a_long_history_is_moved_by_columns_and_not_row_by_row() -> None:
    """A restart, and each step of shortening, move ten thousand buckets of each GPU at once."""
    capacity, source = 10_080, Random(1)
    stored_rows = Rows.empty()
    for number in range(capacity):
        values = [source.random() for _ in range(WIDTH)]
        stored_rows.add(number - 5_000, Bucket(values, values, values, [number % 3] * WIDTH))
    ring = Ring(WIDTH, capacity)
    assert calls(lambda: ring.restore(stored_rows)) < 30
    assert ring.rows(-(2**31)) == stored_rows
    assert calls(lambda: ring.shorten(capacity // 2)) < 60
    assert ring.rows(-(2**31)) == stored_rows.part(capacity // 2, capacity, WIDTH)


@pytest.mark.parametrize("size", [3, 10, 17])
@pytest.mark.parametrize("form", ["single", "packed", "restored"])
def test_a_shorter_ring_keeps_the_newest_and_goes_on(form: str, size: int) -> None:
    ring = Ring(1, 10)

    def add(number: int) -> None:
        value = array("f", [number])
        if form == "single":
            ring.extend(array("i", [number]), value)
        else:
            ring.append(number, Bucket(value, value, value, [2]))
        if form == "restored" and number == 2:
            ring.restore(ring.rows(0))

    for number in range(size + 6):
        if number == size:
            ring.shorten(4)
        add(number)
        kept = list(range(number + 1))[-10 if number < size else -4 :]
        assert [(point.start, point.mean) for point in ring.points(0, 1.0, -1.0, 1e6)] == [
            (float(one), float(one)) for one in kept
        ]
        assert (list(ring.rows(-1).numbers), ring.first, ring.last) == (kept, kept[0], number)


def test_a_full_ring_of_single_samples_takes_a_bucket_of_several_at_once() -> None:
    capacity = 3_600
    ring, ones = Ring(WIDTH, capacity), array("f", [1.0] * WIDTH)
    ring.extend(array("i", range(capacity)), ones * capacity)
    assert calls(lambda: ring.append(capacity, Bucket(ones, ones, ones, [2] * WIDTH))) < 300
    turn = array("i", range(capacity + 1, 2 * capacity + 1))
    each = [calls(partial(ring.extend, turn[at : at + 1], ones)) for at in range(capacity)]
    assert max(each) < 300
    ring.append(2 * capacity + 1, Bucket(ones, ones, ones, [2] * WIDTH))
    turn = turn[1:] + array("i", [2 * capacity + 1])
    assert ring.rows(2 * capacity + 1) == ring.rows(0).part(capacity - 1, capacity, WIDTH)
    assert list(ring.rows(-(2**31)).numbers) == list(turn)
