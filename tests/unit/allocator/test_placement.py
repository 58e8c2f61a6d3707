"""Which GPUs are picked: the best node, its best GPUs, ties by rank and index, all of one node or none."""

import itertools

import pytest

from gpuscale.allocator.domain.model import Ask, Gpu, Node, Pick, Weights
from tests.support.allocator_values import MIB, NOW, ask, gpu, node, plain_node
from tests.support.placing import place


def picked(nodes: list[Node], wish: Ask, held=()) -> list[str]:
    answer = place(nodes, held, wish, NOW)
    assert isinstance(answer, Pick), answer
    return [one.uuid for one in answer.gpus]


def test_the_seeds_example_picks_the_best_four_in_the_order_of_their_scores() -> None:
    """Eight GPUs, four wanted with 10,000 MiB: the freest and idlest first."""
    frees = [9_000, 30_000, 60_000, 50_000, 5_000, 40_000, 20_000, 10_000]
    gpus = [gpu(f"g{i}", index=i, free=free, utilization=10) for i, free in enumerate(frees)]
    assert picked([node("n0", *gpus)], ask(4, memory=10_000)) == ["g2", "g3", "g5", "g1"]


def test_equal_gpus_go_by_index_and_equal_nodes_by_rank() -> None:
    nodes = [plain_node("late", 4, rank=1), plain_node("early", 4, rank=0)]
    assert picked(nodes, ask(2)) == ["early-0", "early-1"]


def test_shuffled_input_gives_the_same_answer() -> None:
    gpus = [gpu(f"g{i}", index=i, free=free) for i, free in enumerate([10, 30, 30, 20])]
    others = [gpu(f"h{i}", index=i, free=free) for i, free in enumerate([30, 10, 20, 30])]
    answers = set()
    for shuffled, reverse in itertools.product(itertools.permutations(gpus), [False, True]):
        nodes = [node("a", *shuffled, rank=0), node("b", *reversed(others), rank=1)]
        answers.add(tuple(picked(nodes[::-1] if reverse else nodes, ask(2))))
    assert answers == {("g1", "g2")}


def test_a_node_is_as_good_as_the_mean_of_its_best() -> None:
    """One splendid GPU does not make up for a poor second one; a third, worse one does not count."""
    mixed = node("mixed", gpu("m0", free=80_000), gpu("m1", index=1, free=10_000), rank=0)
    even = node(
        "even", gpu("e0", free=50_000), gpu("e1", index=1, free=50_000), gpu("e2", index=2, free=0), rank=1
    )
    assert picked([mixed, even], ask(2)) == ["e0", "e1"]
    assert picked([mixed, even], ask(1)) == ["m0"]


def test_all_gpus_come_from_one_node_or_there_are_none() -> None:
    nodes = [plain_node("a", 2), plain_node("b", 2, rank=1)]
    assert not isinstance(place(nodes, (), ask(3), NOW), Pick)
    assert len(picked(nodes, ask(2))) == 2


def test_held_gpus_are_passed_over() -> None:
    assert picked([plain_node("a", 4)], ask(2), held={"a-0", "a-2"}) == ["a-1", "a-3"]


def test_weights_decide_between_memory_and_idleness() -> None:
    full_but_idle: Gpu = gpu("idle", index=0, free=10_000, utilization=0)
    free_but_busy: Gpu = gpu("busy", index=1, free=80_000, utilization=90)
    nodes = [node("n0", full_but_idle, free_but_busy)]
    wish = Ask(1, 0, 100.0, weights=Weights(memory=0.0, utilization=1.0))
    assert picked(nodes, wish) == ["idle"]
    assert picked(nodes, Ask(1, 0, 100.0)) == ["busy"]


def test_a_pick_tells_what_it_picked() -> None:
    answer = place([node("n0", gpu("g0", index=3))], (), ask(), NOW)
    assert isinstance(answer, Pick)
    (one,) = answer.gpus
    assert (one.node, one.uuid, one.index, one.model, one.simulated) == ("n0", "g0", 3, "Test GPU", True)
    assert answer.mean_score == one.score.total == 1.0


@pytest.mark.parametrize("count", [1, 5, 8])
def test_a_minimum_is_met_by_every_gpu(count: int) -> None:
    gpus = [gpu(f"g{i}", index=i, free=1000 * i) for i in range(12)]
    answer = place([node("n0", *gpus)], (), ask(count, memory=4000), NOW)
    assert isinstance(answer, Pick)
    by_uuid = {one.uuid: one for one in gpus}
    assert all((by_uuid[one.uuid].memory_free_bytes or 0) >= 4000 * MIB for one in answer.gpus)
