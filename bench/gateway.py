"""A call through the gateway against the same call past it, interleaved, in one run.

    python -m bench gateway

Three processes: a whole allocator, a gateway in front of it as a program of its own, and this one with the callers, each
call with a deadline. `get` is GetReservation; a turn of `reserve` is Reserve and ReleaseReservation, both on disk before
their answer, both counted as one call. `cost` is the time of a call through the gateway over that of a direct one with as
many callers; the goal at 64 callers is 1.6. CPU is what the kernel gave to each process for one call: where there are
fewer cores than processes, only that can be compared.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import uvloop

from gpuscale.api.allocator import v1 as api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.lifecycle import collecting_what_is_new
from gpuscale.common.wire import to_duration

CALLERS = (1, 64)
ROUNDS = 7
SECONDS = 1.0
TIMEOUT = 30.0
NODES, GPUS = 10, 8
GOAL = 1.6

Call = Callable[[], Awaitable[int]]
"""One turn of a caller; how many calls it was."""


@dataclass
class Result:
    """What was measured of one way, by round: seconds per call, and CPU seconds of each process per call."""

    seconds: list[float] = field(default_factory=list[float])
    cpu: list[tuple[float, ...]] = field(default_factory=list[tuple[float, ...]])

    def cpu_of(self, process: int) -> float:
        """Median of microseconds of one process."""
        return statistics.median(one[process] for one in self.cpu) * 1e6


def main() -> None:
    """Measure and print the table."""
    uvloop.run(_measure())


async def _measure() -> None:
    async with AsyncExitStack() as stack:
        server, direct_address = await stack.enter_async_context(_process("allocator"))
        gateway, address = await stack.enter_async_context(_process("gateway", direct_address))
        print(
            f"{'callers':>7}  {'call':<9}{'direct ms':>10}{'through ms':>11}{'cost':>7}"
            f"{'cpu us: caller':>15}{'server':>8}{'gateway':>8}  cpu cost"
        )
        direct = api.AllocatorServiceStub(await stack.enter_async_context(open_channel(direct_address)))
        through = api.AllocatorServiceStub(await stack.enter_async_context(open_channel(address)))
        name = (await through.Reserve(_request(), timeout=TIMEOUT)).reservation.name
        kinds: dict[str, tuple[Call, Call]] = {
            "get": (_get(direct, name), _get(through, name)),
            "reserve": (_reserve(direct), _reserve(through)),
        }
        for callers in CALLERS:
            for kind, ways in kinds.items():
                results = (Result(), Result())
                for _ in range(ROUNDS):
                    for call, result in zip(ways, results, strict=True):
                        await _round(call, callers, (os.getpid(), server, gateway), result)
                _print(callers, kind, *results)


def _print(callers: int, kind: str, direct: Result, through: Result) -> None:
    cost = statistics.median(b / a for a, b in zip(direct.seconds, through.seconds, strict=True))
    cpu = statistics.median(sum(b) / (a[0] + a[1]) for a, b in zip(direct.cpu, through.cpu, strict=True))
    goal = f" (goal {GOAL})" if callers == CALLERS[-1] else ""
    times = [statistics.median(one.seconds) * callers * 1000 for one in (direct, through)]
    print(
        f"{callers:>7}  {kind:<9}{times[0]:>10.2f}{times[1]:>11.2f}{cost:>7.2f}"
        f"{through.cpu_of(0):>15.0f}{through.cpu_of(1):>8.0f}{through.cpu_of(2):>8.0f}  {cpu:.2f}{goal}",
        flush=True,
    )


async def _round(call: Call, callers: int, processes: tuple[int, ...], result: Result) -> None:
    """Measure one round of a call."""
    before, started, count = [_cpu(process) for process in processes], time.perf_counter(), 0
    end = started + SECONDS

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < end:
            made = await call()
            count += made

    await asyncio.gather(*(caller() for _ in range(callers)))
    result.seconds.append((time.perf_counter() - started) / count)
    used = zip(processes, before, strict=True)
    result.cpu.append(tuple((_cpu(process) - earlier) / count for process, earlier in used))


def _cpu(process: int) -> float:
    """Seconds of CPU that a process has used."""
    if process == os.getpid():
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _request() -> api.ReserveRequest:
    return api.ReserveRequest(
        request_id=str(uuid4()), holder="bench", ask=api.Ask(gpu_count=1), ttl=to_duration(60)
    )


def _get(stub: api.AllocatorServiceStub, name: str) -> Call:
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


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[tuple[int, str]]:
    """A process of this file, until the end of the block: its id and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.gateway", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process.pid, (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


async def _serve_allocator(folder: Path) -> None:
    from tests.support.allocator import allocator, calling
    from tests.support.fake_fleet import FakeFleet, node_message, serving

    fleet = FakeFleet(*(node_message(f"n{index}", count=GPUS) for index in range(NODES)))
    async with serving(fleet) as fleet_address, allocator(folder, fleet_address) as address:
        async with calling(address) as client:
            await client.ready(60)
        print(address, flush=True)
        await asyncio.Event().wait()


async def _serve_gateway(allocator_address: str) -> None:
    from gpuscale.common.rpc.server import Server
    from gpuscale.gateway.main import open_gateway
    from gpuscale.gateway.settings import GatewaySettings

    settings = GatewaySettings(listen="127.0.0.1:0", allocator_address=allocator_address)
    server = Server(settings.server_options(), settings.authenticator())
    async with open_gateway(settings) as (forwarder, services):
        server.add_generic(forwarder, services)
        print(server.bind(), flush=True)
        async with server:
            await asyncio.Event().wait()


if __name__ == "__main__":
    with collecting_what_is_new(), tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as place:
        if sys.argv[1] == "gateway":
            uvloop.run(_serve_gateway(sys.argv[2]))
        else:
            uvloop.run(_serve_allocator(Path(place)))
