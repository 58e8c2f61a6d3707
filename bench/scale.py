"""What a fleet of a million GPUs asks of its services, and what it costs to split it into pools with an allocator each.

python -m bench scale [--gpus 1000000] [--seeds 1] [--nodes NODES.csv --pods PODS.csv]

Load: by Little's law, from the mean life of a reservation and the length of its lease; times the CPU that each thing was
measured to cost (docs/benchmarks.md). Split: nodes with 8 GPUs, asks for 1 to 64 whole GPUs, until as many GPUs were
asked for as there are, and under churn at 95 % offered load; best fit in a pool. With the openb files, which
GPUSCALE_TRACES can name too: the real placer on real nodes that are dealt out to pools by chance. A simulation: nothing
here was run at that size.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from bench._pools import Pool, Router, Routing, Taken
from bench._replay import Cluster
from bench._traces import Trace, demand, read_asks, read_nodes
from gpuscale.allocator.domain.model import Policy

PER_NODE = 8
SIZES, WEIGHTS = (1, 2, 4, 8, 16, 64), (60, 15, 12, 10, 2, 1)
"""GPUs of an ask, and how often each comes in a hundred."""
MEAN_SIZE = sum(size * weight for size, weight in zip(SIZES, WEIGHTS, strict=True)) / sum(WEIGHTS)
LIFE, TTL, USE = 3600.0, 300.0, 0.9
"""Mean life of a reservation and length of its lease in seconds; share of the GPUs that is held."""
OFFERED = 0.95
RENEWALS_A_LEASE = 3
RESERVE_US, RENEW_US, REPORT_US, SAMPLE_US = 695, 457, 20, 228
"""CPU of a Reserve or Release, of a renewal (as a read: it shares its commit), of a busy node's report at the
allocator, and of a sample at the fleet with history and health: docs/benchmarks.md, on two slow cores."""
ROUTINGS = {
    "any pool": Routing(1, 1),
    "emptier of two": Routing(2, 1),
    "the same by figures 1 s old, then three more": Routing(2, 5, refresh=100),
}
SPLITS = (1, 8, 32, 128)
TRACE_SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Load:
    """What one pool asks of its services, each second; shares are of a core."""

    grants: float
    renewals: float
    reports: float
    allocator: float
    fleet: float


def load(gpus: int) -> Load:
    """The load of a pool with so many GPUs, each node reporting once a second."""
    reservations = gpus * USE / MEAN_SIZE
    grants, renewals, reports = reservations / LIFE, reservations * RENEWALS_A_LEASE / TTL, gpus / PER_NODE
    allocator = (2 * grants * RESERVE_US + renewals * RENEW_US + reports * REPORT_US) / 1e6
    return Load(grants, renewals, reports, allocator, reports * SAMPLE_US / 1e6)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a split did, in per cent; `busiest` is the calls of the busiest pool by those of the mean."""

    filled: float
    refused: float
    busiest: float


def fill(gpus: int, split: int, routing: Routing, seed: int) -> Outcome:
    """Asks come until as many GPUs were asked for as there are; nothing ends."""
    chance = random.Random(seed)
    pools = _pools(gpus, split)
    router = Router(pools, routing, random.Random(seed + 1))
    asked = refused = arrivals = 0
    while asked < gpus:
        [count] = chance.choices(SIZES, WEIGHTS)
        asked += count
        arrivals += 1
        refused += router.place(count) is None
    free = sum(pool.free for pool in pools)
    return Outcome(100 * (1 - free / gpus), 100 * refused / arrivals, _busiest(router))


def churn(gpus: int, split: int, routing: Routing, seed: int) -> Outcome:
    """Poisson arrivals and exponential lives at 95 % offered load, from the state it comes to, for one life."""
    chance = random.Random(seed)
    pools = _pools(gpus, split)
    router = Router(pools, routing, random.Random(seed + 1))
    rate = OFFERED * gpus / MEAN_SIZE
    ends: list[tuple[float, int, Taken]] = []
    begun = -round(rate)
    now, refused, arrivals, held = 0.0, 0, begun, 0.0
    while now < 1.0:
        # As many as there would be, all at once; how long each has run already changes nothing for what it has left.
        now += chance.expovariate(rate) if arrivals >= 0 else 0.0
        while ends and ends[0][0] <= now:
            _, pool, taken = heapq.heappop(ends)
            pools[pool].give_back(taken)
        found = router.place(chance.choices(SIZES, WEIGHTS)[0])
        if found is not None:
            heapq.heappush(ends, (now + chance.expovariate(1.0), *found))
        if arrivals >= 0:
            refused += found is None
            held += 1 - sum(pool.free for pool in pools) / gpus if arrivals % 1000 == 0 else 0.0
        arrivals += 1
    return Outcome(100 * held / -(-arrivals // 1000), 100 * refused / arrivals, _busiest(router))


def split_trace(trace: Trace, split: int, seed: int) -> float:
    """Per cent of the GPUs that `pack` fills when the nodes are dealt out to pools, at 100 % arrival.

    A request goes to the pool with the least of its GPUs held, then to the others in that order: the best that a router
    can do that knows everything.
    """
    chance = random.Random(seed)
    nodes = list(trace.nodes)
    chance.shuffle(nodes)
    traces = [Trace(trace.name, tuple(nodes[start::split]), trace.asks) for start in range(split)]
    clusters = [Cluster(one, Policy.PACK, seed) for one in traces]
    held = [0] * split
    for ask in trace.arrivals(Policy.PACK, seed, 1.0):
        for one in sorted(range(split), key=lambda one: held[one] / traces[one].capacity):
            if clusters[one].take(ask) is not None:
                held[one] += demand(ask)
                break
    return 100 * sum(held) / trace.capacity


def main() -> None:
    """Print the tables."""
    options = _options(sys.argv[1:])
    print(f"{options.gpus:,} GPUs, {PER_NODE} a node, {MEAN_SIZE:.1f} a reservation; one pool's load:")
    print(
        f"{'pools':>6} {'GPUs':>10} {'grants/s':>9} {'renewals/s':>11} {'reports/s':>10} {'allocator':>10} {'fleet':>7}"
    )
    for split in SPLITS:
        one = load(options.gpus // split)
        shares = f"{one.allocator:>9.0%} {one.fleet:>8.0%}"
        print(
            f"{split:>6} {options.gpus // split:>10,} {one.grants:>9.1f} {one.renewals:>11.0f} {one.reports:>10,.0f} {shares}"
        )
    for name, play in (("fill, 100 % asked for", fill), ("churn, 95 % offered", churn)):
        print(
            f"\n{name}\n{'pools':>6} {'routing':<45} {'filled %':>9} {'refused %':>10} {'busiest':>8}",
            flush=True,
        )
        for split in SPLITS:
            for words, routing in ROUTINGS.items() if split > 1 else [("one pool", Routing(1, 1))]:
                found = [play(options.gpus, split, routing, seed) for seed in range(options.seeds)]
                filled, refused, busiest = (
                    statistics.mean(getattr(one, field) for one in found)
                    for field in ("filled", "refused", "busiest")
                )
                print(f"{split:>6} {words:<45} {filled:>9.2f} {refused:>10.3f} {busiest:>8.2f}", flush=True)
    if options.nodes.exists() and options.pods.exists():
        _trace_table(Trace("openb", read_nodes(options.nodes), read_asks(options.pods)), options.seeds)
    else:
        print("\nno openb files here: name them by --nodes and --pods, or their folder by GPUSCALE_TRACES")


def _trace_table(trace: Trace, seeds: int) -> None:
    print(
        f"\nopenb, {len(trace.nodes)} nodes dealt out to pools, `pack`\n{'pools':>6} {'filled %':>9}",
        flush=True,
    )
    for split in TRACE_SPLITS:
        filled = statistics.mean(split_trace(trace, split, seed) for seed in range(seeds))
        print(f"{split:>6} {filled:>9.2f}", flush=True)


def _pools(gpus: int, split: int) -> list[Pool]:
    return [Pool(gpus // PER_NODE // split, PER_NODE) for _ in range(split)]


def _busiest(router: Router) -> float:
    return max(router.calls) * len(router.calls) / max(1, sum(router.calls))


def _options(argv: list[str]) -> argparse.Namespace:
    folder = Path(os.environ.get("GPUSCALE_TRACES", "."))
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.add_argument("--gpus", type=int, default=1_000_000, help="a multiple of 1024")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--nodes", type=Path, default=folder / "openb_node_list_gpu_node.csv")
    parser.add_argument("--pods", type=Path, default=folder / "openb_pod_list_default.csv")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
