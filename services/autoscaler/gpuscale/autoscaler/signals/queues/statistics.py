"""What a broker itself has measured of the queues of one virtual host: rates, consumers, and how long the oldest has waited.

One request for all queues, every few seconds: the broker's own figures are no younger. It costs the broker more than
twice what the counts cost, so that where nobody reads rates it is made more rarely, for the consumers alone.
"""

import asyncio
import math
from collections.abc import Mapping

from gpuscale.autoscaler.domain.queues import QueueFailure, Rates
from gpuscale.autoscaler.signals.queues.brokers import VirtualHostError
from gpuscale.autoscaler.signals.queues.management import ManagementClient, Measured
from gpuscale.common.runtime.clock import Clock

STATISTICS_PERIOD = 5.0
"""Seconds between two requests; the broker's own statistics are no younger."""
CONSUMERS_PERIOD = 30.0
"""Seconds between two requests where nobody reads rates."""


class QueueStatistics:
    """The statistics of all queues of a virtual host; one caller at a time."""

    def __init__(self, management: ManagementClient, virtual_host: str, clock: Clock) -> None:
        self._management = management
        self._virtual_host = virtual_host
        self._clock = clock
        self._measured: Mapping[str, Measured] = {}
        self._at, self._wall = 0.0, 0.0
        self._asked = -math.inf
        self._failure: QueueFailure | None = None

    def consumers(self, queue: str) -> int | str:
        """The consumers of a queue, or why they are unknown."""
        found = self._measured.get(queue)
        if found is not None:
            return found.consumers
        why = f": {self._failure.message}" if self._failure else " yet"
        return f"consumers unknown{why}"

    def rates(self, queue: str) -> Rates | None:
        """What goes in and out of a queue; None where that is not known.

        A timestamp ahead of our clock is one of another clock: it tells no age.
        """
        found = self._measured.get(queue)
        if found is None:
            return None
        age = None if found.head_timestamp is None else self._wall - found.head_timestamp
        known = age if age is not None and age >= 0 else None
        return Rates(found.published, found.delivered, self._at, known)

    async def refresh(self, rates: bool) -> QueueFailure | None:
        """Read them anew if it is time; returns why they cannot be read, if so: nothing is known of them then.

        `rates`: whether anybody reads rates.
        """
        now = asyncio.get_running_loop().time()
        if now < self._asked + (STATISTICS_PERIOD if rates else CONSUMERS_PERIOD):
            return self._failure
        self._asked = now
        at, wall = self._clock.now(), self._clock.wall().timestamp()
        try:
            measured, failure = await self._management.statistics(self._virtual_host), None
        except VirtualHostError as error:
            measured, failure = dict[str, Measured](), error.failure
        self._measured, self._failure, self._at, self._wall = measured, failure, at, wall
        return self._failure
