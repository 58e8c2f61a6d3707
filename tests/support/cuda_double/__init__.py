"""A double of the CUDA driver library, in C: `cuda.c` says what it does. Found by who has `variables` in its environment."""

import atexit
import functools
import os
import subprocess
from pathlib import Path

from tests.support.guarded import GuardedFolder
from tests.support.nvml_double.build import FLAGS, compiler

LIBRARY = "libcuda.so.1"


@functools.cache
def folder() -> Path:
    """A folder that holds nothing but the built library; gone when this process is gone."""
    guarded = GuardedFolder("gpuscale-cuda-double-")
    atexit.register(guarded.close)
    source = Path(__file__).with_name("cuda.c")
    words = (
        str(compiler()), *FLAGS, f"-Wl,-soname,{LIBRARY}", "-o", str(guarded.path / LIBRARY), str(source),
    )  # fmt: skip
    built = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    if built.returncode:
        raise RuntimeError(f"the CUDA double does not build:\n{built.stderr}")
    return guarded.path


def variables(misbehaves: str = "") -> dict[str, str]:
    """What a process needs in its environment from its start on, to find the double and have it misbehave."""
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder()), *([before] if before else [])]),
        "CUDA_DOUBLE": misbehaves,
    }
