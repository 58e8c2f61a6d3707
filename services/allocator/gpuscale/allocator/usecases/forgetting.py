"""Forgetting: nodes that the fleet was told are gone for good go here too, as soon as nothing is held on them.

Until then they are kept: what is held there is LOST after the time that any GPU has to come back
(`gpuscale.allocator.usecases.losses`), and a node that reports again meanwhile stays. A node that the fleet has not named since the
allocator started may have been forgotten while nobody listened: it goes after a day.
"""

import asyncio
from collections.abc import Iterable
from typing import NoReturn

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Node
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.allocator.usecases.view import FleetView
from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.logs import get_logger

PERIOD = 0.5
"""Seconds between two looks."""
UNNAMED_FOR = 24 * 3600.0
"""Seconds after which a node goes that the fleet has not named since the start."""

_log = get_logger(__name__)


class Forgetting:
    """Drops forgotten nodes. `run` must run."""

    def __init__(
        self, *, ledger: Ledger, view: FleetView, placer: Placer, store: AllocatorStore, clock: Clock
    ) -> None:
        self._ledger = ledger
        self._view = view
        self._placer = placer
        self._store = store
        self._clock = clock
        self._due: dict[str, float] = {}

    def seen(self, nodes: Iterable[Node]) -> None:
        """Nodes have been taken into the view."""
        now = self._clock.now()
        for node in nodes:
            if node.forgotten:
                self._due[node.id] = now
            elif not node.reported:
                self._due.setdefault(node.id, now + UNNAMED_FOR)
            else:
                self._due.pop(node.id, None)

    async def run(self) -> NoReturn:
        """Drop what can go, for ever."""
        while True:
            await asyncio.sleep(PERIOD)
            now = self._clock.now()
            for node in [node for node, due in self._due.items() if due <= now]:
                if node in self._due and not self._ledger.use.node(node).reservations:
                    await self._drop(node)

    async def _drop(self, node: str) -> None:
        """Out of memory first: should the node report while the disk works, it is a new one."""
        del self._due[node]
        self._placer.remove_node(node)
        rank = self._view.drop(node)
        try:
            await self._store.forget_rank(node, rank)
        except UnavailableError as error:
            # Harmless: after a restart it is shown as a node that has not reported.
            _log.warning("cannot forget a node on disk", node=node, problem=error.message)
        else:
            _log.info("forgot a node", node=node)
