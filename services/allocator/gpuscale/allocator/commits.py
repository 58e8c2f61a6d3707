"""Commits: the second half of every change, the one that waits for the disk.

Each runs as a task of its own, so that a caller who gives up neither undoes nor forgets it, and a caller who repeats
the request waits for the same outcome.
"""

import asyncio
from collections.abc import Sequence

from gpuscale.allocator.ledger import Ledger, activated
from gpuscale.allocator.model import Reservation
from gpuscale.allocator.store import AllocatorStore
from gpuscale.common import failpoints
from gpuscale.common.errors import UnavailableError
from gpuscale.common.lifecycle import TaskScope

Outcome = asyncio.Task[UnavailableError | None]
"""None once the change is on disk and in the ledger; the error if it could not be written and was taken back."""


class Commits:
    """Brings what the ledger granted or closed to disk and tells the ledger how it went.

    Args:
        tasks: the scope that the writes live in.
    """

    def __init__(self, ledger: Ledger, store: AllocatorStore, tasks: TaskScope) -> None:
        self._ledger = ledger
        self._store = store
        self._tasks = tasks
        self._under_way: dict[str, Outcome] = {}

    def grant(self, granted: Reservation) -> Outcome:
        """Begin to write a grant."""
        return self._begin([granted], self._tasks.start("write a grant", self._grant(granted)))

    def end(self, closed: Sequence[Reservation]) -> Outcome:
        """Begin to write the ends of closed reservations, all in one transaction."""
        return self._begin(closed, self._tasks.start("write ends", self._end(closed)))

    async def wait(self, reservation_id: str) -> UnavailableError | None:
        """Wait until nothing is being written about a reservation; the error of the last write, if it failed."""
        error = None
        while (outcome := self._under_way.get(reservation_id)) is not None:
            error = await asyncio.shield(outcome)
        return error

    def _begin(self, reservations: Sequence[Reservation], outcome: Outcome) -> Outcome:
        self._under_way.update((one.id, outcome) for one in reservations)
        return outcome

    def _done(self, reservations: Sequence[Reservation]) -> None:
        for one in reservations:
            self._under_way.pop(one.id, None)

    async def _grant(self, granted: Reservation) -> UnavailableError | None:
        try:
            await failpoints.hit_async("allocator.reserve.before_commit")
            await self._store.add(activated(granted))
        except UnavailableError as error:
            self._ledger.withdraw(granted)
            return error
        else:
            self._ledger.confirm(granted)
            return None
        finally:
            self._done([granted])

    async def _end(self, closed: Sequence[Reservation]) -> UnavailableError | None:
        try:
            await failpoints.hit_async("allocator.end.before_commit")
            await self._store.change(closed)
        except UnavailableError as error:
            for one in closed:
                self._ledger.reopen(one)
            return error
        else:
            for one in closed:
                self._ledger.settle(one)
            return None
        finally:
            self._done(closed)
