"""One program per directory, through kill -9."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.lifecycle import DirectoryLock

HOLDER = """
import pathlib, sys
from gpuscale.common.runtime.lifecycle import DirectoryLock
with DirectoryLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_program_is_refused_until_the_first_is_gone_however_it_went(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(FailedPreconditionError) as caught, DirectoryLock(directory):
                pass
        finally:
            holder.kill()
    assert caught.value.reason == "DIRECTORY_LOCKED"
    assert str(directory) in caught.value.message
    assert str(holder.pid) in caught.value.message
    with DirectoryLock(directory):
        pass


def test_a_second_lock_of_the_same_program_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path):
        for _ in range(2):
            with pytest.raises(FailedPreconditionError), DirectoryLock(tmp_path):
                pass
    with DirectoryLock(tmp_path):
        pass


def test_the_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path / "a"):
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "a" / "lock").stat().st_mode & 0o777 == 0o600


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPreconditionError) as caught, DirectoryLock(tmp_path / "file" / "state"):
        pass
    assert caught.value.reason == "DIRECTORY_UNUSABLE"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(FailedPreconditionError, match="chmod go-w") as caught, DirectoryLock(directory):
        pass
    assert caught.value.reason == "DIRECTORY_UNUSABLE"
    assert list(directory.iterdir()) == []
    directory.chmod(0o755)
    with DirectoryLock(directory):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Who owns it may change what is in it, whatever its mode says."""
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(FailedPreconditionError, match="belongs to another user") as caught:
        DirectoryLock(tmp_path).__enter__()
    assert caught.value.reason == "DIRECTORY_UNUSABLE"
