"""What a policy takes that is told the rate of arrivals at each moment, and nothing of what will come.

It stands between a policy that has to see the rate in a queue and the bound of who knows all. It keeps as many replicas as
the rate needs, with a margin for chance, for a while after the rate has fallen, and works off what waits. Margin and while
are fitted to the workload afterwards, which no policy can do; another one that is told as much may still need less.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import product

from bench._workloads import ARRIVALS, FAMILIES
from gpuscale.autoscaler.backtest.simulate import LONGEST_TAIL, Report, measure
from gpuscale.autoscaler.backtest.world import Setting, World
from gpuscale.client.traces import Request

TICK = 2.0
MARGINS = (0.0, 0.5, 1.0, 1.5, 2.5)
"""Deviations of what is in hand that there is room for."""
HOLDS = (0.0, 60.0, 180.0, 600.0, 1200.0)
"""Seconds for which what was needed is kept."""
AS_LATE = 0.1
"""Points by which the percentage of late requests may be higher and counts as the same."""


def told_gpu_hours(
    family: str, seed: int, requests: Sequence[Request], setting: Setting, late: float, goal: float
) -> float:
    """GPU hours at which no more than `late` percent are late; infinity where there is no such margin and while."""
    reports = (_run(family, seed, requests, setting, *one, goal) for one in product(MARGINS, HOLDS))
    return min(
        (one.gpu_hours for one in reports if one.violation_percent <= late + AS_LATE), default=math.inf
    )


def _run(
    family: str,
    seed: int,
    requests: Sequence[Request],
    setting: Setting,
    margin: float,
    hold: float,
    goal: float,
) -> Report:
    rate = FAMILIES[family].rate(random.Random(f"{family} {seed}"))
    service = statistics.fmean(one.service for one in requests)
    world, last, place, now = World(setting, 1), requests[-1].arrival, 0, 0.0
    needed: deque[tuple[float, int]] = deque()
    while (place < len(requests) or not world.settled) and now < last + LONGEST_TAIL:
        while place < len(requests) and requests[place].arrival <= now:
            world.arrive(requests[place])
            place += 1
        world.advance(now)
        load = rate(now) * ARRIVALS * service
        busy = (load + margin * math.sqrt(load)) / setting.slots
        needed.append((now, math.ceil(busy)))
        while needed[0][0] < now - hold:
            needed.popleft()
        soon = math.ceil(busy + world.waiting * service / setting.slots / (goal / 2))
        wanted = max(1, soon, *(count for _, count in needed))
        world.scale(min(setting.max_gpus or wanted, max(wanted, world.wanted if world.waiting else 0)))
        now += TICK
    return measure(world, len(requests), goal, last)
