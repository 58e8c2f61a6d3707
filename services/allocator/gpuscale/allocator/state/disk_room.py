"""Room on the disk for the ends of reservations: without it a disk that is full could release nothing.

Blocks behind the end of the database and of its write-ahead log are kept for them. While the file system has none to keep,
nothing is granted, so that what is left goes to releases, expiries and deletions.
"""

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from gpuscale.common.runtime.logs import get_logger

ROOM = 8 << 20
"""Bytes that are kept behind the end of either file: some thousand ends of reservations."""
_KEEP_SIZE = 1
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_log = get_logger(__name__)


class Room:
    """The room of one database. For the thread that writes; `close` comes after the connections are closed.

    Attributes:
        short: whether the file system had no blocks to keep.
    """

    def __init__(self, database: Path) -> None:
        self.short = False
        self._paths = (database, database.with_name(f"{database.name}-wal"))
        # Open for as long as SQLite is: to close any descriptor of a file gives up its locks.
        self._files: dict[Path, int] = {}
        self._sizes: dict[Path, int] = {}
        self._able = True

    def look(self) -> None:
        """Keep room where the files have grown, or lacked it before."""
        if not self._able:
            return
        was_short, self.short = self.short, False
        for path in self._paths:
            if path not in self._files:
                with suppress(FileNotFoundError):
                    self._files[path] = os.open(path, os.O_RDWR)
            if path in self._files:
                self._keep(path, again=was_short)
        if self.short and not was_short:
            _log.error("the disk of the state is full: reservations end, and nothing is granted", bytes=ROOM)

    def close(self) -> None:
        """Close the files; the room is given back."""
        for file in self._files.values():
            os.close(file)

    def _keep(self, path: Path, *, again: bool) -> None:
        size = os.fstat(self._files[path]).st_size
        if not again and self._sizes.get(path) == size:
            return
        number = _allocate(self._files[path], size, ROOM)
        self._sizes[path] = size
        self.short = self.short or number in _FULL
        if number and number not in _FULL:
            self._able = False
            _log.info("the file system keeps no room for the state", problem=os.strerror(number))


def _allocate(file: int, offset: int, length: int) -> int:
    """Have the file system keep blocks behind the end of a file; returns the number of the error, 0 for none."""
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = libc.fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    done: int = fallocate(file, _KEEP_SIZE, offset, length)
    return ctypes.get_errno() if done else 0
