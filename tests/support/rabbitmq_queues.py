"""What tests do with the queues of a `RabbitBroker`: declare, publish, hold unacknowledged, purge, count.

Every call opens its own connection, so a helper works after any restart of the broker and shares nothing with the
code under test.
"""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aio_pika
import httpx
from aio_pika.abc import AbstractChannel

from tests.support.rabbitmq import RabbitBroker


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Messages waiting in a queue, and messages handed to a consumer that has not acknowledged them."""

    ready: int
    unacknowledged: int


def unique_queue_name(prefix: str = "test") -> str:
    """A queue name that no other test uses, so that one broker serves all of them."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@asynccontextmanager
async def open_channel(broker: RabbitBroker) -> AsyncGenerator[AbstractChannel, None]:
    """A channel with publisher confirms on a connection of its own."""
    connection = await aio_pika.connect(broker.amqp_url, timeout=60)
    async with connection, connection.channel(publisher_confirms=True) as channel:
        yield channel


async def declare_queue(broker: RabbitBroker, name: str) -> None:
    """Declare a durable queue; harmless if it exists with the same properties."""
    async with open_channel(broker) as channel:
        await channel.declare_queue(name, durable=True)


async def publish(broker: RabbitBroker, name: str, count: int, body: bytes = b"work") -> None:
    """Publish `count` persistent messages; each is confirmed by the broker before this returns."""
    await publish_each(broker, name, [body] * count)


async def publish_each(broker: RabbitBroker, name: str, bodies: Sequence[bytes]) -> None:
    """Publish one persistent message for each body; each is confirmed by the broker before this returns."""
    async with open_channel(broker) as channel:
        for body in bodies:
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, routing_key=name, mandatory=True, timeout=60)


async def purge(broker: RabbitBroker, name: str) -> None:
    """Remove every ready message of a queue; unacknowledged ones stay."""
    async with open_channel(broker) as channel:
        queue = await channel.get_queue(name)
        await queue.purge()


async def delete_queue(broker: RabbitBroker, name: str) -> None:
    """Delete a queue with its messages; harmless if it does not exist."""
    async with open_channel(broker) as channel:
        await channel.queue_delete(name)


@asynccontextmanager
async def held_messages(broker: RabbitBroker, name: str, count: int) -> AsyncGenerator[None, None]:
    """Hold `count` messages unacknowledged, as a busy worker does; they return to the queue on leaving."""
    async with open_channel(broker) as channel:
        queue = await channel.get_queue(name)
        for _ in range(count):
            await queue.get(timeout=60)
        yield


async def queue_counts(broker: RabbitBroker, name: str) -> QueueCounts | None:
    """The counts of one queue from the management API, or None if the queue does not exist.

    With statistics disabled and totals asked for, the API answers from the queues themselves: the figures are
    milliseconds old, where its usual statistics are seconds old.
    """
    async with httpx.AsyncClient(auth=(broker.user, broker.password), timeout=60) as client:
        parameters = {"disable_stats": "true", "enable_queue_totals": "true"}
        answer = await client.get(f"{broker.management_url}/api/queues", params=parameters)
    answer.raise_for_status()
    for queue in answer.json():
        if queue["name"] == name:
            return QueueCounts(ready=queue["messages_ready"], unacknowledged=queue["messages_unacknowledged"])
    return None
