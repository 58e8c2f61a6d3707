"""Builds the C test double once per process, and loads it in the place of the driver's library."""

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.guarded import GuardedFolder

LIBRARY_NAME = "libnvidia-ml.so.1"

_SOURCES = Path(__file__).parent / "c"
FLAGS = (
    "-std=c11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall",
    "-Wextra",
)  # fmt: skip


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def why_unavailable() -> str | None:
    """Why the double cannot be used here, or None if it can."""
    if sys.platform != "linux":
        return "the NVML double is a Linux shared library"
    if compiler() is None:
        return "no C compiler for the NVML double (Debian package gcc)"
    return None


@functools.cache
def library_folder() -> Path:
    """A folder that holds nothing but the built library; gone when this process is gone.

    Raises RuntimeError: it cannot be built; the text holds the compiler's.
    """
    command = compiler()
    if command is None:
        raise RuntimeError(why_unavailable())
    guarded = GuardedFolder("gpuscale-nvml-double-")
    atexit.register(guarded.close)
    folder = guarded.path
    # The name inside the library is what makes a later request for the driver's library end here.
    target = (f"-Wl,-soname,{LIBRARY_NAME}", "-o", str(folder / LIBRARY_NAME))
    sources = sorted(str(path) for path in _SOURCES.glob("*.c"))
    built = subprocess.run(
        [command, *FLAGS, *target, *sources], check=False, capture_output=True, text=True, timeout=120
    )
    if built.returncode != 0:
        raise RuntimeError(f"the NVML double does not build:\n{built.stderr}")
    return folder


@functools.cache
def preload() -> None:
    """Load the double into this process, for good: every later load of the library by name finds it.

    Raises RuntimeError: the process holds the real library already, or the double cannot be built.
    """
    load(library_folder())
    # By name, as everybody else will ask; only the double has this symbol.
    if not hasattr(ctypes.CDLL(LIBRARY_NAME), "nvml_double_marker"):
        raise RuntimeError(f"{LIBRARY_NAME} of a real driver is loaded already")


def load(folder: Path) -> None:
    """Load the double from its folder, in the place of what a process with that folder in `LD_LIBRARY_PATH` would find."""
    ctypes.CDLL(str(folder / LIBRARY_NAME), mode=ctypes.RTLD_GLOBAL)
