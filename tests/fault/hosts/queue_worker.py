"""A worker of a RabbitMQ queue that keeps a diary, a line for each of these in the order in which they came about, on all hosts.

`start`, `up` once it can work, `worked` for a message that it has acknowledged, with the message and whether it came again,
`asked` to end, `end`; each with its replica and its GPU.

    python queue_worker.py FOLDER URL QUEUE
"""

import asyncio
import os
import sys
import threading
from pathlib import Path

import aio_pika

from gpuscale.client.worker import READY_VARIABLE, Worker


async def main(worker: Worker, url: str, name: str) -> None:
    """Work until it is asked to end."""
    async with await aio_pika.connect(url, timeout=60) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(name)
        say("up")
        worker.ready()
        while not worker.draining.is_set():
            message = await queue.get(fail=False)
            if message is None:
                await asyncio.sleep(0.02)
                continue
            async with message.process():
                await asyncio.sleep(float(message.body))
            say("worked", message.body.decode(), "again" if message.redelivered else "once")


class Asked(threading.Event):
    """Says so at once, whatever message is in hand."""

    def set(self) -> None:
        say("asked")
        super().set()


def say(*words: str) -> None:
    """Write a line, whole."""
    with (folder / "diary").open("a") as diary:
        diary.write(" ".join((words[0], replica, os.environ["GPUSCALE_GPU_UUIDS"], *words[1:])) + "\n")


if __name__ == "__main__":
    folder, replica = Path(sys.argv[1]), os.environ["GPUSCALE_REPLICA"].rpartition("/")[2]
    say("start")
    this = Worker({**os.environ, READY_VARIABLE: str(folder / f"up-{replica}")})
    this.draining = Asked()
    with this:
        asyncio.run(main(this, *sys.argv[2:]))
    say("end")
