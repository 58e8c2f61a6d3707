"""Who gets GPUs in 30 days: greedy and modest tenants under first come first served, by what each holds, and by past use too.

A queue of the allocator in virtual time over 32 GPUs. Two greedy tenants ask for half of the fleet each, all the time; six modest ones have a
busy day each week on which they ask for as much as the whole fleet. All have weight 1. Shown: the Jain index of the GPU-hours that each
got of what it asked for, up to an equal share of its own busy time; hours that their jobs wait; and the part of GPU-hours in use.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gpuscale.allocator.domain.accounting import HALVES, decayed
from gpuscale.allocator.domain.model import Ask, Order
from gpuscale.allocator.queueing.model import Quota, Waiter
from gpuscale.allocator.queueing.queue import in_turn

GPUS, DAYS, HOUR = 32, 30, 3600.0
DAY = 24 * HOUR
GREEDY, MODEST = 2, 6


@dataclass
class Fleet:
    """What each tenant holds and held."""

    half_life: float
    held: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    by_day: list[dict[str, int]] = field(default_factory=list)
    past: dict[str, float] = field(default_factory=dict)

    def gpu_milli_held(self, tenant: str) -> int:
        return self.held[tenant]

    def gpu_milli_past(self, tenant: str) -> float:
        return self.past.get(tenant, 0)

    def quota(self, tenant: str) -> Quota:
        return Quota(tenant)

    def note(self, now: float, tenant: str, seconds: float, milli: int) -> None:
        """Count a job that ended, on the day of its end."""
        while len(self.by_day) <= now // DAY:
            self.by_day.append({})
        day = self.by_day[int(now // DAY)]
        day[tenant] = day.get(tenant, 0) + round(seconds * 1000) * milli
        if self.half_life:
            recent = self.by_day[: -int(HALVES * self.half_life) - 2 : -1]
            self.past = decayed(recent, self.half_life)


def jobs(seed: int) -> list[tuple[float, str, int, float]]:
    """(when, tenant, GPUs, seconds) of every job, in turn."""
    dice = random.Random(seed)
    found = []
    for tenant in range(GREEDY + MODEST):
        greedy, hours = tenant < GREEDY, 0.0
        while hours < DAYS * 24:
            busy = greedy or int(hours // 24) % 7 == tenant - GREEDY
            length, size = dice.lognormvariate(1.0, 0.7), dice.choice((1, 1, 2, 4))
            wanted = GPUS * (0.5 if greedy else 1.0)
            if busy:
                found.append(
                    (hours * HOUR, f"{'greedy' if greedy else 'modest'}-{tenant}", size, length * HOUR)
                )
                hours += dice.expovariate(wanted / (2.0 * 3.47))
            else:
                hours = (hours // 24 + 1) * 24
    return sorted(found)


def play(seed: int, kind: str, half_life: float) -> tuple[float, float, float, float]:
    """Jain index, hours that modest and greedy jobs wait, and the part of GPUs in use."""
    free, used, clock = GPUS, 0.0, 0.0
    fleet: Any = Fleet(half_life)  # a world of which in_turn asks for shares alone
    line: list[Waiter] = []
    ends: list[tuple[float, int, str, int, float]] = []
    waits: dict[str, list[float]] = defaultdict(list)
    got: dict[str, float] = defaultdict(float)
    asked: dict[str, float] = defaultdict(float)
    coming = jobs(seed)
    at = 0
    while clock < DAYS * DAY:
        clock = min(
            coming[at][0] if at < len(coming) else DAYS * DAY, ends[0][0] if ends else DAYS * DAY, DAYS * DAY
        )
        while ends and ends[0][0] <= clock:
            _, _, tenant, size, length = heapq.heappop(ends)
            free += size
            fleet.held[tenant] -= 1000 * size
            fleet.note(clock, tenant, length, 1000 * size)
        while at < len(coming) and coming[at][0] <= clock:
            when, tenant, size, length = coming[at]
            order = Order(str(at), "", "", "", length, {}, Ask(size, 0, 100.0), tenant=tenant)
            line.append(Waiter(order, at, when, 1e12))
            asked[tenant] += size * length
            at += 1
        taken = set()
        for waiter in line if kind == "fifo" else in_turn(line, (), fleet):
            size, tenant, length = waiter.order.ask.gpu_count, waiter.order.tenant, waiter.order.ttl
            if size > free:
                break
            free -= size
            fleet.held[tenant] += 1000 * size
            heapq.heappush(ends, (clock + length, waiter.number, tenant, size, length))
            length = min(length, DAYS * DAY - clock)
            got[tenant] += size * length
            used += size * length
            waits[tenant.partition("-")[0]].append((clock - waiter.since) / HOUR)
            taken.add(waiter.number)
        line = [one for one in line if one.number not in taken]
    for waiter in line:
        waits[waiter.order.tenant.partition("-")[0]].append((clock - waiter.since) / HOUR)
    share = GPUS * DAYS * DAY / len(asked)
    parts = [got[tenant] / min(asked[tenant], share) for tenant in asked]
    jain = sum(parts) ** 2 / (len(parts) * sum(one * one for one in parts))
    return jain, fmean(waits["modest"]), fmean(waits["greedy"]), used / (GPUS * DAYS * DAY)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench fairshare")
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    print("| order | Jain index | modest wait | greedy wait | in use |\n| --- | --- | --- | --- | --- |")
    kinds = (
        ("first come", "fifo", 0.0),
        ("share held now", "share", 0.0),
        ("half-life 7 days", "share", 7.0),
        ("half-life 2 days", "share", 2.0),
    )
    for name, kind, half_life in kinds:
        jain, modest, greedy, used = (
            fmean(one) for one in zip(*(play(seed, kind, half_life) for seed in seeds), strict=True)
        )
        print(f"| {name} | {jain:.3f} | {modest:.1f} h | {greedy:.1f} h | {100 * used:.1f} % |", flush=True)
