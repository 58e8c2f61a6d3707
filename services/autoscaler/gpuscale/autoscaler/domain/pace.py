"""Pace: how fast the count may follow what rules ask for. Pure.

Stabilization and rate limits are those of the HorizontalPodAutoscaler (kubernetes: horizontal.go): up, the count follows
the least that was asked for all through its window; down, the most. Limits hold against the count at the beginning of
their period. A window may learn (our own): it doubles while what was given up is needed again. What is not known since a restart allows no reduction: the window has to fill first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from gpuscale.autoscaler.domain.model import Code, Stage, Step
from gpuscale.autoscaler.domain.rules import LONGEST_LEARNT, Pace, RateLimit

REGRET_SECONDS = 1800.0
"""Seconds for which it counts that replicas were given up too early."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of an endpoint between evaluations.

    Attributes:
        since: when remembering began.
        asked: when rules asked for how many replicas, oldest first.
        changes: when the count was changed by how many, oldest first.
    """

    since: float
    asked: tuple[tuple[float, int], ...] = ()
    changes: tuple[tuple[float, int], ...] = ()

    def noted(self, now: float, asked: int, before: int, after: int, keep: float) -> Memory:
        """With one more evaluation; what is older than `keep` seconds is dropped."""
        oldest = now - keep
        changes = self.changes if after == before else (*self.changes, (now, after - before))
        return Memory(
            self.since,
            tuple(one for one in (*self.asked, (now, asked)) if one[0] >= oldest),
            tuple(one for one in changes if one[0] >= oldest),
        )


@dataclass(frozen=True, slots=True)
class Paced:
    """The count after pace, the steps that explain it, and what held it back."""

    count: int
    steps: tuple[Step, ...] = ()
    limited_by: Code | None = None


def paced(
    up: Pace, down: Pace, before: int, asked: int, memory: Memory, now: float, startup: float | None = None
) -> Paced:
    """How far the count goes towards `asked`; `startup`: seconds that replicas take to be ready."""
    if asked == before:
        return Paced(before)
    pace, way = (up, "up") if asked > before else (down, "down")
    if pace.disabled:
        return _held(asked, before, Code.DIRECTION_DISABLED, f"scaling {way} is switched off")
    known = [at for at, change in memory.changes if (change > 0) == (asked > before)]
    # Until a restart there may have been a change down: who wants fewer waits as if there had been.
    last = max(known, default=-math.inf if asked > before else memory.since)
    left = last + pace.cooldown - now
    if left > 0:
        what = f"the last change {way} was" if known else f"not yet known whether a change {way} was"
        text = f"{what} too short ago: {left:.1f} s more"
        return _held(asked, before, Code.ENDPOINT_COOLDOWN, text)
    stable = _stabilized(pace.window(startup, regrets(memory, now)), before, asked, memory, now)
    limit = _limit(pace, before, stable.count, memory, now)
    return Paced(limit.count, (*stable.steps, *limit.steps), limit.limited_by or stable.limited_by)


def longest(up: Pace, down: Pace) -> float:
    """Seconds of the past that the paces look at."""
    periods = [limit.period for pace in (up, down) for limit in pace.limits]
    learnt = REGRET_SECONDS if up.startups or down.startups else 0.0
    windows = [pace.stabilization or 0.0 for pace in (up, down)]
    return max(learnt, *windows, up.cooldown, down.cooldown, *periods, 0.0)


def regrets(memory: Memory, now: float) -> int:
    """How often lately replicas were asked for that had been given up shortly before."""
    recent = [one for one in memory.changes if one[0] > now - REGRET_SECONDS]
    return sum(
        earlier < 0 < later and at - since <= LONGEST_LEARNT
        for (since, earlier), (at, later) in pairwise(recent)
    )


def _stabilized(window: float, before: int, asked: int, memory: Memory, now: float) -> Paced:
    recent = [count for at, count in memory.asked if at > now - window]
    if asked > before:
        count = max(before, min((asked, *recent)))
        code, text = Code.STABILIZED_UP, f"asked for {count} all through the last {window:g} s"
    else:
        count = min(before, max((asked, *recent)))
        code, text = Code.STABILIZED_DOWN, f"asked for {count} within the last {window:g} s"
        if window and now - memory.since < window:
            left = window - (now - memory.since)
            count, text = before, f"not yet known what was asked for over {window:g} s: {left:.1f} s more"
    return Paced(asked) if count == asked else _held(asked, count, code, text)


def _limit(pace: Pace, before: int, asked: int, memory: Memory, now: float) -> Paced:
    if not pace.limits or asked == before:
        return Paced(asked)
    allowed = [_allowed(limit, before, asked > before, memory, now) for limit in pace.limits]
    loosest, tightest = (max(allowed), min(allowed)) if asked > before else (min(allowed), max(allowed))
    bound = tightest if pace.strictest else loosest
    count = max(before, min(asked, bound)) if asked > before else min(before, max(asked, bound))
    if count == asked:
        return Paced(asked)
    code = Code.RATE_LIMITED_UP if asked > before else Code.RATE_LIMITED_DOWN
    return _held(asked, count, code, f"at most {bound} now, by its rate limits")


def _allowed(limit: RateLimit, before: int, up: bool, memory: Memory, now: float) -> int:
    """The furthest count that one limit allows."""
    within = [change for at, change in memory.changes if at > now - limit.period]
    start = before - sum(within)
    if limit.replicas is not None:
        return start + limit.replicas if up else max(0, start - limit.replicas)
    share = (limit.percent or 0.0) / 100
    # Of none every share is none: the first replica is let through, or nothing ever would be.
    return max(1, math.ceil(start * (1 + share))) if up else math.floor(start * max(0.0, 1 - share))


def _held(asked: int, count: int, code: Code, text: str) -> Paced:
    return Paced(count, (Step(Stage.PACE, code, asked, count, text),), code if count != asked else None)
