"""Forecast: how long each of the line waits at the latest, if every lease ends in time and nobody renews."""

from gpuscale.allocator.queueing import queue as forecast
from gpuscale.allocator.queueing.model import Quota
from tests.support.queue_world import Line, QueueWorld, wish


def full(*ttls: float) -> Line:
    """A node with a lease on each GPU that runs out after so many seconds: held-0 and so on."""
    line = Line(QueueWorld({"n0": len(ttls)}))
    for index, ttl in enumerate(ttls):
        line.world.hold(wish(f"held-{index}"), [f"n0-{index}"], ttl=ttl)
    return line


def foreseen(line: Line) -> dict[str, float | None]:
    """What is foreseen of each request, in seconds from now, in turn."""
    line.play()
    now = line.world.now
    found = line.queue.foresee(now)
    return {waiter.order.request_id: None if at is None else at - now for waiter, at in found}


def test_each_is_served_by_the_next_lease_that_ends() -> None:
    line = full(30, 10, 20)
    line.ask(wish("a"), wish("b"), wish("c"))
    assert foreseen(line) == {"a": 10, "b": 20, "c": 30}


def test_one_behind_a_large_one_is_served_beside_it() -> None:
    line = full(10, 20, 30)
    line.ask(wish("large", 2), wish("small"))
    assert foreseen(line) == {"large": 20, "small": 30}


def test_who_comes_after_everything_waits_for_the_leases_of_those_before() -> None:
    line = full(10, 20)
    line.ask(wish("a", ttl=100), wish("b", ttl=50), wish("c"), wish("d"), wish("e"))
    assert foreseen(line) == {"a": 10, "b": 20, "c": 110, "d": 110, "e": 170}


def test_the_times_are_those_at_which_they_are_served() -> None:
    """Played on: every lease ends in time, and nobody is served later than was foreseen."""
    line = full(30, 10, 20)
    line.ask(wish("big", 2, ttl=40), *(wish(f"s-{index}", ttl=15) for index in range(4)))
    said = foreseen(line)
    start = line.world.now
    while len(line.queue):
        name, first = min(line.world.held.items(), key=lambda item: item[1].lease.ends)
        line.world.now = first.lease.ends
        line.end(name)
        for served in line.granted():
            at = said[served]
            assert at is not None
            assert line.world.now - start <= at


def test_what_is_over_its_quota_is_not_foreseen_and_takes_nothing() -> None:
    line = full(10, 20)
    line.world.quotas["poor"] = Quota("poor", 0)
    line.ask(wish("over", tenant="poor"), wish("a"), wish("b"))
    assert foreseen(line) == {"over": None, "a": 10, "b": 20}


def test_what_no_end_of_a_lease_helps_is_not_foreseen() -> None:
    line = full(10, 20)
    line.world.down.add("n0")
    line.ask(wish("a"))
    assert foreseen(line) == {"a": None}


def test_the_work_is_bounded() -> None:
    line = full(10, 20)
    line.ask(*(wish(f"a-{index}") for index in range(forecast.MOST_FORESEEN + 5)))
    line.play()
    before = line.world.placements
    assert len(list(line.queue.foresee(line.world.now))) == forecast.MOST_FORESEEN
    assert line.world.placements == before, "it asks what would be, never what is"
    crowd = full(*range(1, forecast.MOST_LEASES + 2))
    crowd.ask(wish("head"), wish("next"))
    assert foreseen(crowd) == {"head": 1, "next": None}, "the head is promised something anyhow"
