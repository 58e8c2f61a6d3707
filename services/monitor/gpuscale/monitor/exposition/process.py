"""What this process costs, under the names that Prometheus' client libraries use for it."""

import os
import time
from pathlib import Path

from gpuscale.common.runtime.metrics_text import Family, Page

CPU_SECONDS = Family("process_cpu_seconds_total", "counter", "CPU time of this process, user and system.")
RESIDENT_BYTES = Family("process_resident_memory_bytes", "gauge", "Memory of this process that is in RAM.")
OPEN_FDS = Family("process_open_fds", "gauge", "File descriptors that this process has open.")
START_TIME = Family("process_start_time_seconds", "gauge", "When this process started, since the epoch.")

_SELF = Path("/proc/self")
_STARTED_AT = 19  # of the fields after the name of the program in /proc/self/stat: starttime


def add_process(page: Page) -> None:
    """Add the cost of this process, as far as the kernel tells."""
    page.add(CPU_SECONDS, "", round(time.process_time(), 6))
    try:
        resident = int((_SELF / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        open_files = sum(1 for _ in (_SELF / "fd").iterdir())
        started = int((_SELF / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[_STARTED_AT])
    except (OSError, ValueError, IndexError):
        return
    up = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    page.add(RESIDENT_BYTES, "", resident)
    page.add(OPEN_FDS, "", open_files)
    page.add(START_TIME, "", round(time.time() - up, 2))
