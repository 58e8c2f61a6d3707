"""How many asks for four GPUs or more are turned away with moves of what runs, and how long a plan takes.

python -m bench rebalance [--nodes NODES.csv --pods PODS.csv] [--seeds 2] [--movable 1.0 0.5]

Churn as in `placement` (95 % offered load, mean lifetime 7.2 hours as in openb), policy `pack`. An ask that does not fit gets a
plan; its moves are made if as many are left of those of an hour. Nothing moves again within an hour. Plans: 10,000 nodes with 10
GPUs, full but for a GPU here and there, asked for eight of one node. Traces: see `placement`.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from bench._replay import Cluster
from bench._traces import Trace, demand, made_up, read_asks, read_nodes, with_policy
from bench.placement import FLEET, MEASURED, OFFERED, WARM_UP
from gpuscale.allocator.domain.model import Ask, Policy
from gpuscale.allocator.placing.rebalance import MovePlan

LIFE_HOURS = 7.2
RATES = (0, 10, 60, 600)
REST_HOURS = 1.0
PLANS = 40


def main() -> None:
    """Measure what the arguments ask for."""
    options = _options(sys.argv[1:])
    _plans()
    if not options.nodes.exists() or not options.pods.exists():
        print("no traces here: name them by --nodes and --pods, or their folder by GPUSCALE_TRACES")
        return
    trace = Trace("openb", read_nodes(options.nodes), read_asks(options.pods))
    print(
        f"\n{'movable':>8} {'moves/h':>8} {'4+ GPUs turned away':>20} {'demand turned away':>19} {'moves made/h':>13}"
    )
    for movable in options.movable:
        for rate in RATES:
            runs = [churn(trace, seed, rate, movable) for seed in range(options.seeds)]
            large, lost, made = (statistics.fmean(column) for column in zip(*runs, strict=True))
            print(f"{movable:8.0%} {rate:8} {large:18.1f} % {lost:17.2f} % {made:13.1f}", flush=True)


class Movers:
    """What may be moved of a cluster, as an operator allows it: so many moves an hour, and nothing twice in an hour."""

    def __init__(self, cluster: Cluster, rate: int) -> None:
        self._cluster = cluster
        self._rate = rate
        self._made: deque[tuple[float, str]] = deque()
        self.since: dict[str, tuple[float, Ask]] = {}
        self.count = 0

    def take(self, ask: Ask, hour: float) -> str | None:
        """Serve an ask that did not fit, by moves if there are any; its id."""
        while self._made and self._made[0][0] <= hour - REST_HOURS:
            self._made.popleft()
        left = self._rate - sum(1 for _ in self._made)
        if left <= 0:
            return None
        rested = self.since.keys() - {name for _, name in self._made}
        prices = {one: (hour - self.since[one][0]) * demand(self.since[one][1]) for one in rested}
        plan = self._cluster.rebalance(ask, prices, {one: self.since[one][1] for one in rested}, left)
        if not isinstance(plan, MovePlan):
            return None
        for move in plan.moves:
            self._cluster.move(move)
            self._made.append((hour, move.reservation.id))
            self.count += 1
        return self._cluster.take(ask)


def churn(trace: Trace, seed: int, rate: int, movable: float) -> tuple[float, float, float]:
    """Per cent of asks for four GPUs or more, and of the GPU demand, that is turned away; and moves made in an hour."""
    cluster, chance = Cluster(trace, Policy.PACK, seed), random.Random(seed)
    moves = Movers(cluster, rate)
    pace = OFFERED * trace.capacity / statistics.fmean(demand(ask) for ask in trace.asks)
    ends: list[tuple[float, str, Ask]] = []
    now, asked, lost, large, large_lost = 0.0, 0, 0, 0, 0
    while now < WARM_UP + MEASURED:
        now += chance.expovariate(pace)
        while ends and ends[0][0] <= now:
            _, name, ended = heapq.heappop(ends)
            cluster.give_back(name, ended)
            moves.since.pop(name, None)
        ask, life = with_policy(chance.choice(trace.asks), Policy.PACK), chance.expovariate(1.0)
        may_move = chance.random() < movable
        name = cluster.take(ask) or (moves.take(ask, now * LIFE_HOURS) if ask.gpu_count >= 4 else None)
        if name:
            heapq.heappush(ends, (now + life, name, ask))
            if may_move and ask.gpu_count:
                moves.since[name] = (now * LIFE_HOURS, ask)
        if now > WARM_UP:
            asked, lost = asked + demand(ask), lost + (0 if name else demand(ask))
            large, large_lost = large + (ask.gpu_count >= 4), large_lost + (ask.gpu_count >= 4 and not name)
    hours = (WARM_UP + MEASURED) * LIFE_HOURS
    return 100 * large_lost / max(large, 1), 100 * lost / asked, moves.count / hours


def _plans() -> None:
    """Seconds of CPU for a plan on a large fleet on which all of it would have to be looked at."""
    nodes, gpus = FLEET
    one = Ask(1, 0, 100.0, policy=Policy.PACK)
    asks = [Ask(count, 0, 100.0, policy=Policy.PACK) for count in (1, 2)]
    cluster, chance = (
        Cluster(Trace("made up", made_up(nodes, gpus), tuple(asks)), Policy.PACK, 0),
        random.Random(0),
    )
    held: dict[str, tuple[float, Ask]] = {}
    while name := cluster.take(ask := chance.choice(asks)) or cluster.take(ask := one):
        held[name] = chance.expovariate(1 / 3600) * ask.gpu_count, ask
    for name in chance.sample(sorted(held), len(held) // 10):
        cluster.give_back(name, held.pop(name)[1])
    took: dict[bool, list[float]] = {True: [], False: []}
    for count in (8, 10) * (PLANS // 2):
        prices = {name: price for name, (price, _) in held.items() if chance.random() < 0.7}
        start = time.process_time()
        plan = cluster.rebalance(
            Ask(count, 0, 100.0, policy=Policy.PACK),
            prices,
            {name: ask for name, (_, ask) in held.items()},
            100,
        )
        took[isinstance(plan, MovePlan)].append(time.process_time() - start)
    for found, those in took.items():
        if those:
            print(
                f"{nodes} nodes x {gpus} GPUs, {len(held)} reservations: {len(those)} plans {'found' if found else 'not found'},"
                f" median {statistics.median(those):.2f} s of CPU, most {max(those):.2f} s",
                flush=True,
            )


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench rebalance", description="Make room by moves.")
    folder = Path(os.environ.get("GPUSCALE_TRACES", ""))
    parser.add_argument("--nodes", type=Path, default=folder / "openb_node_list_gpu_node.csv")
    parser.add_argument("--pods", type=Path, default=folder / "openb_pod_list_default.csv")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each line")
    parser.add_argument("--movable", type=float, nargs="+", default=[1.0, 0.5], help="parts that may move")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
