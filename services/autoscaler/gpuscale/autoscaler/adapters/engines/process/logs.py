"""Files that replicas write their output to: <directory>/<endpoint>/<replica>.log. Blocking; call it in a thread.

A replica writes to its file itself, in append mode, so that it lives on without the adapter. The adapter looks at the
files every few seconds: one that has grown beyond the limit is copied to <replica>.log.1, over the copy before, and cut
to nothing. So a replica keeps at most two times the limit and what it writes between two looks; what it writes between
the copy and the cut is lost. Of replicas that have ended, the newest `KEPT` files of each endpoint stay, none for longer than
`keep` seconds after it was last written to; a folder with nothing in it goes after as long, so that endpoints that were
deleted leave nothing behind.
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
    """The logs in a directory, none much larger than twice `max_bytes`; of replicas that ended none older than `keep` seconds."""

    def __init__(self, directory: Path, max_bytes: int, keep: float = KEPT_SECONDS) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._keep = keep

    def path(self, replica: str) -> Path:
        """Where endpoints/{endpoint}/replicas/{replica} writes to."""
        _, endpoint, _, own = replica.split("/")
        return self._directory / endpoint / f"{own}.log"

    def read(self, replica: str, offset: int | None, most: int) -> LogPart:
        """At most `most` bytes of what a replica wrote, from `offset` on, or the last ones; from the beginning where less is kept.

        A replica may put whatever it likes in the place of its file: nothing but a file is read.
        """
        if match(REPLICA, replica) is None:
            return LogPart(problem="it is no name of a replica")
        try:
            file = os.open(self.path(replica), _READS)
        except FileNotFoundError:
            return LogPart(problem="it is not kept, or it wrote nothing yet")
        except OSError as error:
            return LogPart(problem=str(error.strerror))
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return LogPart(problem="it is no file")
            begin = max(0, status.st_size - most) if offset is None else offset
            if begin > status.st_size:  # it was cut meanwhile
                begin = 0
            return LogPart(os.pread(file, most, begin), begin)
        except OSError as error:
            return LogPart(problem=str(error.strerror))
        finally:
            os.close(file)

    def bound(self, running: AbstractSet[str]) -> None:
        """Cut what is too large, and remove what is too old and of no running replica; OSError at the end."""
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
    """Remove the files of replicas that ended, but for the newest that are young enough; and the folder, if it is empty."""
    for place, (written, path) in enumerate(sorted(ended, reverse=True)):
        if place >= KEPT or written < oldest:
            path.unlink(missing_ok=True)
            _older(path).unlink(missing_ok=True)
    if folder.lstat().st_mtime < oldest and not any(folder.iterdir()):
        folder.rmdir()


def _cut(path: Path) -> None:
    """Copy a file over the copy before, and cut it to nothing: also where the disk is too full for the copy."""
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
