"""Survey: the nodes as one ask sees them, for saying what came nearest and what stood in the way. Pure."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from gpuscale.allocator.domain.feasibility import LASTING, ORDER, Obstacle
from gpuscale.allocator.domain.model import Ask, Gpu, Node, Reservation
from gpuscale.allocator.domain.use import Use
from gpuscale.allocator.placing.columns import NO_GPU, Bools, Columns, Ints, listed
from gpuscale.allocator.placing.constraints import ABSENT, CODES, selected
from gpuscale.allocator.placing.memory import outsiders
from gpuscale.allocator.placing.shapes import Shape


@dataclass(frozen=True, slots=True)
class NodeSurvey:
    """One node as the ask sees it: how many of its GPUs fit, and what is in the way of the others.

    `outsiders` names processes of no live reservation on GPUs that have too little memory, and what they use.
    """

    node: Node
    fitting: int
    in_the_way: tuple[tuple[Obstacle, Gpu], ...]
    outsiders: tuple[tuple[str, int], ...] = ()

    @property
    def counts(self) -> Counter[Obstacle]:
        """How many GPUs each obstacle keeps out."""
        return Counter(found for found, _ in self.in_the_way)


class Survey:
    """All nodes as one ask sees them.

    Args:
        shape: of the ask, up to date.
        now: as of then, readings are fresh or not.
    """

    def __init__(self, columns: Columns, shape: Shape, use: Use, now: float) -> None:
        size = len(columns)
        self.ask: Ask = shape.ask
        self._columns = columns
        self._shape = shape
        self._use = use
        self._codes = shape.gpu_codes[:size]
        self._rows = np.arange(size)
        self._now = now
        self._gpus = columns.gpu_count[:size]
        self._fitting = (self._codes == 0).sum(1)
        self._candidates: Bools = np.ones(size, np.bool_)
        if self.ask.nodes or self.ask.excluded_nodes:
            self._candidates = np.array([selected(node, self.ask) for node in columns.nodes], np.bool_)

    @property
    def counts(self) -> Counter[Obstacle]:
        """How many GPUs of all nodes each obstacle keeps out; of several in the way of one GPU, the first counts."""
        found = listed(np.bincount(self._codes.ravel() - ABSENT, minlength=len(ORDER) + 2))
        return Counter({one: count for one, count in zip(ORDER, found[2:], strict=True) if count})

    @property
    def candidates(self) -> list[Node]:
        """The nodes that the ask admits by name."""
        return [self._columns.nodes[row] for row in listed(np.flatnonzero(self._candidates))]

    @property
    def unreported(self) -> list[str]:
        """The candidates that have not been heard of yet."""
        silent = self._candidates & ~self._columns.reported[: len(self._columns)]
        return [self._columns.nodes[row].id for row in listed(np.flatnonzero(silent))]

    @property
    def unread(self) -> list[Node]:
        """The candidates that have been heard of, but cannot read their GPUs, and could serve if they had the right ones."""
        size = len(self._columns)
        other = self._shape.node_codes[:size] == CODES[Obstacle.LABELS_DIFFER]
        blind = self._candidates & self._columns.reported[:size] & self._columns.unread[:size] & ~other
        return (
            [self._columns.nodes[row] for row in listed(np.flatnonzero(blind))] if self.ask.gpu_count else []
        )

    @property
    def unreachable(self) -> bool:
        """Whether nothing at all is known of any candidate: it is not online, or all it said is too old."""
        columns, size = self._columns, len(self._columns)
        fresh = (columns.fresh_until[:size] >= self._now) & (columns.kind[:size] != NO_GPU)
        reachable = (columns.state[:size] == 0) & (fresh.any(1) | (self._gpus == 0))
        return not (self._candidates & reachable).any()

    def node(self, row: int) -> NodeSurvey:
        """The node of a row."""
        gpus, codes = self._columns.gpus[row], listed(self._codes[row])
        in_the_way = tuple((ORDER[code - 1], gpu) for code, gpu in zip(codes, gpus, strict=False) if code > 0)
        short = [gpu for obstacle, gpu in in_the_way if obstacle is Obstacle.MEMORY_BELOW_MIN]
        strangers = [one for gpu in short for one in outsiders(gpu, self._live(gpu))]
        strangers.sort(key=lambda one: (-one[1], one[0]))
        return NodeSurvey(self._columns.nodes[row], int(self._fitting[row]), in_the_way, tuple(strangers))

    def closest(self) -> NodeSurvey | None:
        """The candidate with most fitting GPUs, then with most GPUs, then first seen; None if there is none."""
        if not self._candidates.any():
            return None
        closeness = self._fitting * (self._columns.width + 1) + self._gpus
        return self.node(int(np.argmax(np.where(self._candidates, closeness, -1))))

    def nearest(self, most: int) -> list[int]:
        """The rows that came nearest: candidates first, then most fitting GPUs, then most GPUs, then first seen."""
        order = np.lexsort((self._rows, -self._gpus, -self._fitting, ~self._candidates))
        return listed(order[:most])

    def room_ever(self) -> Ints:
        """How many members each candidate would take if all of it were free."""
        return np.where(self._candidates, self._shape.room_ever(), 0)

    def largest(self) -> tuple[int, int, int]:
        """The most of candidates: CPU, main memory, and memory of a GPU; 0 where none tells."""
        rows = np.flatnonzero(self._candidates)
        found = (self._columns.cpu[rows], self._columns.memory[rows], self._columns.total[rows])
        cpu, memory, gpu_memory = (max(0, int(one.max(initial=0))) for one in found)
        return cpu, memory, gpu_memory

    def widest(self) -> Node | None:
        """The candidate with most GPUs; None if there is none."""
        if not self._candidates.any():
            return None
        return self._columns.nodes[int(np.argmax(np.where(self._candidates, self._gpus, -1)))]

    def large_enough(self) -> Ints:
        """How many GPUs of each candidate could serve if all were free, and would if nothing else were asked for."""
        return np.where(self._candidates, self._shape.constraints.ever(self._rows).sum(1), 0)

    def suited(self) -> Ints:
        """The same without regard to memory."""
        return np.where(self._candidates, self._shape.constraints.suited(self._rows).sum(1), 0)

    def lasting(self) -> Counter[Obstacle]:
        """How many GPUs each lasting obstacle keeps out of the candidates."""
        return Counter({one: count for one, count in self.counts.items() if one in LASTING})

    def name(self, row: int) -> str:
        """The id of the node of a row."""
        return self._columns.nodes[row].id

    def _live(self, gpu: Gpu) -> list[Reservation]:
        return [self._use.live(one) for one in self._use.gpu(gpu.uuid).reservations]
