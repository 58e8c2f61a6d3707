"""Who is started, who is stopped, and where: on nodes whose GPUs are reserved, in engines that give them out, and in tiers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from gpuscale.autoscaler.domain import planning
from gpuscale.autoscaler.domain.planning import (
    MAX_PENDING,
    NO_LOADS,
    AdapterFacts,
    Capabilities,
    Plan,
    Plans,
    by_tier,
    candidates,
    crash_delay,
    gpus_elsewhere,
    nobody,
    nodes_of,
)
from gpuscale.autoscaler.domain.presets import Wish, expand
from gpuscale.autoscaler.domain.replicas import Goal, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.spec import AdapterTier, EndpointSpec, ReplicaTemplate, ScaleInOrder
from gpuscale.autoscaler.domain.validate import violations
from tests.support.autoscaler_values import AT, NOW, endpoint, leaving, replica, spec

S, SPEC = ReplicaState, spec()


def plan(*asked: Any, of: EndpointSpec = SPEC, busy: Any = NO_LOADS, now: float = 0.0) -> Plan:
    return planning.plan(*asked, of, busy, now)


def ids(found: Iterable[Replica | AdapterFacts]) -> list[str]:
    return [one.id for one in found]


def test_the_difference_is_started() -> None:
    assert plan(3, [replica(0, S.READY)], ()).start == 2
    assert plan(1, [replica(0, S.READY)], ()).start == 0


def test_what_ends_or_ended_does_not_count() -> None:
    assert plan(1, [asked_to_stop(replica(0, S.READY), "", AT), replica(1, S.FAILED)], ()).start == 1


def test_only_so_many_wait_at_a_time() -> None:
    assert plan(10_000, [], ()).start == MAX_PENDING
    assert plan(10_000, [replica(n) for n in range(MAX_PENDING)], ()).start == 0


def test_victims_are_those_nobody_was_told_of_then_starting_then_leaving_then_newest() -> None:
    states = {1: S.READY, 2: S.STARTING, 3: S.READY, 4: S.DRAINING, 0: S.PENDING, 5: S.READY}
    members = [replica(number, state) for number, state in states.items()]
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
        assert ids(plan(left, members, (), of=oldest, busy=busy).stop) == order[: 7 - left]
    assert ids(plan(3, members[:5], (), of=oldest).stop) == ["r000", "r001"]


def test_silent_replicas_are_neither_replaced_nor_stopped() -> None:
    members = [replica(0, S.READY, adapter="gone"), replica(1, S.READY, adapter="gone")]
    assert plan(2, members, {"gone"}).start == 0
    lowered = plan(1, members, {"gone"})
    assert (lowered.stop, lowered.held) == ((), 1)


def test_no_fewer_than_wanted_are_left_whatever_the_silent_ones_turn_out_to_be() -> None:
    silent = [replica(n, S.READY, adapter="gone") for n in range(2)]
    lowered = plan(2, [*silent, *[replica(n, S.READY) for n in range(2, 5)]], {"gone"})
    assert (ids(lowered.stop), lowered.held) == (["r004"], 2)


def test_where_none_is_wanted_silent_replicas_are_asked_to_stop_too() -> None:
    members = [replica(0, S.READY, adapter="gone"), replica(1, S.READY)]
    assert ids(plan(0, members, {"gone"}).stop) == ["r001", "r000"]


def test_those_that_will_lose_their_gpus_are_replaced_first_and_stopped_as_others_get_ready() -> None:
    old = [leaving(replica(n, S.READY)) for n in range(3)]
    begun = plan(3, old, (), now=NOW)
    assert (begun.start, begun.stop) == (3, ())
    for ready in range(4):
        new = [replica(10 + n, S.READY if n < ready else S.STARTING) for n in range(3)]
        later = plan(3, [*old, *new], (), now=NOW)
        assert (later.start, ids(later.stop)) == (0, ["r002", "r001", "r000"][:ready])


def test_a_smaller_count_gives_up_replacements_that_wait_and_then_those_that_leave() -> None:
    old = [leaving(replica(n, S.READY)) for n in range(3)]
    new = [replica(10, S.READY), replica(11), replica(12)]
    assert ids(plan(1, [*old, *new], (), now=NOW).stop) == ["r012", "r011", "r002", "r001", "r000"]
    assert ids(plan(2, [*old, *new], (), now=NOW).stop) == ["r012", "r002", "r001"]


def test_a_silent_replacement_makes_up_for_nobody_and_silent_ones_are_the_first_to_be_replaced() -> None:
    old = [leaving(replica(0, S.READY, adapter="gone")), leaving(replica(1, S.READY))]
    assert plan(2, [*old, *(replica(n, S.READY, adapter="gone") for n in (2, 3))], {"gone"}).stop == ()
    assert ids(plan(2, [*old, replica(2, S.READY), replica(3)], {"gone"}).stop) == ["r000"]


def test_those_that_may_stay_after_all_stay_and_what_started_in_their_place_goes() -> None:
    old = [replica(n, S.READY) for n in range(2)]
    assert ids(plan(2, [*old, replica(2, S.READY), replica(3)], ()).stop) == ["r003", "r002"]


def test_failed_replicas_are_replaced_ever_more_slowly() -> None:
    def crashes(count: int) -> list[Replica]:
        return [replica(n, S.FAILED, ended_at=NOW - count + n + 1) for n in range(count)]

    assert crash_delay([], NOW) == 0
    assert [crash_delay(crashes(n), NOW) for n in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert crash_delay(crashes(50), NOW) == 60
    assert crash_delay(crashes(3), NOW + 3) == pytest.approx(1)
    assert crash_delay(crashes(3), NOW + 4) == 0


def test_a_wait_for_a_replacement_tells_why_the_last_one_failed() -> None:
    failed = [replica(n, S.FAILED, ended_at=NOW - 2 + n, reason=f"exit code {n}") for n in range(2)]
    plans = Plans.of(endpoint(desired=1), failed, [], frozenset(), {}, NOW, starts=True)
    [step] = plans.steps(failed, frozenset())
    assert step.text == "replicas failed (exit code 1): the next one starts in 1.0 s"


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
    known = {"kind": "process", "node": name, "templates": frozenset({"worker"}), "max_replicas": 0}
    return AdapterFacts(name, **(known | {"live": True} | fields))


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
        (ReplicaTemplate("worker"), adapter("a", max_replicas=2), "the maximum number of replicas"),
        (ReplicaTemplate("worker", gpu_count=1), adapter("a", node=""), "bound to a node"),
    ],
)
def test_adapters_that_cannot_run_it(template: ReplicaTemplate, one: AdapterFacts, why: str) -> None:
    assert candidates(template, [one], {"a": 2}) == []
    assert why in nobody(template, [one])


GPUS = ReplicaTemplate("worker", gpu_count=1)


def node(name: str) -> AdapterFacts:
    return adapter(name, node=f"node-{name}")


def engine(name: str, *, live: bool = True, bound_to: str = "") -> AdapterFacts:
    return adapter(name, kind="ray", node=bound_to, live=live, capabilities=Capabilities(gives_gpus=True))


def test_gpus_are_those_of_a_node_or_of_an_engine() -> None:
    nowhere = adapter("nowhere", node="")
    adapters = [engine("r"), node("n"), nowhere]
    assert ids(candidates(GPUS, adapters, {})) == ["n", "r"]
    assert ids(candidates(ReplicaTemplate("worker"), adapters, {})) == ["n", "nowhere", "r"]
    assert "bound to a node" in nobody(GPUS, [nowhere])


@pytest.mark.parametrize(
    ("adapters", "nodes", "elsewhere"),
    [
        ([node("n"), node("m")], {"node-n", "node-m"}, False),
        ([node("n"), engine("r")], {"node-n"}, True),
        ([engine("r", bound_to="n")], set(), True),
        ([engine("r", live=False)], set(), False),
        ([], set(), False),
    ],
    ids=["nodes", "both", "an engine on a node", "silent", "none"],
)
def test_only_nodes_without_an_engine_are_asked_for_reservations(
    adapters: list[AdapterFacts], nodes: set[str], elsewhere: bool
) -> None:
    """Whoever reserved GPUs of a node that an engine gives out too would give them out twice."""
    assert nodes_of(GPUS, adapters) == nodes
    assert gpus_elsewhere(GPUS, adapters) is elsewhere


def test_tiers_of_both_kinds_are_tried_in_their_order() -> None:
    template = ReplicaTemplate("worker", gpu_count=1, tiers=(AdapterTier("own"), AdapterTier("cloud", 3)))
    able = candidates(template, [engine("cloud"), node("own")], {}, {"cloud": 2})
    assert [ids(tier) for tier in by_tier(template, able)] == [["own"], ["cloud"]]
    assert ids(candidates(template, [engine("cloud"), node("own")], {}, {"cloud": 3})) == ["own"]


def test_a_replica_of_an_engine_counts_as_having_its_gpus() -> None:
    """It has none of ours: what it waits for, its engine knows."""
    template = ReplicaTemplate("worker", gpu_count=1)
    assert not replica(0, ReplicaState.PENDING, template=template).granted
    assert replica(1, ReplicaState.STARTING, template=template, adapter="r").granted


def test_replicas_on_an_adapter_that_the_endpoint_has_left_stop_first() -> None:
    """Older though they are, and without any tiers: so an endpoint that moves ends where it should be."""
    members = [replica(n, ReplicaState.READY, adapter="old" if n < 2 else "new") for n in range(4)]
    moved = spec(template=ReplicaTemplate("worker", adapter="new"))
    assert {one.adapter for one in plan(2, members, (), of=moved).stop} == {"old"}


TIERED = ReplicaTemplate("worker", tiers=(AdapterTier("primary", 2), AdapterTier("elastic")))


ALL = [adapter("elastic"), adapter("other"), adapter("primary")]


@pytest.mark.parametrize(
    ("own", "order"),
    [
        ({}, ["primary", "elastic"]),
        ({"primary": 1, "elastic": 7}, ["primary", "elastic"]),
        ({"primary": 2}, ["elastic"]),
    ],
)
def test_a_tier_is_filled_before_the_next_and_no_other_adapter_is_used(
    own: dict[str, int], order: list[str]
) -> None:
    able = candidates(TIERED, ALL, {"primary": 50}, own)
    assert [one.id for one in able] == order
    assert [[one.id for one in tier] for tier in by_tier(TIERED, able)] == [[one] for one in order]


def test_an_adapter_that_is_not_heard_of_is_passed_over() -> None:
    able = candidates(TIERED, [adapter("primary", live=False), adapter("elastic")], {})
    assert [one.id for one in able] == ["elastic"]
    assert nobody(TIERED, [adapter("other")]) == "adapter primary, elastic is not connected"


def test_the_last_tier_is_drained_first_and_what_is_in_none_before_it() -> None:
    """Whatever is newer, and also before replicas that have not started on an earlier tier."""
    members = [
        replica(1, ReplicaState.READY, adapter="elastic"),
        replica(2, ReplicaState.READY, adapter="other"),
        replica(3, ReplicaState.STARTING, adapter="primary"),
        replica(4, ReplicaState.READY, adapter="primary"),
    ]
    stopped = [ids(plan(left, members, (), of=spec(template=TIERED)).stop) for left in (3, 2, 1)]
    assert stopped == [["r002"], ["r002", "r001"], ["r002", "r001", "r003"]]


def test_fixed_elastic_pins_its_primary_group_to_the_first_adapter() -> None:
    tiers = (AdapterTier("primary"), AdapterTier("elastic"))
    wish = Wish(
        "tasks", 1, 8, ReplicaTemplate("worker", tiers=tiers), parameters={"primary_worker_groups": 3}
    )
    made = expand("opengris_fixed_elastic", wish, "parameters")
    assert made.template.tiers == (AdapterTier("primary", 3), AdapterTier("elastic"))
    assert made.min_replicas == 3


def test_tiers_exclude_an_adapter_and_name_each_once() -> None:
    both = ReplicaTemplate("worker", adapter="a", tiers=(AdapterTier("b"), AdapterTier("b")))
    fields = [one.field for one in violations(spec(template=both))]
    assert fields == ["endpoint.spec.template.tiers", "endpoint.spec.template.tiers[1].adapter"]
