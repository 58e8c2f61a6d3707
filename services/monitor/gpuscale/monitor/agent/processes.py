"""Checks the process ids that a driver reports, and finds the programs and ancestors of processes.

Early 535 drivers fill v3 process records with the v2 stride, so that every second id is nonsense. In a container with its own
PID namespace, the driver's ids are the host's, so processes have neither name nor lineage there. A process that has ended may
still hold memory, and is then shown without a name.

psutil reads name, user and environment. Read without it: cgroups, ids in other PID namespaces, the highest id, and the start in
clock ticks since boot, which unlike psutil's date does not move with the wall clock, with the parent from the same line, at a
seventh of psutil's cost.
"""

import os
import pwd
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any

import psutil

from gpuscale.monitor.model.readings import GpuProcess, ProcessKey

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO
_PID_MAX_LIMIT = 4_194_304  # the kernel's, on 64-bit machines
_DEEPEST_LINEAGE = 64
_STARTED = 19  # starttime, among the fields after the program's name in /proc/PID/stat
# The lists of all GPUs are read at the same time, and their processes share ancestors.
_GLANCE_SECONDS = 0.5
_TRACES_KEPT = 4096
_LONGEST_TEXT = 1 << 16
# The cgroup of a pod, or of a container, which Docker, containerd, CRI-O and Podman name by 64 digits.
_CONTAINER = re.compile(r"/\S*?(?:[-/]pod[0-9a-f]{8}[-_][0-9a-f_-]{27}(?=[./])|[0-9a-f]{64})")
_POD = re.compile(r"[-/]pod([0-9a-f_-]+)$")
_MARK = re.compile(r"reservations/[a-z0-9._-]{1,63}")
_PYTHON = re.compile(r"python[\d.]*")
_PYTHON_FLAG = re.compile(r"-[bBdEiIOPqRsSuvx]+")  # flags without a value
_NAMED = re.compile(r"(?!-)[^=@\s]+")
_LONGEST_PROGRAM = 200
_NAMESPACE_IDS = re.compile(r"^NSpid:\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Glance:
    """A short-lived cache by pid: processes and the pids of their parents, and fields of GpuProcess."""

    entries: dict[int, tuple[ProcessKey, int]] = field(default_factory=dict[int, tuple[ProcessKey, int]])
    facts: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])


class UserNames:
    """Names of Unix users, each looked up once in a thread, since a directory service may be slow."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def name(self, user: int) -> str:
        """The name; the number while or if it is unknown."""
        if user not in self._names:
            self._names[user] = str(user)

            def look_up() -> None:
                with suppress(KeyError):
                    self._names[user] = pwd.getpwuid(user).pw_name

            threading.Thread(target=look_up, name="user-name", daemon=True).start()
        return self._names[user]


class ProcessNames:
    """Checks process ids against this host and describes processes. `foreign`: whether the driver's ids are not ours."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._proc = Path(psutil.PROCFS_PATH)
        self._now = now
        self._glance = _Glance()
        self._glance_until = now()
        self._traces: dict[ProcessKey, tuple[str, str]] = {}
        self._users = UserNames()
        try:
            self.foreign = str((self._proc / "self/ns/pid").readlink()) != _INITIAL_PID_NAMESPACE
        except OSError:
            self.foreign = True
        self._pid_max = self._read_pid_max()

    def believable(self, pids: Iterable[int]) -> bool:
        """Whether all could be process ids of this host."""
        ids = tuple(pids)
        if max(ids, default=0) > self._pid_max:
            self._pid_max = self._read_pid_max()
        return all(0 < pid <= self._pid_max for pid in ids)

    def merge(
        self, records: Iterable[tuple[int, int | None]], used: Mapping[int, Mapping[str, Any]] | None = None
    ) -> tuple[GpuProcess, ...]:
        """One process per id, by id; a program that computes and draws has two records with the same memory.

        `used`: utilization by id and field. Facts from /proc are cached for half a second.
        """
        memory: dict[int, int | None] = {}
        for pid, size in records:
            known = memory.get(pid)
            memory[pid] = size if known is None else max(known, size or 0)
        now, found = self._now(), list[GpuProcess]()
        if now >= self._glance_until:
            self._glance, self._glance_until = _Glance(), now + _GLANCE_SECONDS
        for pid in sorted(memory):
            # One that has ended or cannot be seen has nothing but its memory.
            facts = (not self.foreign and self._facts(pid, self._glance)) or {"holder_unknown": True}
            found.append(GpuProcess(pid, memory[pid], **facts, **(used or {}).get(pid, {})))
        return tuple(found)

    def lineage(self, pid: int) -> tuple[ProcessKey, ...]:
        """The process and its ancestors, nearest first; empty if it does not exist."""
        return tuple(self._ancestry(pid, _Glance()))

    def runs(self, process: ProcessKey) -> bool:
        """Whether a process exists and is no zombie."""
        try:
            ended = psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return not ended and process in self.lineage(process.pid)[:1]

    def find(self, pid: int) -> GpuProcess | None:
        """Describe a process; None if it does not exist."""
        facts = self._facts(pid, _Glance())
        return GpuProcess(pid, **facts) if facts else None

    def leads(self, process: GpuProcess) -> bool:
        """Whether a process is the first of its container, rather than started in it later."""
        if not process.container:
            return False
        ids = self._ids(process.pid)
        if len(ids) > 1:
            return ids[-1] == 1
        parent = process.lineage[1].pid if len(process.lineage) > 1 else 0
        return self._container(parent) != process.container

    def in_namespace(self, pid: int, namespace: int | None) -> int | None:
        """The pid in this program's namespace of the process with `pid` in another one; None without one."""
        if namespace is None or namespace == _namespace(self._proc / "self"):
            return pid
        for found in psutil.pids():
            if self._ids(found)[1:][-1:] == [pid] and _namespace(self._proc / str(found)) == namespace:
                return found
        return None

    def _facts(self, pid: int, glance: _Glance) -> dict[str, Any]:
        """The fields of a GpuProcess beside its memory and use; empty if it does not exist."""
        if pid in glance.facts:
            return glance.facts[pid]
        lineage = tuple(self._ancestry(pid, glance))
        if not lineage:
            return {}
        process = lineage[0]
        try:
            of_system = self._of_system(pid)
            if process not in self._traces:  # read once, since that takes longest
                if len(self._traces) >= _TRACES_KEPT:
                    self._traces.clear()
                self._traces[process] = self._container(pid), _mark(of_system)
            container, mark = self._traces[process]
            name, user, program = of_system.name(), of_system.uids().effective, ""
            with suppress(psutil.AccessDenied, OSError):
                program = shown_program(of_system.cmdline())
        except psutil.Error:
            return {}
        now = self._entry(pid)
        if now is None or now[0] != process:  # it has ended, and another may have its pid
            return {}
        facts = glance.facts[pid] = {
            "command": name,
            "lineage": lineage,
            "container": container,
            "pod": found[1].replace("_", "-") if (found := _POD.search(container)) else "",
            "mark": mark,
            "user": user,
            "user_name": self._users.name(user),
            "program": program,
        }
        return facts

    def _of_system(self, pid: int) -> psutil.Process:
        return psutil.Process(pid)

    def _container(self, pid: int) -> str:
        """The cgroup path of the container or pod of a process; empty without one."""
        found = _CONTAINER.search(self._text(pid, "cgroup"))
        return found[0] if found else ""

    def _ids(self, pid: int) -> list[int]:
        """The ids of a process, from this program's PID namespace down to its own."""
        found = _NAMESPACE_IDS.search(self._text(pid, "status"))
        return [int(word) for word in found[1].split()] if found else []

    def _text(self, pid: int, name: str) -> str:
        """A file of /proc/PID, read in the cheapest way; empty if it cannot be read."""
        try:
            descriptor = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return os.read(descriptor, _LONGEST_TEXT).decode("utf-8", "replace")
        except OSError:
            return ""
        finally:
            os.close(descriptor)

    def _ancestry(self, pid: int, glance: _Glance) -> Iterator[ProcessKey]:
        for _ in range(_DEEPEST_LINEAGE):
            entry = glance.entries.get(pid) or (self._entry(pid) if pid > 0 else None)
            if entry is None:
                return
            glance.entries[pid] = entry
            key, pid = entry
            yield key

    def _read_pid_max(self) -> int:
        """The host's highest id: since Linux 6.14 a container has its own, which does not apply to the driver's ids."""
        if self.foreign:
            return _PID_MAX_LIMIT
        try:
            return int((self._proc / "sys/kernel/pid_max").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return _PID_MAX_LIMIT

    def _entry(self, pid: int) -> tuple[ProcessKey, int] | None:
        """A process and the pid of its parent, by proc(5), where names may have blanks and brackets."""
        words = self._text(pid, "stat").rpartition(")")[2].split()
        return (ProcessKey(pid, int(words[_STARTED])), int(words[1])) if len(words) > _STARTED else None


def _mark(process: psutil.Process) -> str:
    """The reservation in the environment of a process; empty without one or without access."""
    try:
        named = process.environ().get("GPUSCALE_RESERVATION", "")
    except (psutil.Error, OSError):
        return ""
    return named if _MARK.fullmatch(named) else ""


def shown_program(arguments: Sequence[str]) -> str:
    """The program and its script, module or subcommand, such as `python -m vllm.server`.

    Other arguments may be secrets, as may a first word with `=` or `@`.
    """
    if not arguments:
        return ""
    program, *rest = arguments
    shown = program.rpartition("/")[2]
    if _PYTHON.fullmatch(shown):
        rest = list(dropwhile(_PYTHON_FLAG.fullmatch, rest))
        if rest[:1] == ["-m"]:
            shown, rest = f"{shown} -m", rest[1:]
    if rest and _NAMED.fullmatch(rest[0]):
        shown += f" {rest[0]}"
    return shown[:_LONGEST_PROGRAM]


def _namespace(process: Path) -> int | None:
    """The inode number of a process's PID namespace; None without access."""
    try:
        return (process / "ns/pid").stat().st_ino
    except OSError:
        return None
