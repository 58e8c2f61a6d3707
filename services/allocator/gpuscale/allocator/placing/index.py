"""Index: the fleet prepared for asks, and the GPUs that one member gets on its node. Pure.

A `Shape` has, for one kind of ask, the value of every row, updated row by row: a repeated ask costs only the rows that changed
since, and one search for the greatest value. `Members` picks inside a row: the set of GPUs chosen does not depend on their
order.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, compress, count
from math import comb
from operator import not_
from typing import Final, NamedTuple

import numpy as np

from gpuscale.allocator.domain.model import (
    WHOLE,
    Ask,
    Gpu,
    GpuSet,
    Node,
    Policy,
    ReservedGpu,
    Score,
    ScorePart,
    Use,
)
from gpuscale.allocator.placing.columns import Bools, Build, Codes, Columns, Floats, Ints, Row, listed
from gpuscale.allocator.placing.constraints import (
    ABSENT,
    Constraints,
    admitted,
    could_ever,
    floor_on,
    memory_on,
    milli_on,
)
from gpuscale.allocator.placing.policies import (
    AskClass,
    Demand,
    Tariff,
    Typical,
    facts_of,
    fragmentation_gradients,
    integer_scores,
    more_waste,
    parts,
    scored,
    typical,
    value,
    value_of,
    wastes,
)
from gpuscale.common.topology import nearness

_PACK, _FGD = Policy.PACK, Policy.FGD
MOST_ROWS = 8
"""Up to this many rows are brought up to date one by one; for more, arrays are faster."""
MOST_SHAPES = 256
MOST_BYTES = 64 * 1024 * 1024
"""Bounds on the cache of shapes, least recently used first out."""


class Shape:
    """One kind of ask over all rows.

    `gpu_codes` and `node_codes` hold the first obstacle of each, 0 for none; `value` is -inf where the ask does not fit.
    """

    def __init__(self, columns: Columns, use: Use, ask: Ask) -> None:
        rows = len(columns.changed)
        self.ask = ask
        self.constraints = Constraints(columns, use, ask)
        self.gpu_codes: Codes = np.zeros((rows, columns.width), np.int8)
        self.node_codes: Codes = np.zeros(rows, np.int8)
        self.value: Floats = np.full(rows, -np.inf)
        self._columns = columns
        self._by_row = ask.policy is not _FGD and self.constraints.is_plain()
        self._takes_of_node = bool(ask.cpu_milli or ask.host_memory_bytes)
        self._seen = 0
        self._ever: tuple[int, Ints] | None = None
        self._served_by: tuple[int, frozenset[Build]] | None = None
        self._reckoned_with: Tariff | Typical | None = None

    @property
    def bytes(self) -> int:
        """Roughly how much memory it takes."""
        return self.gpu_codes.nbytes + self.value.nbytes

    def update(self, now: float, tariff: Tariff, typical: Callable[[], Typical]) -> None:
        """Bring it up to date."""
        columns, policy = self._columns, self.ask.policy
        reckoning = tariff if policy is _PACK else typical() if policy is _FGD else None
        moved = self._reckoned_with is not None and self._reckoned_with is not reckoning
        self._reckoned_with = reckoning
        if columns.sequence == self._seen and not moved:
            return
        seen, self._seen = self._seen, columns.sequence
        few = columns.changed_since(seen, MOST_ROWS) if self._by_row and not moved else None
        if few is not None:
            ask, constraints = self.ask, self.constraints
            for at, gpus in few.items():  # the GPUs in some columns, or all of a row
                row, node = columns.row(at), int(self.node_codes[at])
                if gpus is None or (self._takes_of_node and constraints.node_code_of(row) != node):
                    node, codes = constraints.codes_of(row, now)
                    self.node_codes[at] = node
                    self.gpu_codes[at] = codes + [ABSENT] * (columns.width - len(codes))
                else:
                    codes = listed(self.gpu_codes[at])
                    constraints.codes_after_use(row, gpus, node, codes)
                    for column in gpus:
                        self.gpu_codes[at, column] = codes[column]
                fits = codes.count(0) >= ask.gpu_count if ask.gpu_count else not node
                self.value[at] = value_of(ask, row, codes, constraints, tariff) if fits else -np.inf
            return
        rows = np.flatnonzero(columns.changed[: len(columns)] > seen)
        self.node_codes[rows], self.gpu_codes[rows] = self.constraints.codes(rows, now)
        rows = np.arange(len(columns)) if moved else rows
        self.value[rows] = -np.inf
        fitting = rows[self.fits(rows)]  # only those that fit are reckoned
        if len(fitting):
            free = self.gpu_codes.take(fitting, 0) == 0
            self.value[fitting] = value(self.ask, columns, fitting, free, self.constraints, tariff, typical)

    def fits(self, rows: Ints) -> Bools:
        """Which of the rows serve the ask."""
        enough = (self.gpu_codes.take(rows, 0) == 0).sum(1) >= self.ask.gpu_count
        found: Bools = enough if self.ask.gpu_count else self.node_codes[rows] == 0
        return found

    def room_ever(self) -> Ints:
        """How many members each node would take if all of it were free."""
        if self._ever is None or self._ever[0] != self._columns.layout:
            self._ever = (self._columns.layout, could_ever(self.ask, self._columns, self.constraints))
        return self._ever[1]

    def served_by(self) -> frozenset[Build]:
        """The builds of node that could ever serve a member; none if the ask names nodes or GPUs."""
        columns = self._columns
        if self._served_by is None or self._served_by[0] != columns.layout:
            chosen = self.ask.nodes or self.ask.gpus or self.ask.mig_profile
            able = columns.build[: len(columns)][self.room_ever() > 0]
            numbers: set[int] = set() if chosen else set(able.tolist())
            found = frozenset(build for build, number in columns.builds.items() if number in numbers)
            self._served_by = columns.layout, found
        return self._served_by[1]


_LINK = 1 << 16
"""The weight of an NVLink connection: more than the nearness over PCIe of all pairs of 128 GPUs."""
MOST_SETS = 20_000
"""Up to this many sets are all compared; beyond, a set is grown from the best pair (16 GPUs have 12870 sets of 8)."""


class NodeCandidate(NamedTuple):
    """A GPU that fits, and its column: what nobody holds of it, the memory a newcomer has there, and how good it is.

    `spare` is what nobody holds of the GPU of which a MIG instance is one: those that are partly held are filled first, so
    that others stay free to be partitioned anew.
    """

    gpu: Gpu
    column: int
    free_milli: int
    available: int
    value: float
    spare: int


def best_first(one: NodeCandidate) -> tuple[float, int, int, str]:
    """Sort key: the highest value, then the lowest index."""
    return -one.value, one.spare, one.gpu.index, one.gpu.uuid


def tightest_first(one: NodeCandidate) -> tuple[float, int, int, int, int, str]:
    """Sort key: of equal value, the GPU of which least is free, so that whole ones stay whole."""
    return -one.value, one.spare, one.free_milli, one.available, one.gpu.index, one.gpu.uuid


def choose(candidates: Sequence[NodeCandidate], count: int, wanted: GpuSet) -> list[NodeCandidate]:
    """The GPUs to take of `candidates`, at least `count` of them in order of preference."""
    if wanted is GpuSet.BEST or count < 2 or count == len(candidates):
        return list(candidates[:count])
    if wanted is GpuSet.NVLINK:
        return _best_linked(candidates, count)
    # Maximize the least free memory, then minimize the spread: those just above the `count`-th largest. Of 80, 60
    # and 60 GB the two balanced ones are 60 and 60.
    least = sorted((one.available for one in candidates), reverse=True)[count - 1]
    enough = [one for one in candidates if one.available >= least]
    return sorted(enough, key=lambda one: (one.available, one.gpu.index, one.gpu.uuid))[:count]


def _best_linked(candidates: Sequence[NodeCandidate], count: int) -> list[NodeCandidate]:
    """The set with the most NVLink connections inside; ties by PCIe distance, then preference."""
    gpus = [one.gpu for one in candidates]
    # How close two GPUs are: by NVLink connections, each of which outweighs PCIe in the largest set.
    links = [
        [
            max(one.nvlinks.get(other.uuid, 0), other.nvlinks.get(one.uuid, 0)) * _LINK
            + (nearness(one.place, other.place) or 0)
            for other in gpus
        ]
        for one in gpus
    ]
    everyone = range(len(candidates))

    def inside(chosen: Sequence[int]) -> int:
        return sum(links[one][other] for one, other in combinations(chosen, 2))

    if comb(len(candidates), count) <= MOST_SETS:
        return [candidates[one] for one in max(combinations(everyone, count), key=inside)]
    chosen: list[int] = []
    while len(chosen) < count:
        rest = [one for one in everyone if one not in chosen]
        chosen.append(max(rest, key=lambda one: inside([*chosen, one]) if chosen else max(links[one])))
    return [candidates[one] for one in sorted(chosen)]


FGD_NOTE = "score = floor(100 / (1 + exp(-gradient / 1000))), gradient in thousandths of a GPU"
SHARED = "shared already: scored by the memory that is left"
_SPREAD: Final = Policy.SPREAD


class Members:
    """Picks GPUs inside rows by the ask's policy; typical asks are computed only for policies that use them."""

    def __init__(self, columns: Columns, demand: Demand, typical: Callable[[], Typical]) -> None:
        self._columns = columns
        self._demand = demand
        self._typical = typical

    def take(self, shape: Shape, row: int, member: int, *, roomiest: bool = False) -> tuple[ReservedGpu, ...]:
        """The GPUs of a row that a member gets; with `roomiest`, those with room for most such members. The row fits."""
        ask = shape.ask
        if not ask.gpu_count:
            return ()
        score = self._scoring(shape, row)
        if ask.gpu_count == 1:
            # Of equals the one with the lowest index.
            of_row, fitting = self._columns.row(row), _fitting(shape, row)
            values = self._values(shape, row, of_row)
            if _by_score(ask) and not ask.mig_profile:
                scores = [*map(values.__getitem__, fitting)]
                first = fitting[scores.index(max(scores))]
            else:
                gpus = of_row.gpus
                first = min(
                    fitting, key=lambda at: (-values[at], gpus[at].spare, -gpus[at].held, gpus[at].available)
                )
            one = self._candidate(row, of_row, first, values[first])
            return (self._reserved(ask, row, one, score(one), member),)
        candidates = self._candidates(shape, row)
        if roomiest:
            candidates.sort(key=lambda one: -_room(ask, one))
        chosen = choose(candidates, ask.gpu_count, GpuSet.BEST if roomiest else ask.gpu_set)
        return tuple([self._reserved(ask, row, one, score(one), member) for one in chosen])

    def scores(self, shape: Shape, row: int) -> dict[str, Score]:
        """The scores of the fitting GPUs of a row, by UUID."""
        if not (found := self._candidates(shape, row)):
            return {}
        score = self._scoring(shape, row)
        return {one.gpu.uuid: score(one) for one in found}

    def each(self, shape: Shape, row: int) -> Iterator[ReservedGpu]:
        """The fitting GPUs of a row, best first, each as if taken alone."""
        score = self._scoring(shape, row)
        for one in self._candidates(shape, row):
            yield self._reserved(shape.ask, row, one, score(one), 0)

    def _candidates(self, shape: Shape, at: int) -> list[NodeCandidate]:
        """The fitting GPUs of a row, best first."""
        row = self._columns.row(at)
        values = self._values(shape, at, row)
        found = [self._candidate(at, row, column, values[column]) for column in _fitting(shape, at)]
        if _by_score(shape.ask):
            return sorted(found, key=best_first)
        return sorted(found, key=tightest_first)

    def _candidate(self, at: int, row: Row, column: int, value: float) -> NodeCandidate:
        gpu = self._columns.gpus[at][column]
        known = row.gpus[column]
        return NodeCandidate(gpu, column, WHOLE - known.held, known.available, value, known.spare)

    def _values(self, shape: Shape, at: int, row: Row) -> list[float]:
        """The values of the fitting GPUs of a row, if they differ."""
        ask = shape.ask
        if ask.policy is _SPREAD:
            return row.scores(ask.weights)
        if ask.policy is Policy.FGD:
            rows, now = np.array([at]), self._typical()
            found = fragmentation_gradients(ask, self._columns, rows, shape.gpu_codes[rows] == 0, now)
            values: list[float] = integer_scores(found[0]).tolist()
            return values
        if wastes(ask):
            left = WHOLE - self._columns.held[at, : len(row.gpus)]
            milli = shape.constraints.milli(np.array([at]))[0, : len(row.gpus)]
            less: list[float] = (-more_waste(left, milli, self._demand.tariff)).tolist()
            return less
        if ask.policy is _PACK and ask.exclusive:
            return [-gpu.watts for gpu in row.gpus]
        return [0.0] * len(row.gpus)

    def _reserved(self, ask: Ask, row: int, one: NodeCandidate, score: Score, member: int) -> ReservedGpu:
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

    def _scoring(self, shape: Shape, row: int) -> Callable[[NodeCandidate], Score]:
        ask, columns = shape.ask, self._columns
        if ask.policy is _SPREAD:
            # As the seed says; of a GPU that is shared already, what its holders have is not free.
            return lambda one: scored(
                one.gpu,
                ask.weights,
                one.available,
                "" if one.available == one.gpu.memory_free_bytes else SHARED,
            )
        if ask.policy is Policy.FGD:
            rows = np.array([row])
            fits, now = shape.gpu_codes[rows] == 0, self._typical()
            gradients = fragmentation_gradients(ask, columns, rows, fits, now)[0]
            compared = integer_scores(gradients)

            def scored_by_gradient(one: NodeCandidate) -> Score:
                gradient, total = float(gradients[one.column]), float(compared[one.column])
                of = (ScorePart("gradient", gradient, 0.0), ScorePart("score", total, 1.0))
                return Score(total, of, FGD_NOTE)

            return scored_by_gradient
        if ask.policy is Policy.FIRSTFIT:
            score = summed((ScorePart("rank", float(columns.nodes[row].rank), -1.0),))
        else:
            tariff, codes = self._demand.tariff, listed(shape.gpu_codes[row])
            known = facts_of(columns.row(row), codes, shape.constraints, ask, tariff)
            score = summed(
                tuple([ScorePart(name, float(value), by) for name, value, by in parts(ask, known, tariff)])
            )
        return lambda _: score


def _fitting(shape: Shape, at: int) -> list[int]:
    return list(compress(count(), map(not_, listed(shape.gpu_codes[at]))))


def _room(ask: Ask, one: NodeCandidate) -> int:
    """How many such shares a GPU has room for."""
    total = one.gpu.memory_total_bytes
    by_memory = one.available // max(floor_on(ask, total or 0), 1)
    return min(one.free_milli // milli_on(ask, total), by_memory)


def _by_score(ask: Ask) -> bool:
    """Whether GPUs of a node are preferred by score, rather than by how little of them is free."""
    return ask.policy is _SPREAD or (ask.policy is Policy.FGD and ask.gpu_count == 1 and not ask.exclusive)


def summed(of: tuple[ScorePart, ...]) -> Score:
    """A score that is the sum of its parts."""
    return Score(math.fsum(part.value * part.weight for part in of if part.value is not None), of)


class Index:
    """The fleet, nodes in order of rank, prepared for asks; `members` picks GPUs inside rows."""

    def __init__(self, nodes: Sequence[Node], use: Use, demand: Demand, cordons: frozenset[str]) -> None:
        self.columns = Columns(nodes, use, cordons)
        self._shapes: OrderedDict[Ask, Shape] = OrderedDict()
        self._bytes = 0
        self._last: Shape | None = None
        self._use = use
        self._demand = demand
        self._typical: tuple[Mapping[AskClass, int], int, Typical] | None = None
        self.members = Members(self.columns, demand, self.typical)
        use.changed()

    def typical(self) -> Typical:
        """The typical asks, recomputed when there are new ones, or new models."""
        classes, models = self._demand.classes, self.columns.models
        if self._typical is None or self._typical[0] is not classes or self._typical[1] != len(models):
            drawn = typical(classes, lambda names: admitted(models, names))
            self._typical = (classes, len(models), drawn)
        return self._typical[2]

    def follow(self, now: float) -> None:
        """Take in what was held and freed since, and what has become too old."""
        for node, gpus in self._use.changed().items():
            row = self.columns.row_of.get(node)
            if row is not None:
                self.columns.write_use_of(row, gpus)
        self.columns.age(now)

    def shape(self, ask: Ask, now: float, *, new: bool = False) -> Shape:
        """The up-to-date shape of an ask; a `new` one is recorded."""
        self.follow(now)
        shape = self._last
        if shape is None or shape.ask is not ask:
            shape = self._last = self._shapes.get(ask)
            if shape is None:
                shape = self._last = self._shapes[ask] = Shape(self.columns, self._use, ask)
                self._bytes += shape.bytes
                while len(self._shapes) > 1 and (len(self._shapes) > MOST_SHAPES or self._bytes > MOST_BYTES):
                    self._bytes -= self._shapes.popitem(last=False)[1].bytes
            self._shapes.move_to_end(ask)
        if new:
            columns, gpus = self.columns, self.columns.gpus_beside_cpu
            self._demand.expect(columns.cpu_beside_gpus / (WHOLE * gpus) if gpus else 0.0)
            self._demand.observe(ask, shape.served_by(), columns.supply, columns.free_of)
        shape.update(now, self._demand.tariff, self.typical)  # drawn up for those alone who reckon with it
        return shape

    def value(self, shape: Shape) -> Floats:
        """The value of each row for an up-to-date shape; -inf where it does not fit."""
        return shape.value[: len(self.columns)]

    def free(self, shape: Shape) -> Bools:
        """Which GPUs can serve an up-to-date shape."""
        found: Bools = shape.gpu_codes[: len(self.columns)] == 0
        return found
