"""What a broker itself has measured of the queues of one virtual host: rates, consumers, and how long the oldest has waited.

One request for all queues, every few seconds: the broker's own figures are no younger.
"""

import asyncio
from collections.abc import Mapping

from gpuscale.autoscaler.queues.brokers import VirtualHostError
from gpuscale.autoscaler.queues.management import ManagementClient, Measured
from gpuscale.autoscaler.queues.model import QueueFailure, Rates
from gpuscale.common.clock import Clock

STATISTICS_PERIOD = 5.0
"""Seconds between two requests; the broker's own statistics are no younger."""


class QueueStatistics:
    """The statistics of all queues of a virtual host; one caller at a time."""

    def __init__(self, management: ManagementClient, virtual_host: str, clock: Clock) -> None:
        self._management = management
        self._virtual_host = virtual_host
        self._clock = clock
        self._measured: Mapping[str, Measured] = {}
        self._at, self._wall = 0.0, 0.0
        self._due = 0.0
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

    async def refresh(self) -> QueueFailure | None:
        """Read them anew if it is time; returns why they cannot be read, if so: nothing is known of them then."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            return self._failure
        self._due = loop.time() + STATISTICS_PERIOD
        at, wall = self._clock.now(), self._clock.wall().timestamp()
        try:
            measured, failure = await self._management.statistics(self._virtual_host), None
        except VirtualHostError as error:
            measured, failure = dict[str, Measured](), error.failure
        self._measured, self._failure, self._at, self._wall = measured, failure, at, wall
        return self._failure
