"""The example worker on a real broker: it finishes the message in hand when it is asked to end, and waits for a broker."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aio_pika

from tests.support import rabbitmq_queues
from tests.support.ports import free_port
from tests.support.rabbitmq import RabbitBroker
from tests.support.waiting import eventually

WORKER = Path(__file__).resolve().parents[3] / "examples" / "worker.py"


@contextmanager
def worker(
    url: str, queue: str, output: Path, variable: str = "GPUSCALE_EXAMPLE_AMQP_URL"
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        "PATH": os.environ["PATH"],
        variable: url,
        "GPUSCALE_GPU_UUIDS": "GPU-aa",
        "GPUSCALE_REPLICA": "endpoints/jobs/replicas/r1",
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), "--queue", queue], env=environment, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_worker_that_is_asked_to_end_finishes_its_message_and_takes_no_other(
    tmp_path: Path, rabbitmq: RabbitBroker
) -> None:
    """Three messages of 3 s, SIGTERM in the first: it is acknowledged, the others are untouched."""
    queue, output = rabbitmq_queues.unique_queue_name(), tmp_path / "out"
    await rabbitmq_queues.declare_queue(rabbitmq, queue)
    await rabbitmq_queues.publish(rabbitmq, queue, 3, body=b"3")
    file = tmp_path / "url"
    file.write_text(f"{rabbitmq.amqp_url}\n")
    with worker(str(file), queue, output, "GPUSCALE_EXAMPLE_AMQP_URL_FILE") as process:
        await eventually(
            lambda: _counts(rabbitmq, queue, rabbitmq_queues.QueueCounts(ready=2, unacknowledged=1))
        )
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    await eventually(lambda: _counts(rabbitmq, queue, rabbitmq_queues.QueueCounts(ready=2, unacknowledged=0)))
    text = output.read_text()
    assert "endpoints/jobs/replicas/r1 takes messages" in text
    assert "on GPU-aa" in text
    assert text.count("worked for 3 s") == 1
    async with rabbitmq_queues.open_channel(rabbitmq) as channel:
        found = await channel.get_queue(queue)
        for _ in range(2):
            message = await found.get(timeout=30)
            assert isinstance(message, aio_pika.IncomingMessage)
            assert message.redelivered is False
            await message.ack()


async def test_a_worker_without_a_broker_waits_for_it_and_still_ends_when_asked(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with worker(f"amqp://user:canary@127.0.0.1:{free_port()}/", "jobs", output) as process:
        await eventually(lambda: "no broker" in output.read_text())
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert "canary" not in output.read_text()


async def test_a_worker_declares_a_deleted_queue_again(tmp_path: Path, rabbitmq: RabbitBroker) -> None:
    queue, none = rabbitmq_queues.unique_queue_name(), rabbitmq_queues.QueueCounts(ready=0, unacknowledged=0)
    with worker(rabbitmq.amqp_url, queue, tmp_path / "out"):
        await eventually(lambda: _counts(rabbitmq, queue, none))
        await rabbitmq_queues.delete_queue(rabbitmq, queue)
        await eventually(lambda: _counts(rabbitmq, queue, none))


async def _counts(broker: RabbitBroker, queue: str, expected: rabbitmq_queues.QueueCounts) -> bool:
    return await rabbitmq_queues.queue_counts(broker, queue) == expected
