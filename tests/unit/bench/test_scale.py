"""The simulation of a split fleet: no GPU twice, none lost, and what the split costs goes the way it must."""

import random

import pytest

from bench._pools import Pool, Router, Routing
from bench.scale import Outcome, churn, fill, load

GPUS = 8 * 64
BEST = Routing(2, 8)


def test_best_fit_takes_the_fullest_node_that_has_room() -> None:
    pool = Pool(2, 8)
    assert pool.take(5) is not None
    [(fuller, _)] = pool.take(2) or []
    [(other, _)] = pool.take(8) or []
    assert fuller != other
    assert pool.take(2) is None
    assert pool.take(1) == [(fuller, 1)]
    assert pool.free == 0


def test_an_ask_for_more_than_a_node_takes_whole_nodes_or_nothing() -> None:
    pool = Pool(3, 8)
    assert pool.take(20) is not None
    assert pool.free == 4
    assert pool.take(8) is None
    assert Pool(2, 8).take(24) is None
    refused = Pool(1, 8)
    assert refused.take(12) is None
    assert refused.free == 8


@pytest.mark.parametrize("seed", range(5))
def test_no_gpu_is_given_twice_and_all_come_back(seed: int) -> None:
    chance = random.Random(seed)
    pool, held = Pool(16, 8), list[list[tuple[int, int]]]()
    for _ in range(2000):
        if chance.random() < 0.5 and held:
            pool.give_back(held.pop(chance.randrange(len(held))))
        elif (taken := pool.take(chance.choice((1, 2, 3, 8, 16, 20)))) is not None:
            held.append(taken)
        by_node = dict.fromkeys(range(16), 0)
        for node, many in (pair for taken in held for pair in taken):
            by_node[node] += many
        assert max(by_node.values()) <= 8
        assert pool.free == 16 * 8 - sum(by_node.values())
    for taken in held:
        pool.give_back(taken)
    assert pool.take(16 * 8) is not None


def test_the_emptier_pool_is_asked_first_and_no_more_than_are_to_be_tried() -> None:
    pools = [Pool(1, 8), Pool(2, 8)]
    router = Router(pools, Routing(2, 2), random.Random(1))
    assert [(router.place(8) or (None,))[0] for _ in range(4)] == [1, 0, 1, None] or pools[1].free == 0
    assert router.place(1) is None
    once = Router([Pool(0, 8), Pool(0, 8)], Routing(2, 1), random.Random(1))
    assert once.place(1) is None
    assert sum(once.calls) == 1


def test_figures_are_learned_anew_only_so_often() -> None:
    pools = [Pool(4, 8), Pool(3, 8)]
    stale = Router(pools, Routing(2, 1, refresh=3), random.Random(1))
    assert [(stale.place(8) or (None,))[0] for _ in range(3)] == [0, 0, 0]
    assert (stale.place(8) or (None,))[0] == 1


def test_one_pool_is_as_good_as_any_split_and_a_better_router_loses_less() -> None:
    def mean(split: int, routing: Routing) -> float:
        return sum(fill(GPUS, split, routing, seed).filled for seed in range(8)) / 8

    assert mean(1, Routing(1, 1)) >= mean(8, BEST) > mean(8, Routing(1, 1))


def test_churn_holds_what_is_offered_and_turns_the_rest_away() -> None:
    found = churn(8 * GPUS, 1, Routing(1, 1), 1)
    assert isinstance(found, Outcome)
    assert 90 < found.filled < 100
    assert 0 < found.refused < 10
    assert found.busiest == 1.0


def test_load_is_in_proportion_to_the_gpus() -> None:
    """Little's law: what is held, by how long it is held."""
    small, large = load(1000), load(100_000)
    assert large.grants == pytest.approx(100 * small.grants)
    assert large.reports == 12_500
    assert large.renewals == pytest.approx(large.grants * 36)
    assert large.allocator == pytest.approx(100 * small.allocator)
