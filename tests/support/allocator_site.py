"""An address and a directory at which one allocator process after the other lives, with a client of it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.secrets import SecretUrl
from tests.support.allocator import Client
from tests.support.allocator_process import AllocatorProcess, Launcher, launching
from tests.support.fake_fleet import FakeFleet, node_message, serving
from tests.support.ports import free_port

QUICK_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]


class Site:
    """Starts the processes."""

    def __init__(self, launcher: Launcher, args: list[str], client: Client) -> None:
        self.client = client
        self.launcher = launcher
        self._args = args

    def prepare(self, failpoints: str = "") -> AllocatorProcess:
        """A process that has only to be let go."""
        return self.launcher.prepare(self._args, failpoints)

    async def start(self, failpoints: str = "") -> AllocatorProcess:
        """A process that serves."""
        process = self.prepare(failpoints)
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


def config_file(data_dir: Path, database: SecretUrl) -> Path:
    """A file that names the database, which no flag may."""
    path = data_dir.with_name(f"{data_dir.name}.toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(f'[allocator]\ndatabase = "{database.reveal()}"\n')
    return path


@asynccontextmanager
async def site(
    data_dir: Path, *, gpus: int = 8, nodes: int = 1, database: SecretUrl | None = None
) -> AsyncGenerator[Site]:
    """A site below a fleet with so many nodes of so many GPUs.

    The state is in `data_dir`, or in a database.
    """
    listen = f"127.0.0.1:{free_port()}"
    fleet = FakeFleet(*(node_message(f"n{index}", count=gpus) for index in range(nodes)))
    async with (
        serving(fleet) as fleet_address,
        grpc.aio.insecure_channel(listen, options=QUICK_RECONNECT) as channel,
        launching(data_dir.with_name(f"{data_dir.name}-logs")) as launcher,
    ):
        args = ["--data-dir", str(data_dir), "--listen", listen, "--fleet-address", fleet_address]
        args += [] if database is None else ["--config", str(config_file(data_dir, database))]
        yield Site(launcher, args, Client(allocator_api.AllocatorServiceStub(channel), 3.0))
