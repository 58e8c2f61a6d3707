"""One count of seconds over all runs and boots, for what is kept on disk. Pure: times are arguments.

The clock of samples begins anew with each boot, and the wall clock may be set at any time. So a stored time is seconds of
the clock plus an offset that stays the same for a whole boot. The first run of a boot takes it from the wall clock, but
never so that time would go back: where the wall clock is behind what was stored, the count goes on from there.
"""

from dataclasses import dataclass

STEP_SECONDS = 60.0
"""Offsets are whole multiples of the coarsest step of history, so that buckets stay buckets."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The count during one boot: seconds of its clock plus `offset`."""

    boot_id: str
    offset: float

    def stored(self, at: float) -> float:
        """A time of the clock as it is stored."""
        return at + self.offset

    def clock(self, stored: float) -> float:
        """A stored time in seconds of the clock; below 0 before this boot."""
        return stored - self.offset


def continued(before: Timeline | None, newest: float, boot_id: str, now: float, wall: float) -> Timeline:
    """The count of this boot.

    Args:
        before: that of the run before; None for the first one.
        newest: the newest time that is stored.
        boot_id: of this boot.
        now: seconds of its clock.
        wall: seconds since 1970 by the wall clock.
    """
    if before is not None and before.boot_id == boot_id:
        return before
    least = max(wall, newest + STEP_SECONDS) - now
    return Timeline(boot_id, (least // STEP_SECONDS) * STEP_SECONDS)
