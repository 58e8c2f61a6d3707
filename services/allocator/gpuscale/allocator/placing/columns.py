"""Columns: the fleet as arrays, one row per node in order of rank, one column per GPU in order of index.

Rows follow telemetry and what is held; each change of a row is numbered (`changed`), so that values computed from rows can be
updated selectively. Pure. Sizes in bytes, shares in thousandths, times of CLOCK_BOOTTIME.

The memory `available` to a new reservation is what is free now, less what holders of shares were granted but do not use yet: a
grant counts in full at once. Memory used by processes without a lease is not free either, so that outsiders are accounted for
without bookkeeping. No byte counts twice: memory of unknown owner counts as the holders', up to what they were granted.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gpuscale.allocator.domain.model import WHOLE, Gpu, GpuUse, Node, NodeState, Reservation, Use, Weights

if TYPE_CHECKING:
    from numpy.typing import NDArray  # nothing here needs NumPy before the first ask (docs/adr/0034)

UNKNOWN = -(1 << 63)
"""Marks an unknown number."""
GIB = 1024**3
NO_GPU = -1
PARTED = -2
"""`kind` of a GPU that is split into MIG instances: only these are given out."""
WHOLE_GPU = 0
MOST_READ = 1024
"""Most rows cached as plain numbers."""
MOST_TOLD = 128
"""Changes of rows that are told one by one; of more, `changed` tells."""

IS_STALE, IS_OFFLINE = 1, 2
_STATES = {NodeState.ONLINE: 0, NodeState.STALE: IS_STALE, NodeState.OFFLINE: IS_OFFLINE}
Build = tuple[str, int, int, int]
"""What equal nodes share: GPU model, number of GPUs, cores and GiB of memory (-1 if unknown)."""
UNKNOWN_USE = -1.0
"""Marks unknown utilization."""
Bools: TypeAlias = "NDArray[np.bool_]"
Floats: TypeAlias = "NDArray[np.float64]"
Ints: TypeAlias = "NDArray[np.int64]"
Codes: TypeAlias = "NDArray[np.int8]"


@dataclass(slots=True)
class NodeFacts:
    """What the columns know of a node as numbers, or of several as one-column arrays."""

    state: Any
    cordoned: Any
    cpu_free: Any
    memory_free: Any
    free_milli: Any


@dataclass(slots=True)
class GpuFacts:
    """What the columns say of a GPU in numbers, or of all GPUs of some rows in arrays.

    `watts` is what it is made for, infinite where that is not told. `spare` is what nobody holds, in thousandths, of the GPU of
    which a MIG instance is one; 0 of whole GPUs.
    """

    node: NodeFacts
    kind: Any
    model: Any
    size: Any
    fresh_until: Any
    trouble: Any
    quarantined: Any
    cordoned: Any
    held: Any
    total: Any
    available: Any
    utilization: Any
    watts: Any
    spare: Any

    @property
    def out_of_use(self) -> Any:
        """Whether it takes no new work, whoever holds it."""
        return self.trouble | self.quarantined | self.cordoned

    @property
    def free_memory(self) -> Any:
        """The share of its memory that is available."""
        return self.available / self.total

    @property
    def idle(self) -> Any:
        """The idle share of its time, 0 if unknown."""
        return (self.utilization >= 0) * (100 - self.utilization) / 100


class FactsOfRows(GpuFacts):
    """The facts of some rows as arrays; each is gathered when it is first read, as most readers need half of them."""

    __slots__ = ("_columns", "_rows")

    def __init__(self, columns: "Columns", rows: Ints) -> None:
        self._columns, self._rows = columns, rows

    def __getattr__(self, name: str) -> Any:
        if name == "node":
            rows = self._rows[:, None]
            found: Any = NodeFacts(*(getattr(self._columns, one).take(rows) for one in _NODE_FACTS))
        else:  # `take` needs a fifth of the time of an index
            found = getattr(self._columns, name).take(self._rows, 0)
        setattr(self, name, found)
        return found


_NODE_FACTS = ("state", "node_cordoned", "cpu_free", "memory_free", "free_milli")
_GPU_FACTS = tuple(one.name for one in fields(GpuFacts) if one.name != "node")
"""The arrays that hold them."""
_OF_NODES, _OF_GPUS = attrgetter(*_NODE_FACTS), attrgetter(*_GPU_FACTS)


class Row:
    """A row as plain numbers, which are read a hundred times as fast as single array elements.

    `places` has the columns on each physical GPU: its own, and those of its MIG instances.
    """

    __slots__ = ("_scores", "_weights", "build", "gpus", "node", "places")

    def __init__(
        self, node: NodeFacts, build: Build, gpus: list[GpuFacts], places: dict[str, list[int]]
    ) -> None:
        self.node = node
        self.build = build
        self.gpus = gpus
        self.places = places
        self._weights: Weights | None = None
        self._scores: list[float] = []

    def scores(self, weights: Weights) -> list[float]:
        """The spread score of each GPU; the scores of the last weights are cached."""
        if self._weights is not weights and self._weights != weights:
            self._weights = weights
            self._scores = [weights.score(gpu.free_memory, gpu.idle) for gpu in self.gpus]
        return self._scores

    def rescore(self, column: int) -> None:
        """The available memory or the utilization of a GPU has changed."""
        if self._weights is not None:
            gpu = self.gpus[column]
            self._scores[column] = self._weights.score(gpu.free_memory, gpu.idle)


class Columns:
    """The rows of all nodes, each of which holds at most `width` GPUs.

    `kind` is WHOLE_GPU, PARTED, NO_GPU, or the number of a MIG profile; `model` the number of a product name. `unread` marks
    nodes that cannot read all of their GPUs. `supply` counts the whole GPUs of each build; `cpu_beside_gpus` is the CPU of all
    nodes that report it and have whole GPUs, `gpus_beside_cpu` the number of those GPUs; `layout` counts changes of node
    hardware; `free_milli` of a node counts its whole GPUs that work. `odd` marks rows with readings that are too old, and those with
    anything unknown or out of use. `gone` has reservations to imagine gone, by the GPUs they hold.
    """

    def __init__(self, nodes: Sequence[Node], use: Use, cordons: frozenset[str], room: int = 64) -> None:
        self._use = use
        self._cordons = cordons
        self.gone: Mapping[str, Sequence[Reservation]] = {}
        self.models: dict[str, int] = {"": 0}
        self.sizes: dict[int, int] = {UNKNOWN: 0}
        self.builds: dict[Build, int] = {}
        self.supply: dict[Build, int] = {}
        self.cpu_beside_gpus = 0
        self.gpus_beside_cpu = 0
        self.profiles: dict[str, int] = {"": WHOLE_GPU}
        self.nodes: list[Node] = []
        self.gpus: list[tuple[Gpu, ...]] = []
        self.row_of: dict[str, int] = {}
        self.sequence = 0
        self.numbered = 0
        self._touched: list[tuple[int, Sequence[int] | None]] = []
        self.layout = self._placed = 0
        self._places: dict[str, list[tuple[int, int]]] = {}
        self._aged = -np.inf
        self._soonest = np.inf
        self._read: dict[int, Row] = {}
        self.width = max((len(node.gpus) for node in nodes), default=1) or 1
        rows = max(room, len(nodes) * 5 // 4)
        shape = rows, self.width
        self.state = np.zeros(rows, np.int8)
        self.build = np.zeros(rows, np.int32)
        self.reported = np.zeros(rows, np.bool_)
        self.unread = np.zeros(rows, np.bool_)
        self.gpu_count = np.zeros(rows, np.int64)
        self.cpu = np.full(rows, UNKNOWN, np.int64)
        self.memory = np.full(rows, UNKNOWN, np.int64)
        self.node_cordoned = np.zeros(rows, np.bool_)
        self.odd = np.zeros((rows, 2), np.bool_)
        self.cpu_free = np.full(rows, UNKNOWN, np.int64)
        self.memory_free = np.full(rows, UNKNOWN, np.int64)
        self.free_milli = np.zeros(rows, np.int64)
        self.expiry = np.full(rows, np.inf)
        self.changed = np.zeros(rows, np.int64)
        self.kind = np.full(shape, NO_GPU, np.int16)
        self.model = np.zeros(shape, np.int32)
        self.fresh_until = np.zeros(shape)
        self.trouble = np.zeros(shape, np.bool_)
        self.quarantined = np.zeros(shape, np.bool_)
        self.cordoned = np.zeros(shape, np.bool_)
        self.held = np.zeros(shape, np.int64)
        self.size = np.zeros(shape, np.int32)
        self.total = np.full(shape, UNKNOWN, np.int64)
        self.available = np.full(shape, UNKNOWN, np.int64)
        self.utilization = np.full(shape, UNKNOWN_USE)
        self.watts = np.full(shape, np.inf)
        self.spare = np.zeros(shape, np.int64)
        for node in nodes:
            self.append(node)

    def __len__(self) -> int:
        return len(self.nodes)

    def row(self, at: int) -> Row:
        """A row as plain numbers, read again if it has changed."""
        row = self._read.get(at)
        if row is None:
            if len(self._read) >= MOST_READ:
                self._read.clear()
            gpus, count = self.gpus[at], len(self.gpus[at])
            node = NodeFacts(*[one.item(at) for one in _OF_NODES(self)])
            facts = zip(*[one[at, :count].tolist() for one in _OF_GPUS(self)], strict=True)
            places: dict[str, list[int]] = {}
            for column, gpu in enumerate(gpus):
                places.setdefault(gpu.uuid, []).append(column)
                if gpu.parent:
                    places.setdefault(gpu.parent, []).append(column)
            row = self._read[at] = Row(
                node, _build(self.nodes[at], gpus), [GpuFacts(node, *one) for one in facts], places
            )
        return row

    def place_of(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Rows and columns of GPUs by UUID in lower case; several for a GPU that was moved."""
        if self._placed != self.layout:
            self._placed, self._places = self.layout, {}
            for row, gpus in enumerate(self.gpus):
                for column, gpu in enumerate(gpus):
                    self._places.setdefault(gpu.uuid.lower(), []).append((row, column))
        return self._places

    def out_of_use(self, rows: "Ints | int") -> Bools:
        """The GPUs that take no new work, whoever holds them: failed, quarantined or cordoned."""
        found: Bools = self.trouble[rows] | self.quarantined[rows] | self.cordoned[rows]
        return found

    def changed_since(self, sequence: int, most: int) -> dict[int, set[int] | None] | None:
        """The rows that changed after the change of that number; None if they are more than that, or too many to tell.

        Each with the columns of the GPUs of which only what is held changed, or None if anything else did.
        """
        first = len(self._touched) - (self.sequence - sequence)
        if first < 0:
            return None
        found: dict[int, set[int] | None] = {}
        for row, columns in self._touched[first:]:
            if columns is None:
                found[row] = None
            elif (known := found.setdefault(row, set())) is not None:
                known.update(columns)
            if len(found) > most:
                return None
        return found

    def has_room(self, node: Node) -> bool:
        """Whether a new node can be appended: there is a row, it is wide enough, and no later rank precedes it."""
        in_order = not self.nodes or (self.nodes[-1].rank, self.nodes[-1].id) < (node.rank, node.id)
        return in_order and len(self.nodes) < len(self.changed) and len(node.gpus) <= self.width

    def append(self, node: Node) -> None:
        """Append a row for a node that `has_room`."""
        row = len(self.nodes)
        self.row_of[node.id] = row
        self.nodes.append(node)
        self.gpus.append(())
        self.layout += 1
        self._write(row, node, _in_order(node))

    def write(self, row: int, node: Node) -> bool:
        """Rewrite the row of a node; it has at most as many GPUs as fit into a row, and its old rank.

        Returns whether an ask that did not fit before may fit now: worse values, and readings of GPUs held whole, do not help.
        """
        gpus, known = _in_order(node), self.gpus[row]
        if _HOST(self.nodes[row]) != _HOST(node) or [*map(_BUILD, known)] != [*map(_BUILD, gpus)]:
            self.layout += 1
            self._write(row, node, gpus)
            return True
        came_back = bool((self.fresh_until[row, : len(gpus)] < self._aged).any())
        for milli, old, new in zip(listed(self.held[row]), known, gpus, strict=False):
            if milli < WHOLE and _READINGS(old) != _READINGS(new):
                available, used = self.available[row].copy(), self.utilization[row].copy()
                self._write(row, node, gpus)
                now_used = self.utilization[row]
                fell = (now_used < used) | ((used == UNKNOWN_USE) & (now_used != UNKNOWN_USE))
                return came_back or bool((fell | (self.available[row] > available)).any())
        # The report changes nothing but its time.
        self.nodes[row], self.gpus[row] = node, gpus
        return self.renew(row)

    def renew(self, row: int) -> bool:
        """Extend the freshness of a row whose readings did not change; returns whether one of them had become too old."""
        came_back = bool((self.fresh_until[row, : len(self.gpus[row])] < self._aged).any())
        self._write_freshness(row)
        if came_back:
            self._touch(row)
        return came_back

    def _write(self, row: int, node: Node, gpus: tuple[Gpu, ...]) -> None:
        self._count(self.nodes[row], self.gpus[row], -1)
        self._count(node, gpus, 1)
        self.nodes[row], self.gpus[row] = node, gpus
        count = len(gpus)
        parted = {gpu.parent for gpu in gpus if gpu.parent}
        self.state[row], self.gpu_count[row] = _STATES[node.state], count
        self.build[row] = self.builds.setdefault(_build(node, gpus), len(self.builds))
        self.reported[row], self.unread[row] = node.reported, bool(node.gpu_problem)
        self.cpu[row], self.memory[row] = _number(node.cpu_milli), _number(node.memory_total_bytes)
        self.kind[row] = NO_GPU
        self.kind[row, :count] = [
            PARTED
            if gpu.uuid in parted
            else self.profiles.setdefault(gpu.mig_profile.lower(), len(self.profiles))
            for gpu in gpus
        ]
        self.model[row, :count] = [self.models.setdefault(gpu.model, len(self.models)) for gpu in gpus]
        self.trouble[row, :count] = [bool(gpu.trouble) for gpu in gpus]
        self.quarantined[row, :count] = [bool(gpu.quarantine) for gpu in gpus]
        self.total[row, :count] = sizes = [_number(gpu.memory_total_bytes) for gpu in gpus]
        self.size[row, :count] = [self.sizes.setdefault(size, len(self.sizes)) for size in sizes]
        self.numbered = len(self.models) + len(self.profiles) + len(self.sizes)
        self.watts[row, :count] = [max(1.0, gpu.rated_watts or math.inf) for gpu in gpus]
        self._write_cordons(row)
        self._write_freshness(row)
        self.write_use(row)

    def write_use(self, row: int) -> None:
        """Rewrite what is held of a node and its GPUs."""
        gpus, count = self.gpus[row], len(self.gpus[row])
        uses = [self._use.on(gpu) for gpu in gpus]
        self.held[row, :count] = [use.milli for use in uses]
        self.available[row, :count] = left = [*map(self._available, gpus, uses)]
        self.utilization[row, :count] = used = [self._utilization(gpu) for gpu in gpus]
        self.spare[row, :count] = self._spare(gpus)
        barred = self.out_of_use(row)
        unread = UNKNOWN in left or UNKNOWN_USE in used
        self.odd[row, 1] = unread or self.state[row] or self.node_cordoned[row] or barred.any()
        working = (self.kind[row] == WHOLE_GPU) & ~barred
        self.free_milli[row] = int((WHOLE - self.held[row])[working].sum())
        self.cpu_free[row], self.memory_free[row] = self._left(row)
        self._touch(row)
        self._read.pop(row, None)

    def write_use_of(self, at: int, uuids: Collection[str]) -> None:
        """Rewrite what is held of a node and these GPUs of it, with their MIG instances."""
        row = self.row(at)
        columns = [column for uuid in uuids for column in row.places.get(uuid, ())]
        split = False
        for column in columns:
            gpu, known = self.gpus[at][column], row.gpus[column]
            use, before = self._use.on(gpu), known.held
            self.held[at, column] = known.held = use.milli
            self.available[at, column] = known.available = self._available(gpu, use)
            if (used := self._utilization(gpu)) != known.utilization:
                self.utilization[at, column] = known.utilization = used
            if known.available == UNKNOWN or used == UNKNOWN_USE:
                self.odd[at, 1] = True
            split = split or bool(gpu.parent)
            row.rescore(column)
            if known.kind == WHOLE_GPU and not known.out_of_use:
                row.node.free_milli += before - use.milli
        self.free_milli[at] = row.node.free_milli
        if split:
            self.spare[at, : len(row.gpus)] = spare = self._spare(self.gpus[at])
            for known, milli in zip(row.gpus, spare, strict=True):
                known.spare = milli
        if (left := self._left(at)) != (row.node.cpu_free, row.node.memory_free):
            row.node.cpu_free, row.node.memory_free = self.cpu_free[at], self.memory_free[at] = left
        self._touch(at, columns)

    def _left(self, row: int) -> tuple[int, int]:
        node = self.nodes[row]
        held = self._use.node(node.id)
        return (
            UNKNOWN if node.cpu_milli is None else node.cpu_milli - held.cpu_milli,
            UNKNOWN if node.memory_total_bytes is None else node.memory_total_bytes - held.memory_bytes,
        )

    def set_cordons(self, cordons: frozenset[str]) -> None:
        """Set what is cordoned."""
        moved, self._cordons = self._cordons ^ cordons, cordons
        for row, node in enumerate(self.nodes):
            gpus = {one.lower() for gpu in node.gpus for one in (gpu.uuid, gpu.parent)}
            if f"nodes/{node.id}" in moved or not gpus.isdisjoint(moved):
                self._write_cordons(row)
                self.write_use(row)

    def age(self, now: float) -> None:
        """Mark the rows in which a reading has become too old."""
        if now > self._aged:
            self._aged = now
        if now <= self._soonest:
            return
        for row in listed(np.flatnonzero(self.expiry[: len(self)] < now)):
            self._write_freshness(row)
            self._touch(row)
        self._soonest = float(self.expiry[: len(self)].min(initial=np.inf))

    def _write_freshness(self, row: int) -> None:
        """Compute when the readings become too old, and when the next one that is still fresh does."""
        fresh = [gpu.fresh_until for gpu in self.gpus[row]]
        self.fresh_until[row, : len(fresh)] = fresh
        self.odd[row, 0] = bool(fresh) and min(fresh) < self._aged
        self._read.pop(row, None)
        expiry = min((until for until in fresh if until >= self._aged), default=np.inf)
        self.expiry[row] = expiry
        self._soonest = min(self._soonest, expiry)

    def free_of(self) -> Mapping[Build, float]:
        """What is free of the whole GPUs of each build, in thousandths."""
        rows = slice(len(self))
        free = np.bincount(self.build[rows], self.free_milli[rows], len(self.builds))
        return dict(zip(self.builds, listed(free), strict=True))

    def _count(self, node: Node, gpus: Sequence[Gpu], sign: int) -> None:
        whole = [gpu for gpu in gpus if not gpu.mig_profile]
        if whole:
            build = _build(node, gpus)
            self.supply[build] = self.supply.get(build, 0) + sign * len(whole)
        if node.cpu_milli is not None and whole:
            self.cpu_beside_gpus += sign * node.cpu_milli
            self.gpus_beside_cpu += sign * len(whole)

    def _available(self, gpu: Gpu, use: GpuUse) -> int:
        if not use.reservations and not self.gone:
            return UNKNOWN if gpu.memory_total_bytes is None else _number(gpu.memory_free_bytes)
        if gpu.processes_known and not gpu.processes and not self.gone:
            return _number(unused(gpu, use.claimed_bytes, use.unsized))
        live = [self._use.live(reservation) for reservation in use.reservations]
        return _number(available(gpu, live, self.gone.get(gpu.uuid, ())))

    def _spare(self, gpus: Sequence[Gpu]) -> list[int]:
        """What nobody holds of the GPU of which each is a MIG instance, by the memory of its instances, in thousandths."""
        free, total = Counter[str](), Counter[str]()
        for gpu in gpus:
            if gpu.parent and gpu.memory_total_bytes:
                total[gpu.parent] += gpu.memory_total_bytes
                free[gpu.parent] += gpu.memory_total_bytes * (WHOLE - self._use.on(gpu).milli)
        return [free[gpu.parent] // max(total[gpu.parent], 1) for gpu in gpus]

    def _utilization(self, gpu: Gpu) -> float:
        """Utilization, UNKNOWN_USE if unknown; a GPU whose holder is imagined gone counts as idle."""
        if gpu.utilization_percent is None:
            return UNKNOWN_USE
        return 0.0 if gpu.uuid in self.gone else gpu.utilization_percent

    def _write_cordons(self, row: int) -> None:
        """Write what is cordoned: the node, and GPUs themselves or the parents of MIG instances."""
        gpus, marks = self.gpus[row], self._cordons
        self.node_cordoned[row] = f"nodes/{self.nodes[row].id}" in marks
        self.cordoned[row, : len(gpus)] = [
            bool(marks) and not marks.isdisjoint((gpu.uuid.lower(), gpu.parent.lower())) for gpu in gpus
        ]

    def _touch(self, row: int, columns: Sequence[int] | None = None) -> None:
        """Record a change of a row: of all of it, or of what is held of the GPUs in these columns."""
        self.sequence += 1
        self.changed[row] = self.sequence
        self._touched.append((row, columns))
        if len(self._touched) > 2 * MOST_TOLD:
            del self._touched[:MOST_TOLD]


def listed(numbers: "NDArray[np.integer]") -> list[int]:
    """The numbers of an array row as a list."""
    found: list[int] = numbers.tolist()
    return found


def _number(value: int | None) -> int:
    return UNKNOWN if value is None else value


def _build(node: Node, gpus: Sequence[Gpu]) -> Build:
    cores, memory = node.cpu_milli, node.memory_total_bytes
    whole = [gpu.model for gpu in gpus if not gpu.mig_profile]
    return (
        whole[0] if whole else "",
        len(whole),
        -1 if cores is None else cores // 1000,
        -1 if memory is None else memory // GIB,
    )


def _in_order(node: Node) -> tuple[Gpu, ...]:
    return tuple(sorted(node.gpus, key=lambda gpu: (gpu.index, gpu.uuid)))


_HOST = attrgetter("state", "reported", "gpu_problem", "cpu_milli", "memory_total_bytes", "labels")
_BUILD = attrgetter(
    *("uuid", "trouble", "quarantine", "index", "model", "memory_total_bytes", "mig_profile", "parent"),
    "rated_watts",
)
_READINGS = attrgetter("memory_free_bytes", "utilization_percent", "processes", "processes_known")
"""Hardware and readings of nodes and GPUs: equal reports are not rewritten."""


def available(gpu: Gpu, live: Iterable[Reservation], gone: Iterable[Reservation] = ()) -> int | None:
    """Bytes of a GPU that a new reservation can use; None if the GPU does not report its memory.

    `live` are the reservations on it, `gone` those imagined gone: the memory of their processes counts as free. One without a
    known process counts as using what it held, as far as nobody else is known to use that memory.
    """
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    if free is None or total is None:
        return None
    live, gone = list(live), list(gone)
    unclear = not gpu.processes_known or any(
        process.unknown or process.memory_bytes is None for process in gpu.processes
    )
    # Bytes in use that no holder's process is known to use; if all processes are clear, outsiders' bytes count as well.
    own = {one.id for one in (*live, *gone)}
    known = (
        process.memory_bytes or 0
        for process in gpu.processes
        if process.reservation in own or (unclear and not process.unknown)
    )
    nobodys = max(0, total - free - sum(known))
    for reservation in gone:
        used = _used(reservation, gpu)
        if used is None:
            used = min(_held(reservation, gpu), nobodys)
            nobodys -= used
        free += used
    unused = sum(max(0, _held(one, gpu) - (_used(one, gpu) or 0)) for one in live)
    return max(0, min(free - max(0, unused - (nobodys if unclear else 0)), total))


def unused(gpu: Gpu, claimed_bytes: int, unsized: int) -> int | None:
    """Like `available`, for a GPU without processes: its holders claim these bytes, and `unsized` of them all of it."""
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    if free is None or total is None:
        return None
    left = free - claimed_bytes - unsized * total
    return total if left > total else left if left > 0 else 0


def outsiders(gpu: Gpu, live: Iterable[Reservation]) -> list[tuple[str, int]]:
    """The processes on a GPU that belong to no live reservation, as `command (pid)`, and the memory they use."""
    holders = {reservation.id for reservation in live}
    return [
        (f"{process.command or 'process'} ({process.pid})", process.memory_bytes or 0)
        for process in gpu.processes
        if process.reservation not in holders and not process.unknown
    ]


def _held(reservation: Reservation, gpu: Gpu) -> int:
    return sum(
        one.memory_bytes or gpu.memory_total_bytes or 0 for one in reservation.gpus if one.uuid == gpu.uuid
    )


def _used(reservation: Reservation, gpu: Gpu) -> int | None:
    """What a reservation's processes use; None if there are none."""
    own = [process.memory_bytes or 0 for process in gpu.processes if process.reservation == reservation.id]
    return sum(own) if own else None
