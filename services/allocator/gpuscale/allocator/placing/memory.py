"""Memory of a GPU that a newcomer may count on. Pure.

What is free now, less what holders of shares were granted and do not use yet: a grant counts in full at once. What
processes of no lease use is not free either, so that outsiders are subtracted without any bookkeeping. No byte counts
twice: memory of which nobody can tell whose it is counts as the holders', as far as they were granted it.
"""

from collections.abc import Iterable, Sequence

from gpuscale.allocator.domain.model import Gpu, Reservation


def available(gpu: Gpu, live: Iterable[Reservation], gone: Iterable[Reservation] = ()) -> int | None:
    """Bytes of a GPU that a newcomer may count on; None where the GPU does not report its memory.

    `live` are the reservations on it, `gone` those that are to be thought away: what their processes use is free
    then. Of one without a known process, what it held is taken to be used by it, as far as nobody else is known to use it.
    """
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    if free is None or total is None:
        return None
    live, gone = list(live), list(gone)
    unclear = any(process.unknown or process.memory_bytes is None for process in gpu.processes)
    nobodys = _nobodys(gpu, total - free, [*live, *gone], outsiders_too=not unclear)
    for reservation in gone:
        used = _used(reservation, gpu)
        if used is None:
            used = min(_held(reservation, gpu), nobodys)
            nobodys -= used
        free += used
    unused = sum(max(0, _held(one, gpu) - (_used(one, gpu) or 0)) for one in live)
    return max(0, min(free - max(0, unused - (nobodys if unclear else 0)), total))


def _nobodys(gpu: Gpu, used: int, holders: Sequence[Reservation], *, outsiders_too: bool) -> int:
    """Bytes in use that no process of a holder is known to use; nor one of an outsider, unless `outsiders_too`."""
    own = {one.id for one in holders}
    known = (
        process.memory_bytes or 0
        for process in gpu.processes
        if process.reservation in own or not (outsiders_too or process.unknown)
    )
    return max(0, used - sum(known))


def unused(gpu: Gpu, claimed_bytes: int, unsized: int) -> int | None:
    """As `available`, of a GPU without processes, whose holders claim so many bytes, and so many of them all of it."""
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    return (
        None if free is None or total is None else max(0, min(free - claimed_bytes - unsized * total, total))
    )


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
    """What its admitted processes use; None where there are none."""
    own = [process.memory_bytes or 0 for process in gpu.processes if process.reservation == reservation.id]
    return sum(own) if own else None
