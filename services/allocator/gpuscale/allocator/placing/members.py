"""Members: the GPUs that one member of an ask gets on the node chosen for it. Pure."""

import math
from collections.abc import Callable
from itertools import compress, count
from operator import not_
from typing import Final

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Ask, GpuSet, Policy, ReservedGpu, Score, ScorePart
from gpuscale.allocator.domain.scoring import scored
from gpuscale.allocator.placing.columns import Bools, Columns, Floats, Ints, listed
from gpuscale.allocator.placing.demand import Tariff
from gpuscale.allocator.placing.fragmentation import Typical
from gpuscale.allocator.placing.gpu_sets import Candidate, best_first, choose, tightest_first
from gpuscale.allocator.placing.policies import (
    facts,
    fragmentation_gradients,
    fragmentation_scores,
    parts,
    spread_scores,
)
from gpuscale.allocator.placing.row import Row
from gpuscale.allocator.placing.shapes import Shape
from gpuscale.allocator.placing.shares import floor_on, memory_on, milli_on

FGD_NOTE = "score = floor(100 / (1 + exp(-gradient / 1000))), gradient in thousandths of a GPU"
SHARED = "shared already: scored by the memory that is left"
_SPREAD: Final = Policy.SPREAD


class Members:
    """Picks GPUs inside rows, by the policy of the ask.

    Args:
        columns: the rows.
        tariff, typical: what policies reckon with, as of now; asked for only where the policy does.
    """

    def __init__(
        self, columns: Columns, tariff: Callable[[], Tariff], typical: Callable[[], Typical]
    ) -> None:
        self._columns = columns
        self._tariff = tariff
        self._typical = typical

    def take(self, shape: Shape, row: int, member: int, *, roomiest: bool = False) -> tuple[ReservedGpu, ...]:
        """The GPUs of a row that a member gets, those with room for most members like it if `roomiest`; the row fits."""
        ask = shape.ask
        if not ask.gpu_count:
            return ()
        score = self._scoring(shape, row)
        if ask.gpu_count == 1:
            one = self._preferred(shape, row)
            return (self._reserved(ask, row, one, score(one), member),)
        candidates = sorted(self._candidates(shape, row), key=_preference(ask))
        if roomiest:
            candidates.sort(key=lambda one: -_room(ask, one))
        chosen = choose(candidates, ask.gpu_count, GpuSet.BEST if roomiest else ask.gpu_set)
        return tuple([self._reserved(ask, row, one, score(one), member) for one in chosen])

    def scores(self, shape: Shape, row: int) -> dict[str, Score]:
        """The scores of the GPUs of a row that fit, by their UUIDs."""
        score = self._scoring(shape, row)
        return {one.gpu.uuid: score(one) for one in self._candidates(shape, row)}

    def best(self, shape: Shape, fits: Bools, most: int) -> tuple[list[ReservedGpu], int]:
        """The GPUs that `fits` with the highest scores, each as if it were taken alone; and how many fit in all."""
        rows, columns = np.nonzero(fits)
        order = np.argsort(-self._totals(shape, rows, columns), kind="stable")[:most]
        found: list[ReservedGpu] = []
        scores: dict[int, Callable[[Candidate], Score]] = {}
        for row, column in zip(listed(rows[order]), listed(columns[order]), strict=True):
            if row not in scores:
                scores[row] = self._scoring(shape, row)
            one = self._candidate(row, self._columns.row(row), column, 0.0)
            found.append(self._reserved(shape.ask, row, one, scores[row](one), 0))
        return found, len(rows)

    def _totals(self, shape: Shape, rows: Ints, columns: Ints) -> Floats:
        """The totals of the scores of GPUs that fit, each by its row and column."""
        ask, where = shape.ask, self._columns
        if ask.policy is _SPREAD:
            return spread_scores(ask, where, rows)[np.arange(len(rows)), columns]
        if ask.policy is Policy.FIRSTFIT:
            ranks: Floats = -np.array([node.rank for node in where.nodes], np.float64)
            return ranks[rows]
        nodes, back = np.unique(rows, return_inverse=True)
        if ask.policy is Policy.FGD:
            fits = shape.gpu_codes[nodes] == 0
            return fragmentation_scores(ask, where, nodes, fits, self._typical())[back, columns]
        tariff = self._tariff()
        known = facts(where, nodes, shape.constraints.kind, ask, tariff)
        total: Floats = np.sum([value * weight for _, value, weight in parts(ask, known, tariff)], axis=0)
        return total[back]

    def _preferred(self, shape: Shape, at: int) -> Candidate:
        """The first GPU of a row by preference; of equals the one with the lowest index, which comes first."""
        row = self._columns.row(at)
        fitting = _fitting(shape, at)
        values = self._values(shape, at, row)
        if _by_score(shape.ask):
            scores = [values[column] for column in fitting]
            first = fitting[scores.index(max(scores))]
        else:
            first = min(fitting, key=lambda column: (-row.held[column], row.available[column]))
        return self._candidate(at, row, first, values[first])

    def _candidates(self, shape: Shape, at: int) -> list[Candidate]:
        """The GPUs of a row that fit, in the order of their indices."""
        row = self._columns.row(at)
        values = self._values(shape, at, row)
        return [self._candidate(at, row, column, values[column]) for column in _fitting(shape, at)]

    def _candidate(self, at: int, row: Row, column: int, value: float) -> Candidate:
        gpu = self._columns.gpus[at][column]
        return Candidate(gpu, column, WHOLE - row.held[column], row.available[column], value)

    def _values(self, shape: Shape, at: int, row: Row) -> list[float]:
        """How good the GPUs of a row are that fit, where that differs between them."""
        ask = shape.ask
        if ask.policy is _SPREAD:
            return row.spread(ask.weights)
        if ask.policy is Policy.FGD:
            rows = np.array([at])
            fits = shape.gpu_codes[rows] == 0
            values: list[float] = fragmentation_scores(
                ask, self._columns, rows, fits, self._typical()
            ).tolist()[0]
            return values
        return [0.0] * len(row.held)

    def _reserved(self, ask: Ask, row: int, one: Candidate, score: Score, member: int) -> ReservedGpu:
        gpu = one.gpu
        return ReservedGpu(
            self._columns.nodes[row].id,
            gpu.uuid,
            gpu.index,
            gpu.model,
            gpu.simulated,
            score,
            milli_on(ask, gpu.memory_total_bytes),
            memory_on(ask, gpu.memory_total_bytes, one.available, one.free_milli),
            member,
            parent=gpu.parent,
        )

    def _scoring(self, shape: Shape, row: int) -> Callable[[Candidate], Score]:
        """What scores the GPUs of a row that fit, in parts."""
        ask, columns = shape.ask, self._columns
        if ask.policy is _SPREAD:
            return lambda one: _spread(ask, one)
        if ask.policy is Policy.FGD:
            return self._fragmentation(shape, row)
        if ask.policy is Policy.FIRSTFIT:
            score = summed((ScorePart("rank", float(columns.nodes[row].rank), -1.0),))
        else:
            tariff = self._tariff()
            known = facts(columns, np.array([row]), shape.constraints.kind, ask, tariff)
            score = summed(
                tuple(
                    ScorePart(name, float(value[0]), weight)
                    for name, value, weight in parts(ask, known, tariff)
                )
            )
        return lambda _: score

    def _fragmentation(self, shape: Shape, row: int) -> Callable[[Candidate], Score]:
        rows = np.array([row])
        fits, typical = shape.gpu_codes[rows] == 0, self._typical()
        gradients = fragmentation_gradients(shape.ask, self._columns, rows, fits, typical)[0]
        compared = fragmentation_scores(shape.ask, self._columns, rows, fits, typical)[0]
        return lambda one: _of_gradient(float(gradients[one.column]), float(compared[one.column]))


def _spread(ask: Ask, one: Candidate) -> Score:
    """As the seed says; of a GPU that is shared already, what its holders have is not free."""
    note = "" if one.available == one.gpu.memory_free_bytes else SHARED
    return scored(one.gpu, ask.weights, one.available, note)


def _of_gradient(gradient: float, score: float) -> Score:
    return Score(score, (ScorePart("gradient", gradient, 0.0), ScorePart("score", score, 1.0)), FGD_NOTE)


def _fitting(shape: Shape, at: int) -> list[int]:
    """The columns of a row's GPUs that fit."""
    return list(compress(count(), map(not_, listed(shape.gpu_codes[at]))))


def _room(ask: Ask, one: Candidate) -> int:
    """How many shares like the one asked for a GPU has room for."""
    total = one.gpu.memory_total_bytes
    by_memory = one.available // max(floor_on(ask, total or 0), 1)
    return min(one.free_milli // milli_on(ask, total), by_memory)


def _by_score(ask: Ask) -> bool:
    """Whether GPUs of a node are preferred by their score, or by how little of them is free."""
    return ask.policy is _SPREAD or (ask.policy is Policy.FGD and ask.gpu_count == 1 and not ask.exclusive)


def _preference(ask: Ask) -> Callable[[Candidate], tuple[float, int, str] | tuple[int, int, int, str]]:
    """The sort key by which GPUs of a node are preferred."""
    return best_first if _by_score(ask) else tightest_first


def summed(of: tuple[ScorePart, ...]) -> Score:
    """A score that is the sum of its parts."""
    return Score(math.fsum(part.value * part.weight for part in of if part.value is not None), of)
