"""Time. Decisions use seconds since boot, which wall-clock steps do not touch; dates are for display.

Seconds since boot (CLOCK_BOOTTIME) also count while the host sleeps, so a lease does not outlive a suspend. They mean
something only together with the boot they belong to: whoever stores them stores `boot_id` too.
"""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """What tells the time; programs use `SystemClock`, tests set their own."""

    @property
    def boot_id(self) -> str:
        """The kernel's id of the current boot."""
        ...

    def now(self) -> float:
        """Seconds since the boot; never goes back within one `boot_id`."""
        ...

    def wall(self) -> datetime:
        """The date, aware and in UTC; may jump in either direction."""
        ...


def read_boot_id() -> str:
    """The kernel's id of the current boot.

    Raises:
        OSError: this is no Linux.
    """
    return _BOOT_ID.read_text(encoding="ascii").strip()


def network_namespace(proc: Path = Path("/proc")) -> int:
    """Number of this process's network namespace; 0 where it is not known.

    Hosts that are namespaces on one kernel share its `boot_id`, and differ in this.
    """
    try:
        return (proc / "self/ns/net").stat().st_ino
    except OSError:
        return 0


class SystemClock:
    """The clock of this host."""

    def __init__(self) -> None:
        self._boot_id = read_boot_id()

    @property
    def boot_id(self) -> str:
        """The kernel's id of the current boot."""
        return self._boot_id

    def now(self) -> float:
        """Seconds of CLOCK_BOOTTIME."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> datetime:
        """The date of this host in UTC."""
        return datetime.now(UTC)
