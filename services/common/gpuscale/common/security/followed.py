"""Files that are reloaded when they change, such as certificates and tokens."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gpuscale.common.runtime.logs import get_logger

_log = get_logger(__name__)

T = TypeVar("T")


class Followed(Generic[T]):
    """A value that `load` makes of files, reloaded when they change, checked every `period` seconds at most. Thread-safe.

    If changed files cannot be used, the previous value stays as `current`, and the log names them by `what`. `load` raises
    OSError or ValueError for unusable files; then so does the constructor.
    """

    def __init__(self, what: str, files: Sequence[Path], load: Callable[[], T], period: float = 0.0) -> None:
        self._what = what
        self._files = files
        self._load = load
        self._period = period
        self._next_look = time.monotonic() + period
        self._lock = threading.Lock()
        self._seen = self._signature()
        self.current = load()

    def newer(self) -> T | None:
        """Check for changes; the new value, or None without a usable change."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_look:
                return None
            self._next_look = now + self._period
            try:
                signature = self._signature()
                if signature == self._seen:
                    return None
                self._seen = signature
                self.current = self._load()
            except (OSError, ValueError) as error:
                _log.warning(
                    "changed files cannot be used, keeping the old ones",
                    what=self._what,
                    problem=cause(error),
                )
                return None
            _log.info("files reloaded", what=self._what, file=str(self._files[0]))
            return self.current

    def _signature(self) -> tuple[tuple[int, int, int], ...]:
        stats = [path.stat() for path in self._files]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def cause(error: OSError | ValueError) -> str:
    """Why a file cannot be used, without its content."""
    if isinstance(error, OSError):  # includes ssl.SSLError
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    from pydantic import ValidationError  # 10 MB, needed only for such files

    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
