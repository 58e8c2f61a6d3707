"""How soon to send another snapshot to a fleet that refuses them. Pure; times in seconds.

One that is refused may have a single bad reading, and the next is well. But where another node claims the same GPUs each
is refused, and a whole snapshot each second would cost both sides fifteen times what changes do.
"""

from typing import Final

LONGEST: Final = 30.0


class Patience:
    """Waits twice as long after each further one that is refused, from one period of the agent on."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._refused = 0
        self._until = float("-inf")

    def answered(self, now: float, *, refused: bool) -> None:
        """The fleet has answered."""
        if not refused:
            self._refused = 0
            return
        self._refused += 1
        if self._refused > 1:
            self._until = now + min(LONGEST, self._period * 2 ** min(self._refused - 1, 10))

    def waits(self, now: float) -> bool:
        """Whether it is too soon for another one."""
        return now < self._until
