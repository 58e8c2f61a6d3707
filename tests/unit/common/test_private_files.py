"""Files with secrets: private, whole, and never in place of what is no file."""

import os
from pathlib import Path

import pytest

from gpuscale.common.private_files import write_private


def test_a_file_is_replaced_and_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("before")
    write_private(file, b"after")
    assert file.read_bytes() == b"after"
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_no_file_is_never_replaced(tmp_path: Path) -> None:
    """Root that names /dev/null would put a file in place of the device, for all programs of the host."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="is not a regular file"):
        write_private(pipe, b"content")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
