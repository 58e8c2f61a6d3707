"""Crowd: for how long a group of changes that wait for the disk stays open for others. Pure; times in seconds.

Replies that leave together cost a third less than replies one by one, and those who were answered together come back
together (research: 189 instead of 379 us of CPU at 64 callers). But nobody tells how many callers there are. What tells it
is a write: changes that come while it is under way are callers beside those who wait for it. So a group waits for as
many as were seen at once, and not at all where that was one; each group that finds more of them lets the next one wait
for more. Waiting pays as long as it takes less time than the write of its own that a late change would need, so
nobody waits longer than a write takes for the next one to come. With that, a slow machine or disk has a longer patience.
"""

from typing import Final

ENOUGH: Final = 32
"""Reservations for which no group is kept open: others are looked at while these are written and answered."""
WRITES: Final = 8
"""A group stays open for as long as so many writes take, at most,"""
WINDOW: Final = 0.05
"""and never longer than this."""
_RISING: Final = 0.1
_FALLING: Final = 0.5
"""How much a write counts that took longer than usual, or less long: one that hung says little of the next."""
_FIRST_WRITE: Final = 0.001


class Crowd:
    """How many reservations are changed at a time, and how long a write takes, as far as the groups so far have told."""

    def __init__(self) -> None:
        self._seen = 1
        self._write = _FIRST_WRITE

    @property
    def expected(self) -> int:
        """How many reservations a group waits for."""
        return min(self._seen, ENOUGH)

    def pause(self, waiting: int, open_for: float) -> float:
        """How long the next change may take to come; 0 where the group is to be written now.

        Args:
            waiting: reservations in it.
            open_for: how long the first of them waits.
        """
        if waiting >= self.expected:
            return 0.0
        left = min(WRITES * self._write, WINDOW) - open_for
        return max(0.0, min(self._write, left))

    def wrote(self, group: int, came: int, seconds: float) -> None:
        """A group was written.

        Args:
            group: reservations in it.
            came: those that came meanwhile.
            seconds: how long it took.
        """
        self._seen = max(group + came, self._seen * 3 // 4)
        self._write += (_RISING if seconds > self._write else _FALLING) * (seconds - self._write)
