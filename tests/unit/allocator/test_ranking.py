"""Ranking: idle, free and measured first; the caller's thresholds, strictly; what is unknown is never idle."""

import itertools
from collections.abc import Collection
from dataclasses import replace

import pytest

from gpuscale.allocator.domain.cordons import Cordon, Cordons, Spot
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Gpu, Node, NodeState
from gpuscale.allocator.domain.ranking import Idleness, RankedNode, best_first, rank
from tests.support.allocator_values import NOW, WALL, gpu, node, order, reserved

ANY = Idleness()


def ranked(
    *nodes: Node, idleness: Idleness = ANY, held: Collection[str] = (), cordoned: Collection[Spot] = ()
) -> list[RankedNode]:
    ledger, cordons = Ledger(), Cordons(Cordon(spot, "", "ann", WALL) for spot in cordoned)
    for uuid in held:
        ledger.grant(order(), [reserved(uuid)], now=NOW, wall=WALL)
    return sorted(rank(nodes, idleness, ledger.use, cordons, NOW), key=best_first)


def with_gpus(name: str, *gpus: Gpu, rank: int = 0) -> Node:
    return node(name, *gpus, rank=rank)


def used(uuid: str, utilization: float | None, memory: float | None = 0.0) -> Gpu:
    """A GPU used that much, both in percent."""
    free = None if memory is None else round(80_000 * (100 - memory) / 100)
    return gpu(uuid, utilization=utilization, free=free)


@pytest.mark.parametrize(
    ("utilization", "memory", "idle"),
    [(29.9, 49.9, 1), (30.0, 0.0, 0), (0.0, 50.0, 0), (None, 0.0, 0), (0.0, None, 0), (100.0, 0.0, 0)],
)
def test_idle_is_strictly_below_both_thresholds(
    utilization: float | None, memory: float | None, idle: int
) -> None:
    [found] = ranked(with_gpus("a", used("g", utilization, memory)))
    assert (found.idle_count, found.sufficient, found.fallback) == (idle, bool(idle), not idle)


def test_thresholds_are_the_callers() -> None:
    """The seed took thresholds as arguments and never used them."""
    busy = with_gpus("a", used("g", 60.0, 70.0))
    assert ranked(busy, idleness=Idleness(61.0, 71.0))[0].idle_count == 1
    assert ranked(busy, idleness=Idleness(60.0, 71.0))[0].idle_count == 0
    assert ranked(busy, idleness=Idleness(61.0, 70.0))[0].idle_count == 0


def test_an_unmeasured_node_never_stands_above_a_measured_one() -> None:
    """In the seed a node without metrics counted all its GPUs as idle, and won."""
    unmeasured = with_gpus("u", *(used(f"u{i}", None, None) for i in range(8)), rank=0)
    busy = with_gpus("b", used("b0", 99.0, 99.0), rank=1)
    idle = with_gpus("i", used("i0", 1.0), rank=2)
    found = ranked(unmeasured, busy, idle)
    assert [one.node.id for one in found] == ["i", "b", "u"]
    assert [one.fallback for one in found] == [False, True, True]
    assert (found[2].mean_utilization_percent, found[2].mean_memory_percent) == (None, None)


@pytest.mark.parametrize("how", ["held", "cordoned", "trouble", "stale", "offline", "old"])
def test_what_cannot_be_had_is_not_idle(how: str) -> None:
    one = gpu("g", trouble="HUNG" if how == "trouble" else "", fresh_until=NOW - 1 if how == "old" else NOW)
    state = {"stale": NodeState.STALE, "offline": NodeState.OFFLINE}.get(how, NodeState.ONLINE)
    held = {"g"} if how == "held" else ()
    cordoned = [Spot("a", "g")] if how == "cordoned" else ()
    [found] = ranked(node("a", one, state=state), held=held, cordoned=cordoned)
    assert (found.idle_count, found.sufficient, found.fallback) == (0, False, True)


def test_enough_goes_before_more_idle_and_that_before_less_used() -> None:
    two = with_gpus("two", used("t0", 20.0), used("t1", 20.0), rank=0)
    three = with_gpus("three", *(used(f"h{i}", 20.0) for i in range(3)), rank=1)
    calm = with_gpus("calm", used("c0", 1.0), used("c1", 1.0), rank=2)
    wanted = Idleness(gpu_count=2)
    assert [one.node.id for one in ranked(two, three, calm, idleness=wanted)] == ["three", "calm", "two"]
    assert [one.sufficient for one in ranked(two, idleness=Idleness(gpu_count=2))] == [True]


def test_nodes_with_too_few_gpus_are_left_out() -> None:
    small, large = with_gpus("s", used("s0", 0.0)), with_gpus("l", used("l0", 99.0), used("l1", 99.0))
    assert [one.node.id for one in ranked(small, large, idleness=Idleness(gpu_count=2))] == ["l"]


def test_of_the_rest_those_one_can_count_on_go_first() -> None:
    offline = node("offline", used("a", 0.0), rank=0, state=NodeState.OFFLINE)
    stale = node("stale", used("b", 0.0), rank=1, state=NodeState.STALE)
    cordoned = node("cordoned", used("c", 0.0), rank=2)
    unmeasured = node("unmeasured", used("d", None), rank=3)
    busy = node("busy", used("e", 99.0), rank=4)
    found = ranked(offline, stale, cordoned, unmeasured, busy, cordoned=[Spot("cordoned")])
    assert [one.node.id for one in found] == ["busy", "unmeasured", "cordoned", "stale", "offline"]
    assert found[2].message == "it is cordoned"


def test_the_order_does_not_depend_on_how_nodes_are_given() -> None:
    nodes = [with_gpus(f"n{i}", used(f"g{i}", 10.0), rank=i) for i in range(4)]
    orders = {tuple(one.node.id for one in ranked(*shuffled)) for shuffled in itertools.permutations(nodes)}
    assert orders == {("n0", "n1", "n2", "n3")}


def test_used_memory_as_reported_goes_before_what_is_not_free() -> None:
    """Memory that the driver keeps for itself is neither free nor in use."""
    reading = replace(gpu("g"), memory_total_bytes=100, memory_free_bytes=40, memory_used_bytes=49)
    [found] = ranked(node("a", reading))
    assert (found.idle_count, found.mean_memory_percent) == (1, 49.0)
