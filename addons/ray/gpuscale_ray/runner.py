"""What runs in Ray: an actor with one command as its child process.

Ray sends this code to the node, which does not need gpuscale, so it uses only the standard library. The command ends with
its actor, however that ends, and its process group ends with the command.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

INHERITED = ("PATH", "HOME", "LANG")
"""Variables of Ray's worker that the command gets, besides the GPUs."""
GPUS = "CUDA_VISIBLE_DEVICES"
_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT

# The kernel kills the command when the actor's process is gone, unless that was quicker than asking for it.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
"""


class Runner:
    """Runs a command and reports its status.

    Args:
        argv: the program and its arguments; {python} as the program is the interpreter of Ray's worker.
        env: variables to set.
        working_dir: where to start it; empty for that of the worker.
        gpus: logical GPUs that it has.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], working_dir: str, gpus: int) -> None:
        own = {name: os.environ[name] for name in INHERITED if name in os.environ}
        program = sys.executable if argv[0] == "{python}" else argv[0]
        tied = [sys.executable, "-ISc", _TIED, str(os.getpid()), program, *argv[1:]]
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            tied,
            env={**own, **env, GPUS: os.environ.get(GPUS, "") if gpus else ""},
            cwd=working_dir or None,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def status(self) -> dict[str, float | None]:
        """Its process id, its exit code once it ended (negative for a signal), and seconds since it was started."""
        process = self._process
        if process.returncode is None and os.waitid(os.P_PID, process.pid, _LOOK) is not None:
            self.kill()  # what it left behind, before its number can be another's
            process.wait()
        return {"pid": process.pid, "exit_code": process.returncode, "lived": time.monotonic() - self._began}

    def finish(self) -> None:
        """Ask it to finish its work and to end."""
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with what it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
