"""News of something that takes its time, on standard error: how long it has taken, and why it is not over."""

import sys
import time

from gpuscale.cli.console.terminal import TERMINAL, note
from gpuscale.cli.grammar.quantities import format_duration

REPEAT = 10.0
"""Seconds after which news that have not changed are said again."""
_AGAIN = "\r\x1b[K"


class Progress:
    """Says how a wait stands: each change once, and now and then that nothing changed.

    On a terminal it is one line, written anew; leaving the block ends it.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._said_at = float("-inf")
        self._last = ""
        self._open = False

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def tell(self, reason: str, moving: str = "", waited: float | None = None) -> None:
        """Say why it is still waited.

        Args:
            reason: why; said again when it changes.
            moving: more about it, which is no news when it changes.
            waited: seconds that were waited, where another clock counts them.
        """
        line = f"waiting {format_duration(self.elapsed if waited is None else waited)}, {reason}{moving}"
        if sys.stderr.isatty() and not TERMINAL.json:
            sys.stderr.write(f"{_AGAIN}{line}")
            sys.stderr.flush()
            self._open = True
            return
        if reason == self._last and time.monotonic() - self._said_at < REPEAT:
            return
        self._last, self._said_at = reason, time.monotonic()
        note(line)

    def end(self) -> None:
        """Leave the line."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False
