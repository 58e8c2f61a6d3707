"""Policies: how good a node is for an ask, the higher the better. Pure.

- `spread` is the score of the GPU tracking seed (seeds/001): 0.6 x free/total + 0.4 x (100 - utilization)/100, both shares
  computed first and then weighted, in that order, so that results agree with the seed's to the last bit; of a node, the
  mean over its best GPUs.
- `fgd` is the fragmentation gradient descent of "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
  Fragmentation Gradient Descent" (Weng et al., USENIX ATC 2023): for each typical ask, weighted by how often it comes, all
  that is free on a node is a fragment if the node cannot serve it, else what lies on GPUs that are too full for it. Typical
  asks are those that make up POPULARITY of all. All is counted in whole numbers: the order of additions does not matter.
- The others are in docs/allocation.md, with where they come from.

The mix of asks is learned as they come (`Demand`); only the cluster's own CPU per GPU is known beforehand. Weights halve every
HALF_LIFE asks, so that it follows a changing workload. Callers break ties by the rank of the node.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from operator import not_
from typing import Any

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Ask, Gpu, Policy, Score, ScorePart, Weights
from gpuscale.allocator.placing.columns import (
    UNKNOWN,
    WHOLE_GPU,
    Bools,
    Build,
    Columns,
    FactsOfRows,
    Floats,
    Ints,
    Row,
)
from gpuscale.allocator.placing.constraints import Constraints

_SPREAD, _PACK = Policy.SPREAD, Policy.PACK  # looked up in an enum, a member takes as long as a call
UNKNOWN_UTILIZATION = "utilization is not reported: scored by memory alone"


def scored(gpu: Gpu, weights: Weights, free_bytes: int | None, note: str = "") -> Score:
    """The score of a GPU by `spread` with its parts: the freer its memory and the idler it is, the higher.

    It is 0-1 with the default weights. A GPU that does not report its utilization gets no credit for being idle.
    Placement lets none through that does not report its memory, of which `free_bytes` are free. `note` is said of the
    score, unless the GPU was scored by memory alone.
    """
    if free_bytes is None or gpu.memory_total_bytes is None:
        raise ValueError(f"GPU {gpu.uuid} does not report its memory")
    free, used = free_bytes / gpu.memory_total_bytes, gpu.utilization_percent
    idle = None if used is None else (100 - used) / 100
    note = UNKNOWN_UTILIZATION if idle is None else note
    total = weights.score(free, idle or 0.0)
    parts = ScorePart("memory", free, weights.memory), ScorePart("utilization", idle, weights.utilization)
    return Score(total, parts, note)


POPULARITY = 0.95
"""Typical asks are the most frequent ones that make up this share of all."""
CHUNK = 2048
"""Most rows evaluated together, which bounds memory use."""
_STEPS = [-1000.0 * math.log(100.0 / score - 1.0) for score in range(1, 100)]

AskClass = tuple[int, int, int, tuple[str, ...]]
"""CPU, number of GPUs, share of each, models."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical asks, as arrays: CPU, GPUs, the place of the share of each in `milli`, frequency, whether each admits each model."""

    cpu: Ints
    count: Ints
    milli: Ints
    share: Ints
    weight: Ints
    admits: Bools


def class_of(ask: Ask) -> AskClass:
    """The class of typical asks that an ask belongs to."""
    return ask.cpu_milli, ask.gpu_count, ask.gpu_milli, ask.models


def typical(seen: Mapping[AskClass, int], admits: Callable[[tuple[str, ...]], Bools]) -> Typical:
    """The most frequent asks seen, of equals the larger, as published; `admits` says which models some names admit."""
    wanted, kept = POPULARITY * sum(seen.values()), Counter[AskClass]()
    for one, weight in sorted(seen.items(), key=lambda item: (item[1], item[0]), reverse=True):
        if kept.total() >= wanted:
            break
        kept[one] = weight
    columns = np.array(
        [(cpu, count, milli, weight) for (cpu, count, milli, _), weight in kept.items()], np.int64
    )
    cpu, count, milli, weights = columns.reshape(-1, 4).T
    known = np.array([admits(models) for *_, models in kept], np.bool_).reshape(len(kept), len(admits(())))
    return Typical(cpu, count, *np.unique(milli, return_inverse=True), weights, known)


def gradients(now: Typical, cpu: Ints, free: Ints, model: Ints, ask: Ask, fits: Bools) -> Floats:
    """How much less of each node is a fragment once the ask is on each GPU that `fits`; -inf on the others.

    `cpu` is what is free of it on each node, `free` the free share of each GPU, `model` that of each node. An ask for
    several GPUs, or none, is the same on all of them: it takes the fullest that fit.
    """
    if len(cpu) > CHUNK:
        halves = slice(len(cpu) // 2), slice(len(cpu) // 2, None)
        return np.concatenate([gradients(now, cpu[at], free[at], model[at], ask, fits[at]) for at in halves])
    reachable = now.admits[:, model].T
    state = _state(now, cpu, free, reachable)
    left = cpu - ask.cpu_milli
    weight = max(int(now.weight.sum()), 1)
    gradient: Floats = np.full(fits.shape, -np.inf)
    if ask.gpu_count == 1 and ask.gpu_milli < WHOLE:
        rows, gpus = np.nonzero(fits)
        # The fragment of each node once a share of a GPU is taken; GPUs of a node that are as free are looked at once.
        alike, again = np.unique(rows * (WHOLE + 1) + free[rows, gpus], return_inverse=True)
        row, was = np.divmod(alike, WHOLE + 1)
        old = was[:, None]
        new = np.maximum(old - ask.gpu_milli, 0)
        count = state[1][row] - (old >= now.milli) + (new >= now.milli)
        waste = state[2][row] - np.where(old < now.milli, old, 0) + np.where(new < now.milli, new, 0)
        total = free.sum(1)[row] - ask.gpu_milli
        after: Ints = _fragment(now, left[row], total, count, waste, reachable[row])[again]
        gradient[rows, gpus] = (state[0][rows] - after) / weight
        return gradient
    after_all = free.copy()
    if ask.gpu_count:  # on the fullest GPUs that fit
        fullest = np.argsort(np.where(fits, free, 2 * WHOLE), axis=1, kind="stable")[:, : ask.gpu_count]
        taken = np.take_along_axis(after_all, fullest, 1) - ask.gpu_milli
        np.put_along_axis(after_all, fullest, np.maximum(taken, 0), 1)
    whole_after = _state(now, left, after_all, reachable)[0]
    return np.where(fits, ((state[0] - whole_after) / weight)[:, None], gradient)


def integer_scores(gradient: Floats) -> Floats:
    """floor(100 / (1 + exp(-gradient / 1000))), by a table, so that it is the same on every CPU; -inf stays -inf."""
    return np.where(np.isneginf(gradient), gradient, np.searchsorted(_STEPS, gradient, side="right"))


def _state(now: Typical, cpu: Ints, free: Ints, reachable: Bools) -> tuple[Ints, Ints, Ints]:
    """The fragment of each node; and, for each share, how many GPUs fit it, and what is free on the others."""
    fitting = np.zeros((len(free), len(now.milli)), np.int64)
    useless = np.zeros(fitting.shape, np.int64)
    for gpu in range(free.shape[1]):
        one = free[:, gpu, None]
        fitting += one >= now.milli
        useless += np.where(one < now.milli, one, 0)
    return _fragment(now, cpu, free.sum(1), fitting, useless, reachable), fitting, useless


def _fragment(now: Typical, cpu: Ints, total: Ints, fitting: Ints, useless: Ints, reachable: Bools) -> Ints:
    enough = fitting.take(now.share, 1) >= now.count
    served = (cpu[:, None] >= now.cpu) & enough & (now.count > 0) & reachable
    fragment: Ints = np.where(served, useless.take(now.share, 1), total[:, None]) @ now.weight
    return fragment


HALF_LIFE = 4096
"""Weights of asks halve after this many asks."""
CPU_PRIOR = 4_000
"""The cluster's own CPU per GPU weighs as much as asks for this many thousandths of GPUs: a prior, soon outweighed."""
PRICE_PRIOR = 32_000
"""A prior of asks for this many thousandths of GPUs, which any node can serve."""
SCARCE = 0.6
"""An ask that less than this share of all GPUs could ever serve makes its nodes scarce."""
SCARCE_CPU = 0.9
"""CPU is scarce if asks take more than this share of the CPU that belongs to the GPUs they take."""
REDRAWN = 1024
FIRST_DRAWN = frozenset({16, 64, 256, 512})
"""The classes of asks are rebuilt after this many asks: everything based on them must be recomputed."""
REPRICED = 8
"""Prices are recomputed after this many asks for GPUs."""
SAVES, SPENDS = 0.25, 0.2
"""Watts count from where more than this part of all GPUs is free to where less than that is."""
STEP, PRICE_STEP = 0.01, 0.1
"""A tariff is replaced when a figure differs by more: the ratio by a share STEP, a price by STEP and by a share PRICE_STEP."""


@dataclass(frozen=True, slots=True)
class Tariff:
    """The figures that policies use.

    `cpu_per_gpu` is R, the CPU that asks take per GPU (thousandths per thousandth; 0 while unknown). `prices` gives each build
    of node the part of the demand that few builds can serve, itself among them, over their part of what is free. `waste` gives
    for each free share of a GPU, in thousandths, how much of it the next share is expected to find too small. `cpu_scarcity` is
    0 if GPUs run out long before CPU does, 1 if they run out together or CPU first. `saves` says
    whether so many GPUs are free that watts settle ties.
    """

    cpu_per_gpu: float = 0.0
    prices: Mapping[Build, float] = field(default_factory=dict[Build, float])
    waste: Floats = field(default_factory=lambda: np.zeros(WHOLE + 1))
    cpu_scarcity: float = 0.0
    saves: bool = False


def expected_waste(classes: Mapping[AskClass, int]) -> Floats:
    """For each free share h of a GPU h x P(the next share asked for is larger than h): a whole GPU wastes nothing."""
    asked: Floats = np.zeros(WHOLE + 1)
    for (_, count, milli, _), weight in classes.items():
        if count == 1 and milli < WHOLE:
            asked[milli] += weight
    larger = asked[::-1].cumsum()[::-1] - asked
    waste: Floats = np.arange(WHOLE + 1) * larger / max(float(asked.sum()), 1.0)
    return waste


class Demand:
    """What was asked for so far.

    `tariff` has the figures to use, `classes` how often each class of asks came: each stays the same object until the figures
    have moved, or the classes are redrawn (see REDRAWN). Given classes are fixed.
    """

    def __init__(self, classes: Mapping[AskClass, int] | None = None) -> None:
        self._decay = 0.5 ** (1.0 / HALF_LIFE)
        self._seen = Counter(classes or {})
        self._learns_classes = classes is None
        self._count = 0
        self.classes: Mapping[AskClass, int] = dict(self._seen)
        self._cpu = self._cpu_of_all = 0.0
        self._gpu_beside_cpu = 0.0
        self._gpu = 0.0
        self._asked = self._packed = 0
        self._constrained: dict[frozenset[Build], float] = {}
        self._prior = 0.0
        self.tariff = Tariff(waste=expected_waste(self.classes))

    def expect(self, cpu_per_gpu: float) -> None:
        """Assume the cluster's own CPU per GPU until asks show otherwise."""
        self._prior = cpu_per_gpu

    def observe(
        self,
        ask: Ask,
        served_by: frozenset[Build],
        supply: Mapping[Build, int],
        free: Callable[[], Mapping[Build, float]],
    ) -> None:
        """Take note of a new ask.

        `served_by` are the builds of node that could ever serve it, `supply` all GPUs, `free` tells what is free of them.
        """
        if self._learns_classes:
            self._count += 1
            self._seen[class_of(ask)] += ask.member_count
            if self._count % HALF_LIFE == 0:
                self._seen = Counter({one: count // 2 for one, count in self._seen.items() if count > 1})
            if self._count % REDRAWN == 0 or self._count in FIRST_DRAWN:
                self.classes = dict(self._seen)
                if (waste := expected_waste(self.classes)).tolist() != self.tariff.waste.tolist():
                    self.tariff = replace(self.tariff, waste=waste)
        milli = float(ask.member_count * ask.gpu_count * ask.gpu_milli)
        self._cpu_of_all += ask.member_count * ask.cpu_milli
        if not milli:
            return
        self._cpu_of_all *= self._decay
        self._gpu = self._gpu * self._decay + milli
        self._gpu_beside_cpu = self._gpu_beside_cpu * self._decay + (milli if ask.cpu_milli else 0.0)
        self._cpu = self._cpu * self._decay + ask.member_count * ask.cpu_milli
        self._asked += 1
        if not served_by.issuperset(supply):
            able = sum(supply.get(build, 0) for build in served_by)
            if 0 < able < SCARCE * sum(supply.values()):
                self._constrained[served_by] = self._constrained.get(served_by, 0.0) + milli
        self._packed += ask.policy is _PACK
        if ask.policy is _PACK and self._packed % REPRICED == 1:
            known, part = self.tariff, sum(free().values()) / WHOLE / max(sum(supply.values()), 1)
            if known.saves != (part > (SPENDS if known.saves else SAVES)):
                self.tariff = replace(known, saves=not known.saves)
        self._renew(free)

    def _renew(self, free: Callable[[], Mapping[Build, float]]) -> None:
        """Draw up the tariff anew, if it has moved."""
        known, prices = self.tariff, self.tariff.prices
        if self._constrained and not self._asked % REPRICED:
            # What is asked of few builds, as a part of all, over the part of all that is free which is theirs.
            there, decay = free(), self._decay**REPRICED
            all_free, prices = sum(there.values()), dict[Build, float]()
            old, self._constrained = self._constrained, {}
            for served_by, milli in old.items():
                if (left := milli * decay) < 1.0:
                    continue
                self._constrained[served_by] = left
                theirs = max(sum(there.get(build, 0.0) for build in served_by), WHOLE)
                for build in served_by:
                    part = left / (self._gpu + PRICE_PRIOR) * all_free / theirs
                    prices[build] = prices.get(build, 0.0) + part
        weight = CPU_PRIOR if self._prior else 0.0
        gpu = self._gpu_beside_cpu + weight
        ratio = (self._cpu + self._prior * weight) / gpu if gpu else 0.0
        # In quarters: how much of the cluster's CPU goes with all of its GPUs, from SCARCE_CPU on.
        cpu_beside = self._prior * (self._gpu + PRICE_PRIOR)
        over = self._cpu_of_all / cpu_beside - SCARCE_CPU if cpu_beside else 0.0
        scarcity = round(4 * min(over / (1.0 - SCARCE_CPU), 1.0)) / 4 if over > 0.0 else 0.0
        if (
            scarcity != known.cpu_scarcity
            or not math.isclose(ratio, known.cpu_per_gpu, rel_tol=STEP)
            or (
                prices is not known.prices
                and any(
                    not math.isclose(price, known.prices.get(one, 0.0), rel_tol=PRICE_STEP, abs_tol=STEP)
                    for one, price in prices.items()
                )
            )
        ):
            self.tariff = replace(known, cpu_per_gpu=ratio, prices=prices, cpu_scarcity=scarcity)


TIGHTNESS = 0.15
"""Weight of free GPU on a node in `pack`: fuller nodes first."""
CPU_TIGHTNESS = 0.12
"""The same for free CPU, by the GPU that it can feed, where CPU is scarce."""
BUCKET = 125.0
"""Values of `pack` are compared in steps of this many thousandths of a GPU; what is closer is a tie."""
PRICE_WEIGHT = 2.0
"""Weight of a scarce build of node in `pack`."""
WASTE_WEIGHT = 2.0
"""Weight of the remainder of a shared GPU."""
MIG_WEIGHT = 64.0
"""Weight of what is free of the GPU of which a MIG instance is one: a seventh outweighs the 56 instances of a node."""
KILOWATT, TIE = 1000.0, 1024.0
"""All GPUs of a kilowatt count less than a step of `pack`, which is worth so many: they settle ties."""
BESTFIT_CPU, BESTFIT_GPU = 128_000.0, 8_000.0
"""`bestfit` measures what is left against a node of 128 cores and 8 GPUs."""


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What `pack` and `bestfit` look at, of one node or, in arrays, of several.

    `cpu` is free CPU (0 unless `cpu_known`), `gpu` free GPU, `taken` what is asked for, `price` that of the node's build. `waste`
    is how much more of a GPU goes to waste, at least, when a share is taken; `spare` what is free, at least, of the GPU whose MIG
    instance is taken; `per_kw` how many GPUs a kilowatt feeds, at most: 0 if unknown, or if few GPUs are free.
    """

    cpu: Any
    cpu_known: Any
    gpu: Any
    taken: Any
    price: Any
    waste: Any
    spare: Any
    per_kw: Any


def facts(
    columns: Columns, rows: Ints, fits: Bools, constraints: Constraints, ask: Ask, tariff: Tariff
) -> PolicyFacts:
    """Gather the facts of some rows; `fits` says which of their GPUs serve the ask."""
    price: Any = 0.0
    if tariff.prices:
        price = np.array([tariff.prices.get(build, 0.0) for build in columns.builds])[columns.build[rows]]
    free, milli = columns.free_milli[rows], constraints.milli(rows)
    if constraints.kind != WHOLE_GPU:
        working = (columns.kind[rows] == constraints.kind) & ~columns.out_of_use(rows)
        free = np.where(working, WHOLE - columns.held[rows], 0).sum(1)
    taken = ask.gpu_count * milli[:, 0]  # where the size decides, that of the first GPU
    cpu = columns.cpu_free[rows].astype(np.float64)
    waste = spare = per_kw = 0.0
    if wastes(ask):
        left = WHOLE - columns.held.take(rows, 0)
        waste = np.where(fits, more_waste(left, milli, tariff), WHOLE).min(1)
    if ask.policy is Policy.PACK and ask.gpu_count:
        if tariff.saves:
            per_kw = KILOWATT / np.where(fits, columns.watts.take(rows, 0), np.inf).min(1)
        if ask.mig_profile:
            spare = np.where(fits, columns.spare[rows], WHOLE).min(1).astype(np.float64)
    free, taken = free.astype(np.float64), taken.astype(np.float64)
    return PolicyFacts(cpu, cpu != UNKNOWN, free, taken, price, waste, spare, per_kw)


def facts_of(
    row: Row, codes: Sequence[int], constraints: Constraints, ask: Ask, tariff: Tariff
) -> PolicyFacts:
    """Like `facts`, for one row; `codes` are those of its GPUs, 0 for one that fits."""
    kind = constraints.kind
    free = row.node.free_milli
    if kind != WHOLE_GPU:
        free = sum(WHOLE - gpu.held for gpu in row.gpus if gpu.kind == kind and not gpu.out_of_use)
    taken = ask.gpu_count * constraints.milli_of(row.gpus[0] if row.gpus else None)
    price, cpu = tariff.prices.get(row.build, 0.0), row.node.cpu_free
    waste = spare = per_kw = 0.0
    if ask.policy is Policy.PACK and ask.gpu_count:
        fitting = list(compress(row.gpus, map(not_, codes)))
        if wastes(ask):
            waste = min(
                float(more_waste(WHOLE - gpu.held, constraints.milli_of(gpu), tariff)) for gpu in fitting
            )
        if tariff.saves:
            per_kw = KILOWATT / min([gpu.watts for gpu in fitting])
        if ask.mig_profile:
            spare = float(min([gpu.spare for gpu in fitting]))
    return PolicyFacts(float(cpu), cpu != UNKNOWN, float(free), float(taken), price, waste, spare, per_kw)


def wastes(ask: Ask) -> bool:
    """Whether a policy looks at what is left of the GPU that an ask takes a share of."""
    return ask.policy is Policy.PACK and ask.gpu_count == 1 and not ask.exclusive


def more_waste(free: Any, milli: Any, tariff: Tariff) -> Any:
    """How much more of GPUs with so much free is expected to go to waste once a share is taken; numbers or arrays."""
    waste: Any = tariff.waste
    return waste.take(np.maximum(free - milli, 0)) - waste.take(free)


def value(
    ask: Ask,
    columns: Columns,
    rows: Ints,
    fits: Bools,
    constraints: Constraints,
    tariff: Tariff,
    typical: Callable[[], Typical],
) -> Floats:
    """How good each row is, where it fits; `fits` says which of its GPUs do."""
    found: Floats = np.zeros(len(rows))
    if ask.policy is Policy.SPREAD and not ask.gpu_count:
        found = columns.cpu_free[rows].astype(np.float64)
    elif ask.policy is Policy.SPREAD:
        gpu = FactsOfRows(columns, rows)
        scores = np.where(fits, ask.weights.score(gpu.free_memory, gpu.idle), -np.inf)
        found = -np.sort(-scores, axis=1)[:, : ask.gpu_count].cumsum(1)[:, -1] / ask.gpu_count
    elif ask.policy is Policy.FGD:
        found = integer_scores(fragmentation_gradients(ask, columns, rows, fits, typical())).max(1)
    elif ask.policy is not Policy.FIRSTFIT:
        found = _rounded(ask, facts(columns, rows, fits, constraints, ask, tariff), tariff)
    return found


def value_of(ask: Ask, row: Row, codes: Sequence[int], constraints: Constraints, tariff: Tariff) -> float:
    """Like `value`, for one row that fits, and not for FGD; `codes` are those of its GPUs, 0 for one that fits."""
    if ask.policy is _SPREAD:
        if not ask.gpu_count:
            return float(row.node.cpu_free)
        scores = compress(row.scores(ask.weights), map(not_, codes))
        if ask.gpu_count == 1:
            return max(scores)
        total = 0.0
        for score in sorted(scores, reverse=True)[: ask.gpu_count]:
            total += score  # from the best on, as arrays do
        return total / ask.gpu_count
    if ask.policy is Policy.FIRSTFIT:
        return 0.0
    return float(_rounded(ask, facts_of(row, codes, constraints, ask, tariff), tariff))


def parts(ask: Ask, known: PolicyFacts, tariff: Tariff) -> tuple[tuple[str, Any, float], ...]:
    """The value of `pack` and `bestfit` before rounding, in parts: names, values and weights."""
    if ask.policy is Policy.PACK:
        found: tuple[tuple[str, Any, float], ...] = (
            ("starvation_drop", _drop(ask, known, tariff), 1.0 / BUCKET),
            ("free_gpu", known.gpu, -TIGHTNESS / BUCKET),
            ("free_cpu", _fed(known, tariff), -CPU_TIGHTNESS / BUCKET),
            ("scarcity", known.price * known.taken, -PRICE_WEIGHT / BUCKET),
            ("share_waste", known.waste, -WASTE_WEIGHT / BUCKET),
        )
        if ask.mig_profile:
            found = (*found, ("free_of_gpu", known.spare, -MIG_WEIGHT / BUCKET))
        return (*found, ("gpus_per_kw", known.per_kw, 1.0 / TIE)) if np.any(known.per_kw) else found
    cpu, gpu = _left(ask, known)
    return (("cpu_left", cpu, -50.0), ("gpu_left", gpu, -50.0))


def fragmentation_gradients(ask: Ask, columns: Columns, rows: Ints, fits: Bools, now: Typical) -> Floats:
    """How much less of a node is a fragment once the ask is on each GPU of it that fits."""
    cpu = columns.cpu_free[rows]
    working = (columns.kind[rows] == WHOLE_GPU) & ~columns.out_of_use(rows)
    free = np.where(working, WHOLE - columns.held[rows], 0)
    known = np.where(cpu == UNKNOWN, np.iinfo(np.int64).max // 2, cpu)
    wanted = fits if ask.gpu_count else np.ones(fits.shape, np.bool_)
    return gradients(now, known, free, columns.model[rows, 0].astype(np.int64), ask, wanted)


def _rounded(ask: Ask, known: PolicyFacts, tariff: Tariff) -> Any:
    """The value of `pack` and `bestfit`, rounded down. Like all functions below, it takes numbers or arrays."""
    if ask.policy is Policy.BESTFIT:
        cpu, gpu = _left(ask, known)
        return 100.0 * (1.0 - 0.5 * (cpu + gpu)) // 1.0
    kept = TIGHTNESS * known.gpu + PRICE_WEIGHT * (known.price * known.taken)
    kept = kept + WASTE_WEIGHT * known.waste + MIG_WEIGHT * known.spare
    steps = (_drop(ask, known, tariff) - kept - CPU_TIGHTNESS * _fed(known, tariff)) / BUCKET // 1.0
    return steps + known.per_kw / TIE


def _fed(known: PolicyFacts, tariff: Tariff) -> Any:
    """The GPU that the free CPU of a node can feed, as far as CPU is scarce."""
    if not tariff.cpu_scarcity:
        return 0.0 * known.gpu
    return tariff.cpu_scarcity * known.cpu_known * known.cpu / tariff.cpu_per_gpu


def _drop(ask: Ask, known: PolicyFacts, tariff: Tariff) -> Any:
    """How much less GPU of the node will be without CPU to feed it; 0 for an ask without CPU."""
    if not ask.cpu_milli or not tariff.cpu_per_gpu:
        return 0.0 * known.gpu
    before = known.gpu - known.cpu / tariff.cpu_per_gpu
    after = (known.gpu - known.taken) - (known.cpu - ask.cpu_milli) / tariff.cpu_per_gpu
    return known.cpu_known * (before * (before > 0) - after * (after > 0))


def _left(ask: Ask, known: PolicyFacts) -> tuple[Any, Any]:
    """What is left of a node for `bestfit`: CPU and GPU, against its measure; unknown CPU is none."""
    cpu = known.cpu_known * (known.cpu - ask.cpu_milli) / BESTFIT_CPU
    return cpu, (known.gpu - known.taken) / BESTFIT_GPU
