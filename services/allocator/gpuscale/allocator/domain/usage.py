"""Use: what holders do with their GPUs: busy, idle or unknown. The single definition for all callers. Pure.

A GPU is idle while its utilization is below IDLE_PERCENT, whatever is in its memory: a process that computes nothing is what
people look for. A used GPU is busy for its holder, unless all its processes are known to be others'. Readings that are missing,
too old, or possibly another's are unknown, which is never taken for idle. MIG instances report no utilization: unknown.

A reservation is busy if one of its GPUs is, else unknown if one of them is, else idle.

`ranking` has different limits: what a caller of RankNodes counts as room, 30 % by default.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from gpuscale.allocator.domain import model

_NodeOf: TypeAlias = Callable[[str], model.Node | None]
IDLE_PERCENT = 5.0
"""A GPU below this utilization, in percent, is idle."""
OVERHEAD_BYTES = 1 << 30
"""Memory that a GPU may use beyond its processes' memory; the driver and its context take less."""


class UseState(StrEnum):
    """The use of a GPU, or of all GPUs of a reservation together."""

    BUSY = "busy"
    IDLE = "idle"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class GpuUsage:
    """The use of a GPU; None is unknown.

    `memory_bytes` is what the holder's processes use; for a GPU held whole, all that is in use. `outsiders` are the pids of
    processes that belong to no reservation on it, `outsider_memory_bytes` is what they use. `utilization_percent` is the GPU's,
    whoever uses it. `over_used` says whether the holder uses more memory than it holds. `quarantine` says why the health checks
    refuse new work on it. `power_watts` and the counter `energy_joules` are the GPU's, read at `read_at` of the boot clock.
    """

    state: UseState = UseState.UNKNOWN
    memory_bytes: int | None = None
    outsider_memory_bytes: int | None = None
    outsiders: tuple[int, ...] = ()
    utilization_percent: float | None = None
    over_used: bool | None = None
    quarantine: str = ""
    power_watts: float | None = None
    energy_joules: float | None = None
    hardware: model.HardwareLook = model.UNSEEN
    read_at: float | None = None


UNREAD = GpuUsage()
"""For a GPU without a fresh reading."""


@dataclass(slots=True)
class ReservationUsage:
    """The use of a reservation; `gpus` has all of them by UUID."""

    gpus: dict[str, GpuUsage]
    state: UseState
    over_used: bool | None

    @property
    def idle(self) -> bool | None:
        """Whether it is idle; None if unknown."""
        return None if self.state is UseState.UNKNOWN else self.state is UseState.IDLE


def usage_of(
    reservation: model.Reservation, node_of: _NodeOf, use: model.Use, now: float
) -> ReservationUsage:
    """The use that the holder of a live reservation makes of it at `now`; `use` says who else holds shares of its GPUs."""
    found = gpus_of(reservation, node_of, use, now)
    states = {one.state for one in found.values()}
    order = (UseState.BUSY, UseState.UNKNOWN, UseState.IDLE)
    state = next((one for one in order if one in states), UseState.UNKNOWN)
    over = {one.over_used for one in found.values()}
    over_used = True if True in over else None if None in over or not over else False
    return ReservationUsage(found, state, over_used)


def gpus_of(
    reservation: model.Reservation, node_of: _NodeOf, use: model.Use, now: float, since: float | None = None
) -> dict[str, GpuUsage]:
    """The `gpus` of `usage_of`, from readings since `since`."""
    found: dict[str, GpuUsage] = {}
    for held in reservation.gpus:
        gpu = read_since(held, node_of, now, since)
        if gpu is None:
            found[held.uuid] = UNREAD
            continue
        holders = use.gpu(held.uuid).reservations
        others = [one for one in gpu.processes if one.reservation not in holders and not one.unknown]
        whole, granted = held.milli >= model.WHOLE, held.memory_bytes
        memory = gpu.memory_used_bytes if whole else _own_memory(gpu, reservation.id, holders)
        listed = gpu.processes_known and gpu.processes
        if gpu.utilization_percent is None:
            state = UseState.UNKNOWN
        elif gpu.utilization_percent < IDLE_PERCENT:
            state = UseState.IDLE
        elif any(one.reservation == reservation.id for one in gpu.processes):
            state = UseState.BUSY
        elif listed and all(one.reservation and not one.unknown for one in gpu.processes):
            state = UseState.IDLE  # others' work
        else:
            state = UseState.BUSY if whole else UseState.UNKNOWN
        found[held.uuid] = GpuUsage(
            state=state,
            memory_bytes=memory,
            outsider_memory_bytes=_total(others) if gpu.processes_known else None,
            outsiders=tuple(one.pid for one in others),
            utilization_percent=gpu.utilization_percent,
            over_used=None if granted is None or memory is None else memory > granted,
            quarantine=gpu.quarantine,
            power_watts=gpu.power_watts,
            energy_joules=gpu.energy_joules,
            hardware=gpu.hardware,
            read_at=gpu.read_at,
        )
    return found


def read_since(
    held: model.ReservedGpu, node_of: _NodeOf, now: float, since: float | None
) -> model.Gpu | None:
    """A GPU as it was read since `since`; None without a fresh reading."""
    node = node_of(held.node)
    for gpu in node.gpus if node else ():
        if gpu.uuid == held.uuid:
            early = since is not None and (gpu.read_at is None or gpu.read_at < since)
            return None if early or gpu.fresh_until < now else gpu
    return None


MOST_JUDGED = 10_000
"""Reservations whose last judgement is cached."""
_Known = tuple[
    tuple[model.ReservedGpu, ...],
    float,
    tuple[tuple[str, model.Node | None, model.NodeUse], ...],
    ReservationUsage,
]


class UsageJudge:
    """Computes `usage_of`, and returns the same object until something it depends on may have changed.

    Nodes and their use are replaced when they change; only `fresh_until` moves in place, and only forward.
    """

    def __init__(self, node_of: _NodeOf, use: model.Use) -> None:
        self._node_of, self._use = node_of, use
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def of(self, reservation: model.Reservation, now: float) -> ReservationUsage:
        """The use that the holder of a live reservation makes of it at `now`."""
        known = self._known.get(reservation.id)
        if known is not None and known[0] is reservation.gpus and now <= known[1]:
            for name, node, held in known[2]:
                if self._node_of(name) is not node or self._use.node(name) is not held:
                    break
            else:
                return known[3]
        found = usage_of(reservation, self._node_of, self._use, now)
        nodes = {gpu.node: self._node_of(gpu.node) for gpu in reservation.gpus}
        uuids = found.gpus.keys()
        until = [gpu.fresh_until for node in nodes.values() if node for gpu in node.gpus if gpu.uuid in uuids]
        grounds = tuple((name, node, self._use.node(name)) for name, node in nodes.items())
        self._known[reservation.id] = reservation.gpus, min(until, default=now), grounds, found
        if len(self._known) > MOST_JUDGED:
            self._known.popitem(last=False)
        return found


def _own_memory(gpu: model.Gpu, own_id: str, holders: Collection[str]) -> int | None:
    """What a holder's processes use.

    None if a process does not report it, or something may be the holder's: processes of unknown owner; or, for a holder without
    known processes, outsiders, and memory of processes not listed yet.
    """
    if not gpu.processes_known or any(one.unknown for one in gpu.processes):
        return None
    own = [one for one in gpu.processes if one.reservation == own_id]
    if own:
        return _total(own)
    if any(one.reservation not in holders for one in gpu.processes):
        return None
    listed, used = _total(gpu.processes), gpu.memory_used_bytes or 0
    return None if listed is not None and used - listed > OVERHEAD_BYTES else 0


def _total(processes: Sequence[model.GpuProcess]) -> int | None:
    """The sum of what they use; None if one does not report it."""
    known = [one.memory_bytes for one in processes if one.memory_bytes is not None]
    return sum(known) if len(known) == len(processes) else None
