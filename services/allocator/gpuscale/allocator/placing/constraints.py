"""Constraints: what an ask takes of a GPU, which GPUs it cannot have, for each obstacle on its own, and how many members fit. Pure.

A share without a memory of its own takes the same part of the memory as of the GPU. What the driver keeps for itself
must not make the last share impossible, so such a share is content with SHARE_FLOOR of that, and is given what is
left where that is less.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gpuscale.allocator.domain.model import WHOLE, Ask, Gpu, Node
from gpuscale.allocator.domain.use import Use
from gpuscale.allocator.placing.columns import NO_GPU, UNKNOWN, Bools, Columns, Ints, listed
from gpuscale.allocator.placing.obstacles import ADMITS_ALL_PERCENT, ORDER, Obstacle

SHARE_FLOOR = (9, 10)
"""The least part of its nominal memory that a share without a memory of its own accepts, as a fraction."""

MOST_MEMORY = (2**63 - 1) // WHOLE
"""More than any GPU has, in bytes, of which thousandths can be reckoned without running over."""


def milli_of(ask: Ask, total: Ints) -> Ints | int:
    """Thousandths of each GPU of these sizes that the ask takes; an array only where the size decides."""
    if ask.gpu_memory_bytes is None or ask.gpu_milli < WHOLE:
        return ask.gpu_milli
    wanted = min(ask.gpu_memory_bytes, MOST_MEMORY) * WHOLE
    milli: Ints = np.clip(wanted // np.maximum(total, 1), 1, WHOLE)
    return milli


def memory_floor(ask: Ask, total: Ints) -> Ints | int:
    """Bytes of each GPU of these sizes that must be available."""
    if ask.exclusive:
        return ask.min_memory_bytes
    if ask.gpu_memory_bytes is not None:
        return max(ask.min_memory_bytes, ask.gpu_memory_bytes)
    numerator, denominator = SHARE_FLOOR
    nominal = total * ask.gpu_milli // WHOLE
    floor: Ints = np.maximum(ask.min_memory_bytes, nominal * numerator // denominator)
    return floor


def floor_on(ask: Ask, total: int) -> int:
    """Bytes that must be available of one GPU of this size."""
    if ask.gpu_memory_bytes is not None:
        return max(ask.min_memory_bytes, ask.gpu_memory_bytes)
    if ask.gpu_milli >= WHOLE:
        return ask.min_memory_bytes
    numerator, denominator = SHARE_FLOOR
    return max(ask.min_memory_bytes, total * ask.gpu_milli // WHOLE * numerator // denominator)


def milli_on(ask: Ask, total: int | None) -> int:
    """Thousandths of one GPU that the ask takes."""
    if ask.gpu_memory_bytes is None or ask.gpu_milli < WHOLE:
        return ask.gpu_milli
    return min(max(ask.gpu_memory_bytes * WHOLE // max(total or 0, 1), 1), WHOLE)


def memory_on(ask: Ask, total: int | None, available: int | None, free_milli: int) -> int | None:
    """Bytes of one GPU that the ask takes: all of a whole one, else its memory or its part of what is left.

    `free_milli` is what nobody holds of the GPU. Rounded so that the last share takes what is left; where outsiders
    have some of it, never less than what was looked for.
    """
    if ask.exclusive or total is None or available is None:
        return total
    if ask.gpu_memory_bytes is not None:
        return max(ask.min_memory_bytes, ask.gpu_memory_bytes)
    nominal = total * ask.gpu_milli // WHOLE
    return max(floor_on(ask, total), min(nominal, available * ask.gpu_milli // max(free_milli, 1)))


CODES = {obstacle: code for code, obstacle in enumerate(ORDER, start=1)}
"""The number that stands for an obstacle in an array; 0 is none."""
Codes = NDArray[np.int8]
ABSENT = -1
"""Stands for no GPU at all."""
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


class Constraints:
    """What keeps GPUs from one ask."""

    def __init__(self, columns: Columns, use: Use, ask: Ask) -> None:
        self._columns = columns
        self._use = use
        self._ask = ask
        self._profile = ask.mig_profile.lower()
        self._admitted = np.zeros(0, np.bool_)

    def masks(self, rows: Ints, now: float) -> Iterator[tuple[Obstacle, Bools]]:
        """The GPUs (or, in one column, the nodes) that each obstacle keeps out alone, in the order of obstacles."""
        yield from self._lasting(rows)
        yield from self._of_the_fleet(rows, now)
        yield from self._of_use(rows)
        yield from self._of_readings(rows)

    def codes(self, rows: Ints, now: float) -> tuple[Codes, Codes]:
        """The first obstacle of each node as such, and of each GPU, as numbers; GPUs that do not exist are ABSENT."""
        nodes = np.where(self._columns.node_cordoned[rows], np.int8(CODES[Obstacle.CORDONED]), np.int8(0))
        np.copyto(nodes, CODES[Obstacle.STALE], where=self._columns.state[rows] == 1)
        gpus = np.zeros((len(rows), self._columns.width), np.int8)
        for obstacle, mask in reversed(list(self.masks(rows, now))):
            np.copyto(gpus, CODES[obstacle], where=mask)
            if obstacle in NODE_OBSTACLES:
                np.copyto(nodes, CODES[obstacle], where=mask[:, 0])
        np.copyto(gpus, ABSENT, where=self._columns.kind[rows] == NO_GPU)
        return nodes, gpus

    def suited(self, rows: Ints) -> Bools:
        """The GPUs that could serve if everything were free, known and online, and memory did not matter."""
        fit: Bools = self._columns.kind[rows] != NO_GPU
        for _, mask in self._lasting(rows):
            fit = fit & ~mask
        return fit

    def ever(self, rows: Ints) -> Bools:
        """Those of the suited ones whose memory would do if all of it were free; unknown sizes count as enough."""
        total = self._columns.total[rows]
        enough: Bools = (total == UNKNOWN) | (total >= memory_floor(self._ask, total))
        return self.suited(rows) & enough

    def _lasting(self, rows: Ints) -> Iterator[tuple[Obstacle, Bools]]:
        ask, columns = self._ask, self._columns
        if ask.nodes or ask.excluded_nodes:
            yield Obstacle.NODE_NOT_SELECTED, self._nodes(rows, lambda node: not selected(node, ask))
        if ask.node_labels:
            yield (
                Obstacle.LABELS_DIFFER,
                self._nodes(rows, lambda node: not _bears(node.labels.get, ask.node_labels)),
            )
        if ask.gpus or ask.excluded_gpus:
            yield Obstacle.GPU_NOT_SELECTED, self._gpus(rows, lambda gpu: not _named(gpu, ask))
        if ask.models:
            yield Obstacle.MODEL_DIFFERS, ~self.admitted()[columns.model[rows]]
        yield Obstacle.MIG_PROFILE_DIFFERS, columns.kind[rows] != self.kind

    @property
    def kind(self) -> int:
        """The number of the MIG profile that is asked for; one that nothing bears if there is none yet."""
        return self._columns.profiles.get(self._profile, len(self._columns.profiles))

    def admitted(self) -> Bools:
        """Whether the ask admits each model, by its number."""
        if len(self._admitted) < len(self._columns.models):
            self._admitted = admitted(self._columns.models, self._ask.models)
        return self._admitted

    def _of_the_fleet(self, rows: Ints, now: float) -> Iterator[tuple[Obstacle, Bools]]:
        columns = self._columns
        state = columns.state[rows][:, None]
        yield Obstacle.NODE_NOT_ONLINE, state == 2
        yield Obstacle.STALE, (state == 1) | (columns.fresh_until[rows] < now)
        yield Obstacle.GPU_NOT_OK, columns.trouble[rows]
        yield Obstacle.QUARANTINED, columns.quarantined[rows]
        yield Obstacle.CORDONED, columns.node_cordoned[rows][:, None] | columns.cordoned[rows]

    def _of_use(self, rows: Ints) -> Iterator[tuple[Obstacle, Bools]]:
        ask, columns = self._ask, self._columns
        if ask.apart_from:
            yield Obstacle.NOT_APART, self._nodes(rows, self._is_beside)
        held = columns.held[rows]
        if ask.exclusive:
            yield Obstacle.HELD, held > 0
        else:
            yield Obstacle.HELD, held + milli_of(ask, columns.total[rows]) > WHOLE
        if ask.cpu_milli:
            yield Obstacle.CPU_BELOW_MIN, (columns.cpu_free[rows] < ask.cpu_milli)[:, None]
        if ask.host_memory_bytes:
            yield Obstacle.HOST_MEMORY_BELOW_MIN, (columns.memory_free[rows] < ask.host_memory_bytes)[:, None]

    def _of_readings(self, rows: Ints) -> Iterator[tuple[Obstacle, Bools]]:
        """The limit of utilization does not count where other reservations share the GPU already."""
        ask, columns = self._ask, self._columns
        free = columns.available[rows]
        unknown = free == UNKNOWN
        yield Obstacle.MEMORY_UNKNOWN, unknown
        yield Obstacle.MEMORY_BELOW_MIN, ~unknown & (free < memory_floor(ask, columns.total[rows]))
        used, alone = columns.utilization[rows], columns.held[rows] == 0
        if not ask.allow_unknown_utilization:
            yield Obstacle.UTILIZATION_UNKNOWN, np.isnan(used) & alone
        if ask.max_utilization_percent < ADMITS_ALL_PERCENT:
            yield Obstacle.UTILIZATION_TOO_HIGH, (used >= ask.max_utilization_percent) & alone

    def _is_beside(self, node: Node) -> bool:
        wanted = self._ask.apart_from
        return any(_bears(one.labels.get, wanted) for one in self._use.reservations(node.id))

    def _nodes(self, rows: Ints, excluded: Callable[[Node], bool]) -> Bools:
        nodes = self._columns.nodes
        return np.array([[excluded(nodes[row])] for row in listed(rows)], np.bool_).reshape(-1, 1)

    def _gpus(self, rows: Ints, excluded: Callable[[Gpu], bool]) -> Bools:
        mask = np.zeros((len(rows), self._columns.width), np.bool_)
        for place, row in enumerate(listed(rows)):
            gpus = self._columns.gpus[row]
            mask[place, : len(gpus)] = [excluded(gpu) for gpu in gpus]
        return mask


def admitted(models: Iterable[str], names: Sequence[str]) -> Bools:
    """Whether each model is one of those named: a part of its name will do, in any case; all are if none is named."""
    wanted = [name.lower() for name in names] or [""]
    return np.array([any(name in model.lower() for name in wanted) for model in models], np.bool_)


def selected(node: Node, ask: Ask) -> bool:
    """Whether the ask admits the node by its name."""
    return (not ask.nodes or node.id in ask.nodes) and node.id not in ask.excluded_nodes


def _named(gpu: Gpu, ask: Ask) -> bool:
    uuid = gpu.uuid.lower()
    return (not ask.gpus or uuid in ask.gpus) and uuid not in ask.excluded_gpus


def _bears(label: Callable[[str], str | None], wanted: tuple[tuple[str, str], ...]) -> bool:
    return all(label(key) == value for key, value in wanted)


def capacities(ask: Ask, columns: Columns, free: Bools) -> Ints:
    """How many members fit on each node at most; `free` says which GPUs can serve."""
    rows = np.arange(len(free))
    total = columns.total[rows]
    milli = np.broadcast_to(milli_of(ask, total), total.shape)
    each = np.where(free, (WHOLE - columns.held[rows]) // np.maximum(milli, 1), 0)
    if not ask.exclusive:
        each = np.minimum(each, columns.available[rows] // np.maximum(memory_floor(ask, total), 1))
    room = _members(ask, np.maximum(each, 0))
    room = np.minimum(room, _times(columns.cpu_free[rows], ask.cpu_milli, ask.member_count))
    return np.minimum(room, _times(columns.memory_free[rows], ask.host_memory_bytes, ask.member_count))


def could_ever(ask: Ask, columns: Columns, fit: Bools) -> Ints:
    """How many members each node would take if all of it were free; `fit` are the GPUs that could serve then.

    What a node does not tell might be enough.
    """
    rows = np.arange(len(fit))
    total = columns.total[rows]
    milli = np.broadcast_to(milli_of(ask, _or_enough(total)), total.shape)
    each = np.where(fit, WHOLE // np.maximum(milli, 1), 0)
    if not ask.exclusive:
        by_memory = total // np.maximum(memory_floor(ask, total), 1)
        each = np.where(total == UNKNOWN, each, np.minimum(each, by_memory))
    room = _members(ask, each)
    cpu, memory = _or_enough(columns.cpu[rows]), _or_enough(columns.memory[rows])
    room = np.minimum(room, _times(cpu, ask.cpu_milli, ask.member_count))
    return np.minimum(room, _times(memory, ask.host_memory_bytes, ask.member_count))


def _or_enough(amount: Ints) -> Ints:
    return np.where(amount == UNKNOWN, np.iinfo(np.int64).max, amount)


def _members(ask: Ask, each: Ints) -> Ints:
    """Members of a node whose GPUs take so many each: no member takes a GPU twice."""
    if ask.gpu_count <= 1:
        return each.sum(1) if ask.gpu_count else np.full(len(each), ask.member_count)
    room = np.zeros(len(each), np.int64)
    for members in range(1, ask.member_count + 1):
        fits = np.minimum(each, members).sum(1) >= members * ask.gpu_count
        if not fits.any():
            break
        room[fits] = members
    return room


def _times(free: Ints, each: int, members: int) -> Ints:
    if not each:
        return np.full(len(free), members, np.int64)
    return np.maximum(free, 0) // each
