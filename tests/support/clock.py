"""A clock that stands still until a test moves it."""

import asyncio
from datetime import UTC, datetime, timedelta

WALL_START = datetime(2026, 1, 1, tzinfo=UTC)


class ManualClock:
    """A `gpuscale.common.runtime.tasks.Clock` whose time passes only by `advance`.

    `now` starts at `start` seconds after boot, the wall clock at 2026-01-01 00:00 UTC. `step_wall` moves the date
    alone, as an operator or NTP would; `reboot` begins a new boot.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._wall = WALL_START
        self._boot_id = "00000000-0000-4000-8000-000000000001"

    @property
    def boot_id(self) -> str:
        return self._boot_id

    def now(self) -> float:
        return self._now

    def wall(self) -> datetime:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let time pass, on both clocks."""
        if seconds < 0:
            raise ValueError("time does not go back; step_wall moves the date")
        self._now += seconds
        self._wall += timedelta(seconds=seconds)

    def step_wall(self, seconds: float) -> None:
        """Set the date forwards or backwards; no time passes."""
        self._wall += timedelta(seconds=seconds)

    def reboot(self, boot_id: str = "00000000-0000-4000-8000-000000000002") -> None:
        """Begin a new boot at 0 seconds."""
        self._boot_id = boot_id
        self._now = 0.0


class LoopClock(ManualClock):
    """A clock that goes with the running loop, on virtual time too; `stalled` lets time pass while the loop stands still."""

    stalled = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.stalled
