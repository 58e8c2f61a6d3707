"""`gpuscalectl up` as a process of its own."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

CTL = (sys.executable, "-m", "gpuscale.cli.main")
ADDRESS = re.compile(r"(127\.0\.0\.1:\d+)")


def ctl_environment(**more: str) -> dict[str, str]:
    """This process's environment without gpuscale's own variables, plus `more`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPUSCALE")}
    return clean | {"NO_COLOR": "1"} | more


class Up:
    """Starts `gpuscalectl up` below a folder and waits until its banner says where it listens.

    Attributes: `address` ("127.0.0.1:port"), `ready_seconds` (from start of the process to the banner), `banner`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        simulate: int | None = None,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.errors = folder / "up.stderr"
        command = [*CTL, "up", "--listen", "127.0.0.1:0", "--data-dir", str(folder / "data"), *arguments]
        if simulate is not None:
            command += ["--simulate", str(simulate)]
        started = time.monotonic()
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment or ctl_environment(),
            )
        try:
            self.banner, self.address = self._wait_for_banner()
        except BaseException:
            self.kill()
            raise
        self.ready_seconds = time.monotonic() - started

    def _wait_for_banner(self) -> tuple[str, str]:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        output, deadline = "", time.monotonic() + 90
        while time.monotonic() < deadline:
            readable, _, _ = select.select([descriptor], [], [], 0.5)
            if readable:
                part = os.read(descriptor, 4096).decode()
                if not part:
                    break
                output += part
            found = ADDRESS.search(output)
            if found and "GPUs" in output and output.endswith("\n"):
                return output, found.group(1)
        raise AssertionError(f"no banner; stdout: {output!r}; stderr: {self.errors.read_text()[-3000:]}")

    def kill(self) -> None:
        """End it as a power cut would: kill -9."""
        self.process.kill()
        self.process.wait()
        self._close()

    def stop(self, timeout: float = 15.0) -> tuple[int, float]:
        """SIGTERM; returns (exit code, seconds it took)."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout)
        self._close()
        return code, time.monotonic() - started

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
