"""Real servers for tests: a temporary folder and the processes that live in it, gone when the test run is gone.

Every server runs in a process group of its own. A guard process waits for the end of its input, which the test run
closes on purpose or by dying, then ends the groups and removes the folder.
"""

import os
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from tests.support.waiting import eventually_sync

CLOSE_TIMEOUT_S = 30.0

_GUARD = """
trap '' INT TERM HUP
while read -r _; do :; done
for note in "$1"/*.pgid; do
  [ -e "$note" ] && kill -s KILL -- "-$(cat "$note")" 2>/dev/null
done
until mv "$1" "$1.gone" 2>/dev/null; do sleep 0.05; done
(until rm -rf "$1.gone" 2>/dev/null; do sleep 0.05; done) &
"""


class GuardedProcess:
    """A process group started by `GuardedFolder.spawn`, together with the helpers its members start."""

    def __init__(self, popen: subprocess.Popen[bytes], note: Path) -> None:
        self._popen = popen
        self._note = note

    @property
    def running(self) -> bool:
        """True while the leader of the group exists, even if it is paused."""
        return self._popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every member of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, number)

    def end(self, number: signal.Signals, timeout: float) -> None:
        """End the leader with a signal (the whole group at once with SIGKILL) and wait until nobody is left.

        Raises subprocess.TimeoutExpired: the leader still runs.
        """
        helpers = psutil.Process(self._popen.pid).children(recursive=True) if self.running else []
        if number == signal.SIGKILL:
            self.send(number)
            for helper in helpers:  # those too that left the group, as PostgreSQL's do
                with suppress(psutil.NoSuchProcess):
                    helper.kill()
        else:
            self._popen.send_signal(number)
        self._popen.wait(timeout)
        # From now on the number of the group may be given to others, so the guard must not know it.
        self._note.unlink(missing_ok=True)
        eventually_sync(lambda: not any(_is_alive(helper) for helper in helpers))


class GuardedFolder:
    """A temporary folder at `path` for the files of servers that `spawn` starts; `close` leaves nothing of either."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._started: list[subprocess.Popen[bytes]] = []
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def spawn(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> GuardedProcess:
        """Start a program with no input and its output appended to `NAME.out` in the folder."""
        with (self.path / f"{name}.out").open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            popen = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        self._started.append(popen)
        note = self.path / f"{name}.pgid"
        note.write_text(str(popen.pid))
        return GuardedProcess(popen, note)

    def close(self) -> None:
        """Let the guard end every process and remove the folder, the same way as after a crash of the test run."""
        self._guard.communicate(timeout=CLOSE_TIMEOUT_S)
        for popen in self._started:
            popen.wait(CLOSE_TIMEOUT_S)

    def tail(self) -> str:
        """The last 20 lines of everything the servers wrote, for the text of a failure."""
        written = [*self.path.glob("*.out"), *self.path.glob("log/*.log")]
        ends = [
            [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-20:]] for path in written
        ]
        return "\n".join(line for end in ends for line in end)


class PrivateServer(ABC):
    @abstractmethod
    def start(self) -> None:
        """Start it, and wait until it answers."""

    @abstractmethod
    def close(self) -> None:
        """End it and remove every file."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
