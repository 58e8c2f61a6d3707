"""What came of a backtest, in numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpuscale.autoscaler.backtest.trace import Request
from gpuscale.autoscaler.backtest.world import World

MOST_MOMENTS = 400
"""Moments that a timeline is thinned out to."""

FLAP_SECONDS = 600.0
"""Changes in opposite directions within this long are a flap."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a run: replicas aimed at, replicas that work, and requests that wait."""

    at: float
    wanted: int
    ready: int
    waiting: int


class Timeline:
    """The moments of a run, thinned out as they come: evenly, each with the most that waited up to the next."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._each = 1
        self._seen = 0

    def add(self, moment: Moment) -> None:
        """One more moment, later than all before."""
        _put(self.moments, self._seen // self._each, moment)
        self._seen += 1
        if len(self.moments) > MOST_MOMENTS:
            thinned: list[Moment] = []
            for index, one in enumerate(self.moments):
                _put(thinned, index // 2, one)
            self.moments = thinned
            self._each *= 2


def _put(moments: list[Moment], index: int, moment: Moment) -> None:
    """Add a moment, or let the last one stand for it too."""
    if index == len(moments):
        moments.append(moment)
    else:
        moments[index] = replace(moments[index], waiting=max(moments[index].waiting, moment.waiting))


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run.

    Attributes:
        requests: how many there were.
        unserved: how many were never taken in hand.
        violation_percent: share that waited longer than the goal, or for ever.
        wait_p50, wait_p95, wait_p99: seconds of waiting.
        backlog_hours: the queue's length, integrated over time.
        gpu_hours: from grant to release, start-up included.
        pending_replica_hours: replicas wanted and not granted, integrated over time.
        flaps: changes in the direction opposite to the one before, within ten minutes of it.
        scale_ops: changes of the count.
        killed: requests dropped in hand.
        wasted_starts: replicas that went before they had been ready for twice their start-up time.
        most_replicas: the largest count.
        changes: when the count changed, and to what.
        timeline: the run at its evaluations, thinned out.
    """

    requests: int
    unserved: int
    violation_percent: float
    wait_p50: float
    wait_p95: float
    wait_p99: float
    backlog_hours: float
    gpu_hours: float
    pending_replica_hours: float
    flaps: int
    scale_ops: int
    killed: int
    wasted_starts: int
    most_replicas: int
    changes: tuple[tuple[float, int], ...]
    timeline: tuple[Moment, ...] = ()


def measure(world: World, requests: int, goal: float, last: float, timeline: Sequence[Moment] = ()) -> Report:
    """The figures of a world that has come to its end."""
    tally = world.tally
    waits = sorted(tally.waits)
    unserved = requests - len(waits)
    late = sum(wait > goal for wait in waits) + unserved
    changes = tuple(one for one in tally.changes if one[0] <= last)
    return Report(
        requests=requests,
        unserved=unserved,
        violation_percent=100.0 * late / requests,
        wait_p50=_quantile(waits, 0.50),
        wait_p95=_quantile(waits, 0.95),
        wait_p99=_quantile(waits, 0.99),
        backlog_hours=tally.backlog_seconds / 3600,
        gpu_hours=tally.gpu_seconds / 3600,
        pending_replica_hours=tally.pending_seconds / 3600,
        flaps=_flaps(changes),
        scale_ops=len(changes) - 1,
        killed=tally.killed,
        wasted_starts=tally.wasted,
        most_replicas=max(count for _, count in changes),
        changes=changes,
        timeline=tuple(timeline),
    )


def oracle_gpu_hours(requests: Sequence[Request], slots: int, gpus_each: int = 1) -> float:
    """GPU hours of the work alone: what a policy would need that knew everything and could divide replicas."""
    return sum(request.service for request in requests) * gpus_each / slots / 3600


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank of a share of sorted values; 0 where there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _flaps(changes: Sequence[tuple[float, int]]) -> int:
    moves = [(at, after - before) for (_, before), (at, after) in pairwise(changes)]
    return sum(
        (one > 0) != (other > 0) and later - earlier <= FLAP_SECONDS
        for (earlier, one), (later, other) in pairwise(moves)
    )
