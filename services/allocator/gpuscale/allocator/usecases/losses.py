"""Losses: ends reservations whose GPUs vanished from a node that reports, so that their other GPUs are free again."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Node
from gpuscale.allocator.domain.vanishing import Vanishing
from gpuscale.allocator.state.changes import Changes
from gpuscale.allocator.usecases.leases import Leases
from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.logs import get_logger

PERIOD = 0.5
"""Seconds between two looks."""

_log = get_logger(__name__)


class Losses:
    """Watches held GPUs in what nodes report.

    Args:
        after: seconds for which a GPU must be missing.
    """

    def __init__(self, ledger: Ledger, leases: Leases, changes: Changes, clock: Clock, after: float) -> None:
        self._ledger = ledger
        self._leases = leases
        self._changes = changes
        self._clock = clock
        self._vanishing = Vanishing(after)

    def seen(self, nodes: Sequence[Node]) -> None:
        """Nodes have been taken into the view."""
        now = self._clock.now()
        for node in nodes:
            self._vanishing.observe(node, self._ledger.use, now)
        self._changes.room([node.id for node in nodes])

    async def run(self, following: Callable[[], bool]) -> NoReturn:
        """End what is lost, for ever, while the fleet is followed."""
        while True:
            await asyncio.sleep(PERIOD)
            if not following():
                continue
            lost = self._vanishing.lost(self._ledger.use, self._clock.now())
            if not lost:
                continue
            try:
                await self._leases.lose(lost)
            except UnavailableError as error:
                _log.warning("cannot write the end of lost reservations", problem=error.message)
            else:
                _log.warning(
                    "GPUs vanished under a lease", reservations={k: sorted(v) for k, v in lost.items()}
                )
