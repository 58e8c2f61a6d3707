"""The private broker behaves as the tests of the queue watcher and of the fault matrix need it."""

import asyncio

import psutil
import pytest

from tests.support.rabbitmq import RabbitBroker
from tests.support.rabbitmq_queues import (
    QueueCounts,
    declare_queue,
    delete_queue,
    held_messages,
    publish,
    purge,
    queue_counts,
    unique_queue_name,
)
from tests.support.waiting import eventually


async def test_counts_tell_ready_from_unacknowledged(rabbitmq: RabbitBroker) -> None:
    name = unique_queue_name()
    await declare_queue(rabbitmq, name)
    await publish(rabbitmq, name, 7)
    await _shows(rabbitmq, name, QueueCounts(ready=7, unacknowledged=0))
    async with held_messages(rabbitmq, name, 3):
        await _shows(rabbitmq, name, QueueCounts(ready=4, unacknowledged=3))
        await purge(rabbitmq, name)
        await _shows(rabbitmq, name, QueueCounts(ready=0, unacknowledged=3))
    await _shows(rabbitmq, name, QueueCounts(ready=3, unacknowledged=0))
    await delete_queue(rabbitmq, name)
    assert await queue_counts(rabbitmq, name) is None


async def test_listens_on_the_loopback_address_alone(rabbitmq: RabbitBroker) -> None:
    ports = {rabbitmq.amqp_port, rabbitmq.management_port}
    listening = [
        tuple(socket.laddr)
        for socket in psutil.net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN and socket.laddr and socket.laddr[1] in ports
    ]
    assert sorted(listening) == sorted(("127.0.0.1", port) for port in ports)


async def test_survives_a_pause_with_its_messages_and_a_kill_with_its_address(
    rabbitmq_private: RabbitBroker,
) -> None:
    """What was declared seconds before a kill -9 may be gone: RabbitMQ writes its table of queues with a delay."""
    name = unique_queue_name()
    url = rabbitmq_private.amqp_url
    await declare_queue(rabbitmq_private, name)
    await publish(rabbitmq_private, name, 5)

    rabbitmq_private.pause()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue_counts(rabbitmq_private, name), 0.5)
    rabbitmq_private.resume()
    await _shows(rabbitmq_private, name, QueueCounts(ready=5, unacknowledged=0))

    await asyncio.to_thread(rabbitmq_private.kill)
    assert not rabbitmq_private.running
    await asyncio.to_thread(rabbitmq_private.restart)
    assert rabbitmq_private.amqp_url == url
    fresh = unique_queue_name()
    await declare_queue(rabbitmq_private, fresh)
    await publish(rabbitmq_private, fresh, 2)
    await _shows(rabbitmq_private, fresh, QueueCounts(ready=2, unacknowledged=0))


async def _shows(broker: RabbitBroker, name: str, expected: QueueCounts) -> None:
    async def counts_match() -> bool:
        assert await queue_counts(broker, name) == expected
        return True

    await eventually(counts_match)
