"""How many messages go in and out of the queues of one virtual host, read every few seconds where anybody asks."""

import asyncio
from collections.abc import Mapping

from gpuscale.autoscaler.queues.brokers import VirtualHostError
from gpuscale.autoscaler.queues.management import ManagementClient
from gpuscale.autoscaler.queues.model import QueueFailure, Rates
from gpuscale.common.clock import Clock

RATES_PERIOD = 5.0
"""Seconds between two requests; the broker's own statistics are no younger."""


class QueueRates:
    """The rates of all queues of a virtual host; one caller at a time."""

    def __init__(self, management: ManagementClient, virtual_host: str, clock: Clock) -> None:
        self._management = management
        self._virtual_host = virtual_host
        self._clock = clock
        self._rates: Mapping[str, Rates] = {}
        self._due = 0.0
        self._failure: QueueFailure | None = None

    def of(self, queue: str) -> Rates | None:
        """What was read of a queue last; None where that is not known."""
        return self._rates.get(queue)

    async def refresh(self) -> QueueFailure | None:
        """Read them anew if it is time; returns why they cannot be read, if so: nothing is known of them then."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            return self._failure
        self._due = loop.time() + RATES_PERIOD
        at = self._clock.now()
        try:
            found = await self._management.rates(self._virtual_host)
        except VirtualHostError as error:
            self._rates, self._failure = {}, error.failure
        else:
            self._rates = {queue: Rates(*rates, at) for queue, rates in found.items()}
            self._failure = None
        return self._failure
