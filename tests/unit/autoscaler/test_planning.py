"""Who is started, who is stopped, and where."""

from dataclasses import replace

import pytest

from gpuscale.autoscaler.domain.planning import (
    MAX_PENDING,
    AdapterFacts,
    candidates,
    crash_delay,
    nobody,
    plan,
)
from gpuscale.autoscaler.domain.replicas import Goal, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.spec import ReplicaTemplate, ScaleInOrder
from tests.support.autoscaler_values import AT, NOW, replica, spec

S = ReplicaState


def ids(replicas: tuple[Replica, ...]) -> list[str]:
    return [one.id for one in replicas]


def test_the_difference_is_started() -> None:
    assert plan(3, [replica(0, S.READY)], ()).start == 2
    assert plan(1, [replica(0, S.READY)], ()).start == 0


def test_what_ends_or_ended_does_not_count() -> None:
    draining = asked_to_stop(replica(0, S.READY), "", AT)
    assert plan(1, [draining, replica(1, S.FAILED)], ()).start == 1


def test_only_so_many_wait_at_a_time() -> None:
    assert plan(10_000, [], ()).start == MAX_PENDING
    assert plan(10_000, [replica(n) for n in range(MAX_PENDING)], ()).start == 0


def test_victims_are_those_nobody_was_told_of_then_starting_then_leaving_then_newest() -> None:
    members = [
        replica(1, S.READY),
        replica(2, S.STARTING),
        replica(3, S.READY),
        replica(4, S.DRAINING),
        replica(0, S.PENDING),
        replica(5, S.READY),
    ]
    order = ["r000", "r002", "r004", "r005", "r003", "r001"]
    for left in range(6):
        assert ids(plan(left, members, ()).stop) == order[: 6 - left]


def test_the_least_busy_go_first_and_those_that_say_nothing_last() -> None:
    members = [replica(n, S.READY) for n in range(5)] + [replica(5, S.STARTING)]
    busy = {"r001": 0.0, "r002": 3.0, "r003": 1.0, "r004": 1.0}
    order = ["r005", "r001", "r004", "r003", "r002", "r000"]
    for left in range(6):
        assert ids(plan(left, members, (), busy=busy).stop) == order[: 6 - left]


def test_oldest_first_stops_the_least_busy_and_of_them_the_first_that_was_started() -> None:
    """As OpenGRIS Scaler does; a replica on its way up has no task, and one that says nothing may have any."""
    members = [replica(n, S.READY) for n in range(5)] + [replica(5, S.STARTING), replica(6)]
    oldest = spec(busy_metric="queued_tasks", scale_in_order=ScaleInOrder.OLDEST_FIRST)
    busy = {"r001": 2.0, "r002": 0.0, "r003": 0.0, "r004": 2.0}
    order = ["r006", "r002", "r003", "r005", "r001", "r004", "r000"]
    for left in range(7):
        assert ids(plan(left, members, (), oldest, busy).stop) == order[: 7 - left]
    assert ids(plan(3, members[:5], (), oldest).stop) == ["r000", "r001"]


def test_silent_replicas_are_neither_replaced_nor_stopped() -> None:
    members = [replica(0, S.READY, adapter="gone"), replica(1, S.READY, adapter="gone")]
    assert plan(2, members, {"gone"}).start == 0
    lowered = plan(1, members, {"gone"})
    assert (lowered.stop, lowered.held) == ((), 1)


def test_no_fewer_than_wanted_are_left_whatever_the_silent_ones_turn_out_to_be() -> None:
    silent = [replica(n, S.READY, adapter="gone") for n in range(2)]
    known = [replica(n, S.READY) for n in range(2, 5)]
    lowered = plan(2, [*silent, *known], {"gone"})
    assert (ids(lowered.stop), lowered.held) == (["r004"], 2)


def test_where_none_is_wanted_silent_replicas_are_asked_to_stop_too() -> None:
    members = [replica(0, S.READY, adapter="gone"), replica(1, S.READY)]
    assert ids(plan(0, members, {"gone"}).stop) == ["r001", "r000"]


def test_failed_replicas_are_replaced_ever_more_slowly() -> None:
    def crashes(count: int) -> list[Replica]:
        return [replica(n, S.FAILED, ended_at=NOW - count + n + 1) for n in range(count)]

    assert crash_delay([], NOW) == 0
    assert [crash_delay(crashes(n), NOW) for n in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert crash_delay(crashes(50), NOW) == 60
    assert crash_delay(crashes(3), NOW + 3) == pytest.approx(1)
    assert crash_delay(crashes(3), NOW + 4) == 0


def test_replicas_that_fail_together_count_as_one_failure() -> None:
    """A host that reboots with 10 replicas must not keep the endpoint down for a minute."""
    together = [replica(n, S.FAILED, ended_at=NOW + n / 100) for n in range(10)]
    assert crash_delay(together, NOW + 0.09) == 1
    again = [replica(n, S.FAILED, ended_at=NOW - 5 + n / 100) for n in range(10)]
    assert crash_delay([*again, *together], NOW + 0.09) == 2


def test_sixty_seconds_of_being_ready_begin_a_new_count() -> None:
    old = [replica(n, S.FAILED, ended_at=NOW - 100 + n) for n in range(5)]
    well = replica(9, S.FAILED, ready_at=NOW - 60, ended_at=NOW)
    assert crash_delay([*old, well], NOW) == 1
    assert crash_delay([*old, replace(well, ready_at=NOW - 59.9)], NOW) == 32


def test_failures_long_ago_do_not_count() -> None:
    old = [replica(n, S.FAILED, ended_at=NOW - 1000 + n) for n in range(5)]
    assert crash_delay([*old, replica(9, S.FAILED, ended_at=NOW)], NOW) == 1
    assert crash_delay(old, NOW) == 0


def test_an_asked_stop_is_no_crash() -> None:
    assert crash_delay([replica(0, S.FAILED, goal=Goal.STOP, ended_at=NOW)], NOW) == 0
    assert crash_delay([replica(0, S.STOPPED, ended_at=NOW)], NOW) == 0


def adapter(name: str, **fields: object) -> AdapterFacts:
    known: dict[str, object] = {
        "kind": "process",
        "node": name,
        "templates": frozenset({"worker"}),
        "max_replicas": 0,
        "live": True,
    }
    return AdapterFacts(name, **(known | fields))  # type: ignore[arg-type]


def test_the_adapter_with_the_fewest_replicas_then_by_id() -> None:
    adapters = [adapter("c"), adapter("b"), adapter("a")]
    found = candidates(ReplicaTemplate("worker"), adapters, {"a": 2, "b": 1, "c": 1})
    assert [one.id for one in found] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("template", "one", "why"),
    [
        (ReplicaTemplate("worker"), adapter("a", live=False), "no adapter is connected"),
        (ReplicaTemplate("other"), adapter("a"), "has the template other"),
        (ReplicaTemplate("worker", adapter="b"), adapter("a"), "adapter b is not connected"),
        (ReplicaTemplate("worker"), adapter("a", max_replicas=2), "as many replicas as they may"),
        (ReplicaTemplate("worker", gpu_count=1), adapter("a", node=""), "bound to a node"),
    ],
)
def test_adapters_that_cannot_run_it(template: ReplicaTemplate, one: AdapterFacts, why: str) -> None:
    assert candidates(template, [one], {"a": 2}) == []
    assert why in nobody(template, [one])


def test_adapters_that_can() -> None:
    assert candidates(
        ReplicaTemplate("worker", adapter="a", gpu_count=1), [adapter("a", max_replicas=3)], {"a": 2}
    )
    assert candidates(ReplicaTemplate("worker"), [adapter("a", node="")], {})
