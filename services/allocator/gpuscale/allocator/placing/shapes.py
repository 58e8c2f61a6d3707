"""Shapes: for each sort of ask, how good every row is, kept up to date row by row. Pure.

An ask that was seen before costs only the rows that have changed since, and one look for the greatest value.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from gpuscale.allocator.domain.model import Ask, Policy
from gpuscale.allocator.domain.use import Use
from gpuscale.allocator.placing.columns import Bools, Columns, Floats, Ints, listed
from gpuscale.allocator.placing.constraints import ABSENT, Constraints, could_ever
from gpuscale.allocator.placing.policies import Tariff, Typical, value, value_of

_PACK, _FGD = Policy.PACK, Policy.FGD
MOST_GPUS = 128
"""Up to so many GPUs are looked at one by one; for more of them arrays are quicker."""
MOST_SHAPES = 256
MOST_BYTES = 64 * 1024 * 1024
"""Bounds on what is kept: the shapes used last."""


class Shape:
    """One sort of ask over all rows.

    `gpu_codes` and `node_codes` hold the first obstacle of each, 0 for none; `value` is -inf where the ask does not fit.
    """

    def __init__(self, columns: Columns, use: Use, ask: Ask) -> None:
        rows = len(columns.changed)
        self.ask = ask
        self.constraints = Constraints(columns, use, ask)
        self.gpu_codes: NDArray[np.int8] = np.zeros((rows, columns.width), np.int8)
        self.node_codes: NDArray[np.int8] = np.zeros(rows, np.int8)
        self.value: Floats = np.full(rows, -np.inf)
        self._columns = columns
        self._by_row = ask.policy is not _FGD and self.constraints.is_plain()
        self._takes_of_node = bool(ask.cpu_milli or ask.host_memory_bytes)
        self._seen = 0
        self._ever: tuple[int, Ints] | None = None
        self._reckoned_with: Tariff | Typical | None = None

    @property
    def bytes(self) -> int:
        """About how much memory it takes."""
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
        few = columns.changed_since(seen) if self._by_row and not moved else None
        if few is not None and (
            len(few) * columns.width <= MOST_GPUS or sum(map(self._width, few.values())) <= MOST_GPUS
        ):
            for row, gpus in few.items():
                self._look(row, gpus, now, tariff)
            return
        rows = np.flatnonzero(columns.changed[: len(columns)] > seen)
        if len(rows):
            self.node_codes[rows], self.gpu_codes[rows] = self.constraints.codes(rows, now)
        if moved:
            rows = np.arange(len(columns))
        if len(rows):
            self.value[rows] = self._values(rows, tariff, typical)

    def fits(self, rows: Ints) -> Bools:
        """Which of the rows serve the ask."""
        enough = (self.gpu_codes[rows] == 0).sum(1) >= self.ask.gpu_count
        found: Bools = enough if self.ask.gpu_count else self.node_codes[rows] == 0
        return found

    def room_ever(self) -> Ints:
        """How many members each node would take if all of it were free."""
        if self._ever is None or self._ever[0] != self._columns.layout:
            self._ever = (self._columns.layout, could_ever(self.ask, self._columns, self.constraints))
        return self._ever[1]

    def _width(self, gpus: Collection[int] | None) -> int:
        return self._columns.width if gpus is None else len(gpus)

    def _look(self, at: int, gpus: Collection[int] | None, now: float, tariff: Tariff) -> None:
        """Bring one row up to date: the GPUs in some columns, or all of it."""
        ask, constraints = self.ask, self.constraints
        row, node = self._columns.row(at), int(self.node_codes[at])
        if gpus is None or (self._takes_of_node and constraints.node_code_of(row) != node):
            node, codes = constraints.codes_of(row, now)
            self.node_codes[at] = node
            self.gpu_codes[at] = codes + [ABSENT] * (self._columns.width - len(codes))
        else:
            codes = listed(self.gpu_codes[at])
            constraints.codes_after_use(row, gpus, node, codes)
            for column in gpus:
                self.gpu_codes[at, column] = codes[column]
        fits = codes.count(0) >= ask.gpu_count if ask.gpu_count else not node
        self.value[at] = value_of(ask, row, codes, constraints, tariff) if fits else -np.inf

    def _values(self, rows: Ints, tariff: Tariff, typical: Callable[[], Typical]) -> Floats:
        """How good rows are; only those that fit are reckoned."""
        found: Floats = np.full(len(rows), -np.inf)
        fits = self.fits(rows)
        fitting = rows[fits]
        if len(fitting):
            free = self.gpu_codes[fitting] == 0
            found[fits] = value(self.ask, self._columns, fitting, free, self.constraints, tariff, typical)
        return found


class Shapes:
    """The shapes used last."""

    def __init__(self, columns: Columns, use: Use) -> None:
        self._columns = columns
        self._use = use
        self._kept: OrderedDict[Ask, Shape] = OrderedDict()
        self._last: Shape | None = None
        self._bytes = 0

    def of(self, ask: Ask) -> Shape:
        """The shape of an ask; a new one knows nothing until it is brought up to date."""
        if self._last is not None and self._last.ask is ask:
            return self._last
        shape = self._kept.get(ask)
        if shape is None:
            shape = self._kept[ask] = Shape(self._columns, self._use, ask)
            self._bytes += shape.bytes
            while len(self._kept) > 1 and (len(self._kept) > MOST_SHAPES or self._bytes > MOST_BYTES):
                self._bytes -= self._kept.popitem(last=False)[1].bytes
        self._kept.move_to_end(ask)
        self._last = shape
        return shape
