"""What each scaling policy makes of a workload: waits beyond a goal, GPU hours and flaps, by the engine that scales live.

python -m bench autoscale [--trace FILE.csv ...] [--slots 8] [--goal 5] [--max-replicas 16] [--seeds 3]

Without a trace, and beside it, on made-up workloads: a day's wave, bursts, a step, a spike, and noise. Each with cold
starts of 10 to 60 s (even, seeded). `work alone` is the GPU time of the requests themselves, packed without a gap: no
policy can need less. Traces: CSV with arrival_seconds,service_seconds or t_s,context_tokens,generated_tokens (such as
AzureLLMInferenceTrace_conv of Azure/AzurePublicDataset, CC-BY 4.0); none is part of this project.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuscale.autoscaler.backtest.report import Report, oracle_gpu_hours
from gpuscale.autoscaler.backtest.simulate import run
from gpuscale.autoscaler.backtest.trace import Request, ServiceModel, read_trace
from gpuscale.autoscaler.backtest.world import Setting
from gpuscale.autoscaler.model import ReplicaTemplate
from gpuscale.autoscaler.presets import PRESETS, Wish
from gpuscale.common.errors import GpuscaleError

COLD = (10.0, 60.0)
HOURS = 1.5
ARRIVALS, SERVICE = 4.0, 6.0
"""Of made-up workloads: requests a second, and median seconds of each."""
RATES: dict[str, Callable[[float], float]] = {
    "wave": lambda t: 1 + 0.9 * math.sin(2 * math.pi * t / 2400),
    "bursts": lambda t: 5.0 if int(t / 300) % 5 == 4 else 0.5,
    "step": lambda t: 0.3 if t < 1800 else 2.0,
    "spike": lambda t: 10.0 if 2000 < t < 2100 else 0.4,
    "noise": lambda t: 1.0,
}


def main() -> None:
    """Run every preset on every workload and print a table for each."""
    options = _options(sys.argv[1:])
    loads: dict[str, list[Request]] = {}
    for path in options.trace:
        try:
            with path.open(encoding="utf-8") as lines:
                loads[path.stem] = read_trace(lines, ServiceModel())
        except (OSError, GpuscaleError) as error:
            sys.exit(f"{path}: {error}")
    loads |= {name: _made_up(rate) for name, rate in RATES.items()}
    for name, requests in loads.items():
        _table(name, requests, options)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench autoscale")
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="CSV of requests; may be repeated"
    )
    parser.add_argument("--slots", type=int, default=8, help="requests that a replica serves at a time")
    parser.add_argument("--goal", type=float, default=5.0, help="seconds that a request may wait")
    parser.add_argument("--max-replicas", type=int, default=16, help="replicas, and GPUs, that there are")
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs with other cold starts; the means are shown"
    )
    return parser.parse_args(argv)


def _table(name: str, requests: Sequence[Request], options: argparse.Namespace) -> None:
    work = oracle_gpu_hours(requests, options.slots)
    print(f"\n{name}: {len(requests)} requests, work alone {work:.2f} GPU hours, goal {options.goal:g} s")
    print(
        f"{'policy':<22}{'late %':>8}{'GPU h':>8}{'ratio':>7}{'flaps':>7}{'p95 s':>8}{'p99 s':>8}{'run s':>7}"
    )
    began = time.perf_counter()
    for preset in PRESETS:
        start = time.perf_counter()
        reports = [_report(preset, requests, options, seed) for seed in range(options.seeds)]
        took = (time.perf_counter() - start) / options.seeds
        late, hours, flaps, p95, p99 = (
            statistics.fmean(figures)
            for figures in zip(
                *((r.violation_percent, r.gpu_hours, r.flaps, r.wait_p95, r.wait_p99) for r in reports),
                strict=True,
            )
        )
        print(
            f"{preset:<22}{late:>8.2f}{hours:>8.2f}{hours / work:>7.2f}{flaps:>7.1f}{p95:>8.1f}{p99:>8.1f}{took:>7.2f}"
        )
    print(f"all {len(PRESETS) * options.seeds} runs in {time.perf_counter() - began:.1f} s")


def _report(preset: str, requests: Sequence[Request], options: argparse.Namespace, seed: int) -> Report:
    wish = Wish(
        "queue",
        1,
        options.max_replicas,
        ReplicaTemplate("worker", gpu_count=1),
        slots=options.slots,
        goal=options.goal,
        service_time=statistics.fmean(request.service for request in requests),
    )

    def cold_start(number: int) -> float:
        return random.Random(seed * 1_000_003 + number).uniform(*COLD)

    setting = Setting(options.slots, cold_start, max_gpus=options.max_replicas)
    return run(PRESETS[preset](wish), requests, setting, goal=options.goal)


def _made_up(rate: Callable[[float], float]) -> list[Request]:
    """Poisson arrivals whose rate follows `rate`, with log-normal service times; always the same."""
    dice = random.Random(20_240_101)
    now, found = 0.0, list[Request]()
    while now < HOURS * 3600:
        now += dice.expovariate(ARRIVALS * rate(now))
        found.append(Request(now, dice.lognormvariate(math.log(SERVICE), 0.6)))
    return found


if __name__ == "__main__":
    main()
