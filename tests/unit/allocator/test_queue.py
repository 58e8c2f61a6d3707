"""The queue: whose turn it is, what quotas admit, what is kept for the head of the line, and who is looked at."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import Pick
from gpuscale.allocator.placing.refusal import Refusal
from gpuscale.allocator.queueing import queue as forecast
from gpuscale.allocator.queueing.model import (
    Grant,
    Looked,
    MonthStanding,
    QueueObstacle,
    Quota,
    Reason,
    Rules,
)
from gpuscale.allocator.queueing.queue import BEHIND_OTHERS, MOST_AT_ONCE
from gpuscale.common.errors import ResourceExhaustedError
from tests.support.allocator_values import NOW
from tests.support.queue_world import Line, QueueWorld, wish


def full(count: int = 4) -> Line:
    """A node on which one lease for each GPU is held: held-0 and so on."""
    line = Line(QueueWorld({"n0": count}))
    for index in range(count):
        line.world.hold(wish(f"held-{index}", tenant="other"), [f"n0-{index}"])
    return line


def test_higher_priority_goes_first_then_arrival() -> None:
    line = full(1)
    line.ask(wish("a"), wish("b", priority=5), wish("c", priority=5), wish("d", priority=-1))
    order = []
    while len(line.queue):
        line.play()
        line.end(*line.world.held)
        order += line.granted()
    assert order == ["b", "c", "a", "d"]


def test_the_tenant_with_the_lowest_share_goes_first() -> None:
    line = full(3)
    line.ask(*(wish(f"rich-{i}", tenant="rich") for i in range(3)), wish("poor", tenant="poor"))
    line.world.hold(wish("had", tenant="rich"), ["elsewhere-0"])
    line.play()
    line.end("held-0", "held-1")
    assert line.granted() == ["poor", "rich-0"]


def test_twice_the_weight_gets_twice_the_gpus() -> None:
    line = full(6)
    line.world.quotas["b"] = Quota("b", weight=2.0)
    line.ask(*(wish(f"a-{i}", tenant="a") for i in range(6)), *(wish(f"b-{i}", tenant="b") for i in range(6)))
    line.play()
    line.end(*(f"held-{i}" for i in range(6)))
    granted = line.granted()
    assert sum(name.startswith("b") for name in granted) == 4
    assert granted[:2] == ["a-0", "b-0"]


def test_nothing_is_kept_for_who_is_over_its_quota_by_now() -> None:
    line = Line(QueueWorld({"n0": 2, "n1": 1}, quotas={"a": Quota("a", 2000)}))
    line.world.hold(wish("old", tenant="b"), ["n0-0"])
    line.ask(wish("a-big", 2, tenant="a"), wish("a-small", tenant="a"), wish("b", tenant="b"))
    assert line.granted() == ["a-small", "b"]
    assert line.place("a-big").obstacle.reason is Reason.QUOTA_EXCEEDED
    assert line.world.held["b"].gpus == {"n0-1"}


def test_positions_and_reasons_are_told() -> None:
    line = full(4)
    line.ask(wish("big", 4), wish("small"), wish("urgent", 4, priority=1))
    line.play()
    places = [line.place(name) for name in ("urgent", "big", "small")]
    assert [one.position for one in places] == [0, 1, 2]
    assert {one.obstacle.reason for one in places} == {Reason.NO_CAPACITY}


def test_the_queue_is_bounded() -> None:
    line = full(1)
    line.rules = Rules(max_waiting=1)
    line.__post_init__()
    line.ask(wish("a"))
    with pytest.raises(ResourceExhaustedError) as error:
        line.ask(wish("b"))
    assert error.value.reason == "QUEUE_FULL"


def test_gpus_that_come_free_are_kept_for_the_head() -> None:
    line = full(4)
    line.ask(wish("big", 4), wish("small"))
    line.play()
    for index in range(3):
        line.end(f"held-{index}")
        assert line.granted() == []
    assert line.place("small").obstacle.reason is Reason.BEHIND_OTHERS
    line.end("held-3")
    assert line.granted() == ["big"]


def test_others_pass_beside_what_is_kept() -> None:
    line = Line(QueueWorld({"n0": 4, "n1": 2}))
    line.world.hold(wish("old"), ["n0-0"])
    line.ask(wish("big", 4), wish("small-0"), wish("small-1"), wish("small-2"))
    assert line.granted() == ["small-0", "small-1"]
    assert {gpu for name in ("small-0", "small-1") for gpu in line.world.held[name].gpus} == {"n1-0", "n1-1"}


def test_the_promise_is_where_leases_end_soonest_and_stays_there() -> None:
    line = Line(QueueWorld({"n0": 2, "n1": 2}))
    for index in range(2):
        line.world.hold(wish(f"late-{index}"), [f"n0-{index}"], ttl=500)
        line.world.hold(wish(f"soon-{index}"), [f"n1-{index}"], ttl=100 + index)
    line.ask(wish("big", 2), wish("small"))
    line.play()
    assert line.place("big").start == line.world.now + 101
    # The holders of n1 renew, so that n0 looks sooner now: what comes free there may still be passed on.
    for index in range(2):
        lease = line.world.held.pop(f"soon-{index}")
        line.world.hold(wish(f"soon-{index}"), lease.gpus, ttl=9000)
    line.end("late-0")
    assert line.granted() == ["small"]
    line.end("soon-0")
    assert line.granted() == []
    line.end("soon-1")
    assert line.granted() == ["big"]


def test_a_promise_that_cannot_be_kept_is_made_elsewhere() -> None:
    line = Line(QueueWorld({"n0": 2, "n1": 2}))
    line.world.hold(wish("n0"), ["n0-0"], ttl=10)
    line.world.hold(wish("n1"), ["n1-0"], ttl=20)
    line.ask(wish("big", 2), wish("small"))
    assert line.granted() == ["small"]
    assert line.world.held["small"].gpus == {"n1-1"}
    line.world.down.add("n0")
    line.queue.changed({"n0"})
    line.end("small")
    line.ask(wish("next"))
    assert line.granted() == []
    line.end("n1")
    assert line.granted() == ["big"]


def test_one_look_takes_nothing_that_is_kept() -> None:
    line = full(4)
    line.ask(wish("big", 4))
    line.play()
    line.end("held-0")
    line.play()
    assert line.queue.look(wish("look"), line.world.now) == BEHIND_OTHERS
    assert isinstance(line.queue.look(wish("higher", priority=1), line.world.now), Pick)
    assert isinstance(line.queue.look(wish("more", 2), line.world.now), Refusal)


def test_one_look_takes_what_is_left() -> None:
    line = Line(QueueWorld({"n0": 2, "n1": 1}))
    line.world.hold(wish("old"), ["n0-0"])
    line.ask(wish("big", 2))
    line.play()
    found = line.queue.look(wish("look"), line.world.now)
    assert isinstance(found, Pick)
    assert [gpu.uuid for gpu in found.gpus] == ["n1-0"]


def test_one_look_is_held_to_the_quota() -> None:
    line = Line(QueueWorld({"n0": 2}, quotas={"t": Quota("t", 1000)}))
    found = line.queue.look(wish("look", 2), line.world.now)
    assert isinstance(found, QueueObstacle)
    assert found.reason is Reason.QUOTA_EXCEEDED
    assert "holds 0; this asks for 2" in found.message


def test_what_was_kept_helps_others_when_the_head_leaves() -> None:
    line = full(4)
    line.ask(wish("big", 4), wish("small"))
    line.play()
    line.end("held-0")
    assert line.granted() == []
    line.leave("big")
    assert line.queue.due
    assert line.granted() == ["small"]


def test_a_higher_priority_takes_over_the_head() -> None:
    line = full(4)
    line.ask(wish("big", 4))
    line.play()
    line.end("held-0")
    line.ask(wish("urgent", priority=1))
    assert line.granted() == ["urgent"]


def test_shares_do_not_move_the_head() -> None:
    """The tenant of the head is granted GPUs meanwhile; its head keeps its turn all the same."""
    line = Line(QueueWorld({"n0": 2, "n1": 1}))
    line.world.hold(wish("old", tenant="x"), ["n0-0"])
    line.ask(wish("a-big", 2, tenant="a"))
    line.play()
    line.ask(wish("a-small", tenant="a"), wish("b-big", 2, tenant="b"))
    assert line.granted() == ["a-small"]
    line.end("old")
    assert line.granted() == ["a-big"]


def test_the_head_keeps_its_turn_before_a_tenant_that_holds_less() -> None:
    """Else what is kept would be kept for another each time that shares change, and nobody would ever get it."""
    line = Line(QueueWorld({"n0": 2, "n1": 1}))
    line.world.hold(wish("a-held", tenant="a"), ["n1-0"])
    for index in range(2):
        line.world.hold(wish(f"old-{index}", tenant="x"), [f"n0-{index}"])
    line.ask(wish("a-big", 2, tenant="a"))
    line.play()
    line.ask(wish("b-big", 2, tenant="b"))
    line.play()
    assert (line.place("a-big").position, line.place("b-big").position) == (0, 1)
    line.end("old-0")
    assert line.granted() == []
    line.end("old-1")
    assert line.granted() == ["a-big"]


def test_only_those_are_placed_again_whom_a_change_could_help() -> None:
    line = Line(QueueWorld({"n0": 1, "n1": 1}))
    line.world.hold(wish("h0"), ["n0-0"])
    line.world.hold(wish("h1"), ["n1-0"])
    line.ask(*(wish(f"on-n0-{index}", nodes=["n0"]) for index in range(50)), wish("on-n1", nodes=["n1"]))
    line.play()
    line.world.placements = 0
    line.end("h1")
    assert line.granted() == ["on-n1"]
    assert line.world.placements == 1


def test_equal_requests_are_placed_once_a_round() -> None:
    line = full(1)
    line.ask(*(wish(f"w{index}") for index in range(200)))
    line.world.placements = 0
    assert line.granted() == []
    assert line.world.placements == 1


def test_a_grant_to_the_first_of_a_thousand_costs_one_round() -> None:
    line = full(1)
    line.ask(*(wish(f"w{index}") for index in range(1000)))
    line.play()
    line.world.placements = line.world.imagined = 0
    line.end("held-0")
    granted, *looked = line.play()
    assert isinstance(granted, Grant)
    assert sum(len(step.moved) for step in looked if isinstance(step, Looked)) == 999
    assert len(looked) <= 2 + 999 / MOST_AT_ONCE, "those who are alike are answered together"
    assert line.world.placements == 2, "for the first, and for all others"
    assert line.world.imagined == 1, "for the promise to who is first now"


def leased(*ttls: float) -> Line:
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
    return {waiter.order.request_id: at and at.start and at.start - now for waiter, at in found}


def test_each_is_served_by_the_next_lease_that_ends() -> None:
    line = leased(30, 10, 20)
    line.ask(wish("a"), wish("b"), wish("c"))
    assert foreseen(line) == {"a": 10, "b": 20, "c": 30}


def test_one_behind_a_large_one_is_served_beside_it() -> None:
    line = leased(10, 20, 30)
    line.ask(wish("large", 2), wish("small"))
    assert foreseen(line) == {"large": 20, "small": 30}


def test_who_comes_after_everything_waits_for_the_leases_of_those_before() -> None:
    line = leased(10, 20)
    line.ask(wish("a", ttl=100), wish("b", ttl=50), wish("c"), wish("d"), wish("e"))
    assert foreseen(line) == {"a": 10, "b": 20, "c": 110, "d": 110, "e": 170}


def test_the_times_are_those_at_which_they_are_served() -> None:
    """Played on: every lease ends in time, and nobody is served later than was foreseen."""
    line = leased(30, 10, 20)
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
    line = leased(10, 20)
    line.world.quotas["poor"] = Quota("poor", 0)
    line.ask(wish("over", tenant="poor"), wish("a"), wish("b"))
    assert foreseen(line) == {"over": None, "a": 10, "b": 20}


def test_hours_of_a_month_that_are_used_or_booked_let_nobody_of_the_tenant_in() -> None:
    line = Line(QueueWorld({"n0": 8}, quotas={"a": Quota("a", 4000, gpu_hours_per_month=100.0)}))
    line.world.months["a"] = MonthStanding(60.0, 40.0, 1_800_000_000.0)
    found = line.queue.look(wish("w", tenant="a"), NOW)
    assert isinstance(found, QueueObstacle)
    assert (found.reason, found.lasting) == (Reason.QUOTA_EXCEEDED, False)
    assert found.until is None, "a booking may be cancelled"
    assert found.message.startswith("tenant a has used 60.0 and booked 40.0 of the 100 GPU-hours")
    assert "Cancel a booking, wait until Fri 2027-01-15 08:00 UTC, or have" in found.message
    line.ask(wish("w", tenant="a"), wish("b", tenant="b"))
    assert line.granted() == ["b"]
    line.world.quotas["c"], line.world.months["c"] = (
        Quota("c", gpu_hours_per_month=0.03),
        MonthStanding(0.0312, 0, 1e9),
    )
    used = line.queue.look(wish("x", tenant="c"), NOW)
    assert isinstance(used, QueueObstacle)
    assert "has used 0.031 of the 0.03 GPU-hours" in used.message
    assert (used.until, " Wait until Sun 2001-09-09" in used.message) == (1e9, True)
    line.world.quotas["d"] = Quota("d", gpu_hours_per_month=0)
    none = line.queue.look(wish("y", tenant="d"), NOW)
    assert isinstance(none, QueueObstacle)
    assert none.until is None
    assert none.message.endswith("for this month. Have the quota raised."), "no end of a month helps"
    line.world.months["a"] = MonthStanding(0.0, 40.0, 1_900_000_000.0)
    line.queue.changed(())
    assert line.granted() == ["w"]


def test_a_lease_counts_as_lasting_as_long_as_is_likely_and_a_wait_has_its_range() -> None:
    line = leased(10, 20)
    for name, low, likely, high in (("held-0", 500, 900, 1500), ("held-1", 100, 300, 700)):
        lease = line.world.held[name].lease
        ends, earliest, latest = (line.world.now + one for one in (likely, low, high))
        line.world.likely[name] = replace(lease, ends=ends, earliest=earliest, latest=latest)
    line.ask(wish("a"), wish("b"))
    line.play()
    found = [at for _, at in line.queue.foresee(line.world.now)]
    spans = [at and [round(one - NOW) for one in (at.earliest, at.start, at.latest) if one] for at in found]
    assert spans == [[100, 300, 700], [500, 900, 1500]]


def test_what_no_end_of_a_lease_helps_is_not_foreseen() -> None:
    line = leased(10, 20)
    line.world.down.add("n0")
    line.ask(wish("a"))
    assert foreseen(line) == {"a": None}


def test_the_work_is_bounded() -> None:
    line = leased(10, 20)
    line.ask(*(wish(f"a-{index}") for index in range(forecast.MOST_FORESEEN + 5)))
    line.play()
    before = line.world.placements
    assert len(list(line.queue.foresee(line.world.now))) == forecast.MOST_FORESEEN
    assert line.world.placements == before, "it asks what would be, never what is"
    most = forecast.MOST_LEASES
    crowd = leased(*range(1, most + 2))
    crowd.ask(wish("head"), wish("next"), wish("large", most + 1))
    assert foreseen(crowd) == {"head": 1, "next": 2, "large": None}, "all that can be foreseen are too few"
    alike = leased(*range(1, 99))
    alike.ask(*(wish(f"a-{index}", ttl=99) for index in range(forecast.MOST_FORESEEN)))
    alike.play()
    alike.world.imagined = 0
    assert list(foreseen(alike).values()) == [*range(1, 1 + forecast.MOST_FORESEEN)]
    assert alike.world.imagined <= 3 * forecast.MOST_FORESEEN, "who asks for the same needs no fewer leases"


def test_a_promise_costs_what_must_end_and_not_what_is_held() -> None:
    read, tried = [], []
    for leases in (100, 1000):
        line = leased(*range(1, leases + 1))
        line.ask(wish("head", 3))
        line.play()
        read.append(line.world.leases_read)
        tried.append(line.world.imagined)
    assert read[0] == read[1] <= 4 * 3, "leases, what ends first first"
    assert tried[0] == tried[1] <= 5, "placements"


def test_what_no_end_of_a_lease_helps_is_tried_again_only_where_something_changed() -> None:
    line = leased(*range(1, 50))
    line.world.down.add("n0")
    line.ask(wish("head", nodes=["n0"]))
    line.play()
    tried = line.world.imagined
    assert tried
    line.queue.changed(["n1"])
    line.play()
    assert line.world.imagined == tried
    line.world.down.clear()
    line.queue.changed(["n0"])
    line.play()
    assert line.granted() or line.place("head").start == line.world.now + 1
