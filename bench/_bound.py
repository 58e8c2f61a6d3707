"""What somebody who knows all that will come needs at least: a linear program over time, solved by SciPy.

Replicas may be divided, and started to be ready just in time; a start costs its time in GPU seconds. Each request is either
taken in hand within the goal, or one of the late ones, of which there are at most a share and whose work may be done at any later
time. Which are late is chosen among groups of requests that come within ten seconds and take about as long.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from gpuscale.client.traces import Request

BIN = 10.0
"""Seconds of a step of time."""
LENGTHS = 4
"""Groups of requests by how long they take."""
TAIL = 30
"""Steps after the last request would be done in which late ones may be worked on."""


def least_gpu_hours(
    requests: Sequence[Request], slots: int, cold: float, late: float, *, goal: float, most: int
) -> float:
    """GPU hours at which a share `late` of the requests is late, with replicas that take `cold` seconds to start."""
    numpy, optimize, sparse = (
        importlib.import_module(f"{one}") for one in ("numpy", "scipy.optimize", "scipy.sparse")
    )
    steps = math.ceil(max(one.arrival + one.service for one in requests) / BIN) + TAIL
    groups = list(_groups(requests))
    soon = [_work(group, 0.0) for group in groups]
    delayed = [_work(group, goal) for group in groups]
    # Columns: replicas, starts, work done (in time; late) by the end of a step, late work that has come (soon; delayed), who is late.
    names = ("replicas", "starts", "done", "caught", "came", "owed", "late")
    at = {name: index * steps for index, name in enumerate(names)}
    rows: list[tuple[dict[int, float], float, float]] = []
    all_soon, all_delayed = 0.0, 0.0
    for step in range(steps):
        all_soon += sum(one.get(step, 0.0) * len(of) for one, of in zip(soon, groups, strict=True))
        all_delayed += sum(one.get(step, 0.0) * len(of) for one, of in zip(delayed, groups, strict=True))
        now = {name: at[name] + step for name in names[:-1]}
        before = {name: place - 1 for name, place in now.items()} if step else {}

        def gain(
            name: str, sign: float, now: dict[str, int] = now, before: dict[str, int] = before
        ) -> dict[int, float]:
            return {now[name]: sign} | ({before[name]: -sign} if before else {})

        rows += [
            ({now["done"]: 1.0, now["came"]: 1.0}, -math.inf, all_soon),
            ({now["done"]: 1.0, now["owed"]: 1.0}, all_delayed, math.inf),
            ({now["replicas"]: -slots * BIN} | gain("done", 1.0) | gain("caught", 1.0), -math.inf, 0.0),
            (gain("done", 1.0), 0.0, math.inf),
            (gain("caught", 1.0), 0.0, math.inf),
            ({now["caught"]: 1.0, now["came"]: -1.0}, -math.inf, 0.0),
            (gain("replicas", 1.0) | {now["starts"]: -1.0}, -math.inf, 0.0 if step else 1.0),
        ]
        for name, works in (("came", soon), ("owed", delayed)):
            late_ones = {at["late"] + index: -one[step] for index, one in enumerate(works) if step in one}
            rows.append((gain(name, 1.0) | late_ones, 0.0, 0.0))
    last = steps - 1
    rows.append(({at["caught"] + last: 1.0, at["came"] + last: -1.0}, 0.0, 0.0))
    rows.append(({at["late"] + index: 1.0 for index in range(len(groups))}, 0.0, late * len(requests)))
    entries = [(row, column, value) for row, (own, _, _) in enumerate(rows) for column, value in own.items()]
    places, columns, values = zip(*entries, strict=True)
    count = at["late"] + len(groups)
    matrix: Any = sparse.csr_array((values, (places, columns)), shape=(len(rows), count))
    cost = numpy.zeros(count)
    cost[: 2 * steps] = [BIN] * steps + [cold] * steps
    upper = numpy.full(count, math.inf)
    upper[:steps] = most
    upper[at["late"] :] = [len(group) for group in groups]
    lower = numpy.zeros(count)
    lower[: int(requests[-1].arrival / BIN)] = 1.0
    limits = optimize.LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows])
    found = optimize.milp(cost, constraints=limits, bounds=optimize.Bounds(lower, upper))
    if found.x is None:
        raise ArithmeticError(found.message)
    return float(found.fun) / 3600


def _groups(requests: Sequence[Request]) -> Iterator[list[Request]]:
    lengths = sorted(one.service for one in requests)
    cuts = [lengths[len(lengths) * place // LENGTHS] for place in range(1, LENGTHS)]
    found: defaultdict[tuple[int, int], list[Request]] = defaultdict(list)
    for one in requests:
        found[int(one.arrival / BIN), sum(one.service >= cut for cut in cuts)].append(one)
    yield from found.values()


def _work(group: Sequence[Request], delay: float) -> dict[int, float]:
    """Slot seconds of a request of a group in each step, on average, where all are taken in hand so long after they came."""
    found: defaultdict[int, float] = defaultdict(float)
    for one in group:
        begin = one.arrival + delay
        end = begin + one.service
        for step in range(int(begin / BIN), int(end / BIN) + 1):
            found[step] += (min(end, (step + 1) * BIN) - max(begin, step * BIN)) / len(group)
    return found
