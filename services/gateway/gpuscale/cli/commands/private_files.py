"""Files with secrets in them: for their owner only, and whole at every moment."""

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Put a file in place of the one there is, mode 0600.

    Raises:
        OSError: it cannot be written, or what is there is no file, such as /dev/null; what was there stays.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no regular file")
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
