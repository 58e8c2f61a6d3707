"""Files with secrets: private, whole, and never in place of what is no file."""

import os
import resource
from pathlib import Path

import pytest

from gpuscale.common.secrets import write_private


def test_a_file_is_replaced_and_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("before")
    file.chmod(0o604)
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_replaces_a_file_of_a_service_that_can_still_read_it(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text("before")
    os.chown(file, 4242, 4343)
    file.chmod(0o640)
    write_private(file, b"after")
    kept = file.stat()
    assert (kept.st_uid, kept.st_gid, kept.st_mode & 0o777) == (4242, 4343, 0o640)


def test_a_link_is_replaced_and_what_it_names_stays(tmp_path: Path) -> None:
    """A service that may write in the directory could otherwise have root change any file."""
    (tmp_path / "shadow").write_text("secret")
    (tmp_path / "ca.crt").symlink_to("shadow")
    write_private(tmp_path / "ca.crt", b"public", public=True)
    assert (tmp_path / "shadow").read_text() == "secret"
    assert (tmp_path / "ca.crt").stat().st_mode & 0o777 == 0o644
    assert not (tmp_path / "ca.crt").is_symlink()


def test_an_error_of_a_write_that_ran_out_of_room_names_the_file(tmp_path: Path) -> None:
    """The kernel names none, and commands say what they cannot write by the error."""
    file = tmp_path / "gpuscale.toml"
    file.write_bytes(b"before")
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(OSError, match="too large") as refused:
            write_private(file, b"after")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.filename == str(file)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]
