"""The host by the files of /proc. In a container these are the figures of the whole host, as the kernel shows them.

The CPU, its load and the memory are read in every tick; swap, disks, network and pressure, which cost more than those
together, every five seconds.
"""

import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from gpuscale.common.runtime.clock import network_namespace
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model.readings import Absent, HostIdentity, HostReading, ReadingStatus

_KIB = 1024
_SECTOR_BYTES = 512  # of /proc/diskstats, whatever the sectors of the disk are
_LOOPBACK = "lo"


class CpuTimes(NamedTuple):
    """Clock ticks of all cores since the boot."""

    busy: int
    total: int


class Memory(NamedTuple):
    """Bytes; `available` is the kernel's own estimate of what can be had without swapping."""

    total: int
    available: int
    swap_total: int
    swap_free: int


class Moved(NamedTuple):
    """Bytes since the boot: read and written, or received and sent."""

    read: int
    written: int


def cpu_times(stat: str) -> CpuTimes:
    """Of the first line of /proc/stat. Waiting for disks is idle; time of guests is in that of their users already."""
    words = stat.partition("\n")[0].split()
    if words[:1] != ["cpu"] or len(words) < 6:
        raise ValueError("no line for all cores")
    ticks = [int(word) for word in words[1:9]]
    total = sum(ticks)
    return CpuTimes(total - ticks[3] - ticks[4], total)


def busy_percent(before: CpuTimes, after: CpuTimes) -> float:
    """Use of all cores between two moments, 0-100. Counters may go back a little, as those of iowait do."""
    total, busy = after.total - before.total, after.busy - before.busy
    return min(100.0, max(0.0, 100.0 * busy / total)) if total > 0 else 0.0


def memory(meminfo: str) -> Memory:
    """Of /proc/meminfo."""
    found = {"MemTotal": -1, "MemAvailable": -1, "SwapTotal": 0, "SwapFree": 0}
    for line in meminfo.splitlines():
        name, _, amount = line.partition(":")
        if name in found:
            found[name] = int(amount.split()[0]) * _KIB
            if name == "SwapFree":
                break  # the last one of these
    memory = Memory(*found.values())
    if memory.total <= 0 or memory.available < 0:
        raise ValueError("no total or no estimate of what is available")
    return memory


def disks(diskstats: str, hardware: Container[str]) -> Moved:
    """Of /proc/diskstats, over the disks that are named.

    The same bytes have lines of their own for partitions, and again for what is built of disks: LVM, RAID, loops.
    """
    lines = [words for words in _words(diskstats) if len(words) >= 10 and words[2] in hardware]
    read, written = (sum(int(words[column]) for words in lines) for column in (5, 9))
    return Moved(read * _SECTOR_BYTES, written * _SECTOR_BYTES)


def network(dev: str, hardware: Container[str]) -> Moved:
    """Of /proc/net/dev, over the interfaces that are named, which lead out of the host.

    Bridges, bonds and the host's ends of containers carry the same bytes again. Where none of those named is there, as
    in a container, over all but the loopback.
    """
    lines = (line.partition(":") for line in dev.splitlines() if ":" in line)
    moved = {name.strip(): counters.split() for name, _, counters in lines}
    counted = [name for name in moved if name in hardware] or [name for name in moved if name != _LOOPBACK]
    received, sent = (sum(int(moved[name][column]) for name in counted) for column in (0, 8))
    return Moved(received, sent)


def pressure(text: str, kind: str) -> float:
    """The ten-second average, 0-100, of a file of /proc/pressure (Documentation/accounting/psi.rst)."""
    for words in _words(text):
        if words[0] == kind and words[1].startswith("avg10="):
            return float(words[1].removeprefix("avg10="))
    raise ValueError(f"no line for {kind}")


def _words(text: str) -> Iterator[list[str]]:
    return (words for line in text.splitlines() if (words := line.split()))


# Shorter spans hold too few clock ticks of 10 ms to tell a percentage.
SHORTEST_CPU_SPAN_SECONDS = 0.1
# The seeds' workers judge a host by ten samples of a second each.
CPU_WINDOW_SECONDS = 10.0
SELDOM_SECONDS = 5.0

_READ_BYTES = 1 << 16
_MEMORY_FIELDS = ("memory_total_bytes", "memory_available_bytes", "memory_used_bytes")
_SWAP_FIELDS = ("swap_total_bytes", "swap_used_bytes")
_PRESSURES = (("cpu", "some"), ("memory", "some"), ("memory", "full"), ("io", "some"), ("io", "full"))

T = TypeVar("T")


@dataclass(slots=True)
class _Seldom:
    """What is read seldom, and until when it serves."""

    reading: HostReading
    until: float


class ProcHost:
    """Reads this host. `now` gives seconds of any clock that never goes back."""

    def __init__(
        self,
        boot_id: str,
        now: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
    ) -> None:
        self._boot_id = boot_id
        self._now = now
        self._proc = proc
        self._sys = sys
        self._cpu_percent: float | None = None
        self._cpu_times: CpuTimes | None = None
        self._cpu_read_at = 0.0
        self._cpu_samples: deque[tuple[float, float]] = deque()
        self._seldom: _Seldom | None = None

    def identity(self) -> HostIdentity:
        """What this host is."""
        foreign = ProcessNames(self._proc).foreign
        return HostIdentity(
            socket.gethostname(), _operating_system(), self._boot_id, foreign, network_namespace(self._proc)
        )

    def read(self) -> HostReading:
        """Read the host."""
        now = self._now()
        absent: list[Absent] = []
        found = _attempt(lambda: memory(self._text("meminfo")), _MEMORY_FIELDS, absent)
        if self._seldom is None or now >= self._seldom.until:
            self._seldom = _Seldom(self._read_seldom(found), now + SELDOM_SECONDS)
        seldom = self._seldom.reading
        load = _attempt(os.getloadavg, ("load_1m", "load_5m", "load_15m", "load_1m_per_core"), absent)
        cpu, cores = self._cpu(now, absent), seldom.cpu_count
        return seldom._replace(
            cpu_percent=cpu,
            cpu_smoothed_percent=self._smoothed(now, absent),
            load_1m=load[0] if load else None,
            load_5m=load[1] if load else None,
            load_15m=load[2] if load else None,
            load_1m_per_core=load[0] / cores if load and cores else None,
            memory_total_bytes=found.total if found else None,
            memory_available_bytes=found.available if found else None,
            memory_used_bytes=found.total - found.available if found else None,
            absent=(*seldom.absent, *absent),
        )

    def _cpu(self, now: float, absent: list[Absent]) -> float | None:
        """Use of all cores since the reading before; a reading right after another repeats it."""
        before = self._cpu_times
        if before is None or now - self._cpu_read_at >= SHORTEST_CPU_SPAN_SECONDS:
            times = _attempt(lambda: cpu_times(self._text("stat")), ("cpu_percent",), absent)
            self._cpu_times, self._cpu_read_at = times, now
            if times is None:
                return None
            if before is not None:
                self._cpu_percent = busy_percent(before, times)
                self._cpu_samples.append((now, self._cpu_percent))
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

    def _read_seldom(self, found: Memory | None) -> HostReading:
        absent: list[Absent] = []
        if found is None:
            absent.extend(Absent(name, ReadingStatus.ERROR, "no /proc/meminfo") for name in _SWAP_FIELDS)
        moved = _attempt(self._disks, ("disk_read_bytes", "disk_written_bytes"), absent)
        net = _attempt(self._network, ("network_received_bytes", "network_sent_bytes"), absent)
        stalled = self._pressure(absent)
        return HostReading(
            cpu_count=os.cpu_count(),
            swap_total_bytes=found.swap_total if found else None,
            swap_used_bytes=found.swap_total - found.swap_free if found else None,
            disk_read_bytes=moved.read if moved else None,
            disk_written_bytes=moved.written if moved else None,
            network_received_bytes=net.read if net else None,
            network_sent_bytes=net.written if net else None,
            pressure_cpu_some_percent=stalled.get("pressure_cpu_some_percent"),
            pressure_memory_some_percent=stalled.get("pressure_memory_some_percent"),
            pressure_memory_full_percent=stalled.get("pressure_memory_full_percent"),
            pressure_io_some_percent=stalled.get("pressure_io_some_percent"),
            pressure_io_full_percent=stalled.get("pressure_io_full_percent"),
            absent=tuple(absent),
        )

    def _disks(self) -> Moved:
        """Bytes read from and written to all disks; a host without disks has moved none."""
        return disks(self._text("diskstats"), _hardware(self._sys / "block"))

    def _network(self) -> Moved:
        """Bytes received and sent by all network cards."""
        return network(self._text("net/dev"), _hardware(self._sys / "class/net"))

    def _pressure(self, absent: list[Absent]) -> dict[str, float]:
        found: dict[str, float] = {}
        for resource, kind in _PRESSURES:
            name = f"pressure_{resource}_{kind}_percent"
            try:
                found[name] = pressure(self._text(f"pressure/{resource}"), kind)
            except PermissionError as error:
                absent.append(Absent(name, ReadingStatus.NO_PERMISSION, str(error)))
            except (OSError, ValueError, IndexError):
                absent.append(Absent(name, ReadingStatus.NOT_SUPPORTED, "the kernel does not tell it"))
        return found

    def _text(self, name: str) -> str:
        """A file of the kernel, by the cheapest way there is: it is made anew for each reader."""
        descriptor = os.open(f"{self._proc}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            parts = [os.read(descriptor, _READ_BYTES)]
            while len(parts[-1]) == _READ_BYTES:
                parts.append(os.read(descriptor, _READ_BYTES))
        finally:
            os.close(descriptor)
        return b"".join(parts).decode("ascii", "replace")


def _attempt(call: Callable[[], T], fields: Iterable[str], absent: list[Absent]) -> T | None:
    try:
        return call()
    except PermissionError as error:
        status, detail = ReadingStatus.NO_PERMISSION, str(error)
    except (OSError, ValueError, IndexError) as error:
        status, detail = ReadingStatus.ERROR, str(error)
    absent.extend(Absent(name, status, detail) for name in fields)
    return None


def _hardware(folder: Path) -> set[str]:
    """The names in a folder of /sys behind which there is a device; none where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if os.access(f"{entry.path}/device", os.F_OK)}
    except FileNotFoundError:
        return set()


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"
