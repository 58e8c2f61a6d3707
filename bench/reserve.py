"""Durable Reserve against a bare echo: calls per second of both, interleaved, on one server process and core.

    python -m bench reserve

The server process runs the whole allocator (guard, validation, placement, SQLite with one fsync a group) and, on the same
loop, a grpc.aio server whose handler returns the bytes it got. Clients are in another process on another core and give
each call a deadline, as ours do. A turn of "reserve" is Reserve and ReleaseReservation: both are on disk before their
answer, both count as one call. A turn of "batch" reserves and releases 16 in a call each; reservations are counted.

Two further servers differ in one thing: every commit takes 2 ms longer, or there are 8,000 GPUs in place of 80. They
are compared with the first, round by round. Targets: DESIGN, section 8.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import grpc
import uvloop

from gpuscale.api.allocator import v1 as api
from gpuscale.common import failpoints
from gpuscale.common.wire import to_duration

CALLERS = (1, 16, 64)
ROUNDS = 5
SECONDS = 1.0
GPUS = 8
NODES = 10
MANY_NODES = 1000
BATCH = 16
TIMEOUT = 30.0
SLOW_DISK = "allocator.store.before_commit=sleep:0.002"
ECHO = "/bench.Echo/Echo"

Call = Callable[[], Awaitable[int]]
"""One turn of a caller; how many calls (of a batch: reservations) it was."""


@dataclass
class Result:
    """What was measured of a call: rates per round, CPU seconds of the server per call, seconds per call."""

    rates: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    times: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class Site:
    """A server process and stubs of it."""

    pid: int
    stub: api.AllocatorServiceStub
    echo: grpc.aio.Channel


def main() -> None:
    """Measure and print the table."""
    _pin(-1)
    uvloop.run(_measure())


async def _measure() -> None:
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(_site(NODES))
        slow = await stack.enter_async_context(_site(NODES, SLOW_DISK))
        large = await stack.enter_async_context(_site(MANY_NODES))
        name = (await plain.stub.Reserve(_request(), timeout=TIMEOUT)).reservation.name
        kinds: dict[str, tuple[Site, Call]] = {
            "echo": (plain, _echo(plain.echo)),
            "get": (plain, _get(name, plain.stub)),
            "reserve": (plain, _reserve(plain.stub)),
            "+2 ms": (slow, _reserve(slow.stub)),
            "8000": (large, _reserve(large.stub)),
            "batch": (plain, _batch(plain.stub)),
        }
        print(f"{'callers':>7}  {'call':<8}{'calls/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'cpu us':>9}  ratio")
        for callers in CALLERS:
            results = {kind: Result() for kind in kinds}
            for _ in range(ROUNDS):
                for kind, (site, call) in kinds.items():
                    await _round(call, callers, site.pid, results[kind])
            _print(callers, results)


def _print(callers: int, results: dict[str, Result]) -> None:
    for kind, result in results.items():
        base = "reserve" if kind in {"+2 ms", "8000", "batch"} else "echo"
        ratio = statistics.median(
            rate / other for rate, other in zip(result.rates, results[base].rates, strict=True)
        )
        times = sorted(result.times)
        p50, p99 = (times[int(len(times) * share)] * 1000 for share in (0.5, 0.99))
        print(
            f"{callers:>7}  {kind:<8}{statistics.median(result.rates):>9.0f}{p50:>9.2f}{p99:>9.2f}"
            f"{statistics.median(result.cpu) * 1e6:>9.0f}  {ratio:.2f} of {base}"
        )


async def _round(call: Call, callers: int, pid: int, result: Result) -> None:
    """Measure one round of a call."""
    times: list[float] = []
    cpu, started = _cpu(pid), time.perf_counter()
    end = started + SECONDS

    async def caller() -> None:
        while (sent := time.perf_counter()) < end:
            count = await call()
            times.extend([(time.perf_counter() - sent) / count] * count)

    await asyncio.gather(*(caller() for _ in range(callers)))
    result.rates.append(len(times) / (time.perf_counter() - started))
    result.cpu.append((_cpu(pid) - cpu) / len(times))
    result.times += times


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _request() -> api.ReserveRequest:
    return api.ReserveRequest(
        request_id=str(uuid4()), holder="bench", ask=api.Ask(gpu_count=1), ttl=to_duration(60)
    )


def _shared_request() -> api.ReserveRequest:
    request = _request()
    request.ask.gpu_milli = 50
    request.ask.min_memory_bytes = 0
    return request


def _echo(channel: grpc.aio.Channel) -> Call:
    call = channel.unary_unary(ECHO)
    payload = _request().SerializeToString()

    async def turn() -> int:
        await call(payload, timeout=TIMEOUT)
        return 1

    return turn


def _get(name: str, stub: api.AllocatorServiceStub) -> Call:
    request = api.GetReservationRequest(name=name)

    async def turn() -> int:
        await stub.GetReservation(request, timeout=TIMEOUT)
        return 1

    return turn


def _reserve(stub: api.AllocatorServiceStub) -> Call:
    async def turn() -> int:
        one = (await stub.Reserve(_request(), timeout=TIMEOUT)).reservation
        release = api.ReleaseReservationRequest(name=one.name, fence=one.fence)
        await stub.ReleaseReservation(release, timeout=TIMEOUT)
        return 2

    return turn


def _batch(stub: api.AllocatorServiceStub) -> Call:
    """Shares, so that 64 callers find room for 16 each."""

    async def turn() -> int:
        requests = [_shared_request() for _ in range(BATCH)]
        made = await stub.BatchReserve(api.BatchReserveRequest(requests=requests), timeout=TIMEOUT)
        releases = [
            api.ReleaseReservationRequest(name=one.name, fence=one.fence) for one in made.reservations
        ]
        await stub.BatchRelease(api.BatchReleaseRequest(requests=releases), timeout=TIMEOUT)
        return BATCH

    return turn


def _pin(index: int) -> None:
    """Keep this process on one of the cores that it may use, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[index]})


@asynccontextmanager
async def _site(nodes: int, points: str = "") -> AsyncIterator[Site]:
    """A server process, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder:
        server = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench.reserve", folder, str(nodes)),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {failpoints.VARIABLE: points},
        )
        try:
            assert server.stdout is not None
            reserve_address, echo_address = (await server.stdout.readline()).decode().split()
            async with (
                grpc.aio.insecure_channel(reserve_address) as allocator,
                grpc.aio.insecure_channel(echo_address) as echo,
            ):
                yield Site(server.pid, api.AllocatorServiceStub(allocator), echo)
        finally:
            server.terminate()
            await server.wait()


async def _serve(folder: Path, nodes: int) -> None:
    from tests.support.allocator import allocator, calling
    from tests.support.fake_fleet import FakeFleet, node_message, serving

    async def echo(request: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return request

    fleet = FakeFleet(*(node_message(f"n{index}", count=GPUS) for index in range(nodes)))
    server = grpc.aio.server()
    service, method = ECHO.strip("/").split("/")
    handler = grpc.method_handlers_generic_handler(
        service, {method: grpc.unary_unary_rpc_method_handler(echo)}
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with serving(fleet) as fleet_address, allocator(folder, fleet_address) as address:
        async with calling(address) as client:
            await client.ready(60)
        print(address, f"127.0.0.1:{port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    _pin(0)
    gc.freeze()  # as every program of ours does
    uvloop.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
