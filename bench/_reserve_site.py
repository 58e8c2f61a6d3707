"""The server of `bench.reserve`: an allocator and a bare echo on one loop of one process, pinned to one core."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop

from bench._callers import Caller, connected
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.lifecycle import collecting_what_is_new

GPUS = 8
ECHO = "/bench.Echo/Echo"
DATABASE = "BENCH_DATABASE"
"""Variable with the URL of the database; a URL is no argument, which every user could read."""
FLEET = "BENCH_FLEET"
"""Variable with the address of a fleet, where it is not to be one of the server's own."""


@dataclass(frozen=True)
class Site:
    """A server process, what calls its allocator and its echo, and the address of the allocator."""

    pid: int
    allocator: Caller
    echo: Caller
    address: str


def pin(index: int) -> None:
    """Keep this process on one of the machine's cores, where there are several, whichever one its parent keeps to."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def open_site(
    client: str, nodes: int, points: str = "", database: str = "", *, reports: bool = False, fleet: str = ""
) -> AsyncIterator[Site]:
    """A server process with so many nodes of eight GPUs, until the end of the block; `points` are failpoints.

    With `fleet` they are those of the fleet at that address. With `reports` each node reports once a second, its GPUs ever busy in another way. Its state is in a temporary folder, or in `database`. `client` is the sort of `bench._callers`.
    """
    with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder:
        server = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "bench._reserve_site", folder, str(nodes), "reports" if reports else ""),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {tasks.FAILPOINTS: points, DATABASE: database, FLEET: fleet},
        )
        try:
            assert server.stdout is not None
            reserve_address, echo_address = (await server.stdout.readline()).decode().split()
            async with (
                connected(client, reserve_address) as allocator,
                connected(client, echo_address) as echo,
            ):
                yield Site(server.pid, allocator, echo, reserve_address)
        finally:
            server.terminate()
            await server.wait()


async def _serve(folder: Path, nodes: int, *, reports: bool) -> None:
    from tests.support.allocator import allocator, calling
    from tests.support.fake_fleet import FakeFleet, gpu_message, node_message, serving

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
    database = os.environ.get(DATABASE, "")
    async with (
        serving(fleet) as fleet_address,
        allocator(folder, os.environ.get(FLEET) or fleet_address, database=database) as address,
    ):
        if not os.environ.get(FLEET):
            async with calling(address) as client:
                await client.ready(60)
        print(address, f"127.0.0.1:{port}", flush=True)
        chance = random.Random(1)
        while reports:
            for index in range(nodes):
                percents = [float(chance.randrange(101)) for _ in range(GPUS)]
                gpus = [gpu_message(f"n{index}-{at}", at, utilization=one) for at, one in enumerate(percents)]
                fleet.put(node_message(f"n{index}", *gpus))
                await asyncio.sleep(1 / nodes)
        await asyncio.Event().wait()


if __name__ == "__main__":
    pin(0)
    with collecting_what_is_new():  # as in every program of ours
        uvloop.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), reports=sys.argv[3:] == ["reports"]))
