"""Looks at what holders make of their GPUs, in the readings that the nodes send anyway (docs/adr/0029), and tells who watches."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.domain.usage import UseState
from gpuscale.allocator.usecases.records import Records

LOOK = 10.0
"""Seconds between two looks: as often as readings of what is held surely come."""
SLICE = 64
"""Reservations that are looked at before other calls come: some 1 ms."""


@dataclass(eq=False)
class Accounting:
    """The looks. `run` must run; `tell` is called with each reservation of which another use is seen."""

    records: Records
    tell: Callable[[Reservation], None]
    _states: dict[str, list[UseState]] = field(default_factory=dict[str, list[UseState]], init=False)

    async def run(self) -> NoReturn:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK)
            await self.look()

    async def look(self) -> None:
        """Look once at every reservation that holds GPUs."""
        before, self._states = self._states, {}
        for nth, one in enumerate(list(self.records.ledger.reservations(ended=False)), 1):
            if nth % SLICE == 0:
                await asyncio.sleep(0)
            usage = self.records.usage(one)
            if usage is None or not one.gpus:
                continue
            self._states[one.id] = states = [gpu.state for gpu in usage.gpus.values()]
            if before.get(one.id) != states:
                self.tell(one)
