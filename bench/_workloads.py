"""Made-up workloads that policies are held against: families of arrivals and of service times, by name and seed.

Each is meant to be one that nobody fitted a policy to: a family has a shape, and a seed moves its phases, its levels and
every single arrival. Rates are multiples of `ARRIVALS` requests a second, so that 16 replicas of 8 slots can serve them.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpuscale.client.traces import Request

ARRIVALS = 4.0
"""Requests a second at a rate of 1."""
SERVICE, SPREAD = 6.0, 0.6
"""Median seconds of a request, and the deviation of its logarithm."""
MEAN = SERVICE * math.exp(SPREAD**2 / 2)
SECONDS = 3600.0
MOST_SERVICE = 600.0
TAIL = 1.5
"""Pareto's alpha of heavy-tailed service times: its variance has no end."""

LONG_WORK = 12.0
"""Times as long as others are, and as rare, where every request is long."""
SHORT, LONG, SHORT_SHARE = 1.5, 30.0, 0.8
"""Median seconds of two kinds of requests, and how many are of the short one."""

Rate = Callable[[float], float]
Service = Callable[[random.Random], float]


@dataclass(frozen=True, slots=True)
class Family:
    """What a workload is like: how its rate is made from a seed, and how long requests take."""

    about: str
    rate: Callable[[random.Random], Rate]
    service: Service


def _lognormal(dice: random.Random) -> float:
    return dice.lognormvariate(math.log(SERVICE), SPREAD)


def _pareto(dice: random.Random) -> float:
    return min(MOST_SERVICE, MEAN * (TAIL - 1) / TAIL * dice.paretovariate(TAIL))


def _long(dice: random.Random) -> float:
    return LONG_WORK * _lognormal(dice)


def _two_kinds(dice: random.Random) -> float:
    middle = SHORT if dice.random() < SHORT_SHARE else LONG
    return dice.lognormvariate(math.log(middle), 0.4)


def _diurnal(dice: random.Random) -> Rate:
    phase, depth = dice.uniform(0, 2 * math.pi), dice.uniform(0.6, 0.95)
    return lambda t: 1.3 * (1 + depth * math.sin(2 * math.pi * t / 2400 + phase))


def _rare_waves(dice: random.Random) -> Rate:
    often = _diurnal(dice)
    return lambda t: often(t) / LONG_WORK


def _bursts(dice: random.Random) -> Rate:
    begins = [dice.uniform(0, SECONDS) for _ in range(8)]
    levels = [dice.uniform(1.5, 3.0) for _ in begins]
    spans = [dice.uniform(40, 200) for _ in begins]

    def rate(t: float) -> float:
        on = (lv for at, span, lv in zip(begins, spans, levels, strict=True) if at <= t < at + span)
        return max(0.5, max(on, default=0.0))

    return rate


def _step(dice: random.Random) -> Rate:
    low, high, at, back = dice.uniform(0.2, 0.5), dice.uniform(1.8, 2.8), dice.uniform(700, 1200), 2700.0
    return lambda t: high if at <= t < back else low


def _ramp(dice: random.Random) -> Rate:
    top, at = dice.uniform(2.0, 3.2), dice.uniform(1800, 2600)
    return lambda t: max(0.2, top * (t / at if t < at else (SECONDS - t) / (SECONDS - at)))


def _on_off(dice: random.Random) -> Rate:
    on, off, level = dice.uniform(120, 500), dice.uniform(120, 500), dice.uniform(1.2, 2.5)
    return lambda t: level if t % (on + off) < on else 0.0


def _poisson(dice: random.Random) -> Rate:
    level = dice.uniform(0.6, 2.2)
    return lambda _t: level


def _modulated(dice: random.Random) -> Rate:
    """A rate that jumps between four levels and stays for a while, minutes on average."""
    levels, at = [(0.0, 1.0)], 0.0
    while at < SECONDS:
        at += dice.expovariate(1 / 240)
        levels.append((at, dice.choice((0.3, 0.8, 1.6, 2.6))))
    return lambda t: next(level for begin, level in reversed(levels) if begin <= t)


def _crowd(dice: random.Random) -> Rate:
    """A jump to many times the rate, which halves every few minutes; a second one later."""
    low, jumps = dice.uniform(0.3, 0.5), (dice.uniform(400, 900), dice.uniform(1900, 2500))
    tops, half = [dice.uniform(1.8, 2.8) for _ in jumps], dice.uniform(180, 420)

    def rate(t: float) -> float:
        return low + max(
            (top * 0.5 ** ((t - at) / half) for at, top in zip(jumps, tops, strict=True) if t >= at),
            default=0.0,
        )

    return rate


def _saw(dice: random.Random) -> Rate:
    """Up evenly for minutes, and back at once."""
    span, low, top = dice.uniform(400, 900), dice.uniform(0.2, 0.5), dice.uniform(1.8, 2.8)
    return lambda t: low + (top - low) * (t % span) / span


def _sources(dice: random.Random) -> Rate:
    """Twelve sources that are on and off for heavy-tailed times, so that no time scale evens them out."""
    switches: list[list[float]] = []
    for _ in range(12):
        at, times = -dice.uniform(0, 300), list[float]()
        while at < SECONDS:
            at += 40 * dice.paretovariate(1.4)
            times.append(at)
        switches.append(times)
    return lambda t: 0.25 * sum(bisect_right(times, t) % 2 for times in switches)


FAMILIES: dict[str, Family] = {
    "poisson": Family("a constant rate", _poisson, _lognormal),
    "diurnal": Family("a wave of 40 minutes", _diurnal, _lognormal),
    "ramp": Family("up for half an hour, down for half an hour", _ramp, _lognormal),
    "step": Family("six times as much, for half an hour", _step, _lognormal),
    "bursts": Family("eight bursts of 40 to 200 s on a low rate", _bursts, _lognormal),
    "on-off": Family("a rate, and nothing, in turn", _on_off, _lognormal),
    "modulated": Family("jumps between four levels", _modulated, _lognormal),
    "heavy-tailed": Family("a wave of requests whose times have no variance", _diurnal, _pareto),
    "crowd": Family("two jumps that die away over minutes", _crowd, _lognormal),
    "saw": Family("up evenly for minutes, and back at once", _saw, _lognormal),
    "sources": Family("twelve sources, on and off for heavy-tailed times", _sources, _lognormal),
    "long-work": Family("a wave of requests of 84 s each", _rare_waves, _long),
    "two-kinds": Family(
        "jumps between levels; most requests short, some twenty times as long", _modulated, _two_kinds
    ),
}


def made_up(name: str, seed: int) -> list[Request]:
    """The requests of a family; the same for the same seed."""
    family = FAMILIES[name]
    return list(_requests(family, random.Random(f"{name} {seed}")))


def _requests(family: Family, dice: random.Random) -> Iterator[Request]:
    """Poisson arrivals whose rate follows the family's, thinned out from the highest that it may have."""
    rate, now, most = family.rate(dice), 0.0, 3.5
    while True:
        now += dice.expovariate(ARRIVALS * most)
        if now >= SECONDS:
            return
        if dice.random() * most < rate(now):
            yield Request(now, family.service(dice))
