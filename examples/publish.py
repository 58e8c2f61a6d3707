"""Fill the example queue: messages that say how many seconds their work takes.

GPUSCALE_EXAMPLE_AMQP_URL=amqp://user:password@127.0.0.1/ python publish.py --queue jobs --count 300
"""

import argparse
import asyncio
import os
import random

import aio_pika

URL_VARIABLE = "GPUSCALE_EXAMPLE_AMQP_URL"


async def publish(url: str, queue: str, count: int, least: float, most: float) -> None:
    """Publish so many messages, each confirmed by the broker."""
    async with await aio_pika.connect(url, timeout=10) as connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue(queue, durable=True)
        for _ in range(count):
            body = f"{random.uniform(least, most):.3f}".encode()  # noqa: S311 - no secret depends on it
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, routing_key=queue)
    print(f"published {count} messages to {queue}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Publishes work to a RabbitMQ queue.")
    parser.add_argument("--queue", required=True, help="name of the queue")
    parser.add_argument("--count", type=int, default=300, help="how many messages (default: 300)")
    parser.add_argument("--least", type=float, default=0.1, help="shortest work in seconds (default: 0.1)")
    parser.add_argument("--most", type=float, default=1.0, help="longest work in seconds (default: 1)")
    given = parser.parse_args()
    if URL_VARIABLE not in os.environ:
        parser.exit(2, f"set {URL_VARIABLE} to amqp://user:password@host/\n")
    asyncio.run(publish(os.environ[URL_VARIABLE], given.queue, given.count, given.least, given.most))
