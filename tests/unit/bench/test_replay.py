"""The cluster of replays: in which order its nodes are, and what of it is in use."""

from bench._replay import Cluster
from bench._traces import Trace, made_up, partitioned, with_policy
from gpuscale.allocator.domain.model import Ask, Policy

ONE = with_policy(Ask(1, 0, 100.0), Policy.FIRSTFIT)


def test_ties_go_by_an_order_that_is_drawn_for_each_seed() -> None:
    trace = Trace("made up", made_up(30, 1), (ONE,))
    first = [Cluster(trace.drawn(seed), Policy.FIRSTFIT, seed).take(ONE) for seed in (1, 1, 2, 3)]
    assert first[0] == first[1]
    assert len(set(first)) == 3


def test_a_divided_gpu_is_in_use_as_long_as_one_of_its_instances() -> None:
    trace = partitioned(1, 1, 0)
    cluster, asks = Cluster(trace, Policy.PACK, 0), [with_policy(ask, Policy.PACK) for ask in trace.asks]
    names = [cluster.take(ask) for ask in asks]
    seen = [cluster.in_use]
    for name, ask in zip(names, asks, strict=True):
        assert name
        cluster.give_back(name, ask)
        seen.append(cluster.in_use)
    assert seen == [1] * len(asks) + [0]
