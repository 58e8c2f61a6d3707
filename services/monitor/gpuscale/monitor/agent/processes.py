"""Which process ids a driver names can be believed, what the programs are called, and what they descend from.

Early 535 drivers fill the v3 process records with the v2 stride, so that every second id is nonsense. In a container
with its own PID namespace the driver's ids are the host's: a name found under the same number would be another
program's, so none is told there, nor a lineage. A process that the driver names and the host has not holds memory all
the same: it is told without a name.

psutil reads the name, user and environment of a process. Read here is what it does not have: the start in clock ticks of
the boot (its own date moves when the wall clock is set, and these are kept on disk), with the parent, which stands in the
same line: asking psutil for each ancestor costs seven times as much. And the cgroup, the ids in other PID namespaces, and
the highest id. Both read the /proc that `psutil.PROCFS_PATH` names.
"""

import os
import pwd
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import psutil

from gpuscale.monitor.model.readings import GpuProcess, ProcessKey

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel, the same on every host
_PID_MAX_LIMIT = 4_194_304  # of the kernel, on machines of 64 bits
_DEEPEST_LINEAGE = 64
_STARTED = 19  # of the fields after the name of the program in /proc/PID/stat: starttime
# The lists of all GPUs fall due in one tick, and their processes descend from the same few.
_GLANCE_SECONDS = 0.5
_TRACES_KEPT = 4096
_LONGEST_TEXT = 1 << 16
# A pod's containers are one; Docker, containerd, CRI-O and Podman name a container by 64 digits, whatever is around them.
_CONTAINER = re.compile(r"/\S*?(?:[-/]pod[0-9a-f]{8}[-_][0-9a-f_-]{27}(?=[./])|[0-9a-f]{64})")
_POD = re.compile(r"[-/]pod([0-9a-f_-]+)$")
_MARK = re.compile(r"reservations/[a-z0-9._-]{1,63}")
_PYTHON = re.compile(r"python[\d.]*")
_PYTHON_FLAG = re.compile(r"-[bBdEiIOPqRsSuvx]+")  # those that take no word
_NAMED = re.compile(r"(?!-)[^=@\s]+")
_LONGEST_PROGRAM = 200
_NAMESPACE_IDS = re.compile(r"^NSpid:\s+(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Program:
    """What a process runs, by name and in words, and the number of its Unix user."""

    name: str
    user: int
    words: str = ""


@dataclass(frozen=True, slots=True)
class _Glance:
    """What was read a moment ago: processes with the pids of their parents, by pid, and their programs."""

    entries: dict[int, tuple[ProcessKey, int]] = field(default_factory=dict[int, tuple[ProcessKey, int]])
    programs: dict[ProcessKey, Program] = field(default_factory=dict[ProcessKey, Program])


class UserNames:
    """Names of Unix users. A directory service may be slow, so a thread asks for each once; until then it is the number."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def name(self, user: int) -> str:
        """The name, or the number where there is none, or none yet."""
        if user not in self._names:
            self._names[user] = str(user)
            threading.Thread(target=self._look_up, args=(user,), name="user-name", daemon=True).start()
        return self._names[user]

    def _look_up(self, user: int) -> None:
        with suppress(KeyError):
            self._names[user] = pwd.getpwuid(user).pw_name


class ProcessNames:
    """Checks process ids against this host and names the programs."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._proc = Path(psutil.PROCFS_PATH)
        self._now = now
        self._glance = _Glance()
        self._glance_until = now()
        self._traces: dict[ProcessKey, tuple[str, str]] = {}
        self._users = UserNames()
        try:
            self._host_ids = str((self._proc / "self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
        except OSError:
            self._host_ids = False
        self._pid_max = self._read_pid_max()

    def believable(self, pids: Iterable[int]) -> bool:
        """Whether each could be the id of a process of this host, whose highest id may be raised while it runs."""
        ids = tuple(pids)
        if max(ids, default=0) > self._pid_max:
            self._pid_max = self._read_pid_max()
        return all(0 < pid <= self._pid_max for pid in ids)

    def merge(
        self, records: Iterable[tuple[int, int | None]], used: Mapping[int, Mapping[str, Any]] | None = None
    ) -> tuple[GpuProcess, ...]:
        """One process per id, by id; a program that computes and draws is listed twice with the same memory.

        `used` has how some use the GPU, by id and field. What /proc says of a process serves for half a second.
        """
        memory: dict[int, int | None] = {}
        for pid, size in records:
            known = memory.get(pid)
            memory[pid] = size if known is None else max(known, size or 0)
        now, found = self._now(), list[GpuProcess]()
        if now >= self._glance_until:
            self._glance, self._glance_until = _Glance(), now + _GLANCE_SECONDS
        for pid in sorted(memory):
            seen = self._seen(pid, memory[pid], self._glance) if self._host_ids else None
            # Of one that has ended or cannot be seen, there is only its memory as the driver says.
            process = seen or GpuProcess(pid, memory[pid], holder_unknown=True)
            found.append(replace(process, **used[pid]) if used and pid in used else process)
        return tuple(found)

    @property
    def foreign(self) -> bool:
        """Whether the driver's ids differ from those that this program sees."""
        return not self._host_ids

    def lineage(self, pid: int) -> tuple[ProcessKey, ...]:
        """The process and its ancestors, nearest first; empty if it does not exist."""
        return tuple(self._ancestry(pid, _Glance()))

    def runs(self, process: ProcessKey) -> bool:
        """Whether a process is there, and has not ended: one whose parent has not asked for its exit code uses nothing."""
        try:
            ended = psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return not ended and process in self.lineage(process.pid)[:1]

    def find(self, pid: int) -> GpuProcess | None:
        """What can be seen of a process now; None if it does not exist."""
        return self._seen(pid, None, _Glance())

    def leads(self, process: GpuProcess) -> bool:
        """Whether a process is the first of its container: not one that somebody started in it later."""
        if not process.container:
            return False
        ids = self._ids(process.pid)
        if len(ids) > 1:
            return ids[-1] == 1
        parent = process.lineage[1].pid if len(process.lineage) > 1 else 0
        return self._container(parent) != process.container

    def in_namespace(self, pid: int, namespace: int | None) -> int | None:
        """The pid, as this program sees it, of the process with `pid` in another PID namespace; None without one."""
        if namespace is None or namespace == _namespace(self._proc / "self"):
            return pid
        for found in psutil.pids():
            if self._ids(found)[1:][-1:] == [pid] and _namespace(self._proc / str(found)) == namespace:
                return found
        return None

    def _seen(self, pid: int, memory: int | None, glance: _Glance) -> GpuProcess | None:
        lineage = tuple(self._ancestry(pid, glance))
        if not lineage:
            return None
        process = lineage[0]
        program = glance.programs.get(process) or self._program(process)
        if program is None:
            return None
        glance.programs[process] = program
        if process not in self._traces:  # read once, since that takes longest
            if len(self._traces) >= _TRACES_KEPT:
                self._traces.clear()
            self._traces[process] = self._container(pid), self._mark(pid)
        container, mark = self._traces[process]
        return GpuProcess(
            pid,
            memory,
            program.name,
            lineage=lineage,
            container=container,
            pod=found[1].replace("_", "-") if (found := _POD.search(container)) else "",
            mark=mark,
            user=program.user,
            user_name=self._users.name(program.user),
            program=program.words,
        )

    def _container(self, pid: int) -> str:
        """What the cgroup of a process says of its container or pod: the path down to it; empty where it is in none."""
        found = _CONTAINER.search(self._text(pid, "cgroup"))
        return found[0] if found else ""

    def _mark(self, pid: int) -> str:
        """The reservation in the environment of a process; empty where this program may not read that."""
        try:
            named = psutil.Process(pid).environ().get("GPUSCALE_RESERVATION", "")
        except (psutil.Error, OSError):
            return ""
        return named if _MARK.fullmatch(named) else ""

    def _ids(self, pid: int) -> list[int]:
        """The ids of a process, from the namespace of this program down to its own."""
        found = _NAMESPACE_IDS.search(self._text(pid, "status"))
        return [int(word) for word in found[1].split()] if found else []

    def _text(self, pid: int, name: str) -> str:
        """A file of /proc about a process, read the cheapest way; empty if it cannot be read."""
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
        """Of the host: a container's own highest id, which Linux 6.14 brought, is about other ids than the driver's."""
        if not self._host_ids:
            return _PID_MAX_LIMIT
        try:
            return int((self._proc / "sys/kernel/pid_max").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return _PID_MAX_LIMIT

    def _entry(self, pid: int) -> tuple[ProcessKey, int] | None:
        """A process and the pid of its parent, by proc(5); its name there may hold blanks and brackets."""
        words = self._text(pid, "stat").rpartition(")")[2].split()
        return (ProcessKey(pid, int(words[_STARTED])), int(words[1])) if len(words) > _STARTED else None

    def _program(self, process: ProcessKey) -> Program | None:
        """What a process runs; None where it has ended, even if another one has its pid since."""
        try:
            found = psutil.Process(process.pid)
            program = Program(found.name(), found.uids().effective)
            with suppress(psutil.AccessDenied, OSError):
                program = replace(program, words=shown_program(found.cmdline()))
        except psutil.Error:
            return None
        now = self._entry(process.pid)
        return program if now is not None and now[0] == process else None


def shown_program(arguments: Sequence[str]) -> str:
    """The program of a command line with its script, module or first command, such as `python -m vllm.server`.

    Nothing else: other arguments may be secrets, and so may a first word that has the form of an assignment or names a user.
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
    """The number of a process's PID namespace; None where this program may not look."""
    try:
        return (process / "ns/pid").stat().st_ino
    except OSError:
        return None
