"""Adapters in tiers: the first until it is full, then the next, and the last one drained first."""

import pytest

from gpuscale.autoscaler.domain.planning import AdapterFacts, by_tier, candidates, nobody, plan
from gpuscale.autoscaler.domain.presets import Wish, expand
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale.autoscaler.domain.spec import AdapterTier, ReplicaTemplate
from gpuscale.autoscaler.domain.validate import violations
from tests.support.autoscaler_values import replica, spec

TIERED = ReplicaTemplate("worker", tiers=(AdapterTier("primary", 2), AdapterTier("elastic")))


def adapter(name: str, *, live: bool = True, node: str = "n") -> AdapterFacts:
    return AdapterFacts(name, "process", node, frozenset({"worker"}), 0, live)


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
    stopped = [[one.id for one in plan(left, members, (), spec(template=TIERED)).stop] for left in (3, 2, 1)]
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
