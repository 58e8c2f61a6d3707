"""A queue worker in a few lines, with `gpuscale.client.worker`: it drains on SIGTERM and starts under its fence.

    GPUSCALE_EXAMPLE_AMQP_URL=amqp://user:password@127.0.0.1/ python queue_worker.py jobs

`examples/worker.py` is the same by hand, and also waits for a broker that is away.
"""

import asyncio
import os
import sys

import aio_pika

from gpuscale.client.worker import Worker


async def main(worker: Worker, queue_name: str) -> None:
    """Work off messages, each a number of seconds, until the worker is to end."""
    async with await aio_pika.connect(os.environ["GPUSCALE_EXAMPLE_AMQP_URL"]) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=1)
        queue = await channel.declare_queue(queue_name, durable=True)
        worker.ready()
        while not worker.draining.is_set():
            message = await queue.get(fail=False)
            if message is None:
                await asyncio.sleep(0.2)
                continue
            async with message.process():
                await asyncio.sleep(float(message.body))


if __name__ == "__main__":
    with Worker() as this:
        this.admit()
        asyncio.run(main(this, sys.argv[1]))
