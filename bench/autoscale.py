"""What each scaling policy makes of workloads that nobody fitted it to, by the engine that scales live endpoints.

python -m bench autoscale [--trace FILE.csv ...] [--family NAME ...] [--cold 10 30 60] [--seeds 3] [--tuned] [--told] [--detail]

Every preset as shipped, and our default, over families of made-up workloads and over the traces given, with replicas that
take each of the cold starts. `late %` is the share of requests that waited longer than the goal; `GPU h` is from grant to
release, beside the time of the work itself, packed without a gap: no policy can need less. At the end: where a preset is late
less often than the default and needs less GPU time too. With --tuned each family of policies is searched, as `gpuscalectl
tune` does, on one seed, and what it chose is run on the others: on what it has not seen. With --told the default stands beside a
policy that is told the rate of arrivals, both in terms of the bound of who knows all.

Traces: CSV with arrival_seconds,service_seconds or t_s,context_tokens,generated_tokens (such as AzureLLMInferenceTrace_conv
of Azure/AzurePublicDataset, CC-BY 4.0); none is part of this project.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench._bound import least_gpu_hours
from bench._told import told_gpu_hours
from bench._workloads import FAMILIES, made_up
from gpuscale.autoscaler.backtest.simulate import Report, oracle_gpu_hours, run
from gpuscale.autoscaler.backtest.world import Setting
from gpuscale.autoscaler.domain.presets import PRESETS, Wish
from gpuscale.autoscaler.domain.spec import EndpointSpec, ReplicaTemplate
from gpuscale.client.traces import Request, ServiceModel, read_trace
from gpuscale.client.tuning import Trial, candidates, choose, parse_goal
from gpuscale.common.errors import GpuscaleError

DEFAULT = "gpuscale"
GOALS = (parse_goal("late<=1%"), parse_goal("late:30s"))
"""What `tune` is told with --tuned."""
SHOWN = ("gpuscale", "hpa", "keda", "knative")
"""Presets that stand beside what is tuned."""
SAME = 0.005
"""Shares of GPU hours that differ by less are the same."""
SPEED_POLICIES, SPEED_REQUESTS = 15, 20_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Means of several runs."""

    late: float
    hours: float
    flaps: float

    def beats(self, other: Figures) -> bool:
        """Whether it is better at both, late requests and GPU hours."""
        return self.late < other.late and self.hours < other.hours * (1 - SAME)


Loads = Mapping[str, Sequence[Sequence[Request]]]
"""Workloads by name, one for each seed."""


def main() -> None:
    """Run every preset on every workload and print a table for each."""
    options = _options(sys.argv[1:])
    loads = _loads(options)
    beaten: list[str] = []
    for name, seeds in loads.items():
        found = _table(name, seeds, options)
        beaten += _beaten(name, found)
    print("\nlate less often than the default, for less GPU time:")
    print("\n".join(f"  {line}" for line in beaten) or "  none")
    if options.tuned:
        for name, seeds in loads.items():
            _tuned(name, seeds, options)
    if options.told:
        for name in filter(FAMILIES.__contains__, loads):
            _told(name, loads[name], options)
    _speed(options)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench autoscale")
    add = parser.add_argument
    add("--trace", type=Path, action="append", default=[], help="CSV of requests; may be repeated")
    add("--family", nargs="*", choices=sorted(FAMILIES), help="made-up workloads; all of them when not given")
    add("--preset", nargs="*", choices=sorted(PRESETS), help="policies; all of them when not given")
    add("--slots", type=int, default=8, help="requests that a replica serves at a time")
    add("--goal", type=float, default=5.0, help="seconds that a request may wait")
    add("--max-replicas", type=int, default=16, help="replicas, and GPUs, that there are")
    add(
        "--cold",
        type=float,
        nargs="+",
        default=[10.0, 30.0, 60.0],
        help="seconds that a replica takes to start",
    )
    add("--seeds", type=int, default=3, help="workloads of each family; the means are shown")
    add(
        "--first-seed",
        type=int,
        default=1000,
        help="the seed of the first; smaller ones were used while the default was made",
    )
    add("--tuned", action="store_true", help="search each family of policies too: minutes")
    add("--told", action="store_true", help="beside a policy that is told the rate of arrivals: minutes")
    add("--detail", action="store_true", help="a table for each cold start")
    return parser.parse_args(argv)


def _loads(options: argparse.Namespace) -> dict[str, list[list[Request]]]:
    loads: dict[str, list[list[Request]]] = {}
    for path in options.trace:
        try:
            with path.open(encoding="utf-8") as lines:
                loads[path.stem] = [read_trace(lines, ServiceModel())]
        except (OSError, GpuscaleError) as error:
            sys.exit(f"{path}: {error}")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    families = FAMILIES if options.family is None else options.family
    return loads | {name: [made_up(name, seed) for seed in seeds] for name in families}


def _table(
    name: str, seeds: Sequence[Sequence[Request]], options: argparse.Namespace
) -> dict[tuple[str, float], Figures]:
    """Print what each preset makes of a workload; returns its figures for each cold start."""
    work = statistics.fmean(oracle_gpu_hours(one, options.slots) for one in seeds)
    count = statistics.fmean(map(len, seeds))
    about = f": {FAMILIES[name].about}" if name in FAMILIES else ""
    print(f"\n{name}{about}; {count:.0f} requests, work alone {work:.2f} GPU hours, goal {options.goal:g} s")
    colds = "".join(f"{f'at {cold:g} s':>9}" for cold in options.cold)
    print(f"{'policy':<28}{'late %':>8}{colds}{'GPU h':>8}{'of work':>9}{'flaps':>7}")
    found: dict[tuple[str, float], Figures] = {}
    for preset in options.preset or PRESETS:
        each = [_mean(_reports(preset, {}, seeds, cold, options)) for cold in options.cold]
        found |= {(preset, cold): one for cold, one in zip(options.cold, each, strict=True)}
        _row(preset, each, work)
        if options.detail:
            for cold, one in zip(options.cold, each, strict=True):
                print(
                    f"    at {cold:g} s: late {one.late:.2f} %, {one.hours:.2f} GPU h, {one.flaps:.1f} flaps"
                )
    return found


def _row(name: str, each: Sequence[Figures], work: float) -> None:
    late, hours, flaps = (
        statistics.fmean(getattr(one, field) for one in each) for field in ("late", "hours", "flaps")
    )
    lates = "".join(f"{one.late:>9.2f}" for one in each)
    print(f"{name:<28}{late:>8.2f}{lates}{hours:>8.2f}{hours / work:>9.2f}{flaps:>7.1f}", flush=True)


def _beaten(name: str, found: Mapping[tuple[str, float], Figures]) -> Iterable[str]:
    """Where the default is beaten at both, in words."""
    for (preset, cold), one in found.items():
        own = found.get((DEFAULT, cold))
        if own is not None and one.beats(own):
            yield (
                f"{name} at {cold:g} s: {preset} {one.late:.2f} % {one.hours:.2f} h {one.flaps:.1f} flaps"
                f" (default {own.late:.2f} % {own.hours:.2f} h {own.flaps:.1f})"
            )


def _reports(
    preset: str,
    parameters: Mapping[str, float],
    seeds: Iterable[Sequence[Request]],
    cold: float,
    options: argparse.Namespace,
) -> list[Report]:
    return [_run(_spec(preset, parameters, one, options), one, cold, options) for one in seeds]


def _run(spec: EndpointSpec, requests: Sequence[Request], cold: float, options: argparse.Namespace) -> Report:
    return run(spec, requests, _setting(cold, options), goal=options.goal)


def _setting(cold: float, options: argparse.Namespace) -> Setting:
    return Setting(options.slots, lambda _number: cold, max_gpus=options.max_replicas)


def _spec(
    preset: str, parameters: Mapping[str, float], requests: Sequence[Request], options: argparse.Namespace
) -> EndpointSpec:
    wish = Wish(
        "queue",
        1,
        options.max_replicas,
        ReplicaTemplate("worker", gpu_count=1),
        slots=options.slots,
        goal=options.goal,
        service_time=statistics.fmean(request.service for request in requests),
        parameters=parameters,
    )
    return PRESETS[preset](wish)


def _mean(reports: Sequence[Report]) -> Figures:
    return Figures(
        statistics.fmean(one.violation_percent for one in reports),
        statistics.fmean(one.gpu_hours for one in reports),
        statistics.fmean(one.flap_count for one in reports),
    )


def _tuned(name: str, seeds: Sequence[Sequence[Request]], options: argparse.Namespace) -> None:
    """Print what `tune` chooses on each seed, or the first half of a trace, makes of the next one, beside the bound."""
    halves = [_halves(seeds[0])] if len(seeds) == 1 else list(pairwise(seeds))
    print(f"\n{name}, chosen on what came before; of bound: GPU hours of who knows all, at the same late %")
    for cold in options.cold:
        found: defaultdict[str, list[tuple[Report, float]]] = defaultdict(list)
        for known, later in halves:
            for policy, report in later_reports(_trials(known, cold, options), known, later, cold, options):
                late = report.violation_percent / 100
                least = least_gpu_hours(
                    later, options.slots, cold, late, goal=options.goal, most=options.max_replicas
                )
                found[policy].append((report, report.gpu_hours / least))
        for policy, each in found.items():
            one, bound = _mean([report for report, _ in each]), statistics.fmean(share for _, share in each)
            line = f"{policy:<16} at {cold:g} s {one.late:>8.2f} %{one.hours:>8.2f} h{bound:>8.2f} of bound"
            print(f"{line}{one.flaps:>7.1f} flaps", flush=True)


def _told(name: str, seeds: Sequence[Sequence[Request]], options: argparse.Namespace) -> None:
    """Print GPU hours of the default, and of who is told the rate, in terms of the bound at the default's late %."""
    for cold in options.cold:
        own, told = list[float](), list[float]()
        setting = _setting(cold, options)
        for seed, requests in enumerate(seeds, options.first_seed):
            report = _run(_spec(DEFAULT, {}, requests, options), requests, cold, options)
            late, goal, most = report.violation_percent, options.goal, options.max_replicas
            least = least_gpu_hours(requests, options.slots, cold, late / 100, goal=goal, most=most)
            own.append(report.gpu_hours / least)
            told.append(told_gpu_hours(name, seed, requests, setting, late, goal) / least)
        line = f"{DEFAULT} {statistics.fmean(own):.2f} of bound, told the rate {statistics.fmean(told):.2f}"
        print(f"{name} at {cold:g} s: {line}", flush=True)


def _halves(requests: Sequence[Request]) -> tuple[Sequence[Request], Sequence[Request]]:
    middle = requests[-1].arrival / 2
    cut = bisect_left(requests, middle, key=lambda one: one.arrival)
    return requests[:cut], [Request(one.arrival - middle, one.service) for one in requests[cut:]]


def _trials(known: Sequence[Request], cold: float, options: argparse.Namespace) -> dict[str, Trial]:
    """What each candidate of `tune` makes of a workload."""
    return {
        name: Trial(name, _run(_spec(preset, stated, known, options), known, cold, options).windows)
        for name, preset, stated in candidates(options.goal, options.slots)
    }


def later_reports(
    trials: Mapping[str, Trial],
    known: Sequence[Request],
    later: Sequence[Request],
    cold: float,
    options: argparse.Namespace,
) -> Iterable[tuple[str, Report]]:
    """What presets as shipped, and what each goal chooses, make of the later workload."""
    chosen = {str(goal): choose(list(trials.values()), goal).chosen.name for goal in GOALS}
    policies = {name: (preset, stated) for name, preset, stated in candidates(options.goal, options.slots)}
    for shown, name in [*((one, one) for one in SHOWN), *chosen.items()]:
        preset, stated = policies[name]
        yield shown, _run(_spec(preset, stated, known, options), later, cold, options)


def _speed(options: argparse.Namespace) -> None:
    """Print how long fifteen policies take over 20,000 requests."""
    requests = sorted(
        (one for seed in range(4) for one in made_up("diurnal", seed)), key=lambda one: one.arrival
    )
    requests = requests[:SPEED_REQUESTS]
    names = [name for name, _ in zip(_endless(tuple(PRESETS)), range(SPEED_POLICIES), strict=False)]
    began = time.process_time()
    for name in names:
        _run(_spec(name, {}, requests, options), requests, 30.0, options)
    took = time.process_time() - began
    print(f"\n{SPEED_POLICIES} policies x {len(requests)} requests: {took:.1f} s of CPU, goal 10")


def _endless(names: Sequence[str]) -> Iterable[str]:
    while True:
        yield from names


if __name__ == "__main__":
    main()
