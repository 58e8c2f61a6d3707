"""Use cases of whoever looks at reservations: get, list, watch, with what their holders make of them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.state.archive import Archive
from gpuscale.allocator.state.changes import Changes
from gpuscale.allocator.usecases.usage import Usage, usage_of
from gpuscale.allocator.usecases.view import FleetView
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.wire import last_key, page, page_limit

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
        self, *, ledger: Ledger, archive: Archive, view: FleetView, changes: Changes, clock: Clock
    ) -> None:
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
        kept = self._ledger.reservations(ended=ended)
        wanted = {one.id: one for one in kept if not holder or one.holder == holder}
        if ended:  # looked up after what is in memory: what moves meanwhile is in both
            after = last_key(page_token)
            most = page_limit(page_size) + 1
            old = await self._archive.page(after=int(after) if after else 0, holder=holder, most=most)
            wanted = {one.id: one for one in old} | wanted
        found = sorted(wanted.values(), key=_age_key)
        return page(found, key=_age_key, page_size=page_size, page_token=page_token)

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


def _age_key(reservation: Reservation) -> str:
    """Sorts as the fence, which grows with every grant."""
    return f"{reservation.fence:020d}"
