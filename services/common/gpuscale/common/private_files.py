"""Files with secrets: readable by their owner and group at most, and complete at every moment."""

import errno
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

LINK_PATH = "/open/"
"""A link that signs in at the dashboard is its address, this, and a secret."""


def write_private(path: Path, content: bytes, *, public: bool = False) -> None:
    """Replace a file at once: with its owner, its group and what the group may read, else of the caller with mode 0600.

    Services run as another user than root, who replaces their files: they must be able to read them afterwards.

    Args:
        path: the file.
        content: what it holds then.
        public: whether all may read it.

    Raises:
        OSError: it cannot be written, or the path is not a regular file, such as /dev/null; nothing changes then.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            new, mode = os.fstat(descriptor), 0o644 if public else 0o600
            with suppress(FileNotFoundError):
                old = path.lstat()
                if stat.S_ISREG(old.st_mode):
                    mode |= old.st_mode & stat.S_IRGRP
                    # Units may not call it at all.
                    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                        os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError:
        with suppress(OSError):
            Path(name).unlink()
        raise


def write_link(file: Path, address: str) -> str:
    """Make a new link to the dashboard at `address`, and write it to the file, which the user alone can read.

    Raises:
        OSError: it cannot be written.
    """
    link = f"http://{address}{LINK_PATH}{secrets.token_urlsafe(16)}"
    write_private(file, f"{link}\n".encode())
    return link
