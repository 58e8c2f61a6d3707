"""Row: a row of the columns as plain numbers, which are read a hundred times as fast as single numbers of arrays. Pure."""

import math
from typing import TYPE_CHECKING

from gpuscale.allocator.domain.model import Weights

if TYPE_CHECKING:
    from gpuscale.allocator.placing.columns import Columns


class Row:
    """What the columns say of a row, of each of its GPUs where it is a list.

    `places` has the columns that hang on each GPU: its own, and those of its MIG instances.
    """

    __slots__ = (
        "_scores",
        "_weights",
        "available",
        "cordoned",
        "cpu_free",
        "free_milli",
        "fresh_until",
        "held",
        "kind",
        "memory_free",
        "model",
        "node_cordoned",
        "places",
        "quarantined",
        "state",
        "total",
        "trouble",
        "utilization",
    )

    def __init__(self, columns: "Columns", row: int) -> None:
        count = int(columns.gpu_count[row])
        self.state = int(columns.state[row])
        self.node_cordoned = bool(columns.node_cordoned[row])
        self.cpu_free = int(columns.cpu_free[row])
        self.memory_free = int(columns.memory_free[row])
        self.free_milli = int(columns.free_milli[row])
        self.kind: list[int] = columns.kind[row, :count].tolist()
        self.model: list[int] = columns.model[row, :count].tolist()
        self.fresh_until: list[float] = columns.fresh_until[row, :count].tolist()
        self.trouble: list[bool] = columns.trouble[row, :count].tolist()
        self.quarantined: list[bool] = columns.quarantined[row, :count].tolist()
        self.cordoned: list[bool] = columns.cordoned[row, :count].tolist()
        self.held: list[int] = columns.held[row, :count].tolist()
        self.total: list[int] = columns.total[row, :count].tolist()
        self.available: list[int] = columns.available[row, :count].tolist()
        self.utilization: list[float] = columns.utilization[row, :count].tolist()
        self.places: dict[str, list[int]] = {}
        for column, gpu in enumerate(columns.gpus[row]):
            self.places.setdefault(gpu.uuid, []).append(column)
            if gpu.parent:
                self.places.setdefault(gpu.parent, []).append(column)
        self._weights: Weights | None = None
        self._scores: list[float] = []

    def out_of_use(self, column: int) -> bool:
        """As `Columns.out_of_use`, of one GPU."""
        return self.trouble[column] or self.quarantined[column] or self.cordoned[column]

    def spread(self, weights: Weights) -> list[float]:
        """The score of each GPU as `policies.spread_scores`; those of the weights that were asked for last are kept."""
        if self._weights is not weights and self._weights != weights:
            self._weights = weights
            self._scores = [self._score(weights, column) for column in range(len(self.held))]
        return self._scores

    def rescore(self, column: int) -> None:
        """What is available of a GPU has changed, or how much it is used."""
        if self._weights is not None:
            self._scores[column] = self._score(self._weights, column)

    def _score(self, weights: Weights, column: int) -> float:
        total, used = self.total[column], self.utilization[column]
        memory = weights.memory * (self.available[column] / (total if total > 0 else 1))
        return memory if math.isnan(used) else memory + weights.utilization * ((100 - used) / 100)
