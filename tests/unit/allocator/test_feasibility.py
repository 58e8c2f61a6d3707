"""Each reason that keeps a GPU out, at its boundary, and which one is named when several apply."""

import pytest

from gpuscale.allocator.feasibility import Obstacle, obstacle
from gpuscale.allocator.model import Gpu, NodeState
from tests.support.allocator_values import NOW, ask, gpu, node


def found(one: Gpu, wish=None, *, held=(), state: NodeState = NodeState.ONLINE, now: float = NOW):
    """What stands in the way of the wish on a node that holds the one GPU."""
    return obstacle(node("n0", one, state=state), one, held, wish or ask(), now)


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
    seen = []
    worst = gpu("GPU-a", free=1, utilization=90.0, trouble="LOST", fresh_until=NOW - 1)
    wish = ask(memory=2, utilization=50, nodes=["other"])
    cures = [
        lambda: found(worst, wish, held={"GPU-a"}, state=NodeState.OFFLINE),
        lambda: found(worst, ask(memory=2, utilization=50), held={"GPU-a"}, state=NodeState.OFFLINE),
        lambda: found(worst, ask(memory=2, utilization=50), held={"GPU-a"}),
        lambda: found(gpu("GPU-a", free=1, utilization=90.0, trouble="LOST"), held={"GPU-a"}),
        lambda: found(gpu("GPU-a", free=1, utilization=90.0), held={"GPU-a"}),
        lambda: found(gpu(free=None, utilization=None), ask(memory=2, utilization=50)),
        lambda: found(gpu(free=1, utilization=None), ask(memory=2, utilization=50)),
        lambda: found(gpu(utilization=None), ask(memory=2, utilization=50)),
        lambda: found(gpu(utilization=90.0), ask(memory=2, utilization=50)),
    ]
    seen = [cure() for cure in cures]
    assert seen == list(Obstacle)
