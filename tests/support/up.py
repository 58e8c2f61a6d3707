"""`gpuscalectl up` as a process of its own: forked (`tests.support.forked`), or begun as a user begins it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Self

from tests.support.cli import Ran
from tests.support.forked import Forked

CTL = (sys.executable, "-m", "gpuscale.cli.main")


def main(arguments: list[str]) -> None:
    """Be `gpuscalectl`, in a forked process.

    On a busy machine it may stand still: its node is not silent then, and it may take longer to end. A library that
    `LD_LIBRARY_PATH` leads to is loaded before: a process that is forked does not look there again.
    """
    from gpuscale.allocator.usecases import fleet
    from gpuscale.cli import main as program
    from gpuscale.common.runtime import lifecycle
    from gpuscale.monitor.model import nodes

    vars(fleet)["FRESH_PERIODS"] = vars(nodes)["STALE_PERIODS"] = 60
    lifecycle.STOP_WARNING_SECONDS, lifecycle.STOP_LIMIT_SECONDS = 25.0, 30.0
    if "NVML_DOUBLE_CONFIG" in os.environ:
        from tests.support.nvml_double.build import load

        load(Path(os.environ["LD_LIBRARY_PATH"].partition(os.pathsep)[0]))
    sys.argv = ["gpuscalectl", *arguments]
    program.main()


ADDRESS = re.compile(r"(127\.0\.0\.1:\d+)")


def ctl_environment(**more: str) -> dict[str, str]:
    """This process's environment without gpuscale's own variables, plus `more`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GPUSCALE")}
    return clean | {"NO_COLOR": "1"} | more


class Up:
    """Starts `gpuscalectl up` below a folder and waits until its banner says where it listens.

    Attributes: `address` ("127.0.0.1:port"), `banner`.

    Args:
        typed: begin it by the program `gpuscalectl`, with its own command line and environment in /proc; takes a second more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        simulate: int | None = None,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        typed: bool = False,
    ) -> None:
        self.folder = folder
        self.errors = folder / "up.stderr"
        self._out = folder / "up.stdout"
        self._out.unlink(missing_ok=True)
        words = ["up", "--listen", "127.0.0.1:0", "--data-dir", str(folder / "data"), *arguments]
        if simulate is not None:
            words += ["--simulate", str(simulate)]
        clean = environment or ctl_environment()
        self.process: Forked | subprocess.Popen[bytes]
        if typed:
            with self.errors.open("ab") as errors, self._out.open("ab") as out:
                self.process = subprocess.Popen([*CTL, *words], stdout=out, stderr=errors, env=clean)
        else:
            self.process = Forked("tests.support.up", words, clean, self.errors, self._out)
        try:
            self.banner, self.address = self._wait_for_banner()
        except BaseException:
            self.kill()
            raise

    def _wait_for_banner(self) -> tuple[str, str]:
        output, deadline = "", time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            output = self._out.read_text() if self._out.exists() else ""
            found = ADDRESS.search(output)
            if found and "GPUs" in output and output.endswith("\n"):
                return output, found.group(1)
            time.sleep(0.02)
        raise AssertionError(f"no banner; stdout: {output!r}; stderr: {self.errors.read_text()[-3000:]}")

    def kill(self) -> None:
        """End it as a power cut would: kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()


class Typed:
    """`gpuscalectl` (or another module) with these words, forked; `stdout` and `stderr` are read as they come."""

    def __init__(
        self, *words: str, environment: Mapping[str, str] | None = None, module: str = "tests.support.up"
    ) -> None:
        (out, to_out), (err, to_err) = Pipe(duplex=False), Pipe(duplex=False)
        self._process = Forked(module, words, environment or ctl_environment(), to_err, to_out)
        self.stdout, self.stderr = (os.fdopen(os.dup(one.fileno())) for one in (out, err))
        for one in (out, to_out, err, to_err):
            one.close()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float = 60.0) -> int:
        return self._process.wait(timeout)

    def ended(self) -> Ran:
        """Wait until nobody writes for it any more; what it wrote and was not read yet."""
        with self.stdout, self.stderr:
            out, err = self.stdout.read(), self.stderr.read()
        return Ran(self.wait(), out, err)

    def close(self) -> None:
        """kill -9, if it still runs."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        self.stdout.close()
        self.stderr.close()
