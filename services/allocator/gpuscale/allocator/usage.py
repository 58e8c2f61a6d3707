"""Usage: what the holder of a reservation makes of its GPUs, as their nodes reported last. Pure.

Nothing is guessed over time: this is the latest reading, and what it does not tell is None.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gpuscale.allocator.domain.model import WHOLE, Gpu, Node, Reservation, ReservedGpu
from gpuscale.allocator.domain.use import Use

IDLE_PERCENT = 5.0
"""A GPU that is used less than this, in percent, does nothing."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """What is made of a GPU. `outsiders` are the pids of processes admitted for no reservation that holds it."""

    memory_used_bytes: int | None
    utilization_percent: float | None
    outsiders: tuple[int, ...]


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
        fences = {use.fence(other) for other in use.gpu(held.uuid).reservations}
        usage = _gpu_usage(gpu, held, reservation.fence, fences)
        found[held.uuid] = usage
        idle.append(_is_idle(gpu, reservation.fence))
        over.append(_is_over(held, usage))
    return Usage(found, _all(idle), _any(over))


def _fresh(node: Node | None, uuid: str, now: float) -> Gpu | None:
    gpus = () if node is None else node.gpus
    return next((gpu for gpu in gpus if gpu.uuid == uuid and gpu.fresh_until >= now), None)


def _gpu_usage(gpu: Gpu, held: ReservedGpu, fence: int, fences: set[int | None]) -> GpuUsage:
    outsiders = tuple(one.pid for one in gpu.processes if one.fence is None or one.fence not in fences)
    if held.milli >= WHOLE:
        return GpuUsage(gpu.memory_used_bytes, gpu.utilization_percent, outsiders)
    own = [one.memory_bytes for one in gpu.processes if one.fence == fence]
    known = [memory for memory in own if memory is not None]
    return GpuUsage(sum(known) if len(known) == len(own) else None, gpu.utilization_percent, outsiders)


def _is_idle(gpu: Gpu, fence: int) -> bool | None:
    if any(one.fence == fence for one in gpu.processes):
        return False
    return None if gpu.utilization_percent is None else gpu.utilization_percent < IDLE_PERCENT


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
