"""Processes as Linux shows them in /proc: who they are, and which of them belong to a replica. Blocking; call it in a thread.

A process is its pid together with the tick of the boot at which it started: pids are used again, the pair is not.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuscale.autoscaler.adapters.records import ProcessId

REPLICA_VARIABLE = "GPUSCALE_REPLICA"
_ROUNDS = 50
_ROUND_SECONDS = 0.1
_PROC = Path("/proc")
_ZOMBIES = frozenset({"Z", "X"})


@dataclass(frozen=True, slots=True)
class _Stat:
    id: ProcessId
    state: str
    session: int


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None if there is none."""
    stat = _stat(pid)
    return stat.id if stat else None


def find_leader(replica: str, user: int | None = None) -> ProcessId | None:
    """The main process of a replica by its environment: the oldest that leads a session of its own.

    `user` is whom replicas run as, here and below; None for the user of this process.
    """
    leaders = [
        stat.id
        for stat in _stats(user)
        if stat.session == stat.id.pid and _has_variable(stat.id.pid, replica)
    ]
    return min(leaders, key=lambda leader: leader.start_ticks, default=None)


def members(replica: str, leader: ProcessId, user: int | None = None) -> list[ProcessId]:
    """What a replica left behind when its main process ended: its session, and whatever has its variable.

    A session keeps its number, so that no new process gets it as a pid, for as long as one of its members lives: if
    its number is another process by now, nothing of the session is left.
    """
    # Session 0 holds processes of every kind: the kernel's, and those that came into a container from outside.
    session_may_live = leader.pid > 1 and identify(leader.pid) in {None, leader}
    return [
        stat.id
        for stat in _stats(user)
        if stat.state not in _ZOMBIES
        and stat.id.start_ticks >= leader.start_ticks
        and ((session_may_live and stat.session == leader.pid) or _has_variable(stat.id.pid, replica))
    ]


def kill_members(replica: str, leader: ProcessId, user: int | None = None) -> int:
    """Kill what a replica left behind, and what that starts meanwhile; returns how many those were.

    The main process must have ended.
    """
    killed: set[ProcessId] = set()
    for _ in range(_ROUNDS):
        left = members(replica, leader, user)
        if not left:
            break
        killed.update(left)
        _kill_and_wait(left)
    return len(killed)


def _kill_and_wait(processes: list[ProcessId]) -> None:
    """Kill each, and wait a moment for all of them; a pidfd keeps the signal from hitting a successor."""
    poll = select.poll()
    descriptors: list[int] = []
    try:
        for process in processes:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(process.pid)
                descriptors.append(descriptor)
                if identify(process.pid) == process:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    poll.register(descriptor, select.POLLIN)
        poll.poll(_ROUND_SECONDS * 1000)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _stats(user: int | None) -> Iterator[_Stat]:
    """Every process of that user."""
    user = os.geteuid() if user is None else user
    for entry in os.scandir(_PROC):
        if entry.name.isdecimal():
            with suppress(OSError):
                if entry.stat().st_uid == user and (stat := _stat(int(entry.name))):
                    yield stat


def _stat(pid: int) -> _Stat | None:
    """The fields of proc(5) /proc/PID/stat: 3 state, 6 session, 22 starttime. The second, the name, may hold anything."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return _Stat(ProcessId(pid, int(fields[19])), fields[0], int(fields[3]))


def _has_variable(pid: int, replica: str) -> bool:
    wanted = f"{REPLICA_VARIABLE}={replica}".encode()
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return wanted in environment.split(b"\0")
