"""Watching the queues of a real RabbitMQ: how long a sweep takes, what it costs, and what it leaves open.

    python -m bench queues
    python -m bench queues --queues 1000 --seconds 60 --sweeps 2000
    python -m bench queues --seconds 0 --way amqp --case "wrong password" --each

A private broker is started on the loopback address (the package rabbitmq-server must be installed). First a watcher reads
all queues once a second, as it does in production; beside it, every second too, the same request is made bare (httpx and
json.loads), which is what a sweep hardly costs less than. The broker's own statistics, which are asked for beside the sweeps and
more rarely, have a row of their own. CPU is what this process used, and the broker (to 10 ms: the means tell), so it holds on
a machine that others use; times do not. Then a watcher sweeps as fast as it can, its waits after failures left out, in each way a queue can fail.
After every hundredth sweep, in the very task that made it, what is open is counted: files, tasks and threads here, connections
and channels at the broker, memory. The table has the count after the first hundred, the most, and the last; `--each` prints all.

Targets: a sweep of 1,000 queues in 100 ms, figures that are a second old at most, 1 % of a core at a sweep a second, and
nothing that grows over 2,000 sweeps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import aio_pika
import httpx
import psutil
import uvloop

from gpuscale.autoscaler.domain.signals import QueueTarget
from gpuscale.autoscaler.signals.brokers import Broker, BrokerSettings, RetryGate, resolve
from gpuscale.autoscaler.signals.rabbitmq import ManagementClient, Measured
from gpuscale.autoscaler.signals.watchers import BrokerSweeps, Publish, VirtualHostReader
from gpuscale.common.runtime import logs
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.secrets import SecretUrl
from tests.support.rabbitmq import RabbitBroker, why_unavailable

NAME = "default"
CASES = ("fine", "missing queue", "broker down", "wrong password")
WAYS = {"management": True, "amqp": False}
AT_ONCE = 200
"""Queues that are declared at a time."""
EVERY = 100
"""Sweeps after which it is counted what is open."""
FEW = 20
"""Queues where what counts is what stays open."""
BARE = {
    "disable_stats": "true",
    "enable_queue_totals": "true",
    "columns": "name,messages_ready,messages_unacknowledged",
}


@dataclass
class Sweeps:
    """What was measured of sweeps: seconds of each, of CPU here and of the broker's, and how old figures had become before."""

    seconds: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    broker: list[float] = field(default_factory=list[float])
    ages: list[float] = field(default_factory=list[float])

    @contextmanager
    def one(self) -> Generator[None]:
        """Measure what is done inside."""
        wall, cpu, broker = time.perf_counter(), time.process_time(), _broker_cpu()
        yield
        self.broker.append(_broker_cpu() - broker)
        self.seconds.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def clear(self) -> None:
        """Begin anew."""
        for each in (self.seconds, self.cpu, self.broker):
            each.clear()


class Open(NamedTuple):
    """What is open: here, and of ours at the broker. Memory is in MiB."""

    files: int
    tasks: int
    threads: int
    connections: int
    channels: int
    memory: int


@cache
def _servers() -> Sequence[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if one.name().startswith("beam")]


def _broker_cpu() -> float:
    """Seconds of CPU that the broker has used."""
    times = [one.cpu_times() for one in _servers()]
    return sum(one.user + one.system for one in times)


@contextmanager
def _measured(
    found: Sweeps, asked: Sweeps | None = None, then: Callable[[], Awaitable[None]] | None = None
) -> Generator[None]:
    """Measure every sweep of every watcher, and every question for statistics; `then` is called after each sweep."""
    read, known = VirtualHostReader.read, ManagementClient.statistics

    async def sweep(reader: VirtualHostReader, targets: Collection[QueueTarget], publish: Publish) -> None:
        with found.one():
            await read(reader, targets, publish)
        if then is not None:
            await then()

    async def ask(client: ManagementClient, virtual_host: str) -> Mapping[str, Measured]:
        with (asked or Sweeps()).one():
            return await known(client, virtual_host)

    with patch.object(VirtualHostReader, "read", sweep), patch.object(ManagementClient, "statistics", ask):
        yield


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench queues", description="Watch queues of RabbitMQ.")
    parser.add_argument("--queues", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=60, help="of watching at a sweep a second; 0 for none")
    parser.add_argument("--sweeps", type=int, default=2000, help="in each way of failing")
    parser.add_argument(
        "--way", choices=WAYS, action="append", help="only this way to read; both where left out"
    )
    parser.add_argument("--case", choices=CASES, action="append", help="only this way of failing")
    parser.add_argument("--each", action="store_true", help=f"print what is open after each {EVERY} sweeps")
    arguments = parser.parse_args()
    if reason := why_unavailable():
        print(f"not measured: {reason}")
        return
    logs.configure("error", "console")
    with RabbitBroker() as broker:
        uvloop.run(_measure(broker, arguments))


async def _measure(broker: RabbitBroker, arguments: argparse.Namespace) -> None:
    names = [f"bench-{index}" for index in range(arguments.queues)]
    await _declare(broker, names)
    if arguments.seconds:
        await _watch(broker, names, arguments.seconds)
    print(f"\n{'way':<12}{'case':<16}{'sweeps':>7}" + "".join(f"{name:>15}" for name in Open._fields))
    for way in arguments.way or WAYS:
        for case in arguments.case or CASES:
            some = names if WAYS[way] and case == "fine" else names[:FEW]
            counted = await _endure(broker, some, case, management=WAYS[way], sweeps=arguments.sweeps)
            for number, one in enumerate(counted if arguments.each else ()):
                _print_open("", f"at {(number + 1) * EVERY}", 0, one)
            _print_open(way, case, arguments.sweeps, *_span(counted))


def _span(counted: Sequence[Open]) -> Sequence[Open]:
    """The first, the most of each and the last."""
    return counted[0], Open(*map(max, zip(*counted, strict=True))), counted[-1]


def _print_open(way: str, case: str, sweeps: int, *counted: Open) -> None:
    cells = (" / ".join(str(one) for one in column) for column in zip(*counted, strict=True))
    print(f"{way:<12}{case:<16}{sweeps or '':>7}" + "".join(f"{cell:>15}" for cell in cells), flush=True)


async def _watch(broker: RabbitBroker, names: list[str], seconds: int) -> None:
    """At a sweep a second: how long, how old, how much of a core; and the bare request beside it."""
    found, bare, asked = Sweeps(), Sweeps(), Sweeps()
    targets = [QueueTarget(NAME, "/", name) for name in names]
    clock, sweeps = SystemClock(), BrokerSweeps(_broker(broker), SystemClock())
    with _measured(found, asked):
        sweeps.watch(dict.fromkeys(targets, 1.0))
        async with _running(sweeps), httpx.AsyncClient(auth=(broker.user, broker.password)) as client:
            await asyncio.sleep(5)  # the broker has its first statistics, and both have their connections
            found.clear()
            for _ in range(seconds):
                await asyncio.sleep(0.5)
                await _bare(client, broker, bare)
                await asyncio.sleep(0.5)
                oldest = min(sweeps.reading(target).observed_at or 0.0 for target in targets)
                found.ages.append(clock.now() - oldest)
    for what, one in (("bare request", bare), ("sweep", found), ("statistics", asked)):
        _print_sweeps(what, one, len(names), bare)


async def _bare(client: httpx.AsyncClient, broker: RabbitBroker, bare: Sweeps) -> None:
    with bare.one():
        answer = await client.get(f"{broker.management_url}/api/queues/%2F", params=BARE)
        json.loads(answer.content)


def _print_sweeps(what: str, one: Sweeps, queues: int, bare: Sweeps) -> None:
    times = sorted(one.seconds)
    cpu, least = statistics.median(one.cpu), statistics.median(bare.cpu)
    mean = statistics.fmean(one.cpu)
    line = (
        f"{what} of {queues} queues: p50 {times[len(times) // 2] * 1e3:.0f} ms, "
        f"p99 {times[int(len(times) * 0.99)] * 1e3:.0f} ms; CPU {cpu * 1e3:.1f} ms, mean {mean * 1e3:.1f} "
        f"= {mean * 100:.2f} % of a core at one a second, {cpu / least:.1f} of bare; "
        f"broker's CPU {statistics.fmean(one.broker) * 1e3:.0f} ms"
    )
    if one.ages:
        line += f"; figures at most {max(one.ages):.2f} s old where looked at"
    print(line)


def _open_gate(gate: RetryGate, now: float) -> None:
    """Stands in for the check of a gate: it is never too early to try again."""


async def _endure(
    broker: RabbitBroker, names: list[str], case: str, *, management: bool, sweeps: int
) -> Sequence[Open]:
    """Sweep as fast as possible; what is open after each hundred sweeps."""
    found, counted, done = Sweeps(), list[Open](), asyncio.Event()
    running = BrokerSweeps(_broker(broker, case=case, management=management), SystemClock())
    wanted = [f"{name}-missing" for name in names] if case == "missing queue" else names

    async def count() -> None:
        if len(found.seconds) % EVERY == 0:
            counted.append(await _open(broker))
        if len(found.seconds) >= max(sweeps, EVERY):
            done.set()

    with _measured(found, then=count), patch.object(RetryGate, "check", _open_gate):
        running.watch({QueueTarget(NAME, "/", name): 0.001 for name in wanted})
        async with _running(running):
            await done.wait()
    return counted


async def _open(broker: RabbitBroker) -> Open:
    """What is open now; the broker counts connections and channels, all of which are ours."""
    process = psutil.Process()
    tasks = len(asyncio.all_tasks())
    files = process.num_fds()
    async with httpx.AsyncClient(auth=(broker.user, broker.password)) as client:
        answers = [
            await client.get(f"{broker.management_url}/api/{what}") for what in ("connections", "channels")
        ]
    connections, channels = (len(answer.json()) for answer in answers)
    memory = process.memory_info().rss >> 20
    return Open(files, tasks, threading.active_count(), connections, channels, memory)


def _broker(broker: RabbitBroker, *, case: str = "fine", management: bool = True) -> Broker:
    password = "wrong" if case == "wrong password" else broker.password
    amqp, http = (1, 1) if case == "broker down" else (broker.amqp_port, broker.management_port)
    settings = BrokerSettings(
        amqp_url=SecretUrl(f"amqp://{broker.user}:{password}@127.0.0.1:{amqp}/"),
        management_url=SecretUrl(f"http://{broker.user}:{password}@127.0.0.1:{http}") if management else None,
    )
    return resolve({NAME: settings}, {})[NAME]


@asynccontextmanager
async def _running(sweeps: BrokerSweeps) -> AsyncGenerator[None]:
    task = asyncio.create_task(sweeps.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _declare(broker: RabbitBroker, names: list[str]) -> None:
    async with (
        await aio_pika.connect(broker.amqp_url) as connection,
        connection.channel() as channel,
    ):
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            await asyncio.gather(*(channel.declare_queue(name, durable=True) for name in some))


if __name__ == "__main__":
    main()
