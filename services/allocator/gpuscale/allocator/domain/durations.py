"""Durations: how long reservations really last, learned from those that ended. Pure.

The newest KEPT samples are kept per owner and shape, per tenant and shape, and overall, with weights that fall by DECAY from
each sample to the next older. A wider group counts as much as PRIOR new samples of the narrowest one, so it dominates while
little is known of an owner, and when a reservation outlasts everything the owner ever had. The estimate for a reservation of
some age is a quantile of the samples that lasted longer. If none did, the longer it has lasted, the longer it will, as in a
Pareto distribution (Lindy's law). The numbers were fitted on the first half of a trace and measured on the second
(`bench.waits`).
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate, groupby
from math import exp, log
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from gpuscale.allocator.domain.model import BOOKING_LABEL, EndCause, Order, Reservation

ENOUGH = 3
"""Samples below which nothing is estimated."""
KEPT = 64
"""Samples kept per group."""
DECAY = 0.95
"""The weight of the next older sample."""
PRIOR = (1.0, 0.5)
"""The weight of all samples of the tenant and shape, and of all samples, in newest samples of the owner and shape."""
MOST = 4096
"""Most groups kept; the least recently used is dropped."""
STALE = 16
"""Samples of others after which their part of an estimate is computed again."""
TAIL = 3.0
"""The exponent of the Pareto distribution."""
LOW, HIGH = 0.2, 0.8
"""The quantiles of a range."""
EARLY = 0.3
"""How far below the median, towards the low end of the range, on a log scale."""
LEARNED = (EndCause.RELEASED, EndCause.EXPIRED, EndCause.CANCELLED)
"""End causes to learn from: a revoked reservation would have lasted longer."""


class Kin(NamedTuple):
    """The owner and shape of a reservation: number of GPUs, and thousandths of each."""

    owner: str
    tenant: str
    gpus: int
    milli: int


class Span(NamedTuple):
    """The likely remaining seconds, and a range that contains three of five cases."""

    low: float
    likely: float
    high: float

    @property
    def early(self) -> float:
        """The end to assume for a wait: the first of several leases to end decides it, so this is below the median."""
        return float(max(self.low, 0.0) ** EARLY * self.likely ** (1 - EARLY))


_Circle: TypeAlias = tuple[str, ...]
_Profile: TypeAlias = tuple[int, Sequence[float], Sequence[float], Sequence[float], dict[int, list[float]]]


class Durations:
    """What was learned."""

    def __init__(self) -> None:
        self._samples: OrderedDict[_Circle, deque[float]] = OrderedDict()
        self._profiles: dict[Kin, _Profile] = {}
        self._count = 0
        self._new: list[tuple[Kin, float]] = []

    def add(self, kin: Kin, seconds: float) -> None:
        """Add a reservation that lasted this long."""
        self._new.append((kin, seconds))
        if len(self._new) >= 4 * KEPT:  # or before, when somebody asks
            self._learn()

    def _learn(self) -> None:
        for kin, some in groupby(self._new, itemgetter(0)):
            samples = [log(max(seconds, 1.0)) for _, seconds in some]
            self._count += len(samples)
            for circle in _circles(kin):
                self._samples.setdefault(circle, deque(maxlen=KEPT)).extendleft(samples)
                self._samples.move_to_end(circle)
            while len(self._samples) > MOST:
                self._samples.popitem(last=False)
            self._profiles.pop(kin, None)
        self._new.clear()

    def remaining(self, kin: Kin, age: float = 0.0) -> Span | None:
        """How much longer a reservation of this age will last; None if too little was learned."""
        self._learn()
        if self._count < ENOUGH:
            return None
        # Logarithms of samples, shortest first, the cumulative sums of their weights, the samples, and quantiles by place.
        known = self._profiles.get(kin)
        if known is None or self._count - known[0] >= STALE:
            points: list[tuple[float, float]] = []
            for circle, prior in zip(_circles(kin), (None, *PRIOR), strict=True):
                samples = self._samples.get(circle, ())
                decays = [DECAY**nth for nth in range(len(samples))]
                scale = 1.0 if prior is None or not samples else prior / sum(decays)
                points += zip(samples, (scale * one for one in decays), strict=True)
            points.sort()
            if len(self._profiles) >= MOST:
                self._profiles.clear()
            sums, found = [*accumulate(weight for _, weight in points)], [one for one, _ in points]
            known = self._profiles[kin] = self._count, found, sums, [*map(exp, found)], {}
        _, logs, weights, lengths, quantiles = known
        at = bisect_right(logs, log(age)) if age >= 1 else 0
        if at == len(logs):
            return Span(*[age * ((1 - part) ** (-1 / TAIL) - 1) for part in (LOW, 0.5, HIGH)])
        if (ends := quantiles.get(at)) is None:
            if len(quantiles) >= KEPT:  # of all places they take more than the samples
                quantiles.clear()
            before, last = weights[at - 1] if at else 0.0, len(logs) - 1
            wanted = [before + part * (weights[last] - before) for part in (LOW, 0.5, HIGH)]
            ends = quantiles[at] = [lengths[min(bisect_right(weights, one), last)] for one in wanted]
        return Span(ends[0] - age, ends[1] - age, ends[2] - age)


def kin_of(one: Reservation) -> Kin:
    """The kin of a reservation that holds GPUs."""
    return Kin._make((one.owner, one.tenant, len(one.gpus), one.gpus[0].milli if one.gpus else 0))


def kin_of_order(order: Order) -> Kin:
    """The kin of an order, as if it were granted."""
    return Kin(order.owner, order.tenant, order.ask.member_count * order.ask.gpu_count, order.ask.gpu_milli)


def lasted(one: Reservation) -> float | None:
    """How many seconds an ended reservation held its GPUs; None if nothing can be learned from it."""
    if not one.gpus or one.ended is None or one.end_cause not in LEARNED or BOOKING_LABEL in one.labels:
        return None
    return (one.ended - (held_since(one) if one.wanted else one.created)).total_seconds()


def held_since(one: Reservation) -> datetime:
    """When it was granted; where it was started again, or that is not recorded, when its job began if that is known."""
    if one.wanted is None:
        return one.created
    if one.wanted.granted and not one.wanted.first:
        return one.wanted.granted
    began = [member.started for member in one.job.members if member.started] if one.job else []
    return min(began, default=one.wanted.granted or one.created)


def _circles(kin: Kin) -> tuple[_Circle, ...]:
    shape = f"{kin.gpus} {kin.milli}"
    return ("owner", kin.owner, shape), ("tenant", kin.tenant, shape), ()
