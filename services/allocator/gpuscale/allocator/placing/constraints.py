"""Constraints: what an ask requires of a GPU, what rules a GPU out, and how many members fit on a node. Pure.

Unknown is never free: a GPU whose memory is not reported, or whose readings are too old, serves nobody.

Each rule is written once, for numbers and arrays alike (`columns.GpuFacts`): arrays evaluate many rows at once, numbers the few
that changed. An array operation costs a microsecond however small the array: with arrays alone, an ask for one GPU after a
grant took 100 us longer, a tenth of a Reserve and its Release. A property test compares the two.

A share without its own memory takes the same fraction of the memory as of the GPU. Memory that the driver keeps must not make
the last share impossible, so such a share accepts SHARE_FLOOR of that, and gets what is left if that is less.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, Final

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Ask, GangStrategy, Node, Use
from gpuscale.allocator.placing.columns import (
    IS_OFFLINE,
    IS_STALE,
    NO_GPU,
    UNKNOWN,
    Bools,
    Codes,
    Columns,
    FactsOfRows,
    GpuFacts,
    Ints,
    NodeFacts,
    Row,
    listed,
)

ADMITS_ALL_PERCENT = 100.0
"""A utilization limit that admits a GPU however busy it is."""


class Obstacle(StrEnum):
    """Why a GPU cannot serve an ask; of several, the first in this order is named.

    Those in LASTING persist whatever ends or comes back; the others pass.
    """

    NODE_NOT_SELECTED = "NODE_NOT_SELECTED"
    LABELS_DIFFER = "LABELS_DIFFER"
    GPU_NOT_SELECTED = "GPU_NOT_SELECTED"
    MODEL_DIFFERS = "MODEL_DIFFERS"
    MIG_PROFILE_DIFFERS = "MIG_PROFILE_DIFFERS"
    NODE_NOT_ONLINE = "NODE_NOT_ONLINE"
    STALE = "STALE"
    GPU_NOT_OK = "GPU_NOT_OK"
    QUARANTINED = "QUARANTINED"
    CORDONED = "CORDONED"
    NOT_APART = "NOT_APART"
    HELD = "HELD"
    CPU_BELOW_MIN = "CPU_BELOW_MIN"
    HOST_MEMORY_BELOW_MIN = "HOST_MEMORY_BELOW_MIN"
    MEMORY_UNKNOWN = "MEMORY_UNKNOWN"
    MEMORY_BELOW_MIN = "MEMORY_BELOW_MIN"
    UTILIZATION_UNKNOWN = "UTILIZATION_UNKNOWN"
    UTILIZATION_TOO_HIGH = "UTILIZATION_TOO_HIGH"
    POWER_BUDGET = "POWER_BUDGET"
    POWER_LIMIT = "POWER_LIMIT"


ORDER = tuple(Obstacle)
"""All obstacles in their order."""
LASTING = frozenset(ORDER[: ORDER.index(Obstacle.MIG_PROFILE_DIFFERS) + 1])
"""Obstacles that persist when reservations end."""

SHARE_FLOOR = (9, 10)
"""The least fraction of its nominal memory that a share without its own memory accepts."""
CODES = {obstacle: code for code, obstacle in enumerate(ORDER, start=1)}
"""The numbers of obstacles in arrays; 0 is none."""
_HELD: Final = CODES[Obstacle.HELD]
_MOST: Final = (1 << 63) - 1
ABSENT = -1
"""Marks a missing GPU."""
NODE_OBSTACLES = frozenset(
    {
        Obstacle.NODE_NOT_SELECTED,
        Obstacle.LABELS_DIFFER,
        Obstacle.NODE_NOT_ONLINE,
        Obstacle.NOT_APART,
        Obstacle.CPU_BELOW_MIN,
        Obstacle.HOST_MEMORY_BELOW_MIN,
    }
)
"""Obstacles of whole nodes."""
Hits = Iterator[tuple[Obstacle, Any]]
"""Obstacles, and whether each is there: of one GPU, or of each in an array."""


def floor_on(ask: Ask, total: int) -> int:
    """Bytes that must be available on a GPU of this size."""
    if ask.gpu_memory_bytes is not None:
        return max(ask.min_memory_bytes, ask.gpu_memory_bytes)
    if ask.gpu_milli >= WHOLE:
        return ask.min_memory_bytes
    part = total * ask.gpu_milli // WHOLE * SHARE_FLOOR[0] // SHARE_FLOOR[1]
    return part if part > ask.min_memory_bytes else ask.min_memory_bytes


def milli_on(ask: Ask, total: int | None) -> int:
    """Thousandths of a GPU of this size that the ask takes."""
    if ask.gpu_memory_bytes is None or ask.gpu_milli < WHOLE:
        return ask.gpu_milli
    return min(max(ask.gpu_memory_bytes * WHOLE // max(total or 0, 1), 1), WHOLE)


def memory_on(ask: Ask, total: int | None, available: int | None, free_milli: int) -> int | None:
    """Bytes of one GPU that the ask takes: all of a whole one, else its memory or its part of what is left.

    `free_milli` is the unheld share of the GPU. Rounded so that the last share takes what is left; if outsiders use some of it,
    never less than was required.
    """
    if ask.exclusive or total is None or available is None:
        return total
    if ask.gpu_memory_bytes is not None:
        return max(ask.min_memory_bytes, ask.gpu_memory_bytes)
    floor, nominal = floor_on(ask, total), total * ask.gpu_milli // WHOLE
    part = available * ask.gpu_milli // (free_milli or 1)
    part = part if part < nominal else nominal
    return part if part > floor else floor


@dataclass(frozen=True, slots=True)
class Needs:
    """What an ask requires, by the columns' model and size numbers: as lists for one GPU, as arrays for many.

    `kind` is the number of the MIG profile; `barred` says for each model whether the ask excludes it; `milli` and `floor` are
    the thousandths that it takes of a GPU of each size, and the bytes that must be available there; floor 0 decides nothing.
    """

    kind: int
    barred: Any
    milli: Any
    floor: Any


def of_the_model(ask: Ask, gpu: GpuFacts, needs: Needs) -> Hits:
    """Obstacles that persist when reservations end."""
    if ask.models:
        yield Obstacle.MODEL_DIFFERS, needs.barred[gpu.model]
    yield Obstacle.MIG_PROFILE_DIFFERS, gpu.kind != needs.kind


def of_the_node(ask: Ask, node: NodeFacts, *, odd: bool = True) -> Hits:
    """Obstacles that rule out all GPUs of a node. Here and below, those of rows that are not `odd` are left out."""
    if odd:
        yield Obstacle.NODE_NOT_ONLINE, node.state == IS_OFFLINE
        yield Obstacle.STALE, node.state == IS_STALE
        yield Obstacle.CORDONED, node.cordoned
    if ask.cpu_milli:
        yield Obstacle.CPU_BELOW_MIN, node.cpu_free < ask.cpu_milli
    if ask.host_memory_bytes:
        yield Obstacle.HOST_MEMORY_BELOW_MIN, node.memory_free < ask.host_memory_bytes


def of_the_gpu(gpu: GpuFacts, now: float) -> Hits:
    """Obstacles of a GPU that affect everybody."""
    yield Obstacle.STALE, gpu.fresh_until < now
    yield Obstacle.GPU_NOT_OK, gpu.trouble
    yield Obstacle.QUARANTINED, gpu.quarantined
    yield Obstacle.CORDONED, gpu.cordoned


def of_use(ask: Ask, gpu: GpuFacts, milli: Any, floor: Any, *, odd: bool = True) -> Hits:
    """Obstacles of what is held and used; the utilization limit does not apply on GPUs that are already shared."""
    yield Obstacle.HELD, gpu.held > WHOLE - milli
    if odd:
        yield Obstacle.MEMORY_UNKNOWN, gpu.available == UNKNOWN
    yield Obstacle.MEMORY_BELOW_MIN, (gpu.available != UNKNOWN) & (gpu.available < floor)
    if odd and not ask.allow_unknown_utilization:
        yield Obstacle.UTILIZATION_UNKNOWN, (gpu.held == 0) & (gpu.utilization < 0)
    if ask.max_utilization_percent < ADMITS_ALL_PERCENT:
        yield (
            Obstacle.UTILIZATION_TOO_HIGH,
            (gpu.held == 0) & (gpu.utilization >= ask.max_utilization_percent),
        )


def first_of(hits: Hits) -> int:
    """The first obstacle present, as a number; 0 for none."""
    found = 0
    for obstacle, hit in hits:
        if hit:
            found = _before(found, CODES[obstacle])
    return found


def _firsts(hits: Hits, shape: tuple[int, int]) -> Codes:
    """Like `first_of`, of each in arrays of this shape."""
    found = np.zeros(shape, np.int8)
    for obstacle, hit in sorted(hits, key=lambda one: CODES[one[0]], reverse=True):
        np.putmask(found, hit, CODES[obstacle])  # in less than half the time of `copyto`
    return found


def _before(one: int, other: int) -> int:
    """The first of two obstacles, 0 being none."""
    return min(one, other) if one and other else one or other


class Constraints:
    """What rules out GPUs for one ask."""

    def __init__(self, columns: Columns, use: Use, ask: Ask) -> None:
        self._columns = columns
        self._use = use
        self._ask = ask
        self._profile = ask.mig_profile.lower()
        self._drawn = -1
        self._plain = self._arrays = Needs(0, [], [], [])

    @property
    def kind(self) -> int:
        """The number of the requested MIG profile; an unused number if no GPU has it."""
        return self._needs()[0].kind

    def masks(self, rows: Ints, now: float) -> Iterator[tuple[Obstacle, Bools]]:
        """The GPUs (or, in one column, the nodes) that each obstacle on its own rules out, in the order of obstacles."""
        ask, gpu = self._ask, FactsOfRows(self._columns, rows)
        found: dict[Obstacle, Bools] = {}
        for obstacle, mask in chain(
            self._lasting(rows, gpu),
            self._apart(rows),
            of_the_node(ask, gpu.node),
            of_the_gpu(gpu, now),
            of_use(ask, gpu, self.milli(rows), self.floor(rows)),
        ):
            found[obstacle] = found[obstacle] | mask if obstacle in found else mask
        return ((one, found[one]) for one in ORDER if one in found)

    def codes(self, rows: Ints, now: float) -> tuple[Codes, Codes]:
        """The first obstacle of each node as a whole, and of each GPU, as numbers; missing GPUs are ABSENT."""
        ask, facts = self._ask, FactsOfRows(self._columns, rows)
        odd = bool(self._columns.odd.take(rows, 0).any())
        chosen = [*self._lasting(rows, facts), *self._apart(rows)]
        of_nodes = [hit for hit in chosen if hit[0] in NODE_OBSTACLES]
        of_gpus = [hit for hit in chosen if hit[0] not in NODE_OBSTACLES]
        nodes = _firsts(chain(of_nodes, of_the_node(ask, facts.node, odd=odd)), (len(rows), 1))
        of_uses = of_use(ask, facts, self.milli(rows), self.floor(rows), odd=odd)
        hits = chain(of_gpus, of_the_gpu(facts, now) if odd else (), of_uses)
        gpus = _firsts(hits, (len(rows), self._columns.width))
        one = np.uint8(1)  # less one, no obstacle is the last
        gpus = (np.minimum(gpus.view(np.uint8) - one, nodes.view(np.uint8) - one) + one).view(np.int8)
        np.putmask(gpus, facts.kind == NO_GPU, ABSENT)
        return nodes[:, 0], gpus

    def codes_of(self, row: Row, now: float) -> tuple[int, list[int]]:
        """Like `codes` for one row, for an ask that `is_plain`."""
        ask, (needs, _) = self._ask, self._needs()
        node = self.node_code_of(row)
        found: list[int] = []
        for gpu in row.gpus:
            of_uses = of_use(ask, gpu, needs.milli[gpu.size], needs.floor[gpu.size])
            hits = chain(of_the_model(ask, gpu, needs), of_the_gpu(gpu, now), of_uses)
            found.append(_before(node, first_of(hits)))
        return node, found

    def node_code_of(self, row: Row) -> int:
        """The first obstacle of a node as a whole."""
        return first_of(of_the_node(self._ask, row.node))

    def codes_after_use(self, row: Row, columns: Iterable[int], node: int, codes: list[int]) -> None:
        """Update the first obstacles of GPUs of which only what is held has changed.

        `node` is the first obstacle of their node, which is unaffected.
        """
        ask, (needs, _) = self._ask, self._needs()
        for column in columns:
            if 0 < codes[column] < _HELD:
                continue
            codes[column], gpu = node, row.gpus[column]
            milli, floor = needs.milli[gpu.size], needs.floor[gpu.size]
            if 0 < gpu.held <= WHOLE - milli and gpu.available >= floor:
                continue  # shared, and with room: none is there
            for obstacle, hit in of_use(ask, gpu, milli, floor):  # in order
                if hit:
                    codes[column] = _before(node, CODES[obstacle])
                    break

    def is_plain(self) -> bool:
        """Whether the ask selects no names or labels, so that `codes_of` covers everything that rules out GPUs."""
        ask = self._ask
        chosen = ask.nodes or ask.excluded_nodes or ask.node_labels or ask.gpus or ask.excluded_gpus
        return not (chosen or ask.apart_from)

    def suited(self, rows: Ints) -> Bools:
        """The GPUs that could serve if everything were free, known and online, whatever their memory."""
        fit: Bools = self._columns.kind.take(rows, 0) != NO_GPU
        for _, mask in self._lasting(rows, FactsOfRows(self._columns, rows)):
            fit = fit & ~mask
        return fit

    def ever(self, rows: Ints) -> Bools:
        """The suited GPUs whose memory suffices if all of it is free; unknown sizes count as enough."""
        total = self._columns.total[rows]
        enough: Bools = (total == UNKNOWN) | (total >= self.floor(rows))
        return self.suited(rows) & enough

    def milli(self, rows: Ints) -> Ints:
        """Thousandths that the ask takes of each GPU."""
        return self._by_size(self._needs()[1].milli, rows)

    def milli_of(self, gpu: GpuFacts | None) -> int:
        """Thousandths that the ask takes of a GPU; None is a GPU of unknown size."""
        found: int = self._needs()[0].milli[gpu.size if gpu else 0]
        return found

    def floor(self, rows: Ints) -> Ints:
        """Bytes that must be available on each GPU."""
        return self._by_size(self._needs()[1].floor, rows)

    def _by_size(self, of_sizes: Ints, rows: Ints) -> Ints:
        """The figure of each GPU's size; a single one where all sizes have the same."""
        return of_sizes.take(self._columns.size.take(rows, 0)) if len(of_sizes) > 1 else of_sizes[:, None]

    def _needs(self) -> tuple[Needs, Needs]:
        """As lists, and as arrays; rebuilt when columns know more models, profiles or sizes."""
        columns, ask = self._columns, self._ask
        if columns.numbered != self._drawn:
            self._drawn = columns.numbered
            sizes = [None if one == UNKNOWN else one for one in columns.sizes]
            barred = ~admitted(columns.models, ask.models)
            milli = [milli_on(ask, one) for one in sizes]
            floor = [min(floor_on(ask, one or 0), _MOST) for one in sizes]
            floor[0] = floor[-1]  # of GPUs of unknown size nothing is known to be available
            kind = columns.profiles.get(self._profile, len(columns.profiles))
            self._plain = Needs(kind, barred.tolist(), milli, floor)
            same = [one[:1] if len({*one}) == 1 else one for one in (milli, floor)]
            self._arrays = Needs(kind, barred, *(np.array(one, np.int64) for one in same))
        return self._plain, self._arrays

    def _lasting(self, rows: Ints, gpu: GpuFacts) -> Hits:
        ask = self._ask
        if ask.nodes or ask.excluded_nodes:
            yield Obstacle.NODE_NOT_SELECTED, ~selected(ask, self._columns)[rows, None]
        if labels := set(ask.node_labels):
            differ = self._nodes(rows, lambda node: not labels <= node.labels.items())
            yield Obstacle.LABELS_DIFFER, differ
        if ask.gpus or ask.excluded_gpus:
            places, kind = self._columns.place_of(), self._columns.kind
            mask = (kind != NO_GPU) & bool(ask.gpus)
            for uuids, kept_out in ((ask.gpus, False), (ask.excluded_gpus, True)):
                for place in (place for uuid in uuids for place in places.get(uuid, ())):
                    mask[place] = kept_out
            yield Obstacle.GPU_NOT_SELECTED, mask[rows]
        yield from of_the_model(ask, gpu, self._needs()[1])

    def _apart(self, rows: Ints) -> Hits:
        if labels := set(self._ask.apart_from):
            use = self._use

            def beside(node: Node) -> bool:
                return any(labels <= one.labels.items() for one in use.reservations(node.id))

            yield Obstacle.NOT_APART, self._nodes(rows, beside)

    def _nodes(self, rows: Ints, excluded: Callable[[Node], bool]) -> Bools:
        nodes = self._columns.nodes
        return np.array([[excluded(nodes[row])] for row in listed(rows)], np.bool_).reshape(-1, 1)


def admitted(models: Iterable[str], names: Sequence[str]) -> Bools:
    """Whether each model contains one of the names, in any case; all do if there are no names."""
    wanted = [name.lower() for name in names] or [""]
    return np.array([any(name in model.lower() for name in wanted) for model in models], np.bool_)


def selected(ask: Ask, columns: Columns) -> Bools:
    """Whether the ask admits each node by its name."""
    found = np.full(len(columns), not ask.nodes)
    for names, admits in ((ask.nodes, True), (ask.excluded_nodes, False)):
        found[[columns.row_of[one] for one in names if one in columns.row_of]] = admits
    return found


def capacities(ask: Ask, columns: Columns, constraints: Constraints, free: Bools) -> Ints:
    """At most how many members fit on each node; `free` says which GPUs can serve."""
    rows = np.arange(len(free))
    each = np.where(free, (WHOLE - columns.held[rows]) // np.maximum(constraints.milli(rows), 1), 0)
    if not ask.exclusive:
        each = np.minimum(each, columns.available[rows] // np.maximum(constraints.floor(rows), 1))
    return _members(ask, np.maximum(each, 0), columns.cpu_free[rows], columns.memory_free[rows])


def suffice(ask: Ask, room: Ints) -> bool:
    """Whether all members fit if nodes take this many each."""
    if ask.gang_strategy is GangStrategy.STRICT_PACK:
        return bool((room >= ask.member_count).any())
    if ask.gang_strategy is GangStrategy.STRICT_SPREAD:
        return int((room > 0).sum()) >= ask.member_count
    return int(room.sum()) >= ask.member_count


def could_ever(ask: Ask, columns: Columns, constraints: Constraints) -> Ints:
    """How many members each node would take if all of it were free. Unreported values count as enough."""
    rows = np.arange(len(columns))
    total = columns.total[rows]
    by_size = ask.gpu_memory_bytes is not None and ask.gpu_milli >= WHOLE
    milli = np.where(by_size & (total == UNKNOWN), 1, constraints.milli(rows))
    each = np.where(constraints.ever(rows), WHOLE // np.maximum(milli, 1), 0)
    if not ask.exclusive:
        by_memory = total // np.maximum(constraints.floor(rows), 1)
        each = np.where(total == UNKNOWN, each, np.minimum(each, by_memory))
    return _members(ask, each, _or_enough(columns.cpu[rows]), _or_enough(columns.memory[rows]))


def _or_enough(amount: Ints) -> Ints:
    return np.where(amount == UNKNOWN, _MOST, amount)


def _members(ask: Ask, each: Ints, cpu: Ints, memory: Ints) -> Ints:
    """Members of a node by what its GPUs take each, and its CPU and memory: no member takes a GPU twice."""
    room = np.full(len(each), ask.member_count, np.int64)
    if ask.gpu_count == 1:
        room = np.minimum(each.sum(1), ask.member_count)
    elif ask.gpu_count:
        room = np.zeros(len(each), np.int64)
        for members in range(1, ask.member_count + 1):
            fits = np.minimum(each, members).sum(1) >= members * ask.gpu_count
            if not fits.any():
                break
            room[fits] = members
    for free, wanted in ((cpu, ask.cpu_milli), (memory, ask.host_memory_bytes)):
        if wanted:
            room = np.minimum(room, np.maximum(free, 0) // wanted)
    return room
