"""Fragmentation: the GPU of a node that is of no use to the next typical ask. Pure.

After "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent" (Weng et al.,
USENIX ATC 2023): for each typical ask, weighted by how often it comes, all that is free on a node is a fragment if the
node cannot serve it, else what lies on GPUs that are too full for it. Typical asks are those that make up
POPULARITY of all. Everything is counted in whole numbers, so that the result does not hang on the order of additions.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Ask
from gpuscale.allocator.placing.columns import Bools, Floats, Ints

POPULARITY = 0.95
"""Typical asks are the most frequent ones that make up this part of all."""
CHUNK = 2048
"""How many rows are looked at together, which bounds the memory it takes."""
_STEPS = np.array([-1000.0 * np.log(100.0 / score - 1.0) for score in range(1, 100)])

AskClass = tuple[int, int, int, tuple[str, ...]]
"""CPU, number of GPUs, share of each, models."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical asks, as arrays: CPU, GPUs, the share of each, how often it comes, and whether it admits each model."""

    cpu: Ints
    count: Ints
    milli: Ints
    weight: Ints
    admits: Bools


def class_of(ask: Ask) -> AskClass:
    """What typical asks have in common with an ask."""
    return ask.cpu_milli, ask.gpu_count, ask.gpu_milli, ask.models


def typical(seen: Mapping[AskClass, int], admits: Callable[[tuple[str, ...]], Bools]) -> Typical:
    """The most frequent of the asks that were seen; `admits` says which models some names admit."""
    wanted, kept = POPULARITY * sum(seen.values()), Counter[AskClass]()
    for one, weight in sorted(seen.items(), key=lambda item: (-item[1], item[0])):
        if kept.total() >= wanted:
            break
        kept[one] = weight
    columns = np.array(
        [(cpu, count, milli, weight) for (cpu, count, milli, _), weight in kept.items()], np.int64
    )
    cpu, count, milli, weights = columns.reshape(-1, 4).T
    known = np.array([admits(models) for *_, models in kept], np.bool_).reshape(len(kept), len(admits(())))
    return Typical(cpu, count, milli, weights, known)


def gradients(now: Typical, cpu: Ints, free: Ints, model: Ints, ask: Ask, fits: Bools) -> Floats:
    """How much less of each node is a fragment once the ask is on each GPU that `fits`; -inf on the others.

    `cpu` is what is free of it on each node, `free` the free share of each GPU, `model` that of each node. An ask for
    several GPUs, or none, is the same on all of them: it takes the fullest that fit.
    """
    parts = [
        _gradients(now, cpu[at], free[at], model[at], ask, fits[at])
        for at in (slice(start, start + CHUNK) for start in range(0, len(cpu), CHUNK))
    ]
    return np.concatenate(parts) if parts else np.zeros((0, free.shape[1]))


def integer_scores(gradient: Floats) -> Ints:
    """floor(100 / (1 + exp(-gradient / 1000))), by a table, so that it is the same everywhere."""
    return np.searchsorted(_STEPS, gradient, side="right").astype(np.int64)


def _gradients(now: Typical, cpu: Ints, free: Ints, model: Ints, ask: Ask, fits: Bools) -> Floats:
    reachable = now.admits[:, model].T
    state = _state(now, cpu, free, reachable)
    left = cpu - ask.cpu_milli
    weight = max(int(now.weight.sum()), 1)
    gradient: Floats = np.full(fits.shape, -np.inf)
    if ask.gpu_count == 1 and ask.gpu_milli < WHOLE:
        rows, gpus = np.nonzero(fits)
        after = _after_shares(now, state, left, free, reachable, ask.gpu_milli, rows, gpus)
        gradient[rows, gpus] = (state[0][rows] - after) / weight
        return gradient
    whole_after = _state(now, left, _taken(free, ask, fits), reachable)[0]
    return np.where(fits, ((state[0] - whole_after) / weight)[:, None], gradient)


def _after_shares(
    now: Typical,
    state: tuple[Ints, Ints, Ints],
    left: Ints,
    free: Ints,
    reachable: Bools,
    milli: int,
    rows: Ints,
    gpus: Ints,
) -> Ints:
    """The fragment of each node once a share of a GPU is taken; GPUs of a node that are as free are looked at once."""
    alike, again = np.unique(rows * (WHOLE + 1) + free[rows, gpus], return_inverse=True)
    row, was = np.divmod(alike, WHOLE + 1)
    old = was[:, None]
    new = np.maximum(old - milli, 0)
    count = state[1][row] - (old >= now.milli) + (new >= now.milli)
    waste = state[2][row] - np.where(old < now.milli, old, 0) + np.where(new < now.milli, new, 0)
    total = free.sum(1)[row] - milli
    after: Ints = _fragment(now, left[row], total, count, waste, reachable[row])[again]
    return after


def _state(now: Typical, cpu: Ints, free: Ints, reachable: Bools) -> tuple[Ints, Ints, Ints]:
    """The fragment of each node; and, for each typical ask, how many GPUs fit it, and what is free on the others."""
    fitting = np.zeros(reachable.shape, np.int64)
    useless = np.zeros(reachable.shape, np.int64)
    for gpu in range(free.shape[1]):
        one = free[:, gpu, None]
        fitting += one >= now.milli
        useless += np.where(one < now.milli, one, 0)
    return _fragment(now, cpu, free.sum(1), fitting, useless, reachable), fitting, useless


def _fragment(now: Typical, cpu: Ints, total: Ints, fitting: Ints, useless: Ints, reachable: Bools) -> Ints:
    served = (cpu[:, None] >= now.cpu) & (fitting >= now.count) & (now.count > 0) & reachable
    fragment: Ints = (np.where(served, useless, total[:, None]) * now.weight).sum(1)
    return fragment


def _taken(free: Ints, ask: Ask, fits: Bools) -> Ints:
    """What is free once the ask is on the fullest GPUs that fit."""
    left = free.copy()
    if ask.gpu_count:
        fullest = np.argsort(np.where(fits, free, 2 * WHOLE), axis=1, kind="stable")[:, : ask.gpu_count]
        taken = np.take_along_axis(left, fullest, 1) - ask.gpu_milli
        np.put_along_axis(left, fullest, np.maximum(taken, 0), 1)
    return left
