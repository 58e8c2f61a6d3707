"""The simulation of a split fleet: no GPU twice, none lost, and what the split costs goes the way it must."""

import random

import pytest

from bench._pools import Pool, Routing
from bench.scale import fill, load

GPUS = 8 * 64
BEST = Routing(2, 8)


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


def test_one_pool_is_as_good_as_any_split_and_a_better_router_loses_less() -> None:
    def mean(split: int, routing: Routing) -> float:
        return sum(fill(GPUS, split, routing, seed).filled for seed in range(8)) / 8

    assert mean(1, Routing(1, 1)) >= mean(8, BEST) > mean(8, Routing(1, 1))


def test_load_is_in_proportion_to_the_gpus() -> None:
    """Little's law: what is held, by how long it is held."""
    small, large = load(1000), load(100_000)
    assert large.grants == pytest.approx(100 * small.grants)
    assert large.reports == 12_500
    assert large.renewals == pytest.approx(large.grants * 36)
    assert large.allocator == pytest.approx(100 * small.allocator)
