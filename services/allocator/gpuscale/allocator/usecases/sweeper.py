"""Sweeper: ends what ran out, was to be taken away or vanished, and forgets the records that were kept long enough.

It wakes at the next deadline, at least every half second, so that it notices when the whole process stood still
(SIGSTOP, a suspended host, a slow disk): then renewals may be waiting in the socket, and it lets one round pass before
it ends anything (etcd#15247 and #12528 ended live leases for want of that).
"""

import asyncio
from typing import NoReturn

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.state.commits import Commits
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.logs import get_logger

TICK = 0.5
"""Longest sleep, in seconds."""
LATE = 0.5
"""A wake-up later than this, in seconds, is a stall."""
START_DELAY = 2.0
"""Seconds after the start in which nothing is ended, so that holders can renew what ran out meanwhile."""
BATCH = 256
"""Most reservations in one transaction."""
_SHORTEST = 0.02

_log = get_logger(__name__)


class Sweeper:
    """Ends and forgets what is due, for as long as it runs."""

    def __init__(self, ledger: Ledger, store: AllocatorStore, commits: Commits, clock: Clock) -> None:
        self._ledger = ledger
        self._store = store
        self._commits = commits
        self._clock = clock
        self._failing = False

    async def run(self) -> NoReturn:
        """Sweep for ever."""
        await asyncio.sleep(START_DELAY)
        stalled = False
        while True:
            pause = TICK if stalled or self._failing else self._pause()
            wake = self._clock.now() + pause
            await asyncio.sleep(pause)
            late = self._clock.now() - wake
            # Only one round: a process that is always late must still end what nobody renews.
            stalled = late > LATE and not stalled
            if stalled:
                _log.warning("stood still, so renewals go first", seconds=round(late, 2))
                continue
            while await self.sweep() == BATCH:
                pass

    async def sweep(self) -> int:
        """End and forget what is due, at most one batch; how many records were due."""
        due = self._ledger.due(self._clock.now(), BATCH)
        expired = [one for one in due if one.live]
        forgotten = [one for one in due if not one.live]
        problem: UnavailableError | None = None
        if expired:
            now, wall = self._clock.now(), self._clock.wall()
            ends = [(one, State.EXPIRED if one.deadline <= now else State.CANCELLED) for one in expired]
            closed = [self._ledger.close(one, state, now=now, wall=wall) for one, state in ends]
            problem = await self._commits.end(closed)
            if problem is None:
                _log.info("reservations ended", states={one.id: state.value for one, state in ends})
        if forgotten:
            problem = await self._forget(forgotten) or problem
        if problem is not None and not self._failing:
            _log.warning("cannot write the end of leases", problem=problem.message)
        self._failing = problem is not None
        return 0 if self._failing else len(due)

    def _pause(self) -> float:
        deadline = self._ledger.next_deadline()
        if deadline is None:
            return TICK
        return min(max(deadline - self._clock.now(), _SHORTEST), TICK)

    async def _forget(self, ended: list[Reservation]) -> UnavailableError | None:
        try:
            await self._store.forget(ended, self._ledger.fence)
        except UnavailableError as error:
            for one in ended:
                self._ledger.postpone(one)
            return error
        for one in ended:
            self._ledger.forget(one)
        return None
