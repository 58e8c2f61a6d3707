"""Memory of a GPU that a newcomer may count on. Pure.

What is free now, less what holders of shares were granted and do not use yet: a grant counts in full at once. What
processes of no lease use is not free either, so that outsiders are subtracted without any bookkeeping.
"""

from collections.abc import Iterable

from gpuscale.allocator.domain.model import Gpu, Reservation


def available(gpu: Gpu, live: Iterable[Reservation], gone: Iterable[Reservation] = ()) -> int | None:
    """Bytes of a GPU that a newcomer may count on; None where the GPU does not report its memory.

    `live` are the reservations on it, `gone` those that are to be thought away: what their processes use is free
    then. Where none of its processes was admitted under its fence, all that it held is taken to be used by it.
    """
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    if free is None or total is None:
        return None
    for reservation in live:
        free -= max(0, _held(reservation, gpu) - (_used(reservation, gpu) or 0))
    for reservation in gone:
        used = _used(reservation, gpu)
        free += _held(reservation, gpu) if used is None else used
    return max(0, min(free, total))


def unused(gpu: Gpu, claimed_bytes: int, unsized: int) -> int | None:
    """As `available`, of a GPU without processes, whose holders claim so many bytes, and so many of them all of it."""
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    return (
        None if free is None or total is None else max(0, min(free - claimed_bytes - unsized * total, total))
    )


def outsiders(gpu: Gpu, live: Iterable[Reservation]) -> list[tuple[str, int]]:
    """The processes on a GPU that belong to no live reservation, as `command (pid)`, and the memory they use."""
    fences = {reservation.fence for reservation in live}
    return [
        (f"{process.command or 'process'} ({process.pid})", process.memory_bytes or 0)
        for process in gpu.processes
        if process.fence not in fences
    ]


def _held(reservation: Reservation, gpu: Gpu) -> int:
    return sum(
        one.memory_bytes or gpu.memory_total_bytes or 0 for one in reservation.gpus if one.uuid == gpu.uuid
    )


def _used(reservation: Reservation, gpu: Gpu) -> int | None:
    """What its admitted processes use; None where there are none."""
    own = [process.memory_bytes or 0 for process in gpu.processes if process.fence == reservation.fence]
    return sum(own) if own else None
