"""Allocators as processes that a test kills, pauses and starts again on the same directory."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

import grpc

from gpuscale.allocator import app as program
from gpuscale.allocator.usecases import accounting, notifying
from gpuscale.allocator.usecases import endings as sweeper
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.secrets import SecretUrl
from tests.support.allocator import Client
from tests.support.fake_fleet import FakeFleet, node_message, serving
from tests.support.forked import Forked, ready
from tests.support.ports import free_port

QUICK_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]
START_DELAY = 0.5
"""Seconds instead of the program's two: lives are short here, and without a sweep in them all GPUs would soon be held."""


def main(arguments: list[str]) -> int:
    """Be an allocator with its own arguments, whose wall clock is off by the seconds that stand in the file WALL.

    It looks at the use of what is granted as seldom as it is told.
    """
    wall, look, *words = arguments
    true_wall = SystemClock.wall

    def stepped(self: SystemClock) -> datetime:
        return true_wall() + timedelta(seconds=float(Path(wall).read_text() or 0))

    SystemClock.wall = stepped  # type: ignore[method-assign]
    sweeper.START_DELAY = START_DELAY
    accounting.LOOK, accounting.CHECKPOINT = float(look), 1
    notifying.LOOK, notifying.DOWN_AFTER = 0.2, 0.5
    return program.main([*words, "--log-level", "error"])


class AllocatorProcess:
    """One life of the allocator. `go` lets it begin."""

    def __init__(self, arguments: list[str], failpoints: str, log: Path) -> None:
        self._arguments = arguments
        self._failpoints = failpoints
        self._log = log
        self._process: Forked | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def go(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUSCALE")}
        environment["GPUSCALE_FAILPOINTS"] = self._failpoints
        self._process = Forked("tests.support.allocator_process", self._arguments, environment, self._log)

    async def ended(self, timeout: float = 120.0) -> tuple[int, str]:
        """Wait for its end; its exit code (negative: the signal) and what it wrote to stderr."""
        code = await asyncio.to_thread(self._process.wait, timeout)
        return code, self._log.read_text()

    async def kill(self) -> None:
        """kill -9, if it still runs."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            await self.ended()

    async def pause(self, seconds: float) -> None:
        self._process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._process.send_signal(signal.SIGCONT)


class Launcher:
    """Prepares the processes, and steps their wall clock.

    Each looks every `look` seconds at the use of what is granted, which writes: by default not before the call that is to meet a
    failpoint of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self.lives: list[AllocatorProcess] = []
        self.look = 3600.0
        self.wall = folder / "wall"
        self.wall.write_text("0")

    def prepare(self, arguments: list[str], failpoints: str = "") -> AllocatorProcess:
        """A process that has only to be let go."""
        log = self._folder / f"life-{next(self._numbers)}.log"
        self.lives.append(AllocatorProcess([str(self.wall), str(self.look), *arguments], failpoints, log))
        return self.lives[-1]

    def step_wall(self, seconds: float) -> None:
        """Set by how much the wall clock of the processes is off."""
        new = self.wall.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self.wall)


@asynccontextmanager
async def launching(folder: Path) -> AsyncGenerator[Launcher]:
    """A launcher once all is imported; `folder` is for logs. What still runs is killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(ready)
    launcher = Launcher(folder)
    try:
        yield launcher
    finally:
        for life in launcher.lives:
            await life.kill()


class Site:
    """Starts the processes."""

    def __init__(
        self, launcher: Launcher, arguments: list[str], channel: grpc.aio.Channel, fleet: FakeFleet
    ) -> None:
        self.client = Client(allocator_api.AllocatorServiceStub(channel), 60.0)
        self.channel = channel
        self.launcher = launcher
        self.arguments = arguments
        self.fleet = fleet

    def prepare(self, failpoints: str = "") -> AllocatorProcess:
        """A process that has only to be let go."""
        return self.launcher.prepare(self.arguments, failpoints)

    async def start(self, failpoints: str = "") -> AllocatorProcess:
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
    """A site below a fleet with so many nodes of so many GPUs; the state is in `data_dir`, or in a database."""
    listen = f"127.0.0.1:{free_port()}"
    fleet = FakeFleet(*(node_message(f"n{index}", count=gpus) for index in range(nodes)))
    async with (
        serving(fleet) as fleet_address,
        grpc.aio.insecure_channel(listen, options=QUICK_RECONNECT) as channel,
        launching(data_dir.with_name(f"{data_dir.name}-logs")) as launcher,
    ):
        args = ["--data-dir", str(data_dir), "--listen", listen, "--fleet-address", fleet_address]
        args += [] if database is None else ["--config", str(config_file(data_dir, database))]
        yield Site(launcher, args, channel, fleet)
