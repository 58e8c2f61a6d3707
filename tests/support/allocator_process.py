"""`gpuscale-allocator` as a process that a test kills, pauses and starts again on the same directory."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from gpuscale.common.failpoints import VARIABLE

# Waits for a line before it begins, so that a successor has its imports behind it when it is needed.
_LAUNCHER = "import sys; from gpuscale.allocator.main import main; sys.stdin.readline(); sys.exit(main())"


class AllocatorProcess:
    """One life of the allocator. Started by `prepare`, set going by `go`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def prepare(
        cls, data_dir: Path, listen: str, fleet_address: str, failpoints: str = ""
    ) -> "AllocatorProcess":
        """Start a process that has imported everything and waits to be told to go on."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUSCALE")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _LAUNCHER,
            *("--data-dir", str(data_dir)),
            *("--listen", listen),
            *("--fleet-address", fleet_address),
            *("--log-level", "error"),
            env=environment | {VARIABLE: failpoints},
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    def go(self) -> None:
        """Let it serve."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.close()

    async def ended(self, timeout: float = 10.0) -> tuple[int, str]:
        """Wait for its end; its exit code (negative: the signal) and what it wrote to stderr."""
        async with asyncio.timeout(timeout):
            _, stderr = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, stderr.decode()

    async def kill(self) -> None:
        """kill -9, if it still runs."""
        if self.alive:
            self._process.kill()
        await self._process.wait()

    async def pause(self, seconds: float) -> None:
        """Stop it in its tracks for a while."""
        if self.alive:
            self._process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            self._process.send_signal(signal.SIGCONT)
