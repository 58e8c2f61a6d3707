"""Which process ids a driver names can be believed, what the programs are called, and what they descend from.

Early 535 drivers fill the v3 process records with the v2 stride, so that every second id is nonsense. In a container
with its own PID namespace the driver's ids are the host's: a name found under the same number would be another
program's, so none is told there, nor a lineage.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuscale.monitor.model.readings import GpuProcess, ProcessKey

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel, the same on every host
_PID_MAX_LIMIT = 4_194_304  # of the kernel, on machines of 64 bits
_DEEPEST_LINEAGE = 64
# The lists of all GPUs fall due in one tick, and their processes descend from the same few.
_GLANCE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Entry:
    """A process as the kernel lists it."""

    pid: int
    command: str
    started: int
    parent: int


class ProcessNames:
    """Checks process ids against this host and names the programs."""

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._now = now
        self._glance: dict[int, _Entry] = {}
        self._glance_until = now()
        self._host_ids = _sees_host_ids(proc)
        self._pid_max = self._read_pid_max()

    def believable(self, pids: Iterable[int]) -> bool:
        """Whether each could be the id of a process of this host, whose highest id may be raised while it runs."""
        ids = tuple(pids)
        if max(ids, default=0) > self._pid_max:
            self._pid_max = self._read_pid_max()
        return all(0 < pid <= self._pid_max for pid in ids)

    def merge(self, records: Iterable[tuple[int, int | None]]) -> tuple[GpuProcess, ...]:
        """One process per id, by id; a program that computes and draws is listed twice with the same memory.

        What /proc says of a process serves for half a second.
        """
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
        return tuple(ProcessKey(entry.pid, entry.started) for entry in self._ancestry(pid, {}))

    def _process(self, pid: int, memory: int | None) -> GpuProcess | None:
        """The process; None of one that is not there (any more), which a stale or wrong record names."""
        if not self._host_ids:
            return GpuProcess(pid, memory)
        found = list(self._ancestry(pid, self._recent()))
        lineage = tuple(ProcessKey(entry.pid, entry.started) for entry in found)
        return GpuProcess(pid, memory, found[0].command, lineage=lineage) if found else None

    def _recent(self) -> dict[int, _Entry]:
        """What was read of processes a moment ago, by id."""
        now = self._now()
        if now >= self._glance_until:
            self._glance, self._glance_until = {}, now + _GLANCE_SECONDS
        return self._glance

    def _ancestry(self, pid: int, known: dict[int, _Entry]) -> Iterator[_Entry]:
        for _ in range(_DEEPEST_LINEAGE):
            entry = known.get(pid) or (self._stat(pid) if pid > 0 else None)
            if entry is None:
                return
            known[pid] = entry
            yield entry
            pid = entry.parent

    def _read_pid_max(self) -> int:
        """Of the host: a container's own highest id, which Linux 6.14 brought, is about other ids than the driver's."""
        if not self._host_ids:
            return _PID_MAX_LIMIT
        try:
            return int((self._proc / "sys/kernel/pid_max").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return _PID_MAX_LIMIT

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


def _sees_host_ids(proc: Path) -> bool:
    try:
        return str((proc / "self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
    except OSError:
        return False
