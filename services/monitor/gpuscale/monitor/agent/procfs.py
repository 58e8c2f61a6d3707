"""What the files of /proc say about the host. Pure: text in, numbers out; formats by proc(5) and the kernel's iostats.rst.

A text that is not as the kernel writes it raises ValueError.
"""

from collections.abc import Container, Iterator
from typing import NamedTuple

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
