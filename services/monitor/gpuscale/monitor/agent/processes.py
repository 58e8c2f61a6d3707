"""Which process ids a driver names can be believed, and what the programs are called.

Early 535 drivers fill the v3 process records with the v2 stride, so that every second id is nonsense. In a container
with its own PID namespace the driver's ids are the host's: a name found under the same number would be another
program's, so none is told there.
"""

from collections.abc import Iterable
from pathlib import Path

from gpuscale.monitor.agent.model import GpuProcess

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel, the same on every host
_DEFAULT_PID_MAX = 4_194_304


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
        return tuple(GpuProcess(pid, memory[pid], self._command(pid)) for pid in sorted(memory))

    def _command(self, pid: int) -> str | None:
        if not self._host_ids:
            return None
        try:
            return (self._proc / str(pid) / "comm").read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except OSError:
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
