"""Index: the columns and shapes of the fleet, kept up to date with what is held and what is learnt. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Ask, Node
from gpuscale.allocator.domain.use import Use
from gpuscale.allocator.placing.columns import Bools, Columns, Floats
from gpuscale.allocator.placing.constraints import admitted
from gpuscale.allocator.placing.demand import Demand, Tariff
from gpuscale.allocator.placing.fragmentation import AskClass, Typical, typical
from gpuscale.allocator.placing.members import Members
from gpuscale.allocator.placing.shapes import Shape, Shapes


class Index:
    """The fleet, ready to be asked; `members` picks GPUs inside rows.

    Args:
        nodes: in the order of their ranks.
    """

    def __init__(self, nodes: Sequence[Node], use: Use, demand: Demand, cordons: frozenset[str]) -> None:
        self.columns = Columns(nodes, use, cordons)
        self._shapes = Shapes(self.columns, use)
        self._use = use
        self._demand = demand
        self._typical: tuple[Mapping[AskClass, int], int, Typical] | None = None
        self.members = Members(self.columns, self.tariff, self.typical)
        use.changed()

    def tariff(self) -> Tariff:
        """What policies reckon with."""
        return self._demand.tariff

    def typical(self) -> Typical:
        """The typical asks, drawn up anew when there are new ones, or new models."""
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

    def shape(self, ask: Ask, now: float) -> Shape:
        """The shape of an ask as things are now."""
        self.follow(now)
        shape = self._shapes.of(ask)
        shape.update(now, self._demand.tariff, self.typical)  # drawn up for those alone who reckon with it
        return shape

    def value(self, shape: Shape) -> Floats:
        """How good each row is for a shape that is up to date; -inf where it does not fit."""
        return shape.value[: len(self.columns)]

    def free(self, shape: Shape) -> Bools:
        """Which GPUs can serve a shape that is up to date."""
        found: Bools = shape.gpu_codes[: len(self.columns)] == 0
        return found

    def learn(self, ask: Ask) -> None:
        """Take note of a new ask."""
        columns, gpus = self.columns, self.columns.gpus_beside_cpu
        self._demand.expect(columns.cpu_beside_gpus / (WHOLE * gpus) if gpus else 0.0)
        served = np.flatnonzero(admitted(columns.models, ask.models)).tolist() if ask.models else ()
        self._demand.observe(ask, served, columns.supply)
