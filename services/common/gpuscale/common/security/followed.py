"""Files that are read again when they change: certificates, tokens."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gpuscale.common.runtime.logs import get_logger

_log = get_logger(__name__)

T = TypeVar("T")


class Followed(Generic[T]):
    """What `load` makes of some files, made anew when they change. Any thread may use it.

    Files that cannot be used after a change leave what was made of them before.

    Args:
        what: names them in the log.
        files: looked at for changes.
        load: raises OSError or ValueError where they cannot be used; so does this class, when it is made.
        period: least seconds between two looks.

    Attributes:
        current: what `load` made last.
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
        """What the files hold now; None if nothing changed, or they cannot be used."""
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
                    "changed files cannot be used, the old ones count", what=self._what, problem=cause(error)
                )
                return None
            _log.info("files read again", what=self._what, file=str(self._files[0]))
            return self.current

    def _signature(self) -> tuple[tuple[int, int, int], ...]:
        stats = [path.stat() for path in self._files]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def cause(error: OSError | ValueError) -> str:
    """What is wrong with a file, without its contents."""
    if isinstance(error, OSError):  # ssl.SSLError is one of them
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    from pydantic import ValidationError  # 10 MB of memory, which a program without such files need not have

    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
