"""Reading queues of one virtual host of a broker, in the better of two ways that works.

Where the broker has a management API, one request tells the ready and unacknowledged messages of all queues, and a
passive declare adds the consumers, every few seconds. Without it, or while it fails, passive declares tell ready
messages and consumers, and unacknowledged messages are unknown.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

from gpuscale.autoscaler.queues.brokers import Broker, RetryGate, VirtualHostError
from gpuscale.autoscaler.queues.management import ManagementClient
from gpuscale.autoscaler.queues.model import (
    QueueFailure,
    QueueReading,
    QueueState,
    Totals,
    of_declared,
    of_totals,
)
from gpuscale.autoscaler.queues.rabbitmq import AmqpSession
from gpuscale.common.clock import Clock
from gpuscale.common.logs import get_logger

CONSUMERS_PERIOD = 5.0

Publish = Callable[[str, QueueReading | QueueFailure], None]
_log = get_logger(__name__)


class VirtualHostReader:
    """Reads queues of one virtual host of one broker; one caller at a time."""

    def __init__(
        self, broker: Broker, virtual_host: str, management: ManagementClient | None, clock: Clock
    ) -> None:
        self._broker = broker
        self._virtual_host = virtual_host
        self._management = management
        self._clock = clock
        self._session = AmqpSession(broker, virtual_host)
        self._gate = RetryGate()
        # The consumers of each queue, or why they are unknown, and when (loop time) that was found.
        self._consumers: dict[str, tuple[int | str, float]] = {}
        self._said: dict[str, str] = {}

    async def read(self, queues: Iterable[str], publish: Publish) -> None:
        """Read the queues and publish each as soon as it is known, some twice."""
        observed_at = self._clock.now()
        try:
            totals = await self._totals()
        except VirtualHostError as error:
            self._say("management", error.failure)
            unknown = f"unacknowledged messages unknown: {error.failure.message}"
            await self._declare(queues, publish, unknown)
            return
        if totals is None:
            reason = f"no management API is configured for broker {self._broker.name}"
            await self._declare(queues, publish, f"unacknowledged messages unknown: {reason}")
            return
        self._say("management", None)
        await self._publish_totals(queues, publish, totals, observed_at)

    def keep(self, queues: AbstractSet[str]) -> None:
        """Forget what it knows of any other queue."""
        self._consumers = {queue: known for queue, known in self._consumers.items() if queue in queues}

    async def close(self) -> None:
        """Close its connection."""
        await self._session.close()

    async def _totals(self) -> dict[str, Totals | None] | None:
        """The counts of the management API; None where there is none."""
        if self._management is None:
            return None
        loop = asyncio.get_running_loop()
        self._gate.check(loop.time())
        try:
            totals = await self._management.totals(self._virtual_host)
        except VirtualHostError as error:
            self._gate.failed(error.failure, loop.time())
            raise
        self._gate.succeeded()
        return totals

    async def _publish_totals(
        self,
        queues: Iterable[str],
        publish: Publish,
        totals: Mapping[str, Totals | None],
        observed_at: float,
    ) -> None:
        uncounted: list[str] = []
        counted: dict[str, Totals] = {}
        for queue in queues:
            if queue not in totals:
                publish(queue, QueueFailure(QueueState.NOT_FOUND, f"there is no queue {queue!r}"))
            elif (found := totals[queue]) is None:
                uncounted.append(queue)
            else:
                counted[queue] = found
                consumers, _ = self._consumers.get(queue, ("consumers not counted yet", 0.0))
                publish(queue, of_totals(found, observed_at, consumers))
        await self._declare(
            uncounted, publish, "unacknowledged messages unknown: the broker does not count them now"
        )
        for queue in await self._count_consumers(counted):
            publish(queue, of_totals(counted[queue], observed_at, self._consumers[queue][0]))

    async def _count_consumers(self, queues: Iterable[str]) -> list[str]:
        """Count the consumers of the queues where it is time; returns those queues."""
        now = asyncio.get_running_loop().time()
        since = now - CONSUMERS_PERIOD
        due = [
            queue for queue in queues if queue not in self._consumers or self._consumers[queue][1] <= since
        ]
        for queue in due:
            try:
                found = await self._session.declare(queue)
            except VirtualHostError as error:
                self._say("amqp", error.failure)
                unknown = f"consumers unknown: {error.failure.message}"
                self._consumers.update(dict.fromkeys(due, (unknown, now)))
                return due
            known = (
                f"consumers unknown: {found.message}" if isinstance(found, QueueFailure) else found.consumers
            )
            self._consumers[queue] = known, now
        if due:
            self._say("amqp", None)
        return due

    async def _declare(self, queues: Iterable[str], publish: Publish, unacked_unknown: str) -> None:
        left = list(queues)
        while left:
            observed_at = self._clock.now()
            try:
                found = await self._session.declare(left[0])
            except VirtualHostError as error:
                self._say("amqp", error.failure)
                for queue in left:
                    publish(queue, error.failure)
                return
            self._say("amqp", None)
            read = (
                found if isinstance(found, QueueFailure) else of_declared(found, observed_at, unacked_unknown)
            )
            publish(left.pop(0), read)

    def _say(self, way: str, failure: QueueFailure | None) -> None:
        """Log the first failure of a way to the broker, each other failure after it, and that it works again."""
        message = failure.message if failure else ""
        if message == self._said.get(way, ""):
            return
        self._said[way] = message
        context = {"broker": self._broker.name, "virtual_host": self._virtual_host, "way": way}
        if failure:
            _log.warning("queues cannot be read", state=failure.state.value, why=message, **context)
        else:
            _log.info("queues can be read again", **context)
