"""How often a caller may call: a token bucket for each, in bounded memory. Pure: `now` is an argument.

A bucket holds as many calls as may come at once and is filled again at a steady rate, so that a burst passes and a flood
does not.
"""

from collections import OrderedDict
from typing import Final

BURST_SECONDS: Final = 2.0
"""A bucket holds the calls of so many seconds, and one at least."""
MOST_CALLERS: Final = 10_000
"""Callers that are remembered; of more, the one that has been silent longest begins with a full bucket."""


class RateLimits:
    """The buckets of all callers.

    Args:
        calls_per_second: how many calls each may make, in the long run.
    """

    def __init__(self, calls_per_second: float) -> None:
        self._rate = calls_per_second
        self._most = max(1.0, calls_per_second * BURST_SECONDS)
        self._buckets: OrderedDict[str, tuple[float, float]] = (
            OrderedDict()
        )  # by caller: what is in it, and when

    def take(self, caller: str, now: float) -> float:
        """Take one call out of the bucket of a caller.

        Returns:
            0 where there was one; else the seconds until there is.
        """
        left, seen = self._buckets.pop(caller, (self._most, now))
        left = min(self._most, left + (now - seen) * self._rate)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left), now
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self._rate
