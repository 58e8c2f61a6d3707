"""Use cases of reading reservations: get and list, with their use by the latest readings."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gpuscale.allocator.domain.ledger import Ledger, Tokens
from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.domain.usage import ReservationUsage, UsageJudge
from gpuscale.allocator.state.archive import Archive, RecordFilter
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import MAX_PAGE_SIZE, page_limit


@dataclass(slots=True, eq=False)
class Records:
    """The known reservations. Errors are those of `gpuscale.common.errors`, as in the contract."""

    ledger: Ledger
    archive: Archive
    view: FleetView
    clock: Clock
    tokens: Tokens
    _judge: UsageJudge = field(init=False)

    def __post_init__(self) -> None:
        self._judge = UsageJudge(self.view.get, self.ledger.use)

    async def get(self, reservation_id: str) -> Reservation:
        """Look up a reservation. Raises NotFoundError if there is none."""
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

        Of matching ones on disk, `keep` filters the first 1,000: a page may be short without being the last.
        """
        most = page_limit(page_size)
        after = self.tokens.fence_of_page(page_token) if page_token else 0
        kept = self.ledger.reservations(ended=ended)
        chosen = {one.id: one for one in kept if one.fence > after and one in wanted}
        last = 0
        if ended:  # read after memory: what moves meanwhile is in both
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
        """When the youngest forgotten reservation ended; None if none was forgotten."""
        forgotten = await self.archive.store.forgotten()
        return datetime.fromtimestamp(forgotten, UTC) if forgotten else None

    def usage(self, reservation: Reservation) -> ReservationUsage | None:
        """The use of a reservation by its holder; None if it has ended."""
        return self._judge.of(reservation, self.clock.now()) if reservation.live else None


async def every(list_page: Callable[..., Awaitable[tuple[list[Reservation], str]]]) -> list[Reservation]:
    """The reservations of all pages: another order shows the last first."""
    found, token = await list_page(page_size=MAX_PAGE_SIZE, page_token="")
    while token:
        more, token = await list_page(page_size=MAX_PAGE_SIZE, page_token=token)
        found += more
    return found
