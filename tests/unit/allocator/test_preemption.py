"""Preemption: both sides agreed, lower priority, long enough, proven to help, fewest and least."""

from gpuscale.allocator.domain.model import Order
from gpuscale.allocator.queueing.model import Revoke, Rules
from gpuscale.allocator.queueing.queue import SETTLE
from tests.support.queue_world import Line, QueueWorld, wish

RULES = Rules(min_runtime=100.0, grace=30.0)


def line_of(gpus: int = 4, *, age: float = 200.0, nodes: int = 1) -> Line:
    """Nodes full of one-GPU leases of this age: n0-0 and so on."""
    line = Line(QueueWorld({f"n{node}": gpus for node in range(nodes)}), RULES)
    for node in range(nodes):
        for index in range(gpus):
            name = f"n{node}-{index}"
            line.world.hold(wish(name, preemptible=True, ttl=1000), [name])
            line.world.now += 0.5
    line.world.now += age
    return line


def urgent(name="urgent", count=1, **fields) -> Order:
    return wish(name, count, **({"priority": 10, "may_preempt": True} | fields))


def test_the_lease_with_the_least_service_makes_room() -> None:
    line = line_of()
    line.ask(urgent())
    assert line.revoked() == ["n0-3"]
    place = line.place("urgent")
    assert place.start == line.world.now + RULES.grace
    assert place.obstacle.message == "it preempts reservations/n0-3, given 30 s to leave"


def test_its_place_is_kept_and_it_is_granted_when_the_victim_ended() -> None:
    line = line_of()
    line.ask(urgent())
    line.play()
    line.ask(wish("same", priority=10))
    assert line.revoked() == []
    line.end("n0-3")
    assert line.granted() == ["urgent"]


def test_nobody_else_is_preempted_while_gpus_that_were_left_still_read_busy() -> None:
    """Their last reading is of the victim: a job that was not needed was sent away as well."""
    line = line_of(1, nodes=2)
    line.ask(urgent())
    assert line.revoked() == ["n1-0"]
    line.world.down.add("n1")
    line.end("n1-0")
    assert line.revoked() == []
    line.world.now += SETTLE
    line.queue.changed({"n1"})
    assert line.revoked() == ["n0-0"], "who is there without a reservation does not leave"


def test_a_preempted_holder_does_not_preempt_back() -> None:
    line = line_of(1)
    line.ask(urgent(preemptible=True))
    line.play()
    line.end("n0-0")
    line.play()
    line.world.now += 1000
    line.ask(urgent("back"), urgent("low", priority=0))
    assert line.revoked() == []


def test_a_young_lease_is_left_alone_until_it_has_run_for_long_enough() -> None:
    line = line_of(1, age=50.0)
    line.ask(urgent())
    assert line.revoked() == []
    assert line.place("urgent").obstacle.message.endswith("preempt others once they have run for 100 s.")
    again = line.queue.look_again
    assert again == line.world.held["n0-0"].lease.since + RULES.min_runtime
    line.world.now = again
    line.queue.changed(())
    assert line.revoked() == ["n0-0"]


def test_nobody_is_ended_in_vain() -> None:
    """One of the GPUs is held by somebody who did not agree: ending the others would not admit the request."""
    line = line_of(4)
    line.world.end("n0-0", line.queue)
    line.world.hold(wish("stays", ttl=1000), ["n0-0"])
    line.world.now += 500
    line.ask(urgent(count=4))
    assert line.revoked() == []


def test_nobody_is_ended_for_a_request_that_would_have_left_by_then() -> None:
    line = line_of()
    line.ask(urgent(), wait=RULES.grace - 1)
    assert line.revoked() == []


def test_one_large_victim_rather_than_many_small_ones() -> None:
    line = line_of(4, nodes=1)
    line.world.nodes = {"n0": 4, "n1": 4}
    line.world.now -= 150
    line.world.hold(wish("large", preemptible=True, ttl=1000), [f"n1-{index}" for index in range(4)])
    line.world.now += 150
    line.ask(urgent(count=4))
    assert line.revoked() == ["large"]


def test_only_as_many_as_needed() -> None:
    line = line_of(4)
    line.ask(urgent(count=2))
    assert sorted(line.revoked()) == ["n0-2", "n0-3"]


def test_two_preemptors_do_not_count_on_the_same_victims() -> None:
    line = line_of(2)
    line.ask(urgent("u0"), urgent("u1"))
    assert sorted(line.revoked()) == ["n0-0", "n0-1"]
    line.end("n0-1", "n0-0")
    assert line.granted() == ["u0", "u1"]


def test_nothing_is_kept_for_who_leaves_while_its_victims_are_told() -> None:
    """Between two steps of a round a caller may go away; what was about to be kept for it would be kept for ever."""
    line = line_of(1)
    line.ask(urgent(), wish("next"))
    steps = line.queue.round(line.world.now)
    assert isinstance(next(steps), Revoke)
    line.leave("urgent")
    assert [step.waiter.order.request_id for step in steps] == ["next"]
    line.end("n0-0")
    assert line.granted() == ["next"]


def test_whoever_would_be_ended_in_vain_is_spared() -> None:
    """The youngest lease is the cheapest to end, but the two that make room together are on the other node."""
    line = Line(QueueWorld({"n0": 2, "n1": 2}), RULES)
    for name in ("n0-0", "n1-0", "n1-1", "n0-1"):
        line.world.hold(wish(name, preemptible=True, ttl=1000), [name])
        line.world.now += 1
    line.world.now += 200
    line.ask(urgent(count=2))
    assert sorted(line.revoked()) == ["n1-0", "n1-1"]


def test_of_leases_of_any_size_the_one_with_the_least_service_makes_room() -> None:
    line = Line(QueueWorld({"n0": 4}), RULES)
    for name, gpus, seconds in (
        ("old", ["n0-0"], 50),
        ("wide", ["n0-1", "n0-2"], 50),
        ("young", ["n0-3"], 200),
    ):
        line.world.hold(wish(name, len(gpus), preemptible=True, ttl=1000), gpus)
        line.world.now += seconds
    line.ask(urgent())
    assert line.revoked() == ["young"]
