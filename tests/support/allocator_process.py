"""Allocators as processes that a test kills, pauses and starts again on the same directory."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[2]


class AllocatorProcess:
    """One life of the allocator. `go` lets it begin."""

    def __init__(self, launcher: "Launcher", life: int, args: list[str], failpoints: str) -> None:
        self._launcher = launcher
        self._order = {"life": life, "args": args, "failpoints": failpoints} | launcher.files(life)
        self.pid = 0
        self._going = False
        self.started = asyncio.Event()
        self.over = asyncio.Event()
        self.code = 0

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self.over.is_set()

    def go(self) -> None:
        """Let it begin to serve."""
        self._going = True
        self._launcher.order(self._order)

    def told(self, news: dict[str, int]) -> None:
        """The launcher tells that it began or ended."""
        if "pid" in news:
            self.pid = news["pid"]
            self.started.set()
        else:
            self.code = news["code"]
            self.over.set()

    async def ended(self, timeout: float = 20.0) -> tuple[int, str]:
        """Wait for its end; its exit code (negative: the signal) and what it wrote to stderr."""
        async with asyncio.timeout(timeout):
            await self.over.wait()
        return self.code, Path(str(self._order["log"])).read_text()

    async def kill(self) -> None:
        """kill -9, if it still runs."""
        if not self._going:
            return
        await self._signal(signal.SIGKILL)
        await self.ended()

    async def pause(self, seconds: float) -> None:
        """Stop it in its tracks for a while."""
        await self._signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        await self._signal(signal.SIGCONT)

    async def _signal(self, number: signal.Signals) -> None:
        async with asyncio.timeout(10):
            await self.started.wait()
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Launcher:
    """What forks the processes; with a planted bug in each of them, if one is named."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._lives: dict[int, AllocatorProcess] = {}
        self._numbers = count()
        self.wall = folder / "wall"
        self.wall.write_text("0")

    def prepare(self, args: list[str], failpoints: str = "") -> AllocatorProcess:
        """A process that has only to be let go."""
        life = next(self._numbers)
        self._lives[life] = AllocatorProcess(self, life, args, failpoints)
        return self._lives[life]

    def step_wall(self, seconds: float) -> None:
        """Set by how much the wall clock of the processes is off."""
        new = self.wall.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self.wall)

    def files(self, life: int) -> dict[str, object]:
        """Where a life writes its stderr, and where it reads the step of its wall clock."""
        return {"log": str(self._folder / f"life-{life}.log"), "wall": str(self.wall)}

    def order(self, order: dict[str, object]) -> None:
        """Have a process forked."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def follow(self) -> None:
        """Pass on what the launcher tells."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            news: dict[str, int] = json.loads(line)
            self._lives[news["life"]].told(news)

    async def close(self) -> None:
        """Kill what still runs."""
        for life in self._lives.values():
            await life.kill()


@asynccontextmanager
async def launching(folder: Path, plant: str = "") -> AsyncGenerator[Launcher]:
    """A launcher that has imported everything; `folder` is for logs."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUSCALE")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.allocator_launcher", plant),
        cwd=ROOT,
        env=environment | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    folder.mkdir(parents=True, exist_ok=True)
    launcher = Launcher(process, folder)
    following = asyncio.create_task(launcher.follow())
    try:
        yield launcher
    finally:
        await launcher.close()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await following
