"""Worker processes: started in their own session or adopted, watched by a pidfd, and what they leave behind.

A pidfd becomes readable when its process ends, whether or not that is our child, so a worker of an earlier run of the adapter
is watched like its own. Exit codes are only known of children.

A process is identified by its pid and the tick of the boot at which it started: pids are reused, the pair is not. Everything
that looks at processes blocks; call it in a thread.
"""

import asyncio
import os
import pwd
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from gpuscale.autoscaler.adapters.templates import Launch
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.secrets import environment

REPLICA_VARIABLE = "GPUSCALE_REPLICA"
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_ROUNDS = 50
_ROUND_SECONDS = 0.1
_ZOMBIES = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of the current boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class WorkerUser:
    """The user of workers."""

    uid: int | None = None  # the user; None for the adapter's own
    home: str = ""  # its home directory
    # the command prefix that runs as that user, without any capability of the adapter
    prefix: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str) -> Self:
        """The user of that name, or the adapter's own; FailedPreconditionError (WORKER_USER) if it cannot be used."""
        if not name:
            return cls()
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise FailedPreconditionError(
                f"worker_user: there is no user {name}", reason="WORKER_USER"
            ) from None
        setpriv = shutil.which("setpriv") or "/usr/bin/setpriv"
        become = (f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups", "--no-new-privs")
        user = cls(
            entry.pw_uid, entry.pw_dir, (setpriv, *become, "--inh-caps=-all", "--ambient-caps=-all", "--")
        )
        tried = subprocess.run(user.command(("/bin/true",)), capture_output=True, timeout=10, check=False)
        if tried.returncode:
            raise FailedPreconditionError(
                f"worker_user: cannot start programs as {name}, which needs CAP_SETUID, CAP_SETGID, CAP_KILL and"
                f" CAP_SYS_PTRACE: {tried.stderr.decode(errors='replace').strip()}",
                reason="WORKER_USER",
            )
        return user

    def command(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """The command that runs `argv` as this user."""
        return (*self.prefix, *argv)

    def environment(self) -> Mapping[str, str]:
        """The adapter's own environment, with this user's home."""
        return environment() if self.uid is None else {**environment(), "HOME": self.home}


class WorkerProcess:
    """A running or ended process; `ended` is done with its exit code: negative for a signal, None if unknown."""

    def __init__(self, process: ProcessId, descriptor: int, child: subprocess.Popen[bytes] | None) -> None:
        self.id = process
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int | None] = self._loop.create_future()
        self._descriptor = descriptor
        self._child = child
        self._loop.add_reader(descriptor, self._on_end)

    @classmethod
    async def start(cls, launch: Launch, log: Path, user: WorkerUser) -> Self:
        """Start a process in its own session, without input, its output appended to the log; OSError."""
        child, process = await asyncio.to_thread(_spawn, launch, log, user)
        return cls(process, os.pidfd_open(child.pid), child)

    @classmethod
    async def adopt(cls, process: ProcessId) -> Self | None:
        """Watch a process of an earlier run of the adapter; None if it has ended."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return None
        if await asyncio.to_thread(identify, process.pid) != process:
            os.close(descriptor)
            return None
        return cls(process, descriptor, None)

    def terminate(self) -> None:
        """Ask it to finish: SIGTERM to the process itself, not to its children."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it at once. `kill_members` kills what it started."""
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


def _spawn(launch: Launch, log: Path, user: WorkerUser) -> tuple[subprocess.Popen[bytes], ProcessId]:
    for folder in (log.parent.parent, log.parent):  # `parents` would make the first readable by all
        folder.mkdir(mode=0o700, exist_ok=True)
    output = os.open(log, _LOG_FLAGS, 0o600)
    try:
        child = subprocess.Popen(
            user.command(launch.argv),
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


def identify(pid: int) -> ProcessId | None:
    """The process that currently has this pid; None if there is none."""
    try:
        process = psutil.Process(pid)
        while True:
            # Ticks from the boot to its start, independent of clock changes, unlike psutil's `create_time`.
            boot = psutil.boot_time()
            ticks = round((process.create_time() - boot) * _TICKS_PER_SECOND)
            if psutil.boot_time() == boot:
                return ProcessId(pid, ticks)
    except psutil.Error:
        return None


def find_leader(replica: str, user: int | None = None) -> ProcessId | None:
    """The main process of a replica by its environment: the oldest that leads its own session.

    `user` is the user of replicas, here and below; None for the user of this process.
    """
    leaders = (
        identify(process.pid)
        for process in _processes(user)
        if _session(process) == process.pid and _has_variable(process, replica)
    )
    return min((leader for leader in leaders if leader), key=lambda leader: leader.start_ticks, default=None)


def members(replica: str, leader: ProcessId, user: int | None = None) -> list[ProcessId]:
    """What a replica left behind when its main process ended: its session, and whatever has its variable.

    A session keeps its number, so that no new process gets it as a pid, while any member lives: if another process has the
    number by now, nothing of the session is left.
    """
    # Session 0 holds all kinds of processes: the kernel's, and those that entered a container from outside.
    session_may_live = leader.pid > 1 and identify(leader.pid) in {None, leader}
    found = (
        identify(process.pid)
        for process in _processes(user)
        if (session_may_live and _session(process) == leader.pid) or _has_variable(process, replica)
    )
    return [process for process in found if process and process.start_ticks >= leader.start_ticks]


def kill_members(replica: str, leader: ProcessId, user: int | None = None) -> int:
    """Kill what a replica left behind when its main process ended, and what that starts meanwhile; returns how many."""
    killed: set[ProcessId] = set()
    for _ in range(_ROUNDS):
        left = members(replica, leader, user)
        if not left:
            break
        killed.update(left)
        poll = select.poll()
        with ExitStack() as stack:
            for process in left:  # a pidfd keeps the signal from hitting a successor
                with suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(process.pid)
                    stack.callback(os.close, descriptor)
                    if identify(process.pid) == process:
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                        poll.register(descriptor, select.POLLIN)
            poll.poll(_ROUND_SECONDS * 1000)
    return len(killed)


def _processes(user: int | None) -> Iterator[psutil.Process]:
    """Every process of that user, except zombies. Not by `process_iter`, which caches what it read of a pid."""
    user = os.geteuid() if user is None else user
    for pid in psutil.pids():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.uids().effective == user and process.status() not in _ZOMBIES:
                yield process


def _session(process: psutil.Process) -> int:
    """The number of its session; 0 if it has ended."""
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


def _has_variable(process: psutil.Process, replica: str) -> bool:
    try:
        return process.environ().get(REPLICA_VARIABLE) == replica
    except (psutil.Error, OSError):
        return False
