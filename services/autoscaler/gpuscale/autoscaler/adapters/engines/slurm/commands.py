"""Slurm's commands as child processes: argument lists, a clean environment, a limit on time."""

import asyncio
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuscale.autoscaler.adapters.engines.model import EngineUnavailableError

COMMAND_TIMEOUT = 15.0
HANDED_ON = ("HOME", "LANG", "LOGNAME", "PATH", "SLURM_CONF", "USER")
"""Variables of the adapter that the commands see; those such as SQUEUE_STATES would change what they say."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def why(self) -> str:
        """What it complained about, in one line."""
        return self.err.strip().rpartition("\n")[2] or f"exit status {self.status}"


class Commands:
    """Runs sbatch, squeue and scancel.

    Args:
        directory: where they are; None to look in PATH.
        environment: what they see of variables.
    """

    def __init__(self, directory: Path | None, environment: Mapping[str, str]) -> None:
        self._path = str(directory) if directory else environment.get("PATH")
        self._environment = environment

    async def run(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Answer:
        """Run a command to its end; `environment` is added to what it sees.

        Raises:
            EngineUnavailableError: it cannot be run, or does not end.
        """
        program = shutil.which(name, path=self._path)
        if program is None:
            raise EngineUnavailableError(f"{name} is not installed here")
        command = (program, *arguments)
        try:
            # In a thread and not by the event loop, whose way to fork has gRPC's threads take part each time.
            done = await asyncio.to_thread(_run, command, {**self._environment, **(environment or {})})
        except subprocess.TimeoutExpired as error:
            raise EngineUnavailableError(f"{name} did not end within {COMMAND_TIMEOUT:g} s") from error
        except OSError as error:
            raise EngineUnavailableError(f"cannot run {name}: {error.strerror}") from error
        return Answer(
            done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )


def _run(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Blocking."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        timeout=COMMAND_TIMEOUT,
        check=False,
    )
