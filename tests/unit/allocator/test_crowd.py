"""How long a group of changes waits for others: as many as were seen at once, and never longer than a write is worth."""

import pytest

from gpuscale.allocator.state.commits import ENOUGH, WINDOW, WRITES, Crowd

WRITE = 0.001


def learnt(*groups: tuple[int, int], seconds: float = WRITE) -> Crowd:
    """What groups (changes, and changes that came while they were written) have taught."""
    crowd = Crowd()
    for group, came in groups:
        crowd.wrote(group, came, seconds)
    return crowd


def test_a_change_that_comes_alone_waits_for_nobody() -> None:
    assert Crowd().pause(1, 0.0) == 0.0
    assert learnt((1, 0), (1, 0)).pause(1, 0.0) == 0.0


def test_whoever_comes_while_a_group_is_written_is_waited_for_with_the_next() -> None:
    crowd = learnt((2, 3))
    assert crowd.expected == 5
    assert crowd.pause(4, 0.0) == pytest.approx(WRITE)
    assert crowd.pause(5, 0.0) == 0.0


def test_a_crowd_is_found_however_few_of_it_are_seen_at_a_time() -> None:
    crowd = Crowd()
    for _ in range(16):
        crowd.wrote(crowd.expected, 2, WRITE)
    assert crowd.expected == ENOUGH


def test_a_crowd_that_left_is_soon_not_waited_for() -> None:
    crowd = learnt((20, 12), *[(1, 0)] * 12)
    assert crowd.expected == 1


def test_no_group_waits_for_more_than_enough() -> None:
    assert learnt((200, 100)).pause(ENOUGH, 0.0) == 0.0


def test_a_slow_disk_is_worth_a_longer_wait_within_bounds() -> None:
    crowd = learnt(*[(8, 8)] * 60, seconds=0.004)
    assert crowd.pause(2, 0.0) == pytest.approx(0.004, rel=0.01)
    assert crowd.pause(2, WRITES * 0.004) == 0.0
    hung = learnt(*[(8, 8)] * 30, (8, 8), seconds=WRITE)
    hung.wrote(8, 8, 1.0)
    hung.wrote(8, 8, WRITE)
    hung.wrote(8, 8, WRITE)
    assert hung.pause(2, 0.0) < 0.03, "one write that hung is soon forgotten"
    slow = learnt(*[(8, 8)] * 60, seconds=1.0)
    assert slow.pause(2, 0.0) == pytest.approx(WINDOW)
    assert slow.pause(2, WINDOW) == 0.0
