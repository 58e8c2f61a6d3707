"""One worker process: started in a session of its own or adopted, its end noticed by a pidfd.

A pidfd becomes readable when its process ends, whether or not that is a child of ours, so a worker that an earlier run
of the adapter started is watched just as its own. Only of a child is the exit code known.
"""

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Self

from gpuscale.autoscaler.adapters.procfs import identify
from gpuscale.autoscaler.adapters.records import ProcessId
from gpuscale.autoscaler.adapters.templates import Launch

_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class WorkerProcess:
    """A process that runs, or ran.

    Attributes:
        id: which process it is.
        ended: done when it has ended, with its exit code: negative for the signal that ended it, None where unknown.
    """

    def __init__(self, process: ProcessId, descriptor: int, child: subprocess.Popen[bytes] | None) -> None:
        self.id = process
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int | None] = self._loop.create_future()
        self._descriptor = descriptor
        self._child = child
        self._loop.add_reader(descriptor, self._on_end)

    @classmethod
    async def start(cls, launch: Launch, log: Path) -> Self:
        """Start a process that leads its own session, with no input and its output appended to the log.

        Raises:
            OSError: the log, the working directory or the program cannot be used.
        """
        child, process = await asyncio.to_thread(_spawn, launch, log)
        return cls(process, os.pidfd_open(child.pid), child)

    @classmethod
    async def adopt(cls, process: ProcessId) -> Self | None:
        """Watch a process that an earlier run of the adapter started; None if it has ended."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return None
        if await asyncio.to_thread(identify, process.pid) != process:
            os.close(descriptor)
            return None
        return cls(process, descriptor, None)

    def terminate(self) -> None:
        """Ask it to finish: SIGTERM to the process itself, not to those that it started."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once. What it started is left to `procfs.kill_members`."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if not self.ended.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        code = None if self._child is None else self._child.poll()
        if not self.ended.done():
            self.ended.set_result(code)


def _spawn(launch: Launch, log: Path) -> tuple[subprocess.Popen[bytes], ProcessId]:
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = os.open(log, _LOG_FLAGS, 0o600)
    try:
        child = subprocess.Popen(
            launch.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=launch.working_dir,
            env=launch.env,
            start_new_session=True,
        )
    finally:
        os.close(output)
    process = identify(child.pid)
    if process is None:
        child.kill()
        child.wait()
        raise FileNotFoundError("no /proc to watch processes in")
    return child, process
