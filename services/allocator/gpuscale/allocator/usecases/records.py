"""Use cases of whoever looks at reservations: get, list, with what their holders make of them.

Use is the latest reading of the nodes: nothing is guessed over time, and what it does not tell is None.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gpuscale.allocator.domain.ledger import Ledger, Tokens
from gpuscale.allocator.domain.model import WHOLE, Gpu, GpuProcess, Node, Reservation, Use
from gpuscale.allocator.state.archive import Archive, RecordFilter
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import MAX_PAGE_SIZE, page_limit

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
    busy: list[bool | None] = []
    over: list[bool | None] = []
    for held in reservation.gpus:
        node, holders = node_of(held.node), use.gpu(held.uuid).reservations
        gpu = next((one for one in (node.gpus if node else ()) if one.uuid == held.uuid), None)
        if gpu is None or gpu.fresh_until < now:
            busy.append(None)
            over.append(None)
            continue
        others = (one for one in gpu.processes if one.reservation not in holders and not one.unknown)
        memory = gpu.memory_used_bytes
        if held.milli < WHOLE:
            memory = _own_memory(gpu, reservation.id, holders)
        outsiders = tuple(one.pid for one in others)
        found[held.uuid] = GpuUsage(memory, gpu.utilization_percent, outsiders, gpu.quarantine)
        busy.append(_is_busy(gpu, reservation.id))
        granted = held.memory_bytes
        over.append(None if granted is None or memory is None else memory > granted)
    any_busy = _any(busy)
    return Usage(found, None if any_busy is None else not any_busy, _any(over))


def _own_memory(gpu: Gpu, own_id: str, holders: Collection[str]) -> int | None:
    """What the processes of a holder use.

    None where one does not tell, or where something is there that may be the holder's: processes of which nobody knows
    whose they are; or, of a holder that is not known to have any, outsiders, and memory of processes that were not
    listed yet.
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


def _total(processes: Sequence[GpuProcess]) -> int | None:
    """What they use; None where one does not tell."""
    known = [one.memory_bytes for one in processes if one.memory_bytes is not None]
    return sum(known) if len(known) == len(processes) else None


def _is_busy(gpu: Gpu, own_id: str) -> bool | None:
    """Something of the holder is there; None where that cannot be told, as while strangers are and none of its own."""
    if any(one.reservation == own_id for one in gpu.processes):
        return True
    if gpu.utilization_percent is None or gpu.utilization_percent >= IDLE_PERCENT:
        return None if gpu.utilization_percent is None else True
    return None if any(one.unknown or one.reservation is None for one in gpu.processes) else False


def _any(answers: list[bool | None]) -> bool | None:
    if True in answers:
        return True
    return None if None in answers or not answers else False


@dataclass(frozen=True, slots=True)
class Records:
    """What is known of reservations. Errors are those of `gpuscale.common.errors`, as the contract says."""

    ledger: Ledger
    archive: Archive
    view: FleetView
    clock: Clock
    tokens: Tokens

    async def get(self, reservation_id: str) -> Reservation:
        """Look up a reservation. Raises NotFoundError: no such reservation."""
        await self.archive.recall(ids=[reservation_id])
        return self.ledger.get(reservation_id)

    async def list_reservations(
        self,
        wanted: RecordFilter,
        *,
        ended: bool,
        page_size: int,
        page_token: str,
        keep: Callable[[Reservation], bool] | None = None,
    ) -> tuple[list[Reservation], str]:
        """A page of reservations, oldest first, and the token of the next page.

        Of those on disk that are wanted, `keep` is asked about the first 1,000: a page may be short and not the last.
        """
        most = page_limit(page_size)
        after = self.tokens.fence_of_page(page_token) if page_token else 0
        kept = self.ledger.reservations(ended=ended)
        chosen = {one.id: one for one in kept if one.fence > after and one in wanted}
        last = 0
        if ended:  # looked up after what is in memory: what moves meanwhile is in both
            looked_at = most + 1 if keep is None else MAX_PAGE_SIZE
            old, last = await self.archive.page(wanted, after=after, most=looked_at)
            if keep is not None and len(old) == looked_at:
                last = old[-1].fence
            chosen = {one.id: one for one in old} | chosen
        found = sorted(chosen.values(), key=lambda one: one.fence)  # it grows with every grant
        if last:
            found = [one for one in found if one.fence <= last]
        found = found if keep is None else list(filter(keep, found))
        if len(found) > most:
            last = found[most - 1].fence
        return found[:most], self.tokens.of_page(last) if last else ""

    async def kept_since(self) -> datetime | None:
        """When the youngest of all forgotten reservations ended; None where none is."""
        forgotten = await self.archive.store.forgotten()
        return datetime.fromtimestamp(forgotten, UTC) if forgotten else None

    def usage(self, reservation: Reservation) -> Usage | None:
        """What the holder makes of a reservation; None of one that has ended."""
        if not reservation.live:
            return None
        return usage_of(reservation, self.view.get, self.ledger.use, self.clock.now())


async def every(list_page: Callable[..., Awaitable[tuple[list[Reservation], str]]]) -> list[Reservation]:
    """The reservations of all pages: an order of their own shows the last first."""
    found, token = await list_page(page_size=MAX_PAGE_SIZE, page_token="")
    while token:
        more, token = await list_page(page_size=MAX_PAGE_SIZE, page_token=token)
        found += more
    return found
