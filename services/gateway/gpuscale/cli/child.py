"""Commands that `gpuscalectl` runs for somebody: signals are passed on to them, and exit codes are those of a shell."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

NOT_FOUND, NOT_RUN = 127, 126
"""Exit codes of a command that is not there, and of one that cannot be run."""
STDERR = 2
"""Where a command's standard output goes, while that of `gpuscalectl` is data."""
OF_SIGNAL = 128
"""Added to the number of the signal that ended a command."""

RESERVATION = "GPUSCALE_RESERVATION"
"""Variable that names the reservation, in the environment of a command that runs on it."""

Handler = Callable[[int, FrameType | None], Any] | int | None
"""What `signal.signal` returns."""

_FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT})


class Forwarding:
    """Passes signals on to a command while its block runs, those too that came before the command had started.

    What a terminal sends on Ctrl-C it sends to the command itself as well, so that is not passed on.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[signal.Signals, Handler] = {}

    def to(self, process: "subprocess.Popen[bytes]") -> None:
        """The command has started."""
        self._process = process
        while self._early:
            process.send_signal(self._early.pop(0))

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if number in _OF_TERMINAL and sys.stdin.isatty():
            return
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def signal_all(variable: str, number: int = 0) -> bool:
    """Send a signal to every process with this NAME=VALUE in its environment, 0 for none; whether there is one."""
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            descriptor = os.pidfd_open(int(path.parent.name))
            try:
                if variable.encode() in path.read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(descriptor, number)
                    found = True
            finally:
                os.close(descriptor)
    return found


def exit_code(returned: int) -> int:
    """The exit code of a command that has ended; 128 and its number where a signal ended it."""
    return OF_SIGNAL - returned if returned < 0 else returned
