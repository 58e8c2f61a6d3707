"""What the log is told of an upstream that does not answer: that it began, now and then that it goes on, and its end.

Every call fails meanwhile, so a line for each would fill the log with as many lines as there are calls.
"""

import time
from collections.abc import Callable
from typing import Final

from gpuscale.common.runtime.logs import get_logger

PERIOD: Final = 10.0
"""Least seconds between two lines about failures of one upstream."""

_log = get_logger(__name__)


class Outage:
    """Logs failures of one upstream, at most one in each PERIOD, and once that it answers again.

    An upstream that fails only now and then gets no more lines than one that is away.

    Args:
        now: seconds that only grow.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = float("-inf")
        self._not_shown = 0
        self._away = ""

    def failed(self, upstream: str, method: str, problem: str) -> None:
        """A call of it failed; the line has the number of those since the last one that got none."""
        now = self._now()
        if now < self._next:
            self._not_shown += 1
            return
        not_shown, self._not_shown = self._not_shown, 0
        self._next, self._away = now + PERIOD, upstream
        _log.warning(
            "upstream failed", upstream=upstream, method=method, problem=problem, not_shown=not_shown
        )

    def answered(self) -> None:
        """It answered a call."""
        if self._away:
            _log.info("upstream answers again", upstream=self._away, not_shown=self._not_shown)
            self._away, self._not_shown = "", 0
