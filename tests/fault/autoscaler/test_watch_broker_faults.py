"""A queue watcher while its broker is killed, restarted, frozen, and polled for long."""

import asyncio
import gc
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest

from gpuscale.autoscaler.domain.signals import QueueState, QueueTarget
from gpuscale.autoscaler.signals.brokers import BrokerSettings, resolve
from gpuscale.autoscaler.signals.watchers import BrokerSweeps, Publish, VirtualHostReader
from gpuscale.common.runtime.tasks import SystemClock
from tests.support.queue_watching import broker_settings, shows, spec, watching
from tests.support.rabbitmq import RabbitBroker
from tests.support.rabbitmq_queues import declare_queue, publish, unique_queue_name
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("statistics_often")


async def test_a_killed_broker_is_unreachable_and_read_again_after_its_restart(
    tmp_path: Path, rabbitmq_private: RabbitBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """No count is shown while the broker is gone, only how long ago the last was; the log tells it in a few lines.

    A watcher that is opened while the broker is down waits for it just the same.
    """
    await declare_queue(rabbitmq_private, "jobs")
    await publish(rabbitmq_private, "jobs", 3)
    brokers = {"default": broker_settings(rabbitmq_private)}
    async with watching(tmp_path / "early", brokers) as watchers:
        await watchers.create("jobs", spec("jobs"), request_id=str(uuid4()))
        before = await shows(watchers, "jobs", QueueState.OK, ready=3, unacked=0)
        await asyncio.to_thread(rabbitmq_private.kill)
        gone = await shows(watchers, "jobs", QueueState.UNREACHABLE, ready=None, unacked=None, consumers=None)
        assert gone.observed_at is not None
        assert before.observed_at is not None
        assert gone.observed_at >= before.observed_at
        assert rabbitmq_private.password not in gone.message  # decisions have it
        async with watching(tmp_path / "late", brokers) as late:
            await late.create("jobs", spec("jobs"), request_id=str(uuid4()))
            await shows(late, "jobs", QueueState.UNREACHABLE, observed_at=None)
            assert watchers.reading("jobs") == gone
            await asyncio.to_thread(rabbitmq_private.start)
            # RabbitMQ may lose a queue that was declared within the first second of its first run.
            await declare_queue(rabbitmq_private, "jobs")
            await shows(late, "jobs", QueueState.OK, unacked=0)
        await shows(watchers, "jobs", QueueState.OK, unacked=0)
    assert [record.name for record in caplog.records if record.name.startswith(("aiormq", "aio_pika"))] == []
    assert 4 <= len([record for record in caplog.records if record.name.startswith("gpuscale")]) <= 12
    assert rabbitmq_private.password not in caplog.text


async def test_a_frozen_broker_times_out_and_is_read_again_when_it_thaws(
    tmp_path: Path, rabbitmq_private: RabbitBroker
) -> None:
    """And a watcher that is closed while its broker is frozen does not wait for it."""
    await declare_queue(rabbitmq_private, "jobs")
    try:
        async with watching(tmp_path, {"default": broker_settings(rabbitmq_private)}) as watchers:
            await watchers.create("jobs", spec("jobs"), request_id=str(uuid4()))
            await shows(watchers, "jobs", QueueState.OK, ready=0, unacked=0)
            rabbitmq_private.pause()
            await shows(watchers, "jobs", QueueState.TIMEOUT, ready=None, unacked=None)
            rabbitmq_private.resume()
            await shows(watchers, "jobs", QueueState.OK, ready=0, unacked=0)
            rabbitmq_private.pause()
    finally:
        rabbitmq_private.resume()


@asynccontextmanager
async def sweeping(settings: BrokerSettings, queue: str) -> AsyncIterator[tuple[BrokerSweeps, QueueTarget]]:
    """One queue polled two hundred times a second."""
    broker = resolve({"default": settings}, {})["default"]
    sweeps = BrokerSweeps(broker, SystemClock())
    target = QueueTarget("default", "/", queue)
    sweeps.watch({target: 0.005})
    task = asyncio.create_task(sweeps.run())
    try:
        yield sweeps, target
    finally:
        task.cancel()
        await asyncio.wait([task])


def footprint(broker: RabbitBroker) -> tuple[int, int, int, int]:
    """Open files, tasks, connections to the broker's AMQP port, and tasks in memory, ended ones too, of this process."""
    connections = psutil.Process().net_connections("tcp")
    to_broker = [item for item in connections if item.raddr and item.raddr[1] == broker.amqp_port]
    gc.collect()
    kept = sum(type(one) is asyncio.Task for one in gc.get_objects())
    return len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks()), len(to_broker), kept


def no_larger(early: tuple[int, int, int, int], late: tuple[int, int, int, int]) -> bool:
    """Whether nothing has grown; raises what has."""
    assert late[0] - early[0] <= 3, (early, late)
    assert late[1] - early[1] <= 4, (early, late)
    assert late[2] <= 1, (early, late)
    assert late[3] - early[3] <= 50, (early, late)
    return True


@pytest.mark.parametrize(
    ("case", "management"),
    [("ok", True), ("ok", False), ("missing", False), ("password", True), ("down", False)],
)
async def test_connections_channels_and_tasks_stay_the_same_over_a_hundred_polls(
    rabbitmq: RabbitBroker, case: str, management: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = 0
    read = VirtualHostReader.read

    async def counted(reader: VirtualHostReader, targets: Collection[QueueTarget], publish: Publish) -> None:
        nonlocal polls
        await read(reader, targets, publish)
        polls += 1

    monkeypatch.setattr(VirtualHostReader, "read", counted)
    monkeypatch.setattr("gpuscale.autoscaler.signals.brokers.RetryGate.check", lambda gate, now: None)
    queue = unique_queue_name()
    password = "wrong" if case == "password" else ""
    settings = broker_settings(rabbitmq, management=management, password=password)
    if case == "ok":
        await declare_queue(rabbitmq, queue)
    if case == "down":
        settings = BrokerSettings(amqp_url="amqp://user:word@127.0.0.1:9/")
    async with sweeping(settings, queue) as (sweeps, target):
        await eventually(lambda: sweeps.reading(target).state is not QueueState.PENDING)
        await eventually(lambda: polls >= 20)
        early = footprint(rabbitmq)
        await eventually(lambda: polls >= 120)
        # A moment may catch a poll with its tasks at work; what leaks is there at every moment.
        await eventually(lambda: no_larger(early, footprint(rabbitmq)))
        late = footprint(rabbitmq)
        if late[2] and case in {"ok", "missing"}:
            await eventually(lambda: _few_channels(rabbitmq), interval=0.3)
    await eventually(lambda: footprint(rabbitmq)[2] == 0)


async def _few_channels(broker: RabbitBroker) -> bool:
    """Whether the broker counts at most two channels on the watcher's connection.

    One may be closing; while a missing queue closes one with every poll, it may see none.
    """
    async with httpx.AsyncClient(auth=(broker.user, broker.password)) as client:
        answer = await client.get(f"{broker.management_url}/api/connections")
    ours = [
        item
        for item in answer.json()
        if item.get("client_properties", {}).get("connection_name") == "gpuscale queue watcher"
    ]
    assert len(ours) == 1, len(ours)
    return int(ours[0]["channels"]) <= 2
