"""Durable Reserve against a bare echo: calls per second of both, interleaved, on one server process and core.

    python -m bench reserve

The server process runs the whole allocator (guard, validation, SQLite with one fsync a group) and, on the same loop, a
grpc.aio server whose handler returns the bytes it got. Clients are in another process on another core. A round of
"reserve" is Reserve and ReleaseReservation in turn: both are on disk before their answer, both count as one call.
Target (DESIGN, section 8): at least 1.0 of echo with 64 callers, 0.5 with one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import grpc
import uvloop

from gpuscale.api.allocator import v1 as api
from gpuscale.common.wire import to_duration

CALLERS = (1, 64)
ROUNDS = 5
SECONDS = 1.5
NODES = 10
GPUS = 8
ECHO = "/bench.Echo/Echo"

Call = Callable[[], Awaitable[int]]
"""One turn of a caller; how many calls it was."""


def main() -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder:
        server = subprocess.Popen(
            [sys.executable, "-m", "bench.reserve", folder], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            reserve_address, echo_address = server.stdout.readline().split()
            _pin(-1)
            uvloop.run(_measure(reserve_address, echo_address))
        finally:
            server.terminate()
            server.wait()


async def _measure(reserve_address: str, echo_address: str) -> None:
    async with (
        grpc.aio.insecure_channel(reserve_address) as allocator,
        grpc.aio.insecure_channel(echo_address) as echo,
    ):
        stub = api.AllocatorServiceStub(allocator)
        kinds: dict[str, Call] = {
            "echo": _echo(echo),
            "get": _get((await stub.Reserve(_request())).reservation.name, stub),
            "reserve": _reserve(stub),
        }
        print(f"{'callers':>7}  {'call':<8}{'calls/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'of echo':>9}")
        for callers in CALLERS:
            results: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in kinds}
            for _ in range(ROUNDS):
                for name, call in kinds.items():
                    results[name].append(await _round(call, callers))
            _print(callers, results)


def _print(callers: int, results: dict[str, list[tuple[float, list[float]]]]) -> None:
    echo = [rate for rate, _ in results["echo"]]
    for name, rounds in results.items():
        rates = [rate for rate, _ in rounds]
        times = sorted(one for _, taken in rounds for one in taken)
        ratio = statistics.median(rate / base for rate, base in zip(rates, echo, strict=True))
        p50, p99 = (times[int(len(times) * share)] * 1000 for share in (0.5, 0.99))
        print(f"{callers:>7}  {name:<8}{statistics.median(rates):>9.0f}{p50:>9.2f}{p99:>9.2f}{ratio:>9.2f}")


async def _round(call: Call, callers: int) -> tuple[float, list[float]]:
    """Calls per second, and the seconds that each call took."""
    times: list[float] = []
    end = time.perf_counter() + SECONDS

    async def caller() -> None:
        while (started := time.perf_counter()) < end:
            count = await call()
            times.extend([(time.perf_counter() - started) / count] * count)

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(times) / (time.perf_counter() - started), times


def _request() -> api.ReserveRequest:
    return api.ReserveRequest(request_id=str(uuid4()), holder="bench", gpu_count=1, ttl=to_duration(60))


def _echo(channel: grpc.aio.Channel) -> Call:
    call = channel.unary_unary(ECHO)
    payload = _request().SerializeToString()

    async def turn() -> int:
        await call(payload)
        return 1

    return turn


def _get(name: str, stub: api.AllocatorServiceStub) -> Call:
    request = api.GetReservationRequest(name=name)

    async def turn() -> int:
        await stub.GetReservation(request)
        return 1

    return turn


def _reserve(stub: api.AllocatorServiceStub) -> Call:
    async def turn() -> int:
        one = (await stub.Reserve(_request())).reservation
        await stub.ReleaseReservation(api.ReleaseReservationRequest(name=one.name, fence=one.fence))
        return 2

    return turn


def _pin(index: int) -> None:
    """Keep this process on one of the cores that it may use, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[index]})


async def _serve(folder: Path) -> None:
    from tests.support.allocator import allocator, calling
    from tests.support.fake_fleet import FakeFleet, node_message, serving

    async def echo(request: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return request

    fleet = FakeFleet(*(node_message(f"n{index}", count=GPUS) for index in range(NODES)))
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
            await client.ready()
        print(address, f"127.0.0.1:{port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    _pin(0)
    uvloop.run(_serve(Path(sys.argv[1])))
