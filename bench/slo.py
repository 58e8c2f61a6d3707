"""Goals of servers of language models: what policies attain, and what they cost.

python -m bench slo [--hours 1] [--seeds 2] [--cold 30 120] [--explain]

Each policy scales the same servers (`tests.support.llm_model`: continuous batching, prompts and answers of very different
lengths) for the same load, by the engine that scales live endpoints: bursts, and waves, between 1 and 24 requests a second. A
request attains the goals if its first token came within 500 ms, its time in the queue included, and its tokens 40 ms apart in the
mean. `GPU h` is from start to end of each replica, its cold start included.

KEDA: KV cache at 60 %, and 5 waiting for each replica, through the HPA. HPA on the queue: 5 waiting for each replica. Knative: 70
of 100 requests in hand (its defaults). `Knative, told` is told how many requests hold the goals: what nobody knows beforehand.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from bench._serving import Site, bursts, load, waves
from gpuscale.autoscaler.domain.inputs import Aggregation
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.rules.slo import SloRule
from gpuscale.autoscaler.domain.rules.targets import PanicRule, TargetRule, TargetType
from gpuscale.autoscaler.domain.spec import (
    EndpointSpec,
    Pace,
    RateLimit,
    ReplicaSignal,
    ReplicaTemplate,
    Signal,
)
from tests.support.llm_model import Speed

GOALS = {"ttft": 0.5, "itl": 0.04}
SPEEDS = {
    "tokens bind": Speed(),
    "room binds": Speed(step_each=0.0004, kv_tokens=14_000),
}
"""A server whose tokens become slow before it is full, and one that is full before."""
LOADS = {"bursts": bursts, "waves": waves}
HPA_UP = Pace(0.0, (RateLimit(15.0, replicas=4), RateLimit(15.0, percent=100.0)))
HPA_DOWN = Pace(300.0)


def _signal(metric: str, across: Aggregation) -> Signal:
    return Signal(metric, ReplicaSignal(f"llm:{metric}"), across=across)


WAITING = _signal("waiting", Aggregation.SUM)
IN_HAND = _signal("in_hand", Aggregation.SUM)
KV_CACHE = _signal("kv_cache_percent", Aggregation.AVG)


def _spec(
    *rules: Rule, signals: tuple[Signal, ...] = (), tick: float = 15.0, hpa: bool = False
) -> EndpointSpec:
    found = EndpointSpec(1, 24, ReplicaTemplate("llm", gpu_count=1), signals, rules, tick)
    return (
        EndpointSpec(1, 24, found.template, signals, rules, tick, up=HPA_UP, down=HPA_DOWN) if hpa else found
    )


def _policies(speed: Speed) -> dict[str, EndpointSpec]:
    told = max(1, min(speed.batch, int((GOALS["itl"] - speed.step_base) / speed.step_each)))
    queue = Rule("queue", "waiting", TargetRule(5.0))
    cache = Rule("cache", "kv_cache_percent", TargetRule(60.0, TargetType.VALUE))
    return {
        "slo": _spec(Rule("goal", "", SloRule(**GOALS)), tick=5.0),
        "KEDA, KV 60 % and queue": _spec(cache, queue, signals=(KV_CACHE, WAITING), hpa=True),
        "HPA on the queue": _spec(queue, signals=(WAITING,), hpa=True),
        "Knative": _spec(Rule("panic", "in_hand", PanicRule(100.0)), signals=(IN_HAND,), tick=2.0),
        "Knative, told": _spec(
            Rule("panic", "in_hand", PanicRule(float(told))), signals=(IN_HAND,), tick=2.0
        ),
    }


def main() -> None:
    """Run every policy on every load, and print what each attains."""
    options = _options(sys.argv[1:])
    for speed_name, speed in SPEEDS.items():
        for load_name, shape in LOADS.items():
            print(f"\n{load_name}, {speed_name}")
            print(f"{'policy':<26}" + "".join(f"{f'cold start {one:g} s':>26}" for one in options.cold))
            print(f"{'':<26}" + f"{'attained %':>12}{'GPU h':>7}{'moves':>7}" * len(options.cold), flush=True)
            for name, spec in _policies(speed).items():
                if options.policy and name not in options.policy:
                    continue
                cells, began = "", time.process_time()
                for cold in options.cold:
                    found = []
                    for seed in range(options.first_seed, options.first_seed + options.seeds):
                        dice, seconds = random.Random(seed), options.hours * 3600
                        asks = list(load(shape(dice, seconds), seconds, dice))
                        site = Site(spec, speed, cold, asks)
                        found.append(site.run(GOALS))
                        if options.explain and name == "slo":
                            print("\n".join(site.text))
                    mean = [
                        statistics.fmean(getattr(one, what) for one in found)
                        for what in ("attained", "hours", "changes")
                    ]
                    cells += f"{mean[0]:>12.1f}{mean[1]:>7.2f}{mean[2]:>7.0f}"
                print(f"{name:<26}{cells}   ({time.process_time() - began:.0f} s)", flush=True)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench slo")
    add = parser.add_argument
    add("--hours", type=float, default=1.0, help="length of a load")
    add("--seeds", type=int, default=2, help="loads of each shape; the means are shown")
    add("--first-seed", type=int, default=1000, help="the seed of the first")
    add("--cold", type=float, nargs="+", default=[30.0, 120.0], help="seconds that a replica takes to start")
    add("--policy", nargs="*", help="names of policies; all of them when not given")
    add("--explain", action="store_true", help="what the slo rule says at each evaluation")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
