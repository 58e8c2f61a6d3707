"""The host through psutil and /proc. In a container these are the figures of the whole host, as the kernel shows them.

The CPU, its load and the memory are read in every tick; swap, disks, network and pressure, which cost more than those
together, every five seconds.
"""

import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from gpuscale.monitor.agent.model import Absent, HostIdentity, HostReading, ReadingStatus
from gpuscale.monitor.agent.processes import ProcessNames

# Shorter spans hold too few clock ticks of 10 ms to tell a percentage.
SHORTEST_CPU_SPAN_SECONDS = 0.1
# The seeds' workers judge a host by ten samples of a second each.
CPU_WINDOW_SECONDS = 10.0
SELDOM_SECONDS = 5.0

_LOOPBACK = "lo"
_PRESSURES = (("cpu", "some"), ("memory", "some"), ("memory", "full"), ("io", "some"), ("io", "full"))

T = TypeVar("T")


@dataclass(slots=True)
class _Seldom:
    """What is read seldom, and until when it serves."""

    reading: HostReading
    until: float


class PsutilHost:
    """Reads this host. `now` gives seconds of any clock that never goes back."""

    def __init__(
        self, boot_id: str, now: Callable[[], float] = time.monotonic, proc: Path = Path("/proc")
    ) -> None:
        self._boot_id = boot_id
        self._now = now
        self._proc = proc
        self._cpu_percent: float | None = None
        self._cpu_read_at: float | None = None
        self._cpu_samples: deque[tuple[float, float]] = deque()
        self._seldom: _Seldom | None = None

    def identity(self) -> HostIdentity:
        """What this host is."""
        foreign = ProcessNames(self._proc).foreign
        return HostIdentity(socket.gethostname(), _operating_system(), self._boot_id, foreign)

    def read(self) -> HostReading:
        """Read the host; always from the same thread, since psutil counts the CPU's use per thread."""
        now = self._now()
        if self._seldom is None or now >= self._seldom.until:
            self._seldom = _Seldom(_read_seldom(self._proc), now + SELDOM_SECONDS)
        absent = list(self._seldom.reading.absent)
        load = _attempt(psutil.getloadavg, ("load_1m", "load_5m", "load_15m", "load_1m_per_core"), absent)
        memory = _attempt(
            psutil.virtual_memory,
            ("memory_total_bytes", "memory_available_bytes", "memory_used_bytes"),
            absent,
        )
        cpu, cores = self._cpu(now, absent), self._seldom.reading.cpu_count
        return replace(
            self._seldom.reading,
            cpu_percent=cpu,
            cpu_smoothed_percent=self._smoothed(now, absent),
            load_1m=load[0] if load else None,
            load_5m=load[1] if load else None,
            load_15m=load[2] if load else None,
            load_1m_per_core=load[0] / cores if load and cores else None,
            memory_total_bytes=memory.total if memory else None,
            memory_available_bytes=memory.available if memory else None,
            memory_used_bytes=memory.used if memory else None,
            absent=tuple(absent),
        )

    def _cpu(self, now: float, absent: list[Absent]) -> float | None:
        """Use of all cores since the reading before; a reading right after another repeats it."""
        if self._cpu_read_at is None:
            self._cpu_read_at = now
            _attempt(psutil.cpu_percent, (), absent)  # begins the first span; its answer means nothing
        elif now - self._cpu_read_at >= SHORTEST_CPU_SPAN_SECONDS:
            self._cpu_read_at = now
            self._cpu_percent = _attempt(psutil.cpu_percent, ("cpu_percent",), absent)
            if self._cpu_percent is not None:
                self._cpu_samples.append((now, self._cpu_percent))
            return self._cpu_percent
        if self._cpu_percent is None:
            absent.append(Absent("cpu_percent", ReadingStatus.ERROR, "needs two readings"))
        return self._cpu_percent

    def _smoothed(self, now: float, absent: list[Absent]) -> float | None:
        """Mean of the samples of the window, each as heavy as the other: one busy second is no busy host."""
        while self._cpu_samples and self._cpu_samples[0][0] <= now - CPU_WINDOW_SECONDS:
            self._cpu_samples.popleft()
        if not self._cpu_samples:
            absent.append(Absent("cpu_smoothed_percent", ReadingStatus.ERROR, "needs two readings"))
            return None
        return sum(percent for _, percent in self._cpu_samples) / len(self._cpu_samples)


def _read_seldom(proc: Path) -> HostReading:
    absent: list[Absent] = []
    swap = _attempt(psutil.swap_memory, ("swap_total_bytes", "swap_used_bytes"), absent)
    disks = _attempt(_disks, ("disk_read_bytes", "disk_written_bytes"), absent)
    network = _attempt(_network, ("network_received_bytes", "network_sent_bytes"), absent)
    pressure = _pressure(proc, absent)
    return HostReading(
        cpu_count=psutil.cpu_count(),
        swap_total_bytes=swap.total if swap else None,
        swap_used_bytes=swap.used if swap else None,
        disk_read_bytes=disks[0] if disks else None,
        disk_written_bytes=disks[1] if disks else None,
        network_received_bytes=network[0] if network else None,
        network_sent_bytes=network[1] if network else None,
        pressure_cpu_some_percent=pressure.get("pressure_cpu_some_percent"),
        pressure_memory_some_percent=pressure.get("pressure_memory_some_percent"),
        pressure_memory_full_percent=pressure.get("pressure_memory_full_percent"),
        pressure_io_some_percent=pressure.get("pressure_io_some_percent"),
        pressure_io_full_percent=pressure.get("pressure_io_full_percent"),
        absent=tuple(absent),
    )


def _disks() -> tuple[int, int]:
    """Bytes read from and written to all disks; a host without disks has moved none."""
    found = psutil.disk_io_counters()
    return (found.read_bytes, found.write_bytes) if found else (0, 0)


def _network() -> tuple[int, int]:
    """Bytes received and sent by all interfaces that lead out of the host."""
    found = [counters for name, counters in psutil.net_io_counters(pernic=True).items() if name != _LOOPBACK]
    return sum(one.bytes_recv for one in found), sum(one.bytes_sent for one in found)


def _pressure(proc: Path, absent: list[Absent]) -> Mapping[str, float]:
    """The ten-second averages of the kernel's pressure stall information (Documentation/accounting/psi.rst)."""
    found: dict[str, float] = {}
    for resource, kind in _PRESSURES:
        name = f"pressure_{resource}_{kind}_percent"
        try:
            text = (proc / "pressure" / resource).read_text(encoding="ascii")
            [line] = [line for line in text.splitlines() if line.startswith(f"{kind} ")]
            found[name] = float(line.split("avg10=")[1].split()[0])
        except PermissionError as error:
            absent.append(Absent(name, ReadingStatus.NO_PERMISSION, str(error)))
        except (OSError, ValueError, IndexError):
            absent.append(Absent(name, ReadingStatus.NOT_SUPPORTED, "the kernel does not tell it"))
    return found


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
