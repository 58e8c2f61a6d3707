"""How long a group of changes waits for others: as many as were seen at once, and never longer than a write is worth."""

import pytest

from gpuscale.allocator.state.commits import ENOUGH, WINDOW, WRITES, GroupWindow

WRITE = 0.001


def learnt(*groups: tuple[int, int], seconds: float = WRITE) -> GroupWindow:
    """What groups (changes, and changes that came while they were written) have taught."""
    window = GroupWindow()
    for group, came in groups:
        window.wrote(group, came, seconds)
    return window


def test_a_change_that_comes_alone_waits_for_nobody() -> None:
    assert GroupWindow().pause(1, 0.0) == 0.0
    assert learnt((1, 0), (1, 0)).pause(1, 0.0) == 0.0


def test_whoever_comes_while_a_group_is_written_is_waited_for_with_the_next() -> None:
    window = learnt((2, 3))
    assert window.expected == 5
    assert window.pause(4, 0.0) == pytest.approx(WRITE)
    assert window.pause(5, 0.0) == 0.0


def test_a_crowd_is_found_however_few_of_it_are_seen_at_a_time() -> None:
    window = GroupWindow()
    for _ in range(16):
        window.wrote(window.expected, 2, WRITE)
    assert window.expected == ENOUGH


def test_a_crowd_that_left_is_soon_not_waited_for() -> None:
    window = learnt((20, 12), *[(1, 0)] * 12)
    assert window.expected == 1


def test_no_group_waits_for_more_than_enough() -> None:
    assert learnt((200, 100)).pause(ENOUGH, 0.0) == 0.0


def test_a_slow_disk_is_worth_a_longer_wait_within_bounds() -> None:
    window = learnt(*[(8, 8)] * 60, seconds=0.004)
    assert window.pause(2, 0.0) == pytest.approx(0.004, rel=0.01)
    assert window.pause(2, WRITES * 0.004) == 0.0
    hung = learnt(*[(8, 8)] * 30, (8, 8), seconds=WRITE)
    hung.wrote(8, 8, 1.0)
    hung.wrote(8, 8, WRITE)
    hung.wrote(8, 8, WRITE)
    assert hung.pause(2, 0.0) < 0.03, "one write that hung is soon forgotten"
    slow = learnt(*[(8, 8)] * 60, seconds=1.0)
    assert slow.pause(2, 0.0) == pytest.approx(WINDOW)
    assert slow.pause(2, WINDOW) == 0.0
