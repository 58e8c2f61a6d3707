"""How cost grows with what is there, where only what changes should cost: three sizes of each, and the exponent between them.

python -m bench cliffs [--rows queue telemetry] [--rounds 10]

queue: a release, and the grant that comes of it, beside ever more leases and a tenth as many waiters, and how much it took one of
them to join. telemetry: a second of reports of 100 nodes that are full, beside requests that wait, whom they do not help. watchers:
a second in which 500 of 10,000 leases are renewed, beside ever more who watch them. nodes: a second of an allocator behind
ever more nodes whose GPUs are busy under leases. quiet, changing: an evaluation beside ever more endpoints, 400 in a second;
restart: the start of an autoscaler on that many. leases: a page of 50 of ever more leases. page: a page of one of ever more endpoints; all: one of them, where all are
read by 100. metrics: a scrape of the fleet's page; backtest: one of ever more requests, streamed. get: what a second of
`get gpus -w` is told of ever more GPUs whose nodes report each second.

CPU is that of the server process, which is pinned to a core of its own; the callers are in this process, but in `page`, `all`,
`metrics` and `backtest` the server is, too. What a server costs in a second
without a release is taken off where one is told. An exponent of 0 says that the size costs nothing, 1 that it costs in
proportion; it is that of the first figure. Goals are those at the largest size.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import grpc
import uvloop

from bench._reserve_site import GPUS, Site, cpu_seconds, open_site, pin
from bench.ingest import Agent, whole
from gpuscale.api.allocator import v1 as api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console.lookup import NODES_MILLIS
from gpuscale.cli.views.monitor import GPU_FIELDS
from gpuscale.common.rpc.feed import MESSAGE_BYTES
from gpuscale.common.rpc.server import registrations
from gpuscale.common.runtime.metrics_text import MetricsPage
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as internal
from gpuscale.monitor.exposition.fleet import FleetPage
from gpuscale.monitor.fleet.join_servicer import Joined
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import AgentStream
from gpuscale.monitor.fleet.servicer import FleetServicer
from gpuscale.monitor.model.prometheus import Style
from tests.support.autoscaler_app import FakeWatchers, running, scaling
from tests.support.monitor import serve

HOUR = 3600.0
BATCH = 256
A_CONNECTION = 100
"""Streams on one connection: as many as a server of gRPC takes there by default."""
ENDPOINTS, LISTED = (80, 625, 5000), (30, 300, 3000)
NODES, WATCHERS = (250, 1000, 4000), (100, 300, 1000)
SCRAPED, REQUESTS, FOLLOWED = (128, 512, 2000), (10_000, 100_000, 1_000_000), (64, 250, 1000)
AT_ONCE = 10
"""Watchers that read their first round at one time."""
BUSY = {
    "utilization_percent",
    "memory_utilization_percent",
    "power_watts",
    "temperature_celsius",
    "energy_joules",
}
"""Readings that move each second."""
EVALUATIONS = 400
"""A second, of all endpoints together."""
FIRST_ROUND = 3.0
"""Seconds in which a watch has told all that there is."""
A_RELEASE = 1.0
"""Seconds from one release to the next."""
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


CPU, MEDIAN, GRANTED, JOINED = "ms CPU", "ms to the grant", "ms at worst", "ms CPU to join"
BYTES, PACKED = "MB", "MB packed"


@dataclass(frozen=True)
class Cost:
    """What one change cost at one size."""

    size: str
    count: int
    figures: Mapping[str, float]

    @classmethod
    def of_cpu(cls, size: str, count: int, cpu: float) -> Self:
        """Milliseconds of CPU alone."""
        return cls(size, count, {CPU: cpu})


async def queue(rounds: int) -> tuple[str, list[Cost]]:
    """A release beside many leases, with as many waiters as a hundredth of them."""
    costs: list[Cost] = []
    for leases in (160, 1600, 10_000):
        async with _full_fleet(leases) as (site, stub, held):
            before = cpu_seconds(site.pid)
            async with _waiters(site.address, leases // 10) as granted:
                await _quiet(site)
                joined = (cpu_seconds(site.pid) - before) / (leases // 10)
                figures = await _releases(site, stub, held, granted, min(rounds, leases // 10))
            costs.append(Cost(f"{leases:,} leases", leases, figures | {JOINED: 1e3 * joined}))
    return "a release, a tenth as many waiters as leases", costs


async def telemetry(rounds: int) -> tuple[str, list[Cost]]:
    """A second of reports of 100 nodes that are full, beside waiters: nothing comes of it for anybody."""
    costs: list[Cost] = []
    for waiters in (16, 128, 1000):
        async with (
            _full_fleet(100 * GPUS, reports=True) as (site, _, _),
            _waiters(site.address, waiters),
        ):
            await asyncio.sleep(2)
            before = cpu_seconds(site.pid)
            await asyncio.sleep(rounds)
            cpu = (cpu_seconds(site.pid) - before) / rounds
            costs.append(Cost.of_cpu(f"{waiters:,} waiters", waiters, 1e3 * cpu))
    return "a second of reports of 100 full nodes", costs


async def watchers(rounds: int) -> tuple[str, list[Cost]]:
    """A second in which 500 of 10,000 leases are renewed, which no watcher is told of."""
    costs: list[Cost] = []
    async with _full_fleet(10_000) as (site, stub, held):
        for count in WATCHERS:
            before = cpu_seconds(site.pid)
            async with _watching(site.address, count):
                first = cpu_seconds(site.pid) - before
                await _quiet(site)
                before = cpu_seconds(site.pid)
                await _renewals(stub, held, rounds)
                cpu = (cpu_seconds(site.pid) - before) / rounds
            costs.append(Cost.of_cpu(f"{count:,} watchers, first rounds {first:.1f} s", count, 1e3 * cpu))
    return "a second of renewals of 10,000 leases every 20 s", costs


async def _renewals(stub: api.AllocatorServiceAsyncStub, held: list[api.Reservation], rounds: int) -> None:
    loop, batch = asyncio.get_running_loop(), 100
    async with asyncio.timeout(10 * rounds + 60):
        call = stub.KeepAlive()
        begin = loop.time()
        for turn in range(rounds * 5):
            at = turn * batch % len(held)
            leases = [api.LeaseRenewal(name=one.name, fence=one.fence) for one in held[at : at + batch]]
            await call.write(api.KeepAliveRequest(leases=leases))
            answer = await call.read()
            assert isinstance(answer, api.KeepAliveResponse)
            assert not any(one.error for one in answer.leases), answer.leases[0]
            await asyncio.sleep(begin + (turn + 1) / 5 - loop.time())
        await call.done_writing()


@asynccontextmanager
async def _watching(address: str, count: int) -> AsyncIterator[None]:
    """Watchers of all reservations, each of which had its first round; what they are told is not decoded."""
    channels = [
        grpc.aio.insecure_channel(address, options=OWN_CONNECTION) for _ in range(-(-count // A_CONNECTION))
    ]
    served, over = asyncio.Semaphore(0), asyncio.Event()
    request = api.WatchReservationsRequest().SerializeToString()

    async def watch(channel: grpc.aio.Channel) -> None:
        call: Any = channel.unary_stream("/gpuscale.api.allocator.v1.AllocatorService/WatchReservations")(
            request
        )
        told = False
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if not told and len(message) < MESSAGE_BYTES:  # of a first round only the last is shorter
                    told = True
                    served.release()
        except grpc.aio.AioRpcError:
            if not over.is_set():
                raise

    try:
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[None]] = []
            for number in range(count):
                if number >= AT_ONCE:
                    await served.acquire()
                tasks.append(group.create_task(watch(channels[number % len(channels)])))
            for _ in range(min(count, AT_ONCE)):
                await served.acquire()
            yield
            over.set()
            for task in tasks:
                task.cancel()
    finally:
        for channel in channels:
            await channel.close()


async def nodes(rounds: int) -> tuple[str, list[Cost]]:
    """A second of an allocator behind nodes that report each second, their GPUs busy in another way."""
    costs: list[Cost] = []
    for count in NODES:
        async with _busy_fleet(count) as address, open_site("light", 1, fleet=address) as site:
            await asyncio.sleep(5)  # it has read the first round by then
            before = cpu_seconds(site.pid)
            await asyncio.sleep(max(10, rounds))  # so that each was told once in whole
            cpu = (cpu_seconds(site.pid) - before) / max(10, rounds)
            costs.append(Cost.of_cpu(f"{count:,} nodes", count, 1e3 * cpu))
    return "a second of nodes that are busy under leases", costs


async def metrics(rounds: int) -> tuple[str, list[Cost]]:
    """A scrape of the fleet's /metrics, on which each GPU has its series up to 2,000 of them."""
    costs: list[Cost] = []
    for gpus in SCRAPED:
        index = Nodes(SystemClock(), gpus)
        async with _busy_fleet(gpus // GPUS, index):
            page = FleetPage(index, list, SystemClock(), Style(many_nodes=True), gpus)
            before = time.process_time()
            texts = list[bytes]()
            for _ in range(max(1, rounds // 5)):
                scrape = MetricsPage()
                await page.add(scrape)
                texts.append(b"".join(scrape.chunks()))
            cpu = (time.process_time() - before) / len(texts)
        sizes = {BYTES: len(texts[0]) / 1e6, PACKED: len(zlib.compress(texts[0], 1)) / 1e6}
        costs.append(Cost(f"{gpus:,} GPUs", gpus, {CPU: 1e3 * cpu} | sizes))
    return "a scrape of the fleet", costs


async def backtest(_: int) -> tuple[str, list[Cost]]:
    """A run of one policy on requests that come at 20 in a second, streamed to the server by 100,000."""
    costs: list[Cost] = []
    spec = autoscaler_api.BacktestSpec()
    spec.policies.add(name="p", preset=autoscaler_api.PresetWish(preset="gpuscale", max_replicas=8))
    spec.goal.FromMilliseconds(5000)
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder:
        async with running(Path(folder), "127.0.0.1:1", FakeWatchers(clock), clock) as autoscaler:
            stub = autoscaler_api.BacktestServiceStub(autoscaler.channel)
            for count in REQUESTS:
                before = time.process_time()
                messages = [autoscaler_api.CreateBacktestRequest(spec=spec, request_id=str(uuid4()))]
                for begin in range(0, count, 100_000):
                    at = range(begin, min(count, begin + 100_000))
                    sent = autoscaler_api.Workload(
                        arrivals=[one / 20 for one in at], service_seconds=[0.5] * len(at)
                    )
                    messages.append(autoscaler_api.CreateBacktestRequest(workload=sent))
                one = (await stub.CreateBacktest(iter(messages))).backtest
                while one.state in (one.STATE_PENDING, one.STATE_RUNNING):
                    await asyncio.sleep(0.2)
                    one = (await stub.GetBacktest(autoscaler_api.GetBacktestRequest(name=one.name))).backtest
                assert one.state == one.STATE_SUCCEEDED, one
                costs.append(Cost.of_cpu(f"{count:,} requests", count, 1e3 * (time.process_time() - before)))
    return "a backtest", costs


async def get(rounds: int) -> tuple[str, list[Cost]]:
    """A second of the watch that `get gpus -w` keeps, of nodes whose GPUs are busy."""
    costs: list[Cost] = []
    for count in FOLLOWED:
        async with (
            _busy_fleet(count) as address,
            grpc.aio.insecure_channel(address, options=OWN_CONNECTION) as channel,
        ):
            request = monitor_api.WatchNodesRequest()
            request.min_interval.FromMilliseconds(NODES_MILLIS)
            request.read_mask.paths.extend(GPU_FIELDS)
            call: Any = channel.unary_stream("/gpuscale.api.monitor.v1.FleetService/WatchNodes")(
                request.SerializeToString()
            )
            begin, got = time.perf_counter(), 0
            while (now := time.perf_counter() - begin) < FIRST_ROUND + rounds:
                message = await call.read()
                got += len(message) if now >= FIRST_ROUND else 0
            costs.append(Cost(f"{count * GPUS:,} GPUs", count, {BYTES: got / rounds / 1e6}))
            call.cancel()
    return "a second of `get gpus -w`", costs


@asynccontextmanager
async def _busy_fleet(count: int, index: Nodes | None = None) -> AsyncIterator[str]:
    """A fleet in this process: its address."""
    source = random.Random(1)
    index = index or Nodes(SystemClock(), count)
    served = registrations(FleetServicer(index, Joined(None), SystemClock()))
    fields = [
        number for number, one in types_api.GpuReading.DESCRIPTOR.fields_by_number.items() if one.name in BUSY
    ]
    with ExitStack() as stack:
        streams: list[AgentStream] = []
        for number in range(count):
            agent = Agent(number, epoch=str(uuid4()))
            hello = internal.Hello(node=agent.node, epoch=agent.epoch, agent_version="bench")
            stream = stack.enter_context(index.connected(hello, lambda: None))
            snapshot = whole(agent, source)
            for gpu in snapshot.gpus:
                gpu.reading.processes.add(pid=1, reservation=f"reservations/{uuid4()}")
            assert index.take(stream, internal.StreamTelemetryRequest(snapshot=snapshot))
            streams.append(stream)

        async def report() -> None:
            begin, seq = time.perf_counter(), 0
            while True:
                seq += 1
                for at, stream in enumerate(streams):
                    values = [float(source.randrange(101)) for _ in range(GPUS * len(fields))]
                    delta = internal.SnapshotDelta(seq=seq, base_seq=seq - 1)
                    delta.numbers.fields.extend(fields)
                    delta.numbers.values.extend(values)
                    assert index.take(stream, internal.StreamTelemetryRequest(delta=delta))
                    if at % 20 == 0:
                        due = begin + seq - 1 + at / count
                        await asyncio.sleep(max(0.0, due - time.perf_counter()))

        async with serve(*served) as address, asyncio.TaskGroup() as group:
            task = group.create_task(report())
            yield address
            task.cancel()


async def leases(rounds: int) -> tuple[str, list[Cost]]:
    """A page of 50 leases behind the first half of them, or the first 1,000."""
    costs: list[Cost] = []
    for count in (160, 1600, 10_000):
        async with _full_fleet(count) as (site, stub, _):
            request = api.ListReservationsRequest(page_size=count // 2)
            request.page_token = (await stub.ListReservations(request)).next_page_token
            request.page_size = 50
            await _quiet(site)
            before = cpu_seconds(site.pid)
            for _ in range(50 * rounds):
                assert len((await stub.ListReservations(request)).reservations) == 50
            cpu = (cpu_seconds(site.pid) - before) / (50 * rounds)
        costs.append(Cost.of_cpu(f"{count:,} leases", count, 1e3 * cpu))
    return "a page of 50 leases", costs


async def page(rounds: int) -> tuple[str, list[Cost]]:
    """A page of one endpoint in the middle."""
    return "a page of one endpoint", await _listed(rounds, page_size=1)


async def every(rounds: int) -> tuple[str, list[Cost]]:
    """All endpoints, by pages of 100."""
    return "an endpoint, where all are read by 100", await _listed(max(1, rounds // 5), page_size=100)


async def _listed(rounds: int, page_size: int) -> list[Cost]:
    costs: list[Cost] = []
    for count in LISTED:
        clock = SystemClock()
        with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder:
            async with running(Path(folder), "127.0.0.1:1", FakeWatchers(clock), clock) as autoscaler:
                for number in range(count):
                    await autoscaler.create(scaling(name=f"e{number:05}", tick=HOUR))
                request = autoscaler_api.ListEndpointsRequest(page_size=page_size)
                if page_size == 1:
                    half = autoscaler_api.ListEndpointsRequest(page_size=count // 2)
                    request.page_token = (await autoscaler.endpoints.ListEndpoints(half)).next_page_token
                first, read, cpu = request.page_token, 0, time.process_time()
                for _ in range(rounds):
                    request.page_token = first
                    while True:
                        answer = await autoscaler.endpoints.ListEndpoints(request)
                        read += len(answer.endpoints)
                        request.page_token = answer.next_page_token
                        if page_size == 1 or not answer.next_page_token:
                            break
                cpu = (time.process_time() - cpu) / read
        costs.append(Cost.of_cpu(f"{count:,} endpoints", count, 1e3 * cpu))
    return costs


async def quiet(rounds: int) -> tuple[str, list[Cost]]:
    """An evaluation that comes to what the one before it came to."""
    return "an evaluation, none changes anything", [await _evaluations(size, rounds) for size in ENDPOINTS]


async def changing(rounds: int) -> tuple[str, list[Cost]]:
    """An evaluation that comes to something else than the one before it."""
    return "an evaluation, each another decision", [
        await _evaluations(size, rounds, "changing") for size in ENDPOINTS
    ]


async def restart(rounds: int) -> tuple[str, list[Cost]]:
    """The start of an autoscaler on endpoints that there are, until each was evaluated."""
    return "a restart until all are evaluated", [
        await _evaluations(size, rounds, again=True) for size in ENDPOINTS
    ]


async def _evaluations(endpoints: int, rounds: int, *words: str, again: bool = False) -> Cost:
    """What one evaluation costs in an autoscaler on so many endpoints, or the second start of one."""
    with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder:
        for nth in range(1 + again):
            tick = endpoints / EVALUATIONS
            site = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "bench._scaling_site", folder, str(endpoints), str(tick)),
                str(0.1 if again and not nth else max(rounds, 2 * tick)),
                *words,
                stdout=asyncio.subprocess.PIPE,
            )
            start, cpu, done, written = map(float, (await site.communicate())[0].split())
    size = f"{endpoints:,}, {done:.0%} on time, {written * 86400 / 1e9:.1f} GB/day"
    return Cost.of_cpu(size, endpoints, 1e3 * (start if again else cpu))


async def _releases(
    site: Site,
    stub: api.AllocatorServiceAsyncStub,
    held: list[api.Reservation],
    granted: asyncio.Queue[float],
    rounds: int,
) -> dict[str, float]:
    """What a release costs in the second after it, and a second without one: medians, since some have work of each minute in them."""
    times: list[float] = []
    with_one: list[float] = []
    without: list[float] = []
    for one in held[:rounds]:
        before = _ran(site.pid)
        await asyncio.sleep(A_RELEASE)
        began, middle = time.perf_counter(), _ran(site.pid)
        await stub.ReleaseReservation(api.ReleaseReservationRequest(name=one.name, fence=one.fence))
        times.append(await granted.get() - began)
        await asyncio.sleep(began + A_RELEASE - time.perf_counter())
        without.append(middle - before)
        with_one.append(_ran(site.pid) - middle)
    cpu = statistics.median(with_one) - statistics.median(without)
    return {CPU: 1e3 * cpu, MEDIAN: 1e3 * statistics.median(times), GRANTED: 1e3 * max(times)}


def _ran(pid: int) -> float:
    """Seconds of CPU that the threads of a process have used which there are."""
    found = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[0]) for one in found) / 1e9


async def _quiet(site: Site) -> None:
    """Wait until the server has nothing left to do."""
    last = -1.0
    while (now := cpu_seconds(site.pid)) != last:
        last = now
        await asyncio.sleep(0.5)


@asynccontextmanager
async def _full_fleet(
    leases: int, *, reports: bool = False
) -> AsyncIterator[tuple[Site, api.AllocatorServiceAsyncStub, list[api.Reservation]]]:
    async with (
        open_site("light", leases // GPUS, reports=reports) as site,
        grpc.aio.insecure_channel(site.address) as channel,
    ):
        stub: api.AllocatorServiceAsyncStub = api.AllocatorServiceStub(channel)
        held: list[api.Reservation] = []
        while len(held) < leases:
            asks = [_request() for _ in range(min(BATCH, leases - len(held)))]
            held += (await stub.BatchReserve(api.BatchReserveRequest(requests=asks))).reservations
        yield site, stub, held


def _request(wait: float | None = None) -> api.ReserveRequest:
    return api.ReserveRequest(
        request_id=str(uuid4()),
        holder="bench",
        ask=api.Ask(gpu_count=1, max_utilization_percent=100),
        ttl=to_duration(HOUR),
        wait=None if wait is None else to_duration(wait),
    )


@asynccontextmanager
async def _waiters(address: str, count: int) -> AsyncIterator[asyncio.Queue[float]]:
    """Requests that wait, on connections of their own; the times at which they were granted."""
    channels = [
        grpc.aio.insecure_channel(address, options=OWN_CONNECTION) for _ in range(-(-count // A_CONNECTION))
    ]
    stubs: list[api.AllocatorServiceAsyncStub] = [api.AllocatorServiceStub(one) for one in channels]
    granted = asyncio.Queue[float]()
    standing = asyncio.Semaphore(0)

    async def wait(stub: api.AllocatorServiceAsyncStub) -> None:
        first = True
        async for news in stub.ReserveAndWatch(api.ReserveAndWatchRequest(reserve=_request(HOUR))):
            if news.HasField("reservation"):
                granted.put_nowait(time.perf_counter())
            elif first:
                standing.release()
                first = False

    try:
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(wait(stubs[number % len(stubs)])) for number in range(count)]
            for _ in waiting:
                await standing.acquire()
            yield granted
            for task in waiting:
                task.cancel()
    finally:
        for channel in channels:
            await channel.close()


Row = Callable[[int], Awaitable[tuple[str, list[Cost]]]]
ROWS: dict[str, tuple[Row, Mapping[str, float]]] = {
    "queue": (queue, {CPU: 20, GRANTED: 50, JOINED: 1}),
    "telemetry": (telemetry, {}),
    "watchers": (watchers, {CPU: 300}),
    "nodes": (nodes, {CPU: 150}),
    "quiet": (quiet, {CPU: 0.25}),
    "changing": (changing, {CPU: 1}),
    "restart": (restart, {CPU: 3000}),
    "leases": (leases, {}),
    "page": (page, {}),
    "all": (every, {}),
    "metrics": (metrics, {}),
    "backtest": (backtest, {}),
    "get": (get, {BYTES: 1.3}),
}
"""Each with its goals; where there is none, the exponent is to be 0, or 1 where all of it is asked for."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench cliffs", description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    pin(1)
    for name in options.rows:
        row, goals = ROWS[name]
        began = os.getloadavg()[0]
        what, costs = uvloop.run(row(options.rounds))
        (first, *_), (last, *_) = (one.figures.values() for one in (costs[0], costs[-1]))
        growth = math.log(last / first) / math.log(costs[-1].count / costs[0].count)
        print(f"{name}: {what}; exponent {growth:.2f}; load {began:.1f} to {os.getloadavg()[0]:.1f}")
        for one in costs:
            figures = (f"{value:>9.2f} {unit}" for unit, value in one.figures.items())
            print(f"  {one.size:<36} {'  '.join(figures)}")
        for unit, goal in goals.items():
            found = costs[-1].figures[unit] / goal
            print(f"  goal {goal:g} {unit}: {'met' if found <= 1 else f'{found:.1f} times'}", flush=True)


if __name__ == "__main__":
    main()
