"""Commands run by `gpuscalectl`: signals are forwarded, exit codes are like a shell's."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Self

import psutil

from gpuscale.cli.console.terminal import TERMINAL, note
from gpuscale.client.over_ssh import dying_with_us, exit_code

NOT_FOUND, NOT_RUN = 127, 126
"""Exit codes for a command that does not exist, and one that cannot be run."""
STDERR = 2
"""Where a command's standard output goes while that of `gpuscalectl` carries data."""
PAUSE = 0.05
"""Seconds between checks of stopping processes."""
LOOK = 0.5
"""Seconds between checks of adopted processes."""
_ERRNO_BYTES = 8
KILL_SECONDS = 2.0
"""Seconds for killed processes to end, unless stuck in the kernel."""
GUARD_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for processes left by a killed supervisor."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h

Handler = Callable[[int, FrameType | None], Any] | int | None
"""The return type of `signal.signal`."""

_FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OF_TERMINAL = frozenset({signal.SIGINT, signal.SIGQUIT})


class WaitingChild:
    """A child process that becomes the command it is sent, which saves the start of another Python.

    Create it before starting threads. The kernel kills it when this process ends without stopping it.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid: int = os.fork()
        if self.pid == 0:
            self._ours.close()
            try:
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                _, outputs, _, _ = socket.recv_fds(theirs, 1, 2, socket.MSG_CMSG_CLOEXEC)
                words, environment, directory = json.loads(theirs.makefile("rb").read())
                os.chdir(directory)
                for number, output in enumerate(outputs, 1):
                    os.dup2(output, number)
                os.closerange(3, theirs.fileno())  # such as the lock of the supervisor
                os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # undo what Python changed
                    signal.signal(number, signal.SIG_DFL)
                if os.getppid() == parent:  # otherwise it ended before the first call
                    os.execvpe(words[0], words, environment)  # noqa: S606
            except OSError as error:
                theirs.send(str(error.errno).encode())
            finally:
                os._exit(NOT_RUN)  # also if it gets no command
        theirs.close()

    def become(
        self, command: Sequence[str], variables: Mapping[str, str], outputs: Sequence[int]
    ) -> WaitingChild | int:
        """Like `start`, with these as standard output and standard error."""
        with self._ours:
            socket.send_fds(self._ours, [b"1"], outputs)
            told = [*command], {**TERMINAL.callers_environment(), **variables}, str(Path.cwd())
            self._ours.sendall(json.dumps(told).encode())
            self._ours.shutdown(socket.SHUT_WR)
            if not (failed := self._ours.recv(_ERRNO_BYTES)):
                return self
        self.wait()
        return _not_started(command, OSError(int(failed), os.strerror(int(failed))))

    def wait(self) -> int:
        """Like `Popen.wait`."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


Started = subprocess.Popen[bytes] | WaitingChild
"""A started command."""


def start(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
    stdout: int | None = None,
    prefix: Sequence[str] = (),
    dies_with_us: bool = False,
) -> subprocess.Popen[bytes] | int:
    """Start a command; if that fails, report it and return an exit code.

    `variables` are added to our caller's environment; `prefix` is a command that becomes it, as another user. The kernel kills
    it if it `dies_with_us` when this process ends without stopping it, as by SIGKILL.
    """
    words = list(command)
    try:
        if dies_with_us and shutil.which(words[0]):
            words = dying_with_us(words)
        return subprocess.Popen(
            [*prefix, *words], env={**TERMINAL.callers_environment(), **variables}, stdout=stdout
        )
    except OSError as error:
        return _not_started(command, error)


def _not_started(command: Sequence[str], error: OSError) -> int:
    note(f"error: {command[0]}: {error.strerror}")
    return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN


class Forwarding:
    """Forwards signals to a command while its block runs, including those from before its start.

    A terminal sends Ctrl-C to its foreground group, the command too, so that is not forwarded.

    Attributes:
        ending: the last signal that ends commands; 0 if none came.
    """

    def __init__(self) -> None:
        self.ending: int = 0
        self._pidfds: list[int] = []
        self._early: list[int] = []
        self._before: dict[signal.Signals, Handler] = {}

    def to(self, process: Started) -> None:
        """Forward signals to this started command, too."""
        # Not `Popen.send_signal`, which reaps an ended command; only its waiter may.
        self._pidfds.append(os.pidfd_open(process.pid))
        for number in self._early:
            self._send(self._pidfds[-1], number)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if number not in {signal.SIGUSR1, signal.SIGUSR2}:
            self.ending = number
        for one in range(3) if number in _OF_TERMINAL else ():
            with suppress(OSError):  # it is no terminal, or not ours
                if os.tcgetpgrp(one) == os.getpgrp():
                    return
        self._early.append(number)
        self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to the started commands."""
        for pidfd in self._pidfds:
            self._send(pidfd, number)

    @staticmethod
    def _send(pidfd: int, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(pidfd, number)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for pidfd in self._pidfds:
            os.close(pidfd)


class Offspring:
    """All processes that this process starts while its block runs, even if they detach.

    A process that calls setsid, forks twice or empties its environment stays in the tree: this process is a subreaper, which
    inherits orphans below it. Processes are identified by id and start time. What a daemon starts for a command
    (`docker run -d`, `systemd-run`) belongs to the daemon.
    """

    def __init__(self, child: WaitingChild | None = None) -> None:
        """`child`: a child that was started before."""
        try:  # the kernel's own list; psutil has to read all of /proc
            ours = set(map(int, Path("/proc/thread-self/children").read_text().split()))
        except FileNotFoundError:
            ours = {one.pid for one in psutil.Process().children()}
        # Children of a shell that became this program by exec.
        self._others = [psutil.Process(pid) for pid in ours - ({child.pid} if child else set())]

    def __enter__(self) -> Self:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the kernel gives it the orphans below
        return self

    def __exit__(self, *_: object) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def wait(self, process: Started) -> int:
        """Wait for the command, and reap orphans meanwhile; returns the same as `Popen.wait`."""
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None:
            if ended.si_pid == process.pid:
                break
            with suppress(ChildProcessError):  # another thread has waited for its own child
                os.waitpid(ended.si_pid, 0)
        return process.wait()

    def alive(self) -> list[psutil.Process]:
        """The running ones.

        psutil builds the tree from one reading of /proc, and misses the children of a parent that ends meanwhile. They become
        our own children, so a second reading finds them.
        """
        return self._look() or self._look()

    def _look(self) -> list[psutil.Process]:
        others = {*self._others}
        for one in self._others:
            with suppress(psutil.NoSuchProcess):
                others.update(one.children(recursive=True))
        found: list[psutil.Process] = []
        for one in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if one not in others and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def stop(self, until: float) -> list[psutil.Process]:
        """Send SIGTERM to all, and SIGKILL to those still running at `until` (of `time.monotonic`).

        Returns those that cannot be killed: of another user, or stuck in the kernel.
        """
        _send(self.alive(), signal.SIGTERM)
        while (left := self.alive()) and time.monotonic() < until:
            time.sleep(PAUSE)
        until = time.monotonic() + KILL_SECONDS
        while left and time.monotonic() < until:  # again: one may have forked meanwhile
            _send(left, signal.SIGKILL)
            time.sleep(PAUSE)
            left = self.alive()
        return left


class Adopted(Offspring):
    """Processes started by others, and their descendants."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    def wait_for_all(self) -> None:
        """Wait until all have ended."""
        while self.alive():
            time.sleep(LOOK)

    def _look(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for root in self._roots:
            with suppress(psutil.NoSuchProcess):
                if root.is_running() and root.status() != psutil.STATUS_ZOMBIE:
                    found += [root, *root.children(recursive=True)]
        return found


def guard() -> int | None:
    """Continue in a child of this process, which stays to stop what the child leaves running, as when it is killed.

    Call it before starting threads. The child handles signals. Returns None in the child, and its exit code here.
    """
    with Offspring() as offspring:
        child = os.fork()
        if child == 0:
            return None
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for one in (0, 1, 2):  # so that readers of our pipes wait for the child only
            os.dup2(nowhere, one)
        while (ended := os.wait())[0] != child:
            pass
        offspring.stop(time.monotonic() + GUARD_GRACE)
        until = time.monotonic() + KILL_SECONDS
        # When nothing is left: all descendants became children of this process.
        with suppress(ChildProcessError):
            while time.monotonic() < until:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    _send(offspring.alive(), signal.SIGKILL)
                    time.sleep(PAUSE)
        return exit_code(os.waitstatus_to_exitcode(ended[1]))


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _send(processes: Iterable[psutil.Process], number: int) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            one.send_signal(number)


def named(processes: Iterable[psutil.Process]) -> str:
    """Processes for a message: `python (123), sleep (124)`."""
    found: list[str] = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            found.append(f"{one.name()} ({one.pid})")
    return ", ".join(found)
