"""Which GPUs are picked, and the spread score, which is the seed's to the last bit and shows its parts."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import Ask, Node, ScorePart, Weights
from gpuscale.allocator.placing.policies import UNKNOWN_UTILIZATION
from tests.support.allocator_values import NOW, ask, gpu, node, plain_node
from tests.support.placing import explained, place


def picked(nodes: list[Node], wish: Ask) -> list[str]:
    answer = place(nodes, (), wish, NOW)
    return [one.uuid for one in answer.gpus]


def test_the_seeds_example_picks_the_best_four_in_the_order_of_their_scores() -> None:
    """Eight GPUs, four wanted with 10,000 MiB: the freest and idlest first."""
    frees = [9_000, 30_000, 60_000, 50_000, 5_000, 40_000, 20_000, 10_000]
    gpus = [gpu(f"g{i}", index=i, free=free, utilization=10) for i, free in enumerate(frees)]
    assert picked([node("n0", *gpus)], ask(4, memory=10_000)) == ["g2", "g3", "g5", "g1"]


def test_equal_gpus_go_by_index_and_equal_nodes_by_rank() -> None:
    nodes = [plain_node("late", 4, rank=1), plain_node("early", 4, rank=0)]
    assert picked(nodes, ask(2)) == ["early-0", "early-1"]


def test_a_node_is_as_good_as_the_mean_of_its_best() -> None:
    """One splendid GPU does not make up for a poor second one; a third, worse one does not count."""
    mixed = node("mixed", gpu("m0", free=80_000), gpu("m1", index=1, free=10_000), rank=0)
    even = node(
        "even", gpu("e0", free=50_000), gpu("e1", index=1, free=50_000), gpu("e2", index=2, free=0), rank=1
    )
    assert picked([mixed, even], ask(2)) == ["e0", "e1"]
    assert picked([mixed, even], ask(1)) == ["m0"]


def test_the_weights_of_an_ask_choose() -> None:
    nodes = [node("n0", gpu("idle", free=10_000), gpu("free", index=1, utilization=40.0))]
    for weights, chosen in ((Weights(0.0, 1.0), "idle"), (Weights(1.0, 0.0), "free")):
        assert picked(nodes, replace(ask(), weights=weights)) == [chosen]


@pytest.mark.parametrize(
    ("free_mib", "total_mib", "utilization", "expected"),
    [
        (80_000, 80_000, 0, 1.0),
        (0, 80_000, 100, 0.0),
        (80_000, 80_000, 100, 0.6),
        (0, 80_000, 0, 0.4),
        (40_000, 80_000, 50, 0.5),
        (8_000, 24_576, 49, 0.39931249999999996),
        (24_269, 24_564, 7, 0.9647943331704933),
        (81_051, 81_559, 1, 0.9922628281366863),
        (1, 3, 33, 0.46799999999999997),
        (15_109, 15_360, 13, 0.9381953125),
        (22_731, 81_920, 37, 0.41848681640624996),
    ],
)
def test_the_score_is_the_seeds(free_mib: int, total_mib: int, utilization: int, expected: float) -> None:
    """Vectors computed once from the seed's own words. Equality is exact on purpose: weighting before dividing
    changes the last bit of two of them.
    """
    scored = explained(gpu(free=free_mib, total=total_mib, utilization=utilization), Weights())
    assert scored.total == expected
    memory_score = free_mib / total_mib
    utilization_score = (100 - utilization) / 100
    assert scored.total == 0.6 * memory_score + 0.4 * utilization_score


def test_the_parts_and_weights_are_told() -> None:
    scored = explained(gpu(free=20_000, total=80_000, utilization=25.0), Weights(memory=1.0, utilization=2.0))
    assert scored.parts == (ScorePart("memory", 0.25, 1.0), ScorePart("utilization", 0.75, 2.0))
    assert scored.total == 1.75
    assert scored.note == ""


def test_unknown_utilization_earns_nothing_and_is_said() -> None:
    scored = explained(gpu(free=40_000, total=80_000, utilization=None), Weights())
    assert scored.total == 0.3
    assert scored.parts[1] == ScorePart("utilization", None, 0.4)
    assert scored.note == UNKNOWN_UTILIZATION


def test_a_gpu_of_unknown_memory_has_no_score() -> None:
    with pytest.raises(ValueError, match="GPU-a"):
        explained(gpu(free=None), Weights())
