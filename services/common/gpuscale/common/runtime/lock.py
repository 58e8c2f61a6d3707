"""One program per directory: two of them on one state would both act."""

import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from gpuscale.common.errors import FailedPreconditionError

_MAX_PID_BYTES = 32


class DirectoryLock:
    """An exclusive lock on a directory, held from entering the context to leaving it.

    The directory is made, for its owner only, if it is missing. The lock is flock(2) on a file `lock` in it, so the
    kernel lets go of it when the process dies in whatever way; the file stays, and holds the pid of the last holder.

    Raises:
        FailedPreconditionError: on entering; DIRECTORY_LOCKED where another program holds it, DIRECTORY_UNUSABLE
            where the directory cannot be made or written to, or where other users may change what is in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(self._path)
            descriptor = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise FailedPreconditionError(
                f"cannot use the directory {self._path}: {error.strerror}", reason="DIRECTORY_UNUSABLE"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, _MAX_PID_BYTES, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise FailedPreconditionError(
                f"the directory {self._path} is in use by process {holder or 'unknown'}",
                reason="DIRECTORY_LOCKED",
                metadata={"directory": str(self._path), "pid": holder},
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _check_private(path: Path) -> None:
    """Refuse a directory in which others could put, or take away, what is trusted here."""
    status = path.stat()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FailedPreconditionError(
            f"other users may write to the directory {path}: chmod go-w {path}", reason="DIRECTORY_UNUSABLE"
        )
    if status.st_uid not in {os.geteuid(), 0}:
        raise FailedPreconditionError(
            f"the directory {path} belongs to another user: chown it, or choose another",
            reason="DIRECTORY_UNUSABLE",
        )
