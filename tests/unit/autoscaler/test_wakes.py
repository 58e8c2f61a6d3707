"""Followers of an endpoint hear of its changes, of no other's, and are forgotten when they leave."""

from gpuscale.autoscaler.loop.hub import Followers


def test_all_who_follow_an_endpoint_hear_of_it_and_no_others() -> None:
    followers = Followers()
    with followers.follow("a") as one, followers.follow("a") as two, followers.follow("b") as other:
        followers.tell("a")
        followers.tell("a")
        assert (one.is_set(), two.is_set(), other.is_set()) == (True, True, False)


def test_who_leaves_is_told_no_more_and_takes_nobody_along() -> None:
    followers = Followers()
    with followers.follow("a") as stays:
        with followers.follow("a") as leaves:
            pass
        followers.tell("a")
        assert (stays.is_set(), leaves.is_set()) == (True, False)


def test_nothing_is_kept_of_endpoints_that_nobody_follows() -> None:
    followers = Followers()
    for number in range(100):
        with followers.follow(f"e{number}"):
            pass
    followers.tell("e1")
    assert vars(followers) == vars(Followers())
