"""How cost grows with what is there, where only what changes should cost: three sizes of each, and the exponent between them.

python -m bench cliffs [--rows queue telemetry] [--rounds 10]

queue: a release, and the grant that comes of it, beside ever more leases and a tenth as many waiters. telemetry:
a second of reports of 100 nodes that are full, beside requests that wait, whom they do not help. quiet, changing: an
evaluation beside ever more endpoints, 400 in a second; restart: the start of an autoscaler on that many.

CPU is that of the server process, which is pinned to a core of its own; the callers are in this process. An exponent of 0
says that the size costs nothing, 1 that it costs in proportion.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import grpc
import uvloop

from bench._reserve_site import GPUS, Site, cpu_seconds, open_site, pin
from gpuscale.api.allocator import v1 as api
from gpuscale.common.wire import to_duration

HOUR = 3600.0
BATCH = 256
A_CONNECTION = 100
"""Streams on one connection: as many as a server of gRPC takes there by default."""
ENDPOINTS = (80, 625, 5000)
EVALUATIONS = 400
"""A second, of all endpoints together."""
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(frozen=True)
class Cost:
    """What one change cost at one size: CPU of the server in ms, and the time until its effect was seen in ms."""

    size: str
    cpu: float
    median: float
    worst: float


async def queue(rounds: int) -> tuple[str, list[Cost]]:
    """A release beside many leases, with as many waiters as a hundredth of them."""
    costs: list[Cost] = []
    for leases in (160, 1600, 10_000):
        async with (
            _full_fleet(leases) as (site, stub, held),
            _waiters(site.address, leases // 10) as granted,
        ):
            costs.append(
                await _releases(site, stub, held, granted, min(rounds, leases // 10), f"{leases:,} leases")
            )
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
            costs.append(Cost(f"{waiters:,} waiters", 1e3 * cpu, math.nan, math.nan))
    return "a second of reports of 100 full nodes", costs


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
        for _ in range(1 + again):
            tick = endpoints / EVALUATIONS
            site = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "bench._scaling_site", folder, str(endpoints), str(tick), str(max(rounds, 2 * tick))),
                *words,
                stdout=asyncio.subprocess.PIPE,
            )
            start, cpu, done, written = map(float, (await site.communicate())[0].split())
    size = f"{endpoints:,}, {done:.0%} on time, {written * 86400 / 1e9:.1f} GB/day"
    return Cost(size, 1e3 * (start if again else cpu), math.nan, math.nan)


async def _releases(
    site: Site,
    stub: api.AllocatorServiceAsyncStub,
    held: list[api.Reservation],
    granted: asyncio.Queue[float],
    rounds: int,
    size: str,
) -> Cost:
    times: list[float] = []
    await _quiet(site)
    before = cpu_seconds(site.pid)
    for one in held[:rounds]:
        began = time.perf_counter()
        await stub.ReleaseReservation(api.ReleaseReservationRequest(name=one.name, fence=one.fence))
        times.append(await granted.get() - began)
    await _quiet(site)
    cpu = (cpu_seconds(site.pid) - before) / rounds
    return Cost(size, 1e3 * cpu, 1e3 * statistics.median(times), 1e3 * max(times))


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
        stub: api.AllocatorServiceAsyncStub = api.AllocatorServiceStub(channel)  # type: ignore[assignment]
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
    stubs = [api.AllocatorServiceStub(channel) for channel in channels]
    granted = asyncio.Queue[float]()
    standing = asyncio.Semaphore(0)

    async def wait(stub: api.AllocatorServiceStub) -> None:
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


ROWS: dict[str, Callable[[int], Awaitable[tuple[str, list[Cost]]]]] = {
    "queue": queue,
    "telemetry": telemetry,
    "quiet": quiet,
    "changing": changing,
    "restart": restart,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench cliffs", description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    pin(1)
    for row in options.rows:
        what, costs = uvloop.run(ROWS[row](options.rounds))
        growth = math.log(costs[-1].cpu / costs[0].cpu) / math.log(62.5)
        print(f"{row}: {what}; exponent {growth:.2f}")
        for one in costs:
            print(
                f"  {one.size:<34} {one.cpu:>9.2f} ms CPU {one.median:>9.1f} ms p50 {one.worst:>9.1f} ms worst",
                flush=True,
            )


if __name__ == "__main__":
    main()
