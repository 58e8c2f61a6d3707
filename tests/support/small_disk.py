"""A file system of its own that a test fills up."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import pytest

from tests.support.fixtures import need


@contextmanager
def small_disk(place: Path) -> Generator[Path]:
    """A file system of 48 MiB at a new folder; skips the test where none can be mounted, but fails in CI."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "tmpfs", str(place)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        need(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    """Leave not a byte free; returns the file to remove for room."""
    file = place / "filler"
    with file.open("ab", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        filler.writelines(repeat(bytes(4096)))
    return file
