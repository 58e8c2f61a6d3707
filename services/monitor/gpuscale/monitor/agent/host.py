"""The host through psutil. In a container these are the figures of the whole host, as far as the kernel shows them."""

import platform
import socket
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import psutil

from gpuscale.monitor.agent.model import Absent, HostIdentity, HostReading, ReadingStatus

# Shorter spans hold too few clock ticks of 10 ms to tell a percentage.
SHORTEST_CPU_SPAN_SECONDS = 0.1

T = TypeVar("T")


class PsutilHost:
    """Reads this host. `now` gives seconds of any clock that never goes back."""

    def __init__(self, boot_id: str, now: Callable[[], float] = time.monotonic) -> None:
        self._boot_id = boot_id
        self._now = now
        self._cpu_percent: float | None = None
        self._cpu_read_at: float | None = None

    def identity(self) -> HostIdentity:
        """What this host is."""
        return HostIdentity(socket.gethostname(), _operating_system(), self._boot_id)

    def read(self) -> HostReading:
        """Read the host; always from the same thread, since psutil counts the CPU's use per thread."""
        absent: list[Absent] = []
        load = _attempt(psutil.getloadavg, ("load_1m", "load_5m", "load_15m"), absent)
        memory = _attempt(
            psutil.virtual_memory,
            ("memory_total_bytes", "memory_available_bytes", "memory_used_bytes"),
            absent,
        )
        swap = _attempt(psutil.swap_memory, ("swap_total_bytes", "swap_used_bytes"), absent)
        return HostReading(
            cpu_percent=self._cpu(absent),
            load_1m=load[0] if load else None,
            load_5m=load[1] if load else None,
            load_15m=load[2] if load else None,
            cpu_count=psutil.cpu_count(),
            memory_total_bytes=memory.total if memory else None,
            memory_available_bytes=memory.available if memory else None,
            memory_used_bytes=memory.used if memory else None,
            swap_total_bytes=swap.total if swap else None,
            swap_used_bytes=swap.used if swap else None,
            absent=tuple(absent),
        )

    def _cpu(self, absent: list[Absent]) -> float | None:
        """Use of all cores since the reading before; a reading right after another repeats it."""
        now = self._now()
        if self._cpu_read_at is None:
            self._cpu_read_at = now
            _attempt(psutil.cpu_percent, (), absent)  # begins the first span; its answer means nothing
        elif now - self._cpu_read_at >= SHORTEST_CPU_SPAN_SECONDS:
            self._cpu_read_at = now
            self._cpu_percent = _attempt(psutil.cpu_percent, ("cpu_percent",), absent)
            return self._cpu_percent
        if self._cpu_percent is None:
            absent.append(Absent("cpu_percent", ReadingStatus.ERROR, "needs two readings"))
        return self._cpu_percent


def _attempt(call: Callable[[], T], fields: Iterable[str], absent: list[Absent]) -> T | None:
    try:
        return call()
    except PermissionError as error:
        status, detail = ReadingStatus.NO_PERMISSION, str(error)
    except (OSError, psutil.Error) as error:
        status, detail = ReadingStatus.ERROR, str(error)
    absent.extend(Absent(name, status, detail) for name in fields)
    return None


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"
