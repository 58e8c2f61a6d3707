"""Each reason that keeps a GPU out, at its boundary, and which one is named when several apply."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import Ask, Gpu, NodeState
from gpuscale.allocator.placing.constraints import Obstacle
from tests.support.allocator_values import MIB, NOW, ask, gpu, node, reserved
from tests.support.placing import held_whole, placer, reservation

NONE: frozenset[str] = frozenset()


def found(
    one: Gpu, wish: Ask | None = None, *, held=(), state: NodeState = NodeState.ONLINE, now: float = NOW
) -> Obstacle | None:
    """What stands in the way of the wish on a node that holds the one GPU."""
    nodes = [node("n0", one, state=state)]
    (seen,) = placer(nodes, held_whole(nodes, held)).explain(wish or ask(), now).nodes[0].gpus
    return seen.obstacle


def test_free_memory_equal_to_the_minimum_is_enough() -> None:
    assert found(gpu(free=8000), ask(memory=8000)) is None
    assert found(gpu(free=7999), ask(memory=8000)) is Obstacle.MEMORY_BELOW_MIN


def test_utilization_must_be_below_the_limit_and_a_limit_of_100_admits_all() -> None:
    assert found(gpu(utilization=49.9), ask(utilization=50)) is None
    assert found(gpu(utilization=50.0), ask(utilization=50)) is Obstacle.UTILIZATION_TOO_HIGH
    assert found(gpu(utilization=100.0), ask(utilization=99.9)) is Obstacle.UTILIZATION_TOO_HIGH
    assert found(gpu(utilization=100.0), ask(utilization=100)) is None


def test_unknown_utilization_passes_only_when_the_ask_allows_it() -> None:
    assert found(gpu(utilization=None), ask(utilization=50)) is Obstacle.UTILIZATION_UNKNOWN
    assert found(gpu(utilization=None), ask(utilization=100)) is Obstacle.UTILIZATION_UNKNOWN
    assert found(gpu(utilization=None), ask(utilization=50, unknown=True)) is None


@pytest.mark.parametrize("reading", [{"free": None}, {"total": None}])
def test_unknown_memory_is_never_free_memory(reading: dict[str, None]) -> None:
    assert found(gpu(**reading), ask(memory=0)) is Obstacle.MEMORY_UNKNOWN


def test_readings_count_until_they_are_stale() -> None:
    assert found(gpu(fresh_until=NOW + 3), now=NOW + 3) is None
    assert found(gpu(fresh_until=NOW + 3), now=NOW + 3.1) is Obstacle.STALE


def test_a_node_that_is_not_online_has_nothing_free() -> None:
    assert found(gpu(), state=NodeState.STALE) is Obstacle.STALE
    assert found(gpu(), state=NodeState.OFFLINE) is Obstacle.NODE_NOT_ONLINE


def test_held_troubled_and_unselected_gpus_are_out() -> None:
    assert found(gpu("GPU-a"), held={"GPU-a"}) is Obstacle.HELD
    assert found(gpu(trouble="HUNG")) is Obstacle.GPU_NOT_OK
    assert found(gpu(), ask(nodes=["other"])) is Obstacle.NODE_NOT_SELECTED


def test_the_first_reason_in_the_documented_order_is_named() -> None:
    """Take the worst GPU there can be and cure it step by step: the reasons come in their order."""
    sick = replace(
        gpu("GPU-a", free=None, utilization=None, trouble="LOST", quarantine="XID 79", fresh_until=NOW - 1),
        mig_profile="1g",
    )
    one = node("n0", sick, state=NodeState.OFFLINE)
    use = held_whole([one], {"GPU-a"})
    use.hold(reservation([reserved("GPU-b")], name="other", labels={"job": "x"}))
    wish = replace(
        ask(memory=2, utilization=50, nodes=["other"]),
        node_labels=(("zone", "a"),),
        excluded_gpus=frozenset({"gpu-a"}),
        models=("A100",),
        apart_from=(("job", "x"),),
        cpu_milli=1,
        host_memory_bytes=1,
    )
    cordons = frozenset({"gpu-a"})
    seen: list[Obstacle | None] = []

    def look() -> None:
        seen.append(placer([one], use, cordons).explain(wish, NOW).nodes[0].gpus[0].obstacle)

    look()
    for field, value in (("nodes", NONE), ("node_labels", ()), ("excluded_gpus", NONE), ("models", ())):
        wish = replace(wish, **{field: value})
        look()
    for fields in (
        {"mig_profile": ""},
        {"state": NodeState.ONLINE},
        {"fresh_until": NOW},
        {"trouble": ""},
        {"quarantine": ""},
    ):
        state = fields.pop("state", one.state)
        sick = replace(sick, **fields)
        one = replace(one, state=state, gpus=(sick,))
        look()
    cordons = NONE
    look()
    wish = replace(wish, apart_from=())
    look()
    use.free("r-GPU-a")
    look()
    for field in ("cpu_milli", "host_memory_bytes"):
        wish = replace(wish, **{field: 0})
        look()
    for field, value in (
        ("memory_free_bytes", 1),
        ("memory_free_bytes", 2 * MIB),
        ("utilization_percent", 90.0),
    ):
        one = replace(one, gpus=(sick := replace(sick, **{field: value}),))
        look()
    assert seen == list(Obstacle)
