"""An engine's adapter as a process that a test kills and starts again on the same directory."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from gpuscale.common.runtime.tasks import FAILPOINTS


class EngineProgram:
    """The lives of `gpuscale-adapter ENGINE --config FILE`.

    Args:
        engine: its name.
        config: its file, which names the autoscaler, the data directory and the templates.
        environment: variables beside those of this process; the GPUSCALE_ ones of this process are left out.
    """

    def __init__(self, engine: str, config: Path, environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._config = config
        own = {name: value for name, value in os.environ.items() if not name.startswith("GPUSCALE")}
        self._environment = {**own, **environment}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, failpoints: str = "") -> None:
        """Begin a life."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "gpuscale.autoscaler.adapters.main", self._engine),
            *("--config", str(self._config)),
            env={**self._environment, FAILPOINTS: failpoints},
        )

    async def ended(self, timeout: float = 120.0) -> int:
        """Wait for the end of this life; negative: the signal that ended it."""
        assert self._process is not None
        async with asyncio.timeout(timeout):
            return await self._process.wait()

    async def kill(self) -> None:
        """kill -9, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def engine_program(
    engine: str, config: Path, environment: Mapping[str, str]
) -> AsyncGenerator[EngineProgram]:
    """A program that is not started yet; leaving kills it."""
    program = EngineProgram(engine, config, environment)
    try:
        yield program
    finally:
        await program.kill()
