"""When a lease is renewed, and when it counts as lost."""

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client.lease import timer_of
from gpuscale.client.lease_timer import LONGEST_MARGIN, LONGEST_PAUSE, LeaseTimer


@pytest.mark.parametrize("ttl", [2.0, 5.0, 30.0, 300.0, 604_800.0])
def test_it_is_renewed_before_a_third_of_it_has_passed(ttl: float) -> None:
    assert 0 < LeaseTimer(ttl, 100.0).wait(100.0) < ttl / 3


def test_no_pause_is_longer_than_the_longest() -> None:
    assert LeaseTimer(604_800, 0.0).wait(0.0) == LONGEST_PAUSE


@pytest.mark.parametrize("ttl", [2.0, 5.0, 300.0])
def test_without_an_answer_it_is_lost_before_it_ends(ttl: float) -> None:
    """The holder learns it while the GPUs are still its own."""
    timer, now = LeaseTimer(ttl, 0.0), 0.0
    while not timer.is_over(now):
        now += timer.wait(now)
        if not timer.is_over(now):
            assert timer.patience(now) <= ttl - now
            timer.unanswered(now)
    assert ttl - LONGEST_MARGIN <= now < ttl
    assert timer.lost == "it was not renewed in time"


def test_what_was_given_back_cannot_be_lost_any_more() -> None:
    timer = LeaseTimer(20, 0.0)
    timer.give_back(17.0)
    timer.refused("no such lease")
    assert not timer.is_over(100.0)


def test_what_is_over_is_lost_though_it_is_given_back() -> None:
    timer = LeaseTimer(20, 0.0)
    timer.give_back(18.5)
    timer.had_ended("it expired")
    assert timer.lost == "it was not renewed in time"


def test_a_renewal_counts_from_when_it_was_sent() -> None:
    timer = LeaseTimer(20, 0.0)
    timer.renewed(sent=5.0)
    assert not timer.is_over(22.9)
    assert timer.is_over(23.0)


def test_what_will_be_taken_away_ends_earlier() -> None:
    timer = LeaseTimer(20, 0.0)
    timer.renewed(sent=0.0, revoked_before_end=15.0, why="nodes/b is drained")
    assert timer.wait(0.0) == 3.0
    assert timer.is_over(3.0)
    assert timer.lost == "nodes/b is drained"


def test_a_guess_is_replaced_at_once() -> None:
    assert LeaseTimer(20, 7.0, renew_at_once=True).wait(7.0) == 0.0


def test_what_is_refused_is_lost() -> None:
    timer = LeaseTimer(20, 0.0)
    timer.refused("taken away by an admin")
    assert timer.is_over(0.0)
    assert timer.lost == "taken away by an admin"


def test_what_an_earlier_call_was_granted_counts_from_what_is_left_of_it() -> None:
    """A repeated request id is answered with the same reservation, and that renews nothing."""
    granted = api.Reservation(
        state=api.Reservation.STATE_ACTIVE, ttl={"seconds": 300}, remaining={"seconds": 40}
    )
    timer = timer_of(api.ReserveRequest(), granted, 1000.0)
    assert timer.wait(1000.0) == 0
    assert not timer.is_over(1034.0)
    assert timer.is_over(1036.0), "5 s before it ends"
