"""Files with secrets: readable by their owner only, and complete at every moment."""

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Replace a file at once, mode 0600.

    Raises:
        OSError: it cannot be written, or the path is not a regular file, such as /dev/null; nothing changes then.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError:
        with suppress(OSError):
            Path(name).unlink()
        raise
