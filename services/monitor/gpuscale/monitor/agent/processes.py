"""Which process ids a driver names can be believed, what the programs are called, and what they descend from.

Early 535 drivers fill the v3 process records with the v2 stride, so that every second id is nonsense. In a container
with its own PID namespace the driver's ids are the host's: a name found under the same number would be another
program's, so none is told there, nor a lineage.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuscale.monitor.agent.model import GpuProcess, ProcessKey

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel, the same on every host
_DEFAULT_PID_MAX = 4_194_304
_DEEPEST_LINEAGE = 64


@dataclass(frozen=True, slots=True)
class _Entry:
    """A process as the kernel lists it."""

    pid: int
    command: str
    started: int
    parent: int


class ProcessNames:
    """Checks process ids against this host and names the programs."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._pid_max = _read_pid_max(proc)
        self._host_ids = _sees_host_ids(proc)

    def believable(self, pids: Iterable[int]) -> bool:
        """Whether each could be the id of a process of this host."""
        return all(0 < pid <= self._pid_max for pid in pids)

    def merge(self, records: Iterable[tuple[int, int | None]]) -> tuple[GpuProcess, ...]:
        """One process per id, by id; a program that computes and draws is listed twice with the same memory."""
        memory: dict[int, int | None] = {}
        for pid, used in records:
            known = memory.get(pid)
            memory[pid] = used if known is None else max(known, used or 0)
        found = (self._process(pid, memory[pid]) for pid in sorted(memory))
        return tuple(process for process in found if process is not None)

    @property
    def foreign(self) -> bool:
        """Whether the driver's ids are not those that this program sees."""
        return not self._host_ids

    def lineage(self, pid: int) -> tuple[ProcessKey, ...]:
        """The process and those that it descends from, nearest first; empty where it is not there."""
        return tuple(ProcessKey(entry.pid, entry.started) for entry in self._ancestry(pid))

    def _process(self, pid: int, memory: int | None) -> GpuProcess | None:
        """The process; None of one that is not there (any more), which a stale or wrong record names."""
        if not self._host_ids:
            return GpuProcess(pid, memory)
        found = list(self._ancestry(pid))
        lineage = tuple(ProcessKey(entry.pid, entry.started) for entry in found)
        return GpuProcess(pid, memory, found[0].command, lineage=lineage) if found else None

    def _ancestry(self, pid: int) -> Iterator[_Entry]:
        for _ in range(_DEEPEST_LINEAGE):
            entry = self._stat(pid) if pid > 0 else None
            if entry is None:
                return
            yield entry
            pid = entry.parent

    def _stat(self, pid: int) -> _Entry | None:
        """What proc(5) says of a process; its name may hold blanks and brackets."""
        try:
            descriptor = os.open(f"{self._proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(descriptor, 4096)
            finally:
                os.close(descriptor)
            before, _, after = text.rpartition(b")")
            words = after.split()
            command = before.partition(b"(")[2].decode("utf-8", "replace")
            return _Entry(pid, command, int(words[19]), int(words[1]))
        except (OSError, ValueError, IndexError):
            return None


def _read_pid_max(proc: Path) -> int:
    try:
        return int((proc / "sys/kernel/pid_max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _DEFAULT_PID_MAX


def _sees_host_ids(proc: Path) -> bool:
    try:
        return str((proc / "self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
    except OSError:
        return False
