"""Usage: what the holder of a reservation makes of its GPUs, as their nodes reported last. Pure.

Nothing is guessed over time: this is the latest reading, and what it does not tell is None.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from gpuscale.allocator.domain.model import WHOLE, Gpu, Node, Reservation, ReservedGpu
from gpuscale.allocator.domain.use import Use

IDLE_PERCENT = 5.0
"""A GPU that is used less than this, in percent, does nothing."""


OVERHEAD_BYTES = 1 << 30
"""Memory that a GPU may have in use beside that of its processes; the driver and its context take less."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """What is made of a GPU. `outsiders` are the pids of processes of no reservation that holds it.

    `quarantine` says why the health checks want no new work on it.
    """

    memory_used_bytes: int | None
    utilization_percent: float | None
    outsiders: tuple[int, ...]
    quarantine: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """What is made of a reservation; `gpus` by UUID, only those whose readings are fresh."""

    gpus: dict[str, GpuUsage]
    idle: bool | None
    overused: bool | None


def usage_of(reservation: Reservation, node_of: Callable[[str], Node | None], use: Use, now: float) -> Usage:
    """What the holder of a live reservation makes of it at `now`."""
    found: dict[str, GpuUsage] = {}
    idle: list[bool | None] = []
    over: list[bool | None] = []
    for held in reservation.gpus:
        gpu = _fresh(node_of(held.node), held.uuid, now)
        if gpu is None:
            idle.append(None)
            over.append(None)
            continue
        usage = _gpu_usage(gpu, held, reservation.id, use.gpu(held.uuid).reservations)
        usage = replace(usage, quarantine=gpu.quarantine)
        found[held.uuid] = usage
        idle.append(_is_idle(gpu, reservation.id))
        over.append(_is_over(held, usage))
    return Usage(found, _all(idle), _any(over))


def _fresh(node: Node | None, uuid: str, now: float) -> Gpu | None:
    gpus = () if node is None else node.gpus
    return next((gpu for gpu in gpus if gpu.uuid == uuid and gpu.fresh_until >= now), None)


def _gpu_usage(gpu: Gpu, held: ReservedGpu, own_id: str, holders: Collection[str]) -> GpuUsage:
    others = (one for one in gpu.processes if one.reservation not in holders and not one.unknown)
    memory = gpu.memory_used_bytes if held.milli >= WHOLE else _own_memory(gpu, own_id, holders)
    return GpuUsage(memory, gpu.utilization_percent, tuple(one.pid for one in others))


def _own_memory(gpu: Gpu, own_id: str, holders: Collection[str]) -> int | None:
    """What the processes of a holder use.

    None where one does not tell, or where something is there that may be the holder's: processes of which nobody knows whose
    they are; or, of a holder that is not known to have any, outsiders, and memory of processes that were not listed yet.
    """
    own = [one.memory_bytes for one in gpu.processes if one.reservation == own_id]
    known = [memory for memory in own if memory is not None]
    unclear = any(one.unknown or (not own and one.reservation not in holders) for one in gpu.processes)
    if unclear or len(known) < len(own) or not gpu.processes_known:
        return None
    listed = [one.memory_bytes for one in gpu.processes]
    told = [memory for memory in listed if memory is not None]
    if not own and len(told) == len(listed) and (gpu.memory_used_bytes or 0) - sum(told) > OVERHEAD_BYTES:
        return None
    return sum(known)


def _is_idle(gpu: Gpu, own_id: str) -> bool | None:
    """Nothing of the holder is there; None where that cannot be told, as while strangers are and none of its own."""
    if any(one.reservation == own_id for one in gpu.processes):
        return False
    if gpu.utilization_percent is None or gpu.utilization_percent >= IDLE_PERCENT:
        return None if gpu.utilization_percent is None else False
    return None if any(one.unknown or one.reservation is None for one in gpu.processes) else True


def _is_over(held: ReservedGpu, usage: GpuUsage) -> bool | None:
    if held.memory_bytes is None or usage.memory_used_bytes is None:
        return None
    return usage.memory_used_bytes > held.memory_bytes


def _all(answers: list[bool | None]) -> bool | None:
    if False in answers:
        return False
    return None if None in answers or not answers else True


def _any(answers: list[bool | None]) -> bool | None:
    if True in answers:
        return True
    return None if None in answers or not answers else False
