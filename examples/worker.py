"""An example worker: takes messages of a RabbitMQ queue one at a time, and finishes the one in hand when asked to end.

    GPUSCALE_EXAMPLE_AMQP_URL=amqp://user:password@127.0.0.1/ python worker.py --queue jobs

GPUSCALE_EXAMPLE_AMQP_URL_FILE names a file that holds that URL, instead.

Each message holds the number of seconds that its work takes, such as `0.5`. A message is acknowledged after its work, so
that one which this worker does not finish goes to another. On SIGTERM it tells the broker that it takes no more, works
off what it has, and exits with 0. While the broker is away it waits for it.
"""

import argparse
import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TypeAlias

import aio_pika
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
from aio_pika.exceptions import AMQPError, ChannelInvalidStateError

URL_VARIABLE = "GPUSCALE_EXAMPLE_AMQP_URL"
RETRY_SECONDS = 1.0
LATE_MESSAGE_SECONDS = 0.2
LOST = (AMQPError, ChannelInvalidStateError, OSError)

# Messages, and None to wake the worker: it is to end, or the connection is lost.
Inbox: TypeAlias = asyncio.Queue[AbstractIncomingMessage | None]


class Worker:
    """Works off one queue until it is asked to end."""

    def __init__(self, url: str, queue: str) -> None:
        self._url = url
        self._queue = queue
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Take no more messages, and end once the one in hand is done."""
        self._stop.set()

    async def run(self) -> None:
        """Work until `stop` is called, and connect again whenever the connection is lost."""
        while not self._stop.is_set():
            try:
                await self._consume()
            except LOST as error:
                print(f"no broker: {type(error).__name__}", file=sys.stderr, flush=True)
                await self._pause()

    async def _consume(self) -> None:
        """Work over one connection, until it is lost or `stop` is called."""
        inbox: Inbox = asyncio.Queue()
        async with await aio_pika.connect(self._url, timeout=10) as connection:
            connection.close_callbacks.add(partial(_wake, inbox))
            channel = await connection.channel()
            lost = await channel.get_underlay_channel()
            lost.on_consumer_cancel_callbacks.add(partial(_wake, inbox))  # the queue is deleted
            await channel.set_qos(prefetch_count=1)
            queue = await channel.declare_queue(self._queue, durable=True)
            tag = await queue.consume(inbox.put)
            leaving = asyncio.create_task(self._leave(queue, tag, inbox))
            try:
                while (message := await inbox.get()) is not None:
                    await work(message)
            finally:
                leaving.cancel()

    async def _leave(self, queue: AbstractQueue, tag: str, inbox: Inbox) -> None:
        """Once asked to end, tell the broker to send no more, while the message in hand is worked on."""
        await self._stop.wait()
        try:
            await queue.cancel(tag)
            # What the broker had sent by then is ours, and may still be on its way through the library.
            await asyncio.sleep(LATE_MESSAGE_SECONDS)
        except LOST:
            pass
        inbox.put_nowait(None)

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), RETRY_SECONDS)
        except TimeoutError:
            return


def _wake(inbox: Inbox, *_: object) -> None:
    inbox.put_nowait(None)


async def work(message: AbstractIncomingMessage) -> None:
    """Do what a message asks for, then acknowledge it; refuse one that makes no sense."""
    try:
        seconds = float(message.body)
    except ValueError:
        print("refused a message that is no number", file=sys.stderr, flush=True)
        await message.reject(requeue=False)
        return
    await asyncio.sleep(seconds)
    await message.ack()
    print(f"worked{' again' if message.redelivered else ''} for {seconds:g} s", flush=True)


async def main(url: str, queue: str) -> None:
    """Work until SIGTERM or SIGINT."""
    worker = Worker(url, queue)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    gpus = os.environ.get("GPUSCALE_GPU_UUIDS") or "no GPU"
    print(f"{os.environ.get('GPUSCALE_REPLICA', 'worker')} takes messages of {queue} on {gpus}", flush=True)
    await worker.run()
    print("done", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Works off a RabbitMQ queue.")
    parser.add_argument("--queue", required=True, help="name of the queue")
    arguments = parser.parse_args()
    if file := os.environ.get(f"{URL_VARIABLE}_FILE"):
        url = Path(file).read_text(encoding="utf-8").strip()
    elif not (url := os.environ.get(URL_VARIABLE, "")):
        parser.exit(2, f"set {URL_VARIABLE} to amqp://user:password@host/\n")
    asyncio.run(main(url, arguments.queue))
