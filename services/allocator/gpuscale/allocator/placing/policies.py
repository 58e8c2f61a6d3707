"""Policies: how good a node is for an ask, the higher the better. Pure.

`spread` is the mean of the seed's score over the best GPUs of the node; the others are in docs/allocation.md, with
where they come from. Ties are settled by the rank of the node, by whoever compares.
"""

from dataclasses import dataclass

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Ask, Policy
from gpuscale.allocator.placing.columns import UNKNOWN, WHOLE_GPU, Bools, Columns, Floats, Ints
from gpuscale.allocator.placing.demand import Tariff
from gpuscale.allocator.placing.fragmentation import Typical, gradients, integer_scores
from gpuscale.allocator.placing.shares import milli_of

TIGHTNESS = 0.15
"""Weight of what is free on a node in `pack`: fuller nodes first."""
BUCKET = 125.0
"""Values of `pack` are compared in steps of this many thousandths of a GPU; what is closer is a tie."""
CPU_BUCKET = 200.0
"""The same for asks without GPUs."""
PRICE_WEIGHT = 2.0
"""Weight of a scarce model in `pack`, for asks that name none."""
BESTFIT_CPU, BESTFIT_GPU = 128_000.0, 8_000.0
"""`bestfit` measures what is left against a node of 128 cores and 8 GPUs."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What policies look at, a row per node: free CPU (known or not), free GPU, what is asked of it, the price."""

    cpu: Floats
    cpu_known: Bools
    gpu: Floats
    taken: Floats
    price: Floats


def facts(columns: Columns, rows: Ints, kind: int, ask: Ask, tariff: Tariff) -> Facts:
    """Gather the facts of some rows; `kind` is the sort of GPU that is asked for."""
    cpu = columns.cpu_free[rows]
    known = cpu != UNKNOWN
    price = np.zeros(len(rows))
    if tariff.prices and not ask.models:
        listed = np.array([tariff.prices.get(model, 0.0) for model in range(len(columns.models))])
        price = listed[columns.model[rows, 0]]
    return Facts(
        np.where(known, cpu, 0).astype(np.float64),
        known,
        _free(columns, rows, kind),
        _taken(columns, rows, ask),
        price,
    )


def value(
    ask: Ask, columns: Columns, rows: Ints, fits: Bools, kind: int, tariff: Tariff, now: Typical
) -> Floats:
    """How good each row is, where it fits; `fits` says which of its GPUs do, `kind` is the sort that is asked for."""
    if ask.policy is Policy.SPREAD:
        return _spread(ask, columns, rows, fits)
    if ask.policy is Policy.FIRSTFIT:
        return np.zeros(len(rows))
    if ask.policy is Policy.FGD:
        best: Floats = fragmentation_scores(ask, columns, rows, fits, now).max(1)
        return best
    known = facts(columns, rows, kind, ask, tariff)
    if ask.policy is Policy.PACK:
        return _pack(ask, known, tariff)
    cpu, gpu = _left(ask, known)
    return np.floor(100.0 * (1.0 - 0.5 * (cpu + gpu)))


def parts(ask: Ask, known: Facts, tariff: Tariff) -> tuple[tuple[str, Floats, float], ...]:
    """The value of `pack` and `bestfit` in parts, as compared but for the rounding: names, values by row, and weights."""
    if ask.policy is Policy.PACK:
        drop = _drop(ask, known, tariff)
        if not ask.gpu_count:
            return (("starvation_drop", drop, 1.0 / CPU_BUCKET),)
        return (
            ("starvation_drop", drop, 1.0 / BUCKET),
            ("free_gpu", known.gpu, -TIGHTNESS / BUCKET),
            ("scarcity", known.price * known.taken, -PRICE_WEIGHT / BUCKET),
        )
    cpu, gpu = _left(ask, known)
    return (("cpu_left", cpu, -50.0), ("gpu_left", gpu, -50.0))


def spread_scores(ask: Ask, columns: Columns, rows: Ints) -> Floats:
    """The seed's score of each GPU of the rows, as `scoring.spread` says; nonsense where memory is not reported."""
    total = np.maximum(columns.total[rows], 1)
    memory = ask.weights.memory * (columns.available[rows] / total)
    used = columns.utilization[rows]
    return np.where(np.isnan(used), memory, memory + ask.weights.utilization * ((100 - used) / 100))


def fragmentation_scores(ask: Ask, columns: Columns, rows: Ints, fits: Bools, now: Typical) -> Floats:
    """The integer score of `fgd` of each GPU that fits, -inf on the others; of each node where no GPU is asked for."""
    gradient = fragmentation_gradients(ask, columns, rows, fits, now)
    return np.where(np.isneginf(gradient), -np.inf, integer_scores(gradient))


def fragmentation_gradients(ask: Ask, columns: Columns, rows: Ints, fits: Bools, now: Typical) -> Floats:
    """How much less of a node is a fragment once the ask is on each GPU of it that fits."""
    cpu = columns.cpu_free[rows]
    working = (columns.kind[rows] == WHOLE_GPU) & ~columns.out_of_use(rows)
    free = np.where(working, WHOLE - columns.held[rows], 0)
    known = np.where(cpu == UNKNOWN, np.iinfo(np.int64).max // 2, cpu)
    wanted = fits if ask.gpu_count else np.ones((len(rows), 1), np.bool_)
    return gradients(now, known, free, columns.model[rows, 0].astype(np.int64), ask, wanted)


def _spread(ask: Ask, columns: Columns, rows: Ints, fits: Bools) -> Floats:
    if not ask.gpu_count:
        return columns.cpu_free[rows].astype(np.float64)
    scores = -np.sort(-np.where(fits, spread_scores(ask, columns, rows), -np.inf), axis=1)
    total = np.zeros(len(rows))
    for place in range(min(ask.gpu_count, scores.shape[1])):
        total = total + scores[:, place]
    return total / ask.gpu_count


def _pack(ask: Ask, known: Facts, tariff: Tariff) -> Floats:
    drop = _drop(ask, known, tariff)
    if not ask.gpu_count:
        return np.floor(drop / CPU_BUCKET)
    return np.floor((drop - TIGHTNESS * known.gpu - PRICE_WEIGHT * (known.price * known.taken)) / BUCKET)


def _drop(ask: Ask, known: Facts, tariff: Tariff) -> Floats:
    """How much less GPU of the node will be without CPU to feed it; 0 for an ask that says nothing of CPU."""
    if not ask.cpu_milli or not tariff.cpu_per_gpu:
        return np.zeros(len(known.gpu))
    before = np.maximum(known.gpu - known.cpu / tariff.cpu_per_gpu, 0.0)
    fed = (known.cpu - ask.cpu_milli) / tariff.cpu_per_gpu
    after = np.maximum((known.gpu - known.taken) - fed, 0.0)
    return np.where(known.cpu_known, before - after, 0.0)


def _left(ask: Ask, known: Facts) -> tuple[Floats, Floats]:
    """What is left of a node for `bestfit`: CPU and GPU, against its measure; unknown CPU is none."""
    cpu = np.where(known.cpu_known, (known.cpu - ask.cpu_milli) / BESTFIT_CPU, 0.0)
    return cpu, (known.gpu - known.taken) / BESTFIT_GPU


def _free(columns: Columns, rows: Ints, kind: int) -> Floats:
    free = columns.free_milli[rows]
    if kind != WHOLE_GPU:
        working = (columns.kind[rows] == kind) & ~columns.out_of_use(rows)
        free = np.where(working, WHOLE - columns.held[rows], 0).sum(1)
    return free.astype(np.float64)


def _taken(columns: Columns, rows: Ints, ask: Ask) -> Floats:
    """What the ask takes of each node; where the size of a GPU decides, as of its first GPU."""
    milli = milli_of(ask, columns.total[rows, :1])
    if isinstance(milli, int):
        return np.full(len(rows), float(ask.gpu_count * milli))
    return ask.gpu_count * milli[:, 0].astype(np.float64)
