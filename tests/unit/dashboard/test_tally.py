"""What idle reservations cost is counted from what was read, and a time that nobody counted costs nothing."""

import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.dashboard import tally
from gpuscale.dashboard.facts import GpuFacts
from gpuscale.dashboard.tally import Count, Tally


def gpu(held_milli: int, utilization: float | None) -> GpuFacts:
    reading = types_api.GpuReading(utilization_percent=utilization)
    return GpuFacts(
        *("n/0", "n", "GPU-0", 0, "H100", "OK"), simulated=False, reading=reading, held_milli=held_milli
    )


def test_a_share_counts_as_what_it_is_and_what_was_not_read_is_neither_used_nor_idle() -> None:
    gpus = [gpu(1000, 50.0), gpu(500, 0.0), gpu(1000, None), gpu(0, 100.0)]
    assert tally.count(gpus, 7.0) == Count(at=7.0, total=4, reserved=2.5, used=0.5, idle=0.5)


def counted(*counts: tuple[float, float, float]) -> Tally:
    found = Tally()
    for at, reserved, used in counts:
        found.add(Count(at, 8, reserved, used, 0))
    return found


def test_counts_of_a_step_are_shown_as_their_mean() -> None:
    shown = counted((0, 2, 0), (10, 4, 2), (20, 6, 6)).since(0, 100, 20)
    assert [(one.at, one.reserved, one.used) for one in shown] == [(0, 3, 1), (20, 6, 6)]


def test_only_the_asked_time_is_shown() -> None:
    shown = counted((0, 1, 0), (10, 2, 0), (20, 3, 0)).since(10, 15, 1)
    assert [one.reserved for one in shown] == [2]


def test_unused_hours_are_reserved_minus_used_over_time() -> None:
    assert counted((0, 4, 1), (10, 4, 4), (20, 0, 0)).wasted_hours(0, 100) == pytest.approx(30 / 3600)


def test_a_time_that_was_not_counted_is_not_charged() -> None:
    assert counted((0, 1, 0), (3600, 1, 0)).wasted_hours(0, 9999) == pytest.approx(tally.PERIOD / 3600)


def test_a_clock_that_was_put_back_leaves_no_line_that_runs_backwards() -> None:
    shown = counted((100, 1, 0), (50, 2, 0), (110, 3, 0)).since(0, 1000, 1)
    assert [one.at for one in shown] == [100, 110]
