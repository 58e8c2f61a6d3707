"""An address and a directory at which one allocator process after the other lives, with a client of it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from tests.support.allocator import Client
from tests.support.allocator_process import AllocatorProcess
from tests.support.fake_fleet import FakeFleet, node_message, serving
from tests.support.ports import free_port

QUICK_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]


class Site:
    """Starts the processes and ends them all."""

    def __init__(self, data_dir: Path, fleet_address: str, client: Client, listen: str) -> None:
        self.client = client
        self._data_dir = data_dir
        self._fleet_address = fleet_address
        self._listen = listen
        self._all: list[AllocatorProcess] = []

    async def prepare(self, failpoints: str = "") -> AllocatorProcess:
        """A process that has only to be let go."""
        process = await AllocatorProcess.prepare(
            self._data_dir, self._listen, self._fleet_address, failpoints
        )
        self._all.append(process)
        return process

    async def start(self, failpoints: str = "") -> AllocatorProcess:
        """A process that serves."""
        process = await self.prepare(failpoints)
        await self.go(process)
        return process

    async def go(self, process: AllocatorProcess) -> None:
        """Let a prepared process go on and wait until it serves, or has met its failpoint already."""
        process.go()
        while process.alive:
            try:
                await self.client.ready(timeout=1.0)
            except AssertionError:
                continue
            return

    async def close(self) -> None:
        """Kill what still runs."""
        for process in self._all:
            await process.kill()


@asynccontextmanager
async def site(data_dir: Path, *, gpus: int = 8) -> AsyncGenerator[Site]:
    """A site below a fleet with one node."""
    listen = f"127.0.0.1:{free_port()}"
    async with (
        serving(FakeFleet(node_message("n0", count=gpus))) as fleet_address,
        grpc.aio.insecure_channel(listen, options=QUICK_RECONNECT) as channel,
    ):
        place = Site(
            data_dir, fleet_address, Client(allocator_api.AllocatorServiceStub(channel), 3.0), listen
        )
        try:
            yield place
        finally:
            await place.close()
