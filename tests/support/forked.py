"""Programs in processes that are forked of one that has imported them, so that a start costs no second of imports."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

from gpuscale.common.runtime import tasks

_forks = get_context("forkserver")
_forks.set_forkserver_preload(
    ["gpuscale.autoscaler.adapters.main", "gpuscale.up.main", "tests.support.allocator_process"]
)


@cache
def ready() -> None:
    """Have everything imported; the first start does so otherwise. Blocks for some seconds, once."""
    grpc = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "false"}  # as programs import it
    with patch.dict(os.environ, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", **grpc):
        forkserver.ensure_running()
    process = _forks.Process(target=int)
    process.start()
    process.join()


class Forked:
    """`python -m MODULE ARGUMENTS` with nothing but this environment.

    Its output goes to the end of `log`; where there is `out`, what it writes to standard output goes there. Each is a file, or
    the end of a pipe.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path | Connection | None = None,
        out: Path | Connection | None = None,
    ) -> None:
        ready()
        files = [file or log or Path(os.devnull) for file in (out, log)]
        given = (module, [*arguments], dict(environment), files)
        self._process = _forks.Process(target=_be, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit code. Raises subprocess.TimeoutExpired: it still runs."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _be(
    module: str, arguments: list[str], environment: dict[str, str], files: list[Path | Connection]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in enumerate(files, 1):
        if isinstance(file, Path):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
        else:
            os.dup2(file.fileno(), descriptor)
            # What is written through was opened for a file, in which one can seek.
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    sys.argv = [module, *arguments]
    tasks._points = tasks.parse_failpoints(environment.get(tasks.FAILPOINTS, ""))
    sys.exit(importlib.import_module(module).main(arguments))
