"""What any placement can fill at most: a linear program over builds of nodes, solved by SciPy.

Why it is a bound: whatever a placement serves, the numbers of each shape of ask that it put on each build of node solve the
program, which knows all asks beforehand, divides them, and gives nothing to those without GPUs. Beside what there is of
GPUs, CPU and memory in all, its rows say what one GPU or node cannot hold: sums over dual feasible functions, whose values
for what fits into one bin add up to 1 at most (Fekete and Schepers, 2001).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench._traces import demand
from gpuscale.allocator.domain.model import WHOLE, Ask, Node
from gpuscale.allocator.placing.constraints import admitted

Part = Callable[[int, int], float]
"""What an item counts of a bin, by its size and the bin's."""


class Kind(NamedTuple):
    """What nodes are alike in."""

    model: str
    gpus: int
    cpu: int
    memory: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The program: how many of an ask on a kind of node are the columns; each row, a sum over them, is at most `most`."""

    columns: list[tuple[Ask, Kind]] = field(default_factory=list[tuple[Ask, Kind]])
    rows: defaultdict[object, dict[int, float]] = field(
        default_factory=lambda: defaultdict[object, dict[int, float]](dict)
    )
    most: dict[object, float] = field(default_factory=dict[object, float])


def kind_of(node: Node) -> Kind:
    """The kind of a node."""
    return Kind(node.gpus[0].model, len(node.gpus), node.cpu_milli or 0, node.memory_total_bytes or 0)


def limits(nodes: Sequence[Node], wanted: Mapping[Ask, float]) -> Limits:
    """What bounds a placement of asks, of each of which so many came."""
    kinds, found = Counter(kind_of(node) for node in nodes), Limits()
    for ask, many in wanted.items():
        for kind, count in kinds.items():
            if not ask.gpu_count or not _serves(kind, ask):
                continue
            column = len(found.columns)
            found.columns.append((ask, kind))
            found.rows[ask][column], found.most[ask] = 1.0, many
            for what, bins, times, size, whole in _sizes(ask, kind):
                for index, part in enumerate(PARTS):
                    if value := times * part(size, whole):
                        found.rows[kind, what, index][column] = value
                        found.most[kind, what, index] = float(bins * count)
    return found


def most_filled(nodes: Sequence[Node], wanted: Mapping[Ask, float]) -> float:
    """Thousandths of GPUs that can be given to asks at most. As a function of how many came it is concave, so that of means
    it bounds the mean."""
    program = limits(nodes, wanted)
    optimize, sparse = (importlib.import_module(f"scipy.{one}") for one in ("optimize", "sparse"))
    entries = [
        (row, column, value)
        for row, key in enumerate(program.most)
        for column, value in program.rows[key].items()
    ]
    rows, columns, values = zip(*entries, strict=True)
    shape = len(program.most), len(program.columns)
    matrix: Any = sparse.csr_array((values, (rows, columns)), shape=shape)
    gain = [-float(demand(ask)) for ask, _ in program.columns]
    found = optimize.linprog(gain, A_ub=matrix, b_ub=list(program.most.values()), method="highs")
    if found.x is None:
        raise ArithmeticError(found.message)
    return -float(found.fun)


def can_solve() -> bool:
    """Whether SciPy is here."""
    return importlib.util.find_spec("scipy") is not None


def _serves(kind: Kind, ask: Ask) -> bool:
    """Whether an empty node of a kind has room for an ask."""
    return (
        ask.gpu_count <= kind.gpus
        and ask.cpu_milli <= kind.cpu
        and ask.host_memory_bytes <= kind.memory
        and bool(admitted((kind.model,), ask.models)[0])
    )


def _sizes(ask: Ask, kind: Kind) -> Iterator[tuple[str, int, int, int, int]]:
    """Of what an ask takes on a node: the bins of a node, how many of them it takes of, how much of each, of how much."""
    yield "gpu", kind.gpus, ask.gpu_count, ask.gpu_milli, WHOLE
    yield "cpu", 1, 1, ask.cpu_milli, max(kind.cpu, 1)
    yield "memory", 1, 1, ask.host_memory_bytes, max(kind.memory, 1)


def _plain(size: int, whole: int) -> float:
    return size / whole


def _step(k: int) -> Part:
    """Of items larger than 1/(k + 1) of a bin, k fit; of those larger than 2/(k + 1) half as many, and so on."""

    def part(size: int, whole: int) -> float:
        steps, rest = divmod((k + 1) * size, whole)
        return steps / k if rest else size / whole

    return part


def _cut(small: int) -> Part:
    """Items that leave less than `small` thousandths of a bin fill it, where smaller ones count nothing."""

    def part(size: int, whole: int) -> float:
        if size * WHOLE > (WHOLE - small) * whole:
            return 1.0
        return size / whole if size * WHOLE >= small * whole else 0.0

    return part


PARTS: tuple[Part, ...] = (_plain, *map(_step, range(1, 9)), *map(_cut, range(50, 501, 50)))
