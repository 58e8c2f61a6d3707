"""Archive: reservations that ended leave memory for the disk, and leave the disk when there are too many.

Memory keeps what ended last; older records are read where somebody asks for them, or repeats their request. On disk they
are bounded by time, by number and by bytes; those whose time is over first go first.
"""

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NoReturn

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.state.ended_store import EndedStore, Totals
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.logs import get_logger

IN_MEMORY = 4096
"""Ended reservations that memory keeps."""
PERIOD = 1.0
"""Seconds between two looks."""
DUE_PERIOD = 60.0
"""Seconds between two looks for records whose time is over."""
BATCH = 64
"""Most records in one transaction."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """How many ended reservations are kept at most, and how many bytes of disk they may take."""

    records: int
    bytes: int


class Archive:
    """The records that are not in memory. `run` must run."""

    def __init__(self, ledger: Ledger, store: EndedStore, limits: Limits, clock: Clock) -> None:
        self._ledger = ledger
        self._store = store
        self._limits = limits
        self._clock = clock
        self._totals = Totals()
        self._due_again = 0.0
        self._failing = False

    async def open(self) -> None:
        """Learn how much there is.

        Raises:
            UnavailableError: the state cannot be read.
        """
        self._totals = await self._store.totals()

    async def recall(self, *, ids: Collection[str] = (), requests: Collection[str] = ()) -> None:
        """Bring records back to memory, by their ids and by the requests that they were granted for, if there are any.

        Raises:
            UnavailableError: the state cannot be read.
            FailedPreconditionError: STATE_INCONSISTENT, a record is not as it was written.
        """
        if not self._totals.records:
            return
        ids = [one for one in ids if not self._ledger.knows(one)]
        requests = [one for one in requests if not self._ledger.knows(request_id=one)]
        if ids or requests:
            self._ledger.restore(await self._store.find(ids=ids, requests=requests))

    async def page(self, *, after: int, holder: str, most: int) -> Sequence[Reservation]:
        """At most so many records with a higher fence, by fence; all holders' if `holder` is empty. Raises as `recall`."""
        if not self._totals.records:
            return ()
        return await self._store.page(after=after, holder=holder, most=most)

    async def run(self) -> NoReturn:
        """Keep within the limits, for ever."""
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self.tidy()
                self._failing = False
            except (UnavailableError, FailedPreconditionError) as error:
                if not self._failing:
                    _log.warning("cannot move records of ended reservations", problem=error.message)
                self._failing = True

    async def tidy(self) -> None:
        """Move what memory has too much of to the disk, and drop what the disk has too much of.

        Raises:
            UnavailableError: the state cannot be written.
            FailedPreconditionError: STATE_UNREADABLE, the file was found damaged.
        """
        await self._make_room()
        while (over := self._ledger.ended_count - min(IN_MEMORY, self._limits.records)) > 0:
            chosen = self._ledger.first_ended(min(over, BATCH))
            self._totals = await self._store.retire([one.id for one in chosen], self._ledger.fence)
            for one in chosen:
                self._ledger.forget(one)
        while (over := self._too_many()) > 0 and await self._drop(min(over, BATCH)):
            pass
        if self._clock.now() >= self._due_again:
            before = Totals()
            while self._totals.records and before != self._totals:
                before = self._totals
                self._totals = await self._store.drop_due(self._clock.now(), BATCH, self._ledger.fence)
            self._due_again = self._clock.now() + DUE_PERIOD

    def _too_many(self) -> int:
        """How many records have to go; none where it is not positive."""
        totals, limits = self._totals, self._limits
        too_large = totals.bytes - limits.bytes
        return max(
            totals.records + self._ledger.ended_count - limits.records,
            math.ceil(too_large * totals.records / totals.bytes) if too_large > 0 else 0,
        )

    async def _make_room(self) -> None:
        """Drop the first records while the disk lacks the room that ends of reservations need."""
        if not await self._store.short():
            return
        _log.warning("the disk is full: records of ended reservations go before their time")
        while await self._store.short() and await self._drop(BATCH):
            pass

    async def _drop(self, count: int) -> bool:
        """Drop the first records; False where there are none."""
        before, self._totals = self._totals, await self._store.drop_first(count, self._ledger.fence)
        return before != self._totals
