"""Use cases of whoever looks at reservations: get, list, watch, with what their holders make of them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.domain.tokens import Tokens
from gpuscale.allocator.state.archive import Archive
from gpuscale.allocator.state.changes import Changes
from gpuscale.allocator.usecases.usage import Usage, usage_of
from gpuscale.allocator.usecases.view import FleetView
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.wire import page_limit

CHUNK = 500
"""Most reservations in one message of a watch."""


@dataclass(frozen=True, slots=True)
class News:
    """Reservations as they are now; `full` on the last of the first round."""

    reservations: list[Reservation]
    full: bool


class Records:
    """What is known of reservations. Errors are those of `gpuscale.common.errors`, as the contract says."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        archive: Archive,
        view: FleetView,
        changes: Changes,
        clock: Clock,
        tokens: Tokens,
    ) -> None:
        self._tokens = tokens
        self._ledger = ledger
        self._archive = archive
        self._view = view
        self._changes = changes
        self._clock = clock

    async def get(self, reservation_id: str) -> Reservation:
        """Look up a reservation.

        Raises:
            NotFoundError: no such reservation.
        """
        await self._archive.recall(ids=[reservation_id])
        return self._ledger.get(reservation_id)

    async def list_reservations(
        self, *, holder: str, ended: bool, page_size: int, page_token: str
    ) -> tuple[list[Reservation], str]:
        """A page of reservations, oldest first, and the token of the next page; all holders' if `holder` is empty.

        Raises:
            InvalidArgumentError: the token is not one of this list.
        """
        most = page_limit(page_size)
        after = self._tokens.fence_of_page(page_token) if page_token else 0
        kept = self._ledger.reservations(ended=ended)
        wanted = {one.id: one for one in kept if one.fence > after and holder in {"", one.holder}}
        if ended:  # looked up after what is in memory: what moves meanwhile is in both
            old = await self._archive.page(after=after, holder=holder, most=most + 1)
            wanted = {one.id: one for one in old} | wanted
        found = sorted(wanted.values(), key=lambda one: one.fence)  # it grows with every grant
        return found[:most], self._tokens.of_page(found[most - 1].fence) if len(found) > most else ""

    async def watch(self, holder: str) -> AsyncIterator[News]:
        """All live reservations of a holder, or of all, and then those that change, for ever."""
        with self._changes.subscribe(holder) as subscription:
            live = [one for one in self._ledger.reservations(ended=False) if subscription.wants(one)]
            for start in range(0, max(1, len(live)), CHUNK):
                yield News(live[start : start + CHUNK], full=start + CHUNK >= len(live))
            while True:
                yield News(await subscription.next(CHUNK), full=False)

    def usage(self, reservation: Reservation) -> Usage | None:
        """What the holder makes of a reservation; None of one that has ended."""
        if not reservation.live:
            return None
        return usage_of(reservation, self._view.get, self._ledger.use, self._clock.now())
