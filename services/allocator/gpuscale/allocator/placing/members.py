"""Members: the GPUs that one member of an ask gets on the node chosen for it. Pure."""

import math
from collections.abc import Callable

import numpy as np

from gpuscale.allocator.model import WHOLE, Ask, GpuSet, Policy, ReservedGpu, Score, ScorePart
from gpuscale.allocator.placing.columns import Columns, listed
from gpuscale.allocator.placing.demand import Tariff
from gpuscale.allocator.placing.fragmentation import Typical
from gpuscale.allocator.placing.gpu_sets import Candidate, best_first, choose, tightest_first
from gpuscale.allocator.placing.policies import (
    facts,
    fragmentation_gradients,
    fragmentation_scores,
    parts,
)
from gpuscale.allocator.placing.row import Row
from gpuscale.allocator.placing.shapes import Shape
from gpuscale.allocator.placing.shares import floor_on, memory_on, milli_on
from gpuscale.allocator.scoring import scored

FGD_NOTE = "score = floor(100 / (1 + exp(-gradient / 1000))), gradient in thousandths of a GPU"
SHARED = "shared already: scored by the memory that is left"


class Members:
    """Picks GPUs inside rows, by the policy of the ask."""

    def __init__(self, columns: Columns, tariff: Tariff, typical: Typical) -> None:
        self._columns = columns
        self._tariff = tariff
        self._typical = typical

    def take(self, shape: Shape, row: int, member: int, *, roomiest: bool = False) -> tuple[ReservedGpu, ...]:
        """The GPUs of a row that a member gets, those with room for most members like it if `roomiest`; the row fits."""
        ask = shape.ask
        if not ask.gpu_count:
            return ()
        if ask.gpu_count == 1:
            chosen = [self._preferred(shape, row)]
        else:
            candidates = sorted(self._candidates(shape, row), key=_preference(ask))
            if roomiest:
                candidates.sort(key=lambda one: -_room(ask, one))
            chosen = choose(candidates, ask.gpu_count, GpuSet.BEST if roomiest else ask.gpu_set)
        scores = self._scores(shape, row, [one.column for one in chosen])
        return tuple(
            [self._reserved(ask, row, one, score, member) for one, score in zip(chosen, scores, strict=True)]
        )

    def scores(self, shape: Shape, row: int) -> dict[str, Score]:
        """The scores of the GPUs of a row that fit, by their UUIDs."""
        fitting = listed(np.flatnonzero(shape.gpu_codes[row] == 0))
        gpus = self._columns.gpus[row]
        found = self._scores(shape, row, fitting)
        return {gpus[column].uuid: score for column, score in zip(fitting, found, strict=True)}

    def _preferred(self, shape: Shape, at: int) -> Candidate:
        """The first GPU of a row by preference; of equals the one with the lowest index, which comes first."""
        row = self._columns.row(at)
        fitting = _fitting(shape, at)
        values = self._values(shape, at, row, fitting)
        if _by_score(shape.ask):
            first = values.index(max(values))
        else:
            left = [(WHOLE - row.held[column], row.available[column]) for column in fitting]
            first = left.index(min(left))
        return self._candidate(at, row, fitting[first], values[first])

    def _candidates(self, shape: Shape, at: int) -> list[Candidate]:
        """The GPUs of a row that fit, in the order of their indices."""
        row, fitting = self._columns.row(at), _fitting(shape, at)
        values = self._values(shape, at, row, fitting)
        return [
            self._candidate(at, row, column, value) for column, value in zip(fitting, values, strict=True)
        ]

    def _candidate(self, at: int, row: Row, column: int, value: float) -> Candidate:
        gpu = self._columns.gpus[at][column]
        return Candidate(gpu, column, WHOLE - row.held[column], row.available[column], value)

    def _values(self, shape: Shape, at: int, row: Row, fitting: list[int]) -> list[float]:
        """How good GPUs of a row are, where that differs between them."""
        ask = shape.ask
        if ask.policy is Policy.SPREAD:
            scores = row.spread(ask.weights)
            return [scores[column] for column in fitting]
        if ask.policy is Policy.FGD:
            rows = np.array([at])
            fits = shape.gpu_codes[rows] == 0
            scores = fragmentation_scores(ask, self._columns, rows, fits, self._typical)[0]
            return [float(scores[column]) for column in fitting]
        return [0.0] * len(fitting)

    def _reserved(self, ask: Ask, row: int, one: Candidate, score: Score, member: int) -> ReservedGpu:
        gpu = one.gpu
        return ReservedGpu(
            node=self._columns.nodes[row].id,
            uuid=gpu.uuid,
            index=gpu.index,
            model=gpu.model,
            simulated=gpu.simulated,
            score=score,
            milli=milli_on(ask, gpu.memory_total_bytes),
            memory_bytes=memory_on(ask, gpu.memory_total_bytes, one.available, one.free_milli),
            member=member,
        )

    def _scores(self, shape: Shape, row: int, fitting: list[int]) -> list[Score]:
        """The scores of some GPUs of a row, in parts."""
        ask, columns = shape.ask, self._columns
        if ask.policy is Policy.SPREAD:
            return [self._spread(ask, row, column) for column in fitting]
        if ask.policy is Policy.FGD:
            return self._fragmentation(shape, row, fitting)
        if ask.policy is Policy.FIRSTFIT:
            score = summed((ScorePart("rank", float(columns.nodes[row].rank), -1.0),))
        else:
            known = facts(columns, np.array([row]), shape.constraints.kind, ask, self._tariff)
            score = summed(parts(ask, known, self._tariff))
        return [score] * len(fitting)

    def _spread(self, ask: Ask, row: int, column: int) -> Score:
        """As the seed says; of a GPU that is shared already, what its holders have is not free."""
        gpu, available = self._columns.gpus[row][column], self._columns.row(row).available[column]
        note = "" if available == gpu.memory_free_bytes else SHARED
        return scored(gpu, ask.weights, available, note)

    def _fragmentation(self, shape: Shape, row: int, fitting: list[int]) -> list[Score]:
        rows = np.array([row])
        fits = shape.gpu_codes[rows] == 0
        gradients = fragmentation_gradients(shape.ask, self._columns, rows, fits, self._typical)[0]
        compared = fragmentation_scores(shape.ask, self._columns, rows, fits, self._typical)[0]
        return [_of_gradient(float(gradients[column]), float(compared[column])) for column in fitting]


def _of_gradient(gradient: float, score: float) -> Score:
    return Score(score, (ScorePart("gradient", gradient, 0.0), ScorePart("score", score, 1.0)), FGD_NOTE)


def _fitting(shape: Shape, at: int) -> list[int]:
    """The columns of a row's GPUs that fit."""
    return [column for column, code in enumerate(listed(shape.gpu_codes[at])) if code == 0]


def _room(ask: Ask, one: Candidate) -> int:
    """How many shares like the one asked for a GPU has room for."""
    total = one.gpu.memory_total_bytes
    by_memory = one.available // max(floor_on(ask, total or 0), 1)
    return min(one.free_milli // milli_on(ask, total), by_memory)


def _by_score(ask: Ask) -> bool:
    """Whether GPUs of a node are preferred by their score, or by how little of them is free."""
    return ask.policy is Policy.SPREAD or (
        ask.policy is Policy.FGD and ask.gpu_count == 1 and not ask.exclusive
    )


def _preference(ask: Ask) -> Callable[[Candidate], tuple[float, int, str] | tuple[int, int, int, str]]:
    """The sort key by which GPUs of a node are preferred."""
    return best_first if _by_score(ask) else tightest_first


def summed(of: tuple[ScorePart, ...]) -> Score:
    """A score that is the sum of its parts."""
    return Score(math.fsum(part.value * part.weight for part in of if part.value is not None), of)
