"""Waiting between attempts, so that those who failed together do not come back together.

Full jitter as in "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015): each wait is uniform between nothing
and a ceiling that doubles up to a cap.
"""

from random import SystemRandom

_random = SystemRandom()


class Backoff:
    """The waits of one retry loop.

    Args:
        initial: ceiling of the first wait, in seconds.
        cap: highest ceiling, in seconds.
    """

    def __init__(self, initial: float = 0.5, cap: float = 30.0) -> None:
        self._initial = initial
        self._cap = cap
        self._ceiling = initial

    def next(self) -> float:
        """Seconds to wait before the next attempt."""
        wait = _random.uniform(0.0, self._ceiling)
        self._ceiling = min(self._cap, self._ceiling * 2)
        return wait

    def reset(self) -> None:
        """The attempt succeeded: begin again with the first ceiling."""
        self._ceiling = self._initial
