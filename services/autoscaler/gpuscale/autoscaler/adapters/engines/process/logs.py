"""Log files of replicas: <directory>/<endpoint>/<replica>.log. Blocking; call it in a thread.

A replica appends to its file itself, so it can outlive the adapter. The adapter checks the files every few seconds: a file
beyond the limit is copied to <replica>.log.1, replacing the previous copy, and truncated. So a replica keeps at most twice the
limit plus what it writes between two checks; what it writes between copy and truncation is lost. For ended replicas, the newest
`KEPT` files of each endpoint stay, at most `keep` seconds after their last write; empty folders are removed after the same
time, so that deleted endpoints leave nothing behind.
"""

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from gpuscale.autoscaler.domain.replicas import LogPart
from gpuscale.common.names import REPLICA, match

KEPT = 50
KEPT_SECONDS = 14 * 86_400.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_READS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ReplicaLogs:
    """The logs in a directory, none much larger than twice `max_bytes`; for ended replicas none older than `keep` seconds."""

    def __init__(self, directory: Path, max_bytes: int, keep: float = KEPT_SECONDS) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._keep = keep

    def path(self, replica: str) -> Path:
        """Where endpoints/{endpoint}/replicas/{replica} writes to."""
        _, endpoint, _, own = replica.split("/")
        return self._directory / endpoint / f"{own}.log"

    def read(self, replica: str, offset: int | None, most: int) -> LogPart:
        """At most `most` bytes of a replica's log, from `offset`, or the last ones; from the beginning if less is kept.

        A replica may replace its file with anything: only regular files are read.
        """
        if match(REPLICA, replica) is None:
            return LogPart(problem="it is not a replica's name")
        try:
            file = os.open(self.path(replica), _READS)
        except FileNotFoundError:
            return LogPart(problem="it was not kept, or the replica has written nothing yet")
        except OSError as error:
            return LogPart(problem=str(error.strerror))
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return LogPart(problem="it is not a file")
            begin = max(0, status.st_size - most) if offset is None else offset
            if begin > status.st_size:  # it was truncated meanwhile
                begin = 0
            return LogPart(os.pread(file, most, begin), begin)
        except OSError as error:
            return LogPart(problem=str(error.strerror))
        finally:
            os.close(file)

    def bound(self, running: AbstractSet[str]) -> None:
        """Truncate what is too large, and remove what is too old and of no running replica; OSError at the end."""
        in_use = {self.path(replica) for replica in running}
        problem: OSError | None = None
        for endpoint in self._directory.glob("*/"):
            ended: list[tuple[float, Path]] = []
            for path in endpoint.glob("*.log"):
                try:
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode) and status.st_size > self._max_bytes:
                        _cut(path)
                except OSError as error:
                    problem = error
                    continue
                if path not in in_use:
                    ended.append((status.st_mtime, path))
            try:
                _remove_old(endpoint, ended, time.time() - self._keep)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem


def _remove_old(folder: Path, ended: Iterable[tuple[float, Path]], oldest: float) -> None:
    """Remove the files of ended replicas, except the newest that are young enough; and the folder, if it is empty."""
    for place, (written, path) in enumerate(sorted(ended, reverse=True)):
        if place >= KEPT or written < oldest:
            path.unlink(missing_ok=True)
            _older(path).unlink(missing_ok=True)
    if folder.lstat().st_mtime < oldest and not any(folder.iterdir()):
        folder.rmdir()


def _cut(path: Path) -> None:
    """Copy a file over the previous copy, and truncate it, even if the disk is too full for the copy."""
    older = _older(path)
    older.unlink(missing_ok=True)
    try:
        shutil.copyfile(path, older)
    except OSError as error:
        older.unlink(missing_ok=True)
        if error.errno not in _FULL:
            raise
    os.truncate(path, 0)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
