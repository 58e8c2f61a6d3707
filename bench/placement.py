"""How much of a cluster each placement policy fills, how much it turns away, and how long a decision takes.

python -m bench placement --nodes NODES.csv --pods PODS.csv [...] [--policy pack ...] [--seeds 5] [--published CSV]

Fill: all requests of a trace in random order, then random ones until 130 % of the GPUs were asked for, nothing ends;
fit by CPU, main memory, GPU and model. Churn: Poisson arrivals and exponential lifetimes at 95 % offered load; what
does not fit is lost. Nodes are in an order drawn for each seed. Watts: the same with `pack` at lower loads too, where
watts are read and where they are not. MIG: 16 nodes with 8 GPUs divided at random; needs no trace. Decisions: 10,000
nodes with 10 GPUs, 60 shapes of asks, nine tenths full. Where GPUSCALE_TRACES names a folder with the openb files, that
is where they are looked for.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench._limit import can_solve, most_filled
from bench._replay import POLICIES, Cluster
from bench._traces import (
    Trace,
    demand,
    made_up,
    partitioned,
    read_asks,
    read_nodes,
    read_published,
    with_policy,
    with_watts,
)
from gpuscale.allocator.domain.model import Ask, Policy
from gpuscale.common.runtime.lifecycle import collecting_what_is_new

MARKS = (0.9, 1.0, 1.3)
OFFERED = 0.95
LOADS = (0.3, 0.5, 0.7, OFFERED)
"""Offered loads at which watts are compared."""
DIVIDED = (16, 8)
MIG_POLICIES = (Policy.SPREAD, Policy.BESTFIT, Policy.FIRSTFIT, Policy.PACK)
WARM_UP, MEASURED = 2.5, 5.0
"""Of churn, in mean lifetimes."""
FLEET = (10_000, 10)
SHAPES = 60
DECISIONS = 6_000


def main() -> None:
    """Measure what the arguments ask for."""
    options = _options(sys.argv[1:])
    if options.mig_seeds:
        _mig_table(range(options.mig_seeds))
    if not options.nodes or not options.pods:
        print(
            "no traces here: name them by --nodes and --pods, or their folder by GPUSCALE_TRACES", flush=True
        )
        return
    missing = [str(path) for path in (options.nodes, *options.pods) if not path.exists()]
    if missing:
        sys.exit(f"no such file: {', '.join(missing)}")
    nodes, published = read_nodes(options.nodes), read_published(options.published)
    for path in options.pods:
        trace = Trace(path.stem.removeprefix("openb_pod_list_"), nodes, read_asks(path))
        if options.seeds:
            _fill_table(trace, options.policy, range(options.seeds), published)
        if options.churn_seeds:
            _churn_table(trace, options.policy, range(options.churn_seeds))
        if options.watts_seeds:
            _watts_table(trace, range(options.watts_seeds))
    if not options.no_decisions:
        _decision_table(options.policy)


def fill(trace: Trace, policy: str, seed: int) -> list[float]:
    """Per cent of the GPUs that are allocated at each of MARKS."""
    cluster, marks = Cluster(trace.drawn(seed), policy, seed), deque(MARKS)
    arrived = allocated = 0
    reached: list[float] = []
    for ask in trace.arrivals(_own(policy), seed, MARKS[-1]):
        arrived += demand(ask)
        allocated += demand(ask) if cluster.take(ask) else 0
        while marks and arrived >= marks[0] * trace.capacity:
            marks.popleft()
            reached.append(100 * allocated / trace.capacity)
    return reached


class Churned(NamedTuple):
    """Per cent of the GPU demand that is turned away, and of the requests for four GPUs or more; kW, of what is held; and
    GPUs of which something is held."""

    lost: float
    large_lost: float
    kilowatts: float
    in_use: float


def churn(trace: Trace, policy: str, seed: int, offered: float = OFFERED) -> Churned:
    """What comes of arrivals and departures."""
    cluster, chance = Cluster(trace.drawn(seed), policy, seed), random.Random(seed)
    rate = offered * trace.capacity / statistics.fmean(demand(ask) for ask in trace.asks)
    ends: list[tuple[float, str, Ask]] = []
    now, asked, lost, large, large_lost, drawn, in_use = 0.0, 0, 0, 0, 0, 0.0, 0.0

    def pass_to(moment: float) -> None:
        nonlocal now, drawn, in_use
        took = max(moment, WARM_UP) - max(now, WARM_UP)
        now, drawn, in_use = moment, drawn + cluster.watts * took, in_use + cluster.in_use * took

    while now < WARM_UP + MEASURED:
        arrival = now + chance.expovariate(rate)
        while ends and ends[0][0] <= arrival:
            end, name, ended = heapq.heappop(ends)
            pass_to(end)
            cluster.give_back(name, ended)
        pass_to(arrival)
        ask, life = with_policy(chance.choice(trace.asks), _own(policy)), chance.expovariate(1.0)
        name = cluster.take(ask)
        if name:
            heapq.heappush(ends, (now + life, name, ask))
        if now > WARM_UP:
            asked, lost = asked + demand(ask), lost + (0 if name else demand(ask))
            large, large_lost = large + (ask.gpu_count >= 4), large_lost + (ask.gpu_count >= 4 and not name)
    spent = now - WARM_UP
    return Churned(100 * lost / asked, 100 * large_lost / max(large, 1), drawn / 1000 / spent, in_use / spent)


def fill_bound(trace: Trace, seeds: range) -> list[float]:
    """Per cent of the GPUs that the arrivals of the seeds can fill at most on average at each of MARKS."""
    came = [Counter[Ask]() for _ in MARKS]
    for seed in seeds:
        marks, arrived, so_far = deque(zip(MARKS, came, strict=True)), 0, Counter[Ask]()
        for ask in trace.arrivals(Policy.FIRSTFIT, seed, MARKS[-1]):
            arrived += demand(ask)
            so_far[ask] += 1
            while marks and arrived >= marks[0][0] * trace.capacity:
                marks.popleft()[1].update(so_far)
    means = [{ask: many / len(seeds) for ask, many in one.items()} for one in came]
    return [100 * most_filled(trace.nodes, mean) / trace.capacity for mean in means]


def churn_bound(trace: Trace) -> float:
    """Per cent of the GPU demand that is turned away at least in the long run: who is served holds GPUs for 1 on average."""
    offered = OFFERED * trace.capacity
    rate = offered / sum(map(demand, trace.asks))
    came = {ask: many * rate for ask, many in Counter(trace.asks).items()}
    return max(0.0, 100 * (1 - most_filled(trace.nodes, came) / offered))


def decisions(policy: Policy) -> tuple[float, float, float]:
    """Median and 99th percentile of a decision in ms of CPU, and place and free per second of it."""
    trace = Trace("made up", made_up(*FLEET), tuple(_shapes()))
    cluster, chance = Cluster(trace, policy, 0), random.Random(0)
    held: deque[tuple[str, Ask]] = deque()
    asks = [with_policy(ask, policy) for ask in trace.asks]
    allocated = 0
    while allocated < 0.9 * trace.capacity:
        ask = chance.choice(asks)
        if name := cluster.take(ask):
            held.append((name, ask))
            allocated += demand(ask)
    took: list[float] = []
    with collecting_what_is_new():  # as in every program of ours
        start = time.process_time()
        for _ in range(DECISIONS):
            held.rotate(chance.randrange(64))
            cluster.give_back(*held.popleft())
            ask, before = chance.choice(asks), time.process_time()
            name = cluster.take(ask)
            took.append(1000 * (time.process_time() - before))
            if name:
                held.append((name, ask))
        rate = DECISIONS / (time.process_time() - start)
    return statistics.median(took), statistics.quantiles(took, n=100)[98], rate


def _shapes() -> list[Ask]:
    """Asks of 60 shapes: shares, one, two, four and eight GPUs, each with several amounts of CPU."""
    sizes = [(1, milli) for milli in (200, 300, 500, 700)] + [(count, 1000) for count in (1, 2, 4, 8)]
    found = [
        replace(
            Ask(count, 0, 100.0), gpu_milli=milli, cpu_milli=cpu * count, host_memory_bytes=cpu * 1024 * 1024
        )
        for cpu in (2000, 3000, 4000, 5000, 6000, 8000, 10_000, 12_000)
        for count, milli in sizes
    ]
    return found[:SHAPES]


def _fill_table(
    trace: Trace, policies: Sequence[str], seeds: range, published: dict[tuple[str, str], tuple[float, float]]
) -> None:
    print(
        f"\n{trace.name}: % of GPUs allocated at {', '.join(f'{100 * mark:.0f}' for mark in MARKS)} % arrival"
    )
    print(f"{'policy':10} {'@90':>7} {'@100':>7} {'@130':>7} {'sd':>5}   published @100/@130      seconds")
    for policy in policies:
        start = time.perf_counter()
        runs = [fill(trace, policy, seed) for seed in seeds]
        means = [statistics.fmean(run[mark] for run in runs) for mark in range(len(MARKS))]
        spread = statistics.stdev(run[1] for run in runs) if len(runs) > 1 else 0.0
        known = published.get((trace.name, policy))
        beside = f"{known[0]:.2f} / {known[1]:.2f}" if known else "-"
        took = time.perf_counter() - start
        figures = " ".join(f"{mean:7.2f}" for mean in means)
        print(f"{policy:10} {figures} {spread:5.2f}   {beside:24} {took:7.1f}", flush=True)
    if can_solve():
        print(f"{'bound':10} {' '.join(f'{most:7.2f}' for most in fill_bound(trace, seeds))}", flush=True)


def _churn_table(trace: Trace, policies: Sequence[str], seeds: range) -> None:
    print(f"\n{trace.name}: % turned away at {100 * OFFERED:.0f} % offered load with arrivals and departures")
    print(f"{'policy':10} {'of GPU demand':>14} {'of asks for 4+ GPUs':>20}")
    for policy in policies:
        runs = [churn(trace, policy, seed) for seed in seeds]
        mean = _mean(runs)
        print(f"{policy:10} {mean.lost:14.2f} {mean.large_lost:20.1f}", flush=True)
    if can_solve():
        print(f"{'bound':10} {churn_bound(trace):14.2f}", flush=True)


def _watts_table(trace: Trace, seeds: range) -> None:
    """Work takes as long on each GPU, and draws its power limit; GPUs of which nothing is held draw nothing."""
    print(f"\n{trace.name}: kW of the GPUs in use by pack, and % of GPU demand turned away")
    print(f"{'load %':>6} {'limits unread':>16} {'read':>16} {'kW less %':>10}")
    for load in LOADS:
        kilowatts, figures = list[float](), list[str]()
        for one in (trace, with_watts(trace)):
            mean = _mean([churn(one, Policy.PACK, seed, load) for seed in seeds])
            kilowatts.append(mean.kilowatts)
            figures.append(f"{mean.kilowatts:9.1f} {mean.lost:6.2f}")
        less = 100 - 100 * kilowatts[1] / kilowatts[0]
        print(f"{100 * load:6.0f} {figures[0]:>16} {figures[1]:>16} {less:10.1f}", flush=True)


def _mig_table(seeds: range) -> None:
    """GPUs divided at random, and requests for instances like theirs."""
    nodes, gpus = DIVIDED
    loads = f"{', '.join(f'{100 * load:.0f}' for load in LOADS)} % offered load"
    print(f"\nMIG: of {nodes * gpus} GPUs those without work, and % of instances refused, at {loads}")
    for policy in MIG_POLICIES:
        means = [
            _mean([churn(partitioned(nodes, gpus, seed), policy, seed, load) for seed in seeds])
            for load in LOADS
        ]
        figures = " ".join(f"{nodes * gpus - mean.in_use:9.1f} {mean.lost:5.2f}" for mean in means)
        print(f"{policy:10} {figures}", flush=True)


def _mean(runs: Sequence[Churned]) -> Churned:
    return Churned(*(statistics.fmean(column) for column in zip(*runs, strict=True)))


def _decision_table(policies: Sequence[str]) -> None:
    print(
        f"\ndecisions at {FLEET[0]} nodes x {FLEET[1]} GPUs, {SHAPES} shapes, 90 % full; CPU time, holding included"
    )
    print(f"{'policy':10} {'p50 ms':>8} {'p99 ms':>8} {'place + free /s':>16}")
    for policy in policies:
        if policy != "random":
            median, slow, rate = decisions(Policy(policy))
            print(f"{policy:10} {median:8.3f} {slow:8.3f} {rate:16.0f}", flush=True)


def _own(policy: str) -> Policy:
    return Policy.FIRSTFIT if policy == "random" else Policy(policy)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench placement", description="Compare the placement policies."
    )
    folder = Path(os.environ.get("GPUSCALE_TRACES", "")) if os.environ.get("GPUSCALE_TRACES") else None
    nodes = folder and folder / "openb_node_list_gpu_node.csv"
    pods = [folder / "openb_pod_list_default.csv"] if folder else []
    published = folder and folder / "fgd_published_alloc.csv"
    parser.add_argument("--nodes", type=Path, default=nodes, help="nodes of the trace")
    parser.add_argument(
        "--pods", type=Path, nargs="+", default=pods, help="requests, one file for each workload"
    )
    parser.add_argument("--published", type=Path, default=published, help="published results to print beside")
    parser.add_argument(
        "--policy", nargs="+", choices=POLICIES, default=list(POLICIES), help="all by default"
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of the fill of each policy; 0 for none")
    parser.add_argument(
        "--churn-seeds", type=int, default=3, help="runs of the churn of each policy; 0 for none"
    )
    parser.add_argument("--watts-seeds", type=int, default=1, help="runs of each load for watts; 0 for none")
    parser.add_argument("--mig-seeds", type=int, default=2, help="runs of each load for MIG; 0 for none")
    parser.add_argument("--no-decisions", action="store_true", help="leave out the time of decisions")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
