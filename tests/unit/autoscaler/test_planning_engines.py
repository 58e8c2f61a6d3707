"""Adapters whose engine gives out GPUs itself, beside those of nodes whose GPUs are reserved."""

import pytest

from gpuscale.autoscaler.domain.planning import (
    AdapterFacts,
    Capabilities,
    by_tier,
    candidates,
    gpus_elsewhere,
    nobody,
    nodes_of,
    plan,
)
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale.autoscaler.domain.spec import AdapterTier, ReplicaTemplate
from tests.support.autoscaler_values import replica, spec

GPUS = ReplicaTemplate("worker", gpu_count=1)


def node(name: str, *, live: bool = True) -> AdapterFacts:
    return AdapterFacts(name, "process", f"node-{name}", frozenset({"worker"}), 0, live)


def engine(name: str, *, live: bool = True, most: int = 0, bound_to: str = "") -> AdapterFacts:
    gives = Capabilities(gives_gpus=True)
    return AdapterFacts(name, "ray", bound_to, frozenset({"worker"}), most, live, gives)


def ids(adapters: list[AdapterFacts]) -> list[str]:
    return [one.id for one in adapters]


def test_gpus_are_those_of_a_node_or_of_an_engine() -> None:
    nowhere = AdapterFacts("nowhere", "process", "", frozenset({"worker"}), 0, live=True)
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


def test_an_engine_that_runs_as_many_as_it_may_is_no_place() -> None:
    full = engine("r", most=2)
    assert candidates(GPUS, [full], {"r": 2}) == []
    assert "as many replicas as they may" in nobody(GPUS, [full])


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
    assert {one.adapter for one in plan(2, members, (), moved).stop} == {"old"}
