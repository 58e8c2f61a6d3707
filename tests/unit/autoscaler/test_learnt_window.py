"""A stabilization window that doubles while what was given up is needed again."""

import pytest

from gpuscale.autoscaler.domain.engine import REGRET_SECONDS, Memory, longest, paced, regrets
from gpuscale.autoscaler.domain.spec import LONGEST_LEARNT, UNPACED, Pace

NOW = 10_000.0


def memory(*changes: tuple[float, int]) -> Memory:
    return Memory(0.0, (), tuple((NOW - ago, change) for ago, change in changes))


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ((), 0),
        (((500, -2), (400, 1)), 1),
        (((500, 2), (400, -1)), 0),
        (((1700, -2), (1600, 1), (900, -1), (300, 1)), 2),
        (((1700, -2), (1700 - LONGEST_LEARNT - 1, 1)), 0),
        (((REGRET_SECONDS, -2), (REGRET_SECONDS - 10, 1)), 0),
    ],
)
def test_what_was_given_up_and_needed_soon_after_is_regretted(
    changes: tuple[tuple[float, int], ...], count: int
) -> None:
    assert regrets(memory(*changes), NOW) == count


@pytest.mark.parametrize(
    ("startup", "count", "window"),
    [
        (30.0, 0, 100.0),
        (30.0, 1, 200.0),
        (30.0, 5, 300.0),
        (None, 5, 100.0),
        (5.0, 5, 100.0),
        (900.0, 9, 600.0),
    ],
)
def test_the_window_doubles_up_to_ten_start_ups_and_ten_minutes(
    startup: float | None, count: int, window: float
) -> None:
    assert Pace(100.0, startups=10.0).window(startup, count) == window
    assert Pace(100.0).window(startup, count) == 100.0


def test_a_count_that_is_regretted_is_given_up_later() -> None:
    down = Pace(100.0, startups=10.0)
    past = Memory(0.0, ((NOW - 150, 5), (NOW - 50, 3)), ((NOW - 700, -2), (NOW - 600, 2)))
    assert paced(UNPACED, down, 5, 3, past, NOW, 30.0).count == 5
    assert paced(UNPACED, down, 5, 3, past, NOW, None).count == 3
    assert longest(UNPACED, down) == REGRET_SECONDS, (
        "changes are remembered for as long as they are regretted"
    )
