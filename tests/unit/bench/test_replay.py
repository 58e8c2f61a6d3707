"""The cluster of replays: what of it is in use."""

from bench._replay import Cluster
from bench._traces import partitioned, with_policy
from gpuscale.allocator.domain.model import Policy


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
