"""Durable Reserve against a bare echo, and against etcd and Slurm: calls per second, interleaved, servers on one core.

python -m bench reserve [--callers 1 16 64] [--rounds 5] [--seconds 1] [--rows echo reserve ...]

The server process runs the whole allocator (guard, validation, placement, SQLite with one fsync a group) and, on the same
loop, a grpc.aio server whose handler returns the bytes it got. Callers are in another process on another core and give
each call a deadline, as ours do; they share a connection of a client that costs little (`bench._http2`), since gRPC's own
takes nearly as much CPU as the servers (`--client grpc`). A turn of "reserve" is Reserve and ReleaseReservation: both are on disk before their
answer, both count as one call. A turn of "batch" reserves and releases 16 in a call each: 32 changes, each of which counts,
as each transaction of etcd does.

Three further servers differ in one thing: the state is in PostgreSQL (a private one, on any core; what it uses is not in
the CPU shown), every commit takes 2 ms longer, or there are 8,000 GPUs in place of 80. They are compared with the first, round by round. The peers are described in `bench._reserve_peers`. CPU is what the process
under test used per call, all its threads: it can be trusted on a busy machine, rates cannot. Targets: DESIGN, section 8.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from uuid import uuid4

import uvloop

from bench._callers import CLIENTS, Caller
from bench._reserve_peers import Call, etcd, postgresql, slurm
from bench._reserve_site import ECHO, cpu_seconds, open_site, pin
from gpuscale.api.allocator import v1 as api
from gpuscale.common.wire import to_duration

ROWS = ("echo", "get", "reserve", "postgresql", "+2 ms", "8000", "batch", "etcd", "slurm")
BASES = {"postgresql": "reserve", "+2 ms": "reserve", "8000": "reserve", "batch": "etcd", "slurm": "reserve"}
"""What a row is compared with, where that is not the echo."""
NODES, MANY_NODES = 10, 1000
BATCH = 16
ALLOCATOR = "/gpuscale.api.allocator.v1.AllocatorService/"
SLOW_DISK = "allocator.store.before_commit=sleep:0.002"
MOST_PROCESSES = 16
"""Callers of Slurm at most: each call is a process."""


@dataclass
class Result:
    """What was measured of a call: rates per round, CPU seconds of the server per call, seconds per call."""

    rates: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    times: list[float] = field(default_factory=list[float])


Kinds = dict[str, tuple[int, Call]]
"""The process under test and the call, by row."""


def main() -> None:
    """Measure and print the table."""
    options = _options(sys.argv[1:])
    server_core = min(os.sched_getaffinity(0))
    pin(-1)
    uvloop.run(_measure(options, server_core))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench reserve")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 16, 64], help="calls at a time")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is printed")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each round")
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=ROWS, help="what to measure; all by default"
    )
    parser.add_argument("--client", choices=CLIENTS, default=CLIENTS[0], help="what calls the servers")
    return parser.parse_args(arguments)


async def _measure(options: argparse.Namespace, server_core: int) -> None:
    async with AsyncExitStack() as stack:
        kinds = await _kinds(stack, options.rows, options.client, server_core)
        print(f"{'callers':>7}  {'call':<11}{'calls/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'cpu us':>9}  ratio")
        for callers in options.callers:
            results = {kind: Result() for kind in kinds}
            for _ in range(options.rounds):
                for kind, (pid, call) in kinds.items():
                    at_once = min(callers, MOST_PROCESSES) if kind == "slurm" else callers
                    await _round(call, at_once, pid, options.seconds, results[kind])
            _print(callers, results)


async def _kinds(stack: AsyncExitStack, rows: Sequence[str], client: str, server_core: int) -> Kinds:
    """The servers that the rows need, each in a process of its own, and what is called."""
    kinds: Kinds = {}
    if {"echo", "get", "reserve", "batch"} & set(rows):
        plain = await stack.enter_async_context(open_site(client, NODES))
        held = api.ReserveResponse.FromString(
            await plain.allocator(f"{ALLOCATOR}Reserve", _request().SerializeToString())
        )
        kinds |= {
            "echo": (plain.pid, _echo(plain.echo)),
            "get": (plain.pid, _get(held.reservation.name, plain.allocator)),
            "reserve": (plain.pid, _reserve(plain.allocator)),
            "batch": (plain.pid, _batch(plain.allocator)),
        }
    if "postgresql" in rows:
        url = await stack.enter_async_context(postgresql())
        if url:
            shared = await stack.enter_async_context(open_site(client, NODES, database=url))
            kinds["postgresql"] = shared.pid, _reserve(shared.allocator)
        else:
            print("postgresql: not installed: apt install postgresql", flush=True)
    if "+2 ms" in rows:
        slow = await stack.enter_async_context(open_site(client, NODES, SLOW_DISK))
        kinds["+2 ms"] = slow.pid, _reserve(slow.allocator)
    if "8000" in rows:
        large = await stack.enter_async_context(open_site(client, MANY_NODES))
        kinds["8000"] = large.pid, _reserve(large.allocator)
    for peer, opened in (("etcd", etcd(client, server_core)), ("slurm", slurm())):
        if peer in rows:
            found = await stack.enter_async_context(opened)
            if isinstance(found, str):
                print(f"{peer}: {found}", flush=True)
            else:
                kinds[peer] = found
    return {row: kinds[row] for row in rows if row in kinds}


def _print(callers: int, results: dict[str, Result]) -> None:
    for kind, result in results.items():
        base = BASES.get(kind, "echo")
        compared = ""
        if base in results:
            pairs = zip(result.rates, results[base].rates, strict=True)
            compared = f"{statistics.median(rate / other for rate, other in pairs):.2f} of {base}"
        times = sorted(result.times)
        p50, p99 = (times[int(len(times) * share)] * 1000 for share in (0.5, 0.99))
        print(
            f"{callers:>7}  {kind:<11}{statistics.median(result.rates):>9.0f}{p50:>9.2f}{p99:>9.2f}"
            f"{statistics.median(result.cpu) * 1e6:>9.0f}  {compared}",
            flush=True,
        )


async def _round(call: Call, callers: int, pid: int, seconds: float, result: Result) -> None:
    """Measure one round of a call."""
    times: list[float] = []
    cpu, started = cpu_seconds(pid), time.perf_counter()
    end = started + seconds

    async def caller() -> None:
        while (sent := time.perf_counter()) < end:
            count = await call()
            times.extend([(time.perf_counter() - sent) / count] * count)

    await asyncio.gather(*(caller() for _ in range(callers)))
    result.rates.append(len(times) / (time.perf_counter() - started))
    result.cpu.append((cpu_seconds(pid) - cpu) / len(times))
    result.times += times


def _request() -> api.ReserveRequest:
    return api.ReserveRequest(
        request_id=str(uuid4()), holder="bench", ask=api.Ask(gpu_count=1), ttl=to_duration(60)
    )


def _shared_request() -> api.ReserveRequest:
    request = _request()
    request.ask.gpu_milli = 50
    request.ask.min_memory_bytes = 0
    return request


def _echo(call: Caller) -> Call:
    payload = _request().SerializeToString()

    async def turn() -> int:
        await call(ECHO, payload)
        return 1

    return turn


def _get(name: str, call: Caller) -> Call:
    request = api.GetReservationRequest(name=name).SerializeToString()

    async def turn() -> int:
        api.GetReservationResponse.FromString(await call(f"{ALLOCATOR}GetReservation", request))
        return 1

    return turn


def _reserve(call: Caller) -> Call:
    async def turn() -> int:
        answer = await call(f"{ALLOCATOR}Reserve", _request().SerializeToString())
        one = api.ReserveResponse.FromString(answer).reservation
        release = api.ReleaseReservationRequest(name=one.name, fence=one.fence)
        await call(f"{ALLOCATOR}ReleaseReservation", release.SerializeToString())
        return 2

    return turn


def _batch(call: Caller) -> Call:
    """Shares, so that 64 callers find room for 16 each."""

    async def turn() -> int:
        request = api.BatchReserveRequest(requests=[_shared_request() for _ in range(BATCH)])
        answer = await call(f"{ALLOCATOR}BatchReserve", request.SerializeToString())
        made = api.BatchReserveResponse.FromString(answer).reservations
        releases = [api.ReleaseReservationRequest(name=one.name, fence=one.fence) for one in made]
        release = api.BatchReleaseRequest(requests=releases)
        await call(f"{ALLOCATOR}BatchRelease", release.SerializeToString())
        return 2 * BATCH

    return turn


if __name__ == "__main__":
    main()
