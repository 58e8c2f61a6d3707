"""No message is lost, and none is delivered twice because of a scale-in, while everything is killed on the way.

100 messages that take 0.2 to 3 s each, three tenths of that unless GPUSCALE_CONSERVATION_SCALE says otherwise (1 for the
full length). A real RabbitMQ, the example worker, the process adapter and the autoscaler as processes of their own, the endpoint
going 4 -> 1 -> 4 -> 1 -> 4 -> 0: the autoscaler and the adapter die (kill -9) in the middle of a drain, and workers while they
are busy. Deaths at the failpoints of a start are those of test_killed_while_moving and test_process_crash.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from gpuscale.api.autoscaler import v1 as api
from tests.support import rabbitmq_queues
from tests.support.autoscaler_app import TIMEOUT, endpoint
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.program import AutoscalerProcess
from tests.support.rabbitmq import RabbitBroker
from tests.support.scripted_autoscaler import AdapterProcess, adapter_process, kill_processes, processes_of
from tests.support.waiting import eventually

WORKER = Path(__file__).resolve().parents[2] / "examples" / "worker.py"
SCALE = float(os.environ.get("GPUSCALE_CONSERVATION_SCALE", "0.3"))
BATCHES = 4
SECONDS = [f"{(0.2 + 2.8 * index / 99) * SCALE:.6g}" for index in range(100)]
"""What each message says that its work takes; no two the same, so that each is known by it."""
MOST = 4
WAIT = 240.0 + 300 * SCALE
READY = api.Replica.STATE_READY

pytestmark = pytest.mark.timeout(900)


@dataclass
class Site:
    """The parts, and the name of the endpoint: it is the identity of its workers on this host."""

    folder: Path
    broker: RabbitBroker
    queue: str
    allocator: FakeAllocator
    autoscaler: AutoscalerProcess
    adapter: AdapterProcess
    name: str

    def start_adapter(self) -> None:
        """Begin a life of the adapter."""
        self.adapter.start(GPUSCALE_EXAMPLE_AMQP_URL=self.broker.amqp_url)

    async def replicas(self) -> list[api.Replica]:
        async with self.autoscaler.called() as called:
            return await called.replicas(parent=self.name)

    async def scale(self, replicas: int) -> None:
        request = api.SetReplicasRequest(name=self.name, replicas=replicas)
        async with self.autoscaler.called() as called:
            await called.endpoints.SetReplicas(request, timeout=TIMEOUT)

    async def settled(self, count: int) -> list[api.Replica]:
        """Wait until rows, processes and GPUs held are the same `count` things; the rows."""

        async def rows() -> list[api.Replica]:
            found = await self.replicas()
            assert [one.state for one in found] == [READY] * count, [
                (one.name, one.state, one.reason) for one in found
            ]
            assert {one.pid for one in found} == {one.pid for one in processes_of(f"{self.name}/")}
            assert sorted(self.allocator.held) == sorted(gpu for one in found for gpu in one.gpu_uuids)
            return found if count else [api.Replica()]

        return await eventually(rows, timeout=WAIT, interval=0.3)

    async def consuming(self, workers: int) -> None:
        """Wait until so many workers take messages: one that is READY may not have found the broker yet."""
        async with rabbitmq_queues.open_channel(self.broker) as channel:
            await eventually(
                lambda: channel.declare_queue(self.queue, passive=True),
                lambda queue: queue.declaration_result.consumer_count == workers,
                timeout=WAIT,
                interval=0.1,
            )

    async def publish(self, batch: int) -> None:
        """A part of the messages, the longest first: whoever is asked to end soon has one of them in hand."""
        bodies = [seconds.encode() for seconds in reversed(SECONDS[batch::BATCHES])]
        await rabbitmq_queues.publish_each(self.broker, self.queue, bodies)

    async def busy(self, workers: int) -> None:
        """Wait until so many workers have a message in hand."""
        await eventually(
            lambda: rabbitmq_queues.queue_counts(self.broker, self.queue),
            lambda counts: counts is not None and counts.unacknowledged >= workers,
            timeout=WAIT,
            interval=0.1,
        )

    async def empty(self) -> bool:
        counts = await rabbitmq_queues.queue_counts(self.broker, self.queue)
        return counts is not None and counts.ready == counts.unacknowledged == 0

    def worked(self) -> tuple[Counter[str], int]:
        """How often each message was acknowledged, by its seconds, and how many were so after a redelivery.

        As the workers' own logs have it: the broker's counters lose what a connection did just before it ended.
        """
        logs = self.folder.joinpath("adapter", "logs", self.name.removeprefix("endpoints/")).glob("*.log*")
        lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith("worked")]
        seconds = Counter(line.split()[-2] for line in lines)
        return seconds, sum("again" in line for line in lines)


@pytest.fixture
async def site(tmp_path: Path, rabbitmq: RabbitBroker) -> AsyncIterator[Site]:
    queue, name = rabbitmq_queues.unique_queue_name(), f"endpoints/conserve-{uuid4().hex[:8]}"
    await rabbitmq_queues.declare_queue(rabbitmq, queue)
    allocator = FakeAllocator({"here": [f"GPU-{index}" for index in range(MOST)]})
    async with (
        serving(allocator) as allocator_address,
        AutoscalerProcess(tmp_path / "autoscaler", allocator_address) as autoscaler,
    ):
        with adapter_process(tmp_path, autoscaler.address) as adapter:
            with adapter.config.open("a") as config:
                config.write(
                    f'[templates.queue]\ncommand = ["{{python}}", "{WORKER}", "--queue", "{{queue}}"]\n'
                    'pass_env = ["GPUSCALE_EXAMPLE_AMQP_URL"]\n'
                )
            try:
                yield Site(tmp_path, rabbitmq, queue, allocator, autoscaler, adapter, name)
            finally:
                kill_processes(f"{name}/")


async def first_replicas(site: Site) -> None:
    """To as many replicas as there may be."""
    await site.autoscaler.start()
    site.start_adapter()
    wanted = endpoint(
        high=MOST,
        gpus=1,
        tick=1.0,
        name=site.name.removeprefix("endpoints/"),
        parameters={"queue": site.queue},
    )
    wanted.spec.template.template = "queue"
    async with site.autoscaler.called() as called:
        await called.create(wanted)
        await called.endpoints.SetReplicas(
            api.SetReplicasRequest(name=site.name, replicas=MOST), timeout=TIMEOUT
        )


async def test_nothing_is_lost_and_no_scale_in_causes_a_redelivery(site: Site) -> None:
    await first_replicas(site)
    await site.settled(MOST)

    await site.consuming(MOST)
    await site.publish(0)
    await site.busy(MOST)
    await site.scale(1)
    await site.autoscaler.kill()
    await site.autoscaler.start()
    await site.settled(1)

    await site.scale(MOST)
    workers = await site.settled(MOST)
    await site.consuming(MOST)
    await site.publish(1)
    await site.busy(MOST)
    kills = 2
    for worker in workers[:kills]:
        os.kill(worker.pid, signal.SIGKILL)
    await site.settled(MOST)

    await site.consuming(MOST)
    await site.publish(2)
    await site.busy(MOST)
    await site.scale(1)
    await asyncio.to_thread(site.adapter.kill)
    site.start_adapter()
    await site.settled(1)

    await site.scale(MOST)
    await site.publish(3)
    await site.settled(MOST)

    await eventually(site.empty, timeout=WAIT, interval=0.2)
    await site.scale(0)
    await site.settled(0)
    worked, again = site.worked()
    assert not worked - Counter(SECONDS), "no message is acknowledged twice"
    missing = Counter(SECONDS) - worked
    assert missing.total() <= kills, f"a killed worker may not have noted its last one, but: {missing}"
    assert again <= kills, "only a worker that was killed gives its message back"
