"""Replicas of a queue move from host to host while messages flow: none is lost, none comes twice, as many serve as before.

They are moved once by hand and once by the allocator itself, each time for who waits, who is served while `reserve --wait` lasts.
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from tests.fault.hosts.lan import ROOT, Lan, why_unavailable
from tests.fault.hosts.site import LEFT, RIGHT, SERVICES, Site, Tables, typing_on_hosts
from tests.support.cli import Ran
from tests.support.nvml_double import why_unavailable as why_no_double
from tests.support.rabbitmq import RabbitBroker
from tests.support.rabbitmq_queues import open_channel, unique_queue_name
from tests.support.waiting import eventually

MESSAGES, AHEAD = 300, 6
REPLICAS = 2
SERVED = "60s"
"""In which who waits is served, on a machine with much else to do."""
WORKER = Path(__file__).with_name("queue_worker.py")
BROKER = f"{Lan((SERVICES, LEFT, RIGHT)).address(SERVICES)}:5672"
PROGRAM = "gpuscale.allocator.main"
ANY = ("--max-utilization", "100")
AT_ONCE = {"preemption_min_runtime_seconds": 0}
ENDPOINT = """
kind: QueueWatcher
name: jobs
spec: {{broker: default, queue: {queue}, interval: 0.5s}}
---
kind: Endpoint
name: jobs
spec:
  minReplicas: 2
  maxReplicas: 2
  tick: 0.5s
  signals: [{{id: depth, queue: {{watcher: watchers/jobs, count: QUEUE_COUNT_READY}}}}]
  rules: [{{id: up, signal: depth, step: {{comparator: COMPARATOR_GREATER_THAN, threshold: 10, step: 1}}}}]
  template:
    template: queue
    parameters: {{queue: {queue}}}
    movable: 5s
    ask: {{gpuCount: 1, maxUtilizationPercent: 100}}
"""

pytestmark = pytest.mark.timeout(300)


@dataclass
class Flow:
    """Two replicas, one on each host, and what they write."""

    site: Site
    broker: RabbitBroker
    folder: Path
    queue: str

    async def typed(self, *words: str) -> Ran:
        """Type a command."""
        return await asyncio.to_thread(self.site.ctl, SERVICES, *words)

    async def data(self, *words: str) -> Any:
        """What a command answers."""
        ran = await self.typed(*words, "-o", "json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    async def serve(self) -> None:
        """Begin."""

        async def adapters() -> bool:
            return len((await self.data("get", "adapters"))["adapters"]) == 2

        await eventually(adapters, timeout=60, interval=0.5)
        one_each = ("--gpus", "1", "--members", "2", "--strategy", "strict-spread")
        beside = (await self.data("reserve", *one_each, *ANY))["name"]
        file = self.folder / "jobs.yaml"
        file.write_text(ENDPOINT.format(queue=self.queue))
        applied = await self.typed("apply", "-f", str(file))
        assert applied.code == 0, applied.err
        await eventually(lambda: len(self.who("up")) == REPLICAS, timeout=60)
        assert self.hosts_of(self.who("up")) == {LEFT, RIGHT}
        assert (await self.typed("release", beside)).code == 0

    async def feed(self, moved: asyncio.Event) -> list[str]:
        """Let some messages wait at any time until all has moved; each is known by how long it takes."""
        sent: list[str] = []
        async with open_channel(self.broker) as channel:
            while len(sent) < MESSAGES or not moved.is_set():
                waiting = (await channel.declare_queue(self.queue, passive=True)).declaration_result
                for _ in range(AHEAD - (waiting.message_count or 0)):
                    sent.append(f"{0.1 + len(sent) / 1e6:.6f}")
                    message = aio_pika.Message(
                        sent[-1].encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT
                    )
                    await channel.default_exchange.publish(message, routing_key=self.queue, timeout=60)
                await asyncio.sleep(0.05)
        return sent

    async def granted(self, *words: str) -> tuple[str, str]:
        """Wait for GPUs; the reservation, and the one host that they are on."""
        made = await self.data("reserve", *words, *ANY, "--wait", SERVED, "--ttl", "10m")
        gpus = [gpu["uuid"] for gpu in made["gpus"]]
        self.write(*(f"start {made['name']} {uuid}" for uuid in gpus))
        [host] = {gpu["nodeName"].removeprefix("nodes/") for gpu in made["gpus"]}
        return made["name"], host

    async def release(self, name: str) -> None:
        """Give them back."""
        gpus = [gpu for word, whose, gpu, *_ in self.diary() if (word, whose) == ("start", name)]
        self.write(*(f"end {name} {uuid}" for uuid in gpus))
        assert (await self.typed("release", name)).code == 0

    async def settled(self, host: str) -> None:
        """Wait until the replicas work on this host, and nothing else is left of them."""

        def work() -> bool:
            serving = self.who("up") - self.who("asked")
            return self.hosts_of(serving) == {host} and serving <= self.who("worked")

        async def so() -> bool:
            rows = (await self.data("get", "replicas"))["replicas"]
            return [(one["node"], one["state"]) for one in rows] == [
                (f"nodes/{host}", "STATE_READY")
            ] * REPLICAS

        await eventually(work, timeout=60)
        await eventually(so, timeout=60, interval=0.5)

    def diary(self) -> list[list[str]]:
        """Words of lines: what, whose, GPU and more."""
        return [line.split() for line in (self.folder / "diary").read_text().splitlines()]

    def write(self, *lines: str) -> None:
        """Add to it."""
        with (self.folder / "diary").open("a") as diary:
            diary.writelines(f"{line}\n" for line in lines)

    def who(self, word: str) -> set[str]:
        """Whose such lines are."""
        return {who for what, who, *_ in self.diary() if what == word}

    def hosts_of(self, replicas: set[str]) -> set[str]:
        """Where they were started."""
        return {
            gpu.split("-")[1] for word, who, gpu, *_ in self.diary() if word == "start" and who in replicas
        }

    def check(self, sent: list[str]) -> None:
        """Each message was worked on once, as many replicas as ever served at any time, and no GPU had two holders."""
        worked = Counter((line[3], line[4]) for line in self.diary() if line[0] == "worked")
        assert worked == Counter((one, "once") for one in sent)
        serving, holders = set[str](), dict[str, str]()
        for word, who, gpu, *_ in (lines := self.diary()):
            if word == "start":
                assert gpu not in holders, lines
                holders[gpu] = who
            elif word == "up":
                serving.add(who)
            elif word == "asked":
                serving.discard(who)
                assert len(serving) >= REPLICAS, lines
            elif word == "end":
                del holders[gpu]


@pytest.fixture
def flow(tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitBroker) -> Iterator[Flow]:
    reason = why_unavailable() or why_no_double()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("m")  # a short name, since sockets are below it
    (folder / "diary").touch()
    (folder / "probe.sh").write_text(f"test -e {folder}/up-${{GPUSCALE_REPLICA##*/}}\n")
    url = f"amqp://{rabbitmq.user}:{rabbitmq.password}@{BROKER}/"
    command = ["{python}", str(WORKER), str(folder), url, "{queue}"]
    probe = {"exec": ["/bin/sh", str(folder / "probe.sh")], "period": 0.1, "timeout": 30}
    also: dict[str, Tables] = {
        PROGRAM: {"allocator": AT_ONCE},
        "gpuscale.autoscaler.main": {"brokers.default": {"amqp_url": url}},
        "gpuscale.autoscaler.adapters.main": {
            "templates.queue": {"command": command},
            "templates.queue.probe": probe,
        },
    }
    with typing_on_hosts(folder, also) as site, socket.socket(socket.AF_UNIX) as way:
        way.bind(str(folder / "amqp"))
        way.listen()
        outside = f"{way.fileno()}=127.0.0.1:{rabbitmq.amqp_port}"
        inside = f"{BROKER}={folder / 'amqp'}"
        reach = (sys.executable, "-m", "tests.fault.hosts.reach")
        site.hosts.lan.start(SERVICES, *reach, inside, log=folder / "reach.log")
        with subprocess.Popen([*reach, outside], cwd=ROOT, pass_fds=[way.fileno()]) as forwarder:
            try:
                yield Flow(site, rabbitmq, folder, unique_queue_name())
            finally:
                forwarder.kill()


async def by_hand(flow: Flow) -> str:
    """A gang of two that fits on neither host is served by one move; where to."""
    gang = asyncio.create_task(flow.granted("--gpus", "1", "--members", "2", "--strategy", "strict-pack"))

    async def planned() -> bool:
        plans = (await flow.data("plan", "rebalance")).get("plans", [])
        return [len(one.get("moves", ())) for one in plans] == [1]

    await eventually(planned, timeout=60, interval=0.5)
    assert flow.who("asked") == set()
    assert len((await flow.data("plan", "rebalance", "--apply", "--yes"))["plans"][0]["moves"]) == 1
    name, host = await gang
    [other] = {LEFT, RIGHT} - {host}
    await flow.settled(other)
    await flow.release(name)
    return other


async def by_itself(flow: Flow, there: str) -> None:
    """Who wants all of the host that they are on is served by two moves, which nobody asks for."""
    flow.site.hosts.kill_allocator()
    flow.site.hosts.also[PROGRAM] = {"allocator": AT_ONCE | {"rebalance_moves_per_hour": 10}}
    flow.site.hosts.start_allocator()
    [back] = {LEFT, RIGHT} - {there}

    async def known() -> bool:
        return (await flow.typed("check", "--gpus", "2", "--node", back, *ANY)).code == 0

    await eventually(known, timeout=60, interval=0.5)
    _, host = await flow.granted("--gpus", "2", "--node", there)
    assert host == there
    await flow.settled(back)


async def test_messages_flow_while_replicas_move_by_hand_and_by_itself(flow: Flow) -> None:
    async with open_channel(flow.broker) as channel:
        await channel.declare_queue(flow.queue, durable=True)
    await flow.serve()
    moved = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        feeding = group.create_task(flow.feed(moved))
        await by_itself(flow, await by_hand(flow))
        moved.set()
    sent = feeding.result()
    await eventually(lambda: sum(one[0] == "worked" for one in flow.diary()) >= len(sent), timeout=60)
    flow.check(sent)
    assert len(flow.who("up")) == REPLICAS + 1 + 2
    assert len(flow.site.listed("reservations")) == REPLICAS + 1
