"""A shell in which `gpuscalectl` is typed again and again: a process that has imported it, and forks for each command.

A command comes as a line of JSON with its words, its standard input and, where it has one of its own, its environment; its exit
code and what it wrote go back as one.
"""

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from unittest.mock import patch

from gpuscale.cli import main as program
from tests.support.cli import Ran

ROOT = Path(__file__).parents[2]
ANSWER_SECONDS = 120.0

USED = (
    *(
        f"gpuscale.cli.{name}"
        for name in ("commands.get", "commands.logs", "commands.run", "console.cells", "console.lookup")
    ),
    *(f"gpuscale.cli.views.{name}" for name in ("allocator", "autoscaler", "monitor")),
    *(
        f"gpuscale.api.allocator.v1.{name}_pb2"
        for name in ("allocator_service", "reservation", "node_service")
    ),
    *("gpuscale.api.monitor.v1.metric_pb2", "gpuscale.api.autoscaler.v1.rule_pb2", "gpuscale.common.wire"),
    *(
        "gpuscale.client.jobs", "gpuscale.client", "gpuscale.client.connection", "gpuscale.common.secrets",
        "grpc",
    ),
)  # fmt: skip
"""What most commands load, at its first use: to list the names of a module is to use it."""


class Shell:
    """A shell that runs: by `python -m tests.support.shell` below these words, with this environment."""

    def __init__(self, environment: Mapping[str, str], words: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*words, "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.support.shell"],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ctl(self, *words: str, stdin: str = "", environment: Mapping[str, str] | None = None) -> Ran:
        """Type a command; blocks until it has ended."""
        shell = self._process
        limit = threading.Timer(ANSWER_SECONDS, shell.kill)
        limit.start()
        try:
            shell.stdin.write(f"{json.dumps([words, stdin, environment and dict(environment)])}\n")
            shell.stdin.flush()
            answer = shell.stdout.readline()
        finally:
            limit.cancel()
        assert answer, f"{words}: no answer in {ANSWER_SECONDS:g} s"
        return Ran(*json.loads(answer))

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    """Run commands until standard input ends."""
    with patch.dict(os.environ, GRPC_VERBOSITY="NONE"):
        for name in USED:
            dir(importlib.import_module(name))
    del os.environ["PYTHONPATH"]  # which is this program's alone
    for line in sys.stdin:
        words, stdin, environment = json.loads(line)
        with ExitStack() as stack:
            files = [stack.enter_context(TemporaryFile()) for _ in range(3)]
            files[0].write(stdin.encode())
            files[0].seek(0)
            child = os.fork()
            if child == 0:
                _be(words, files, environment)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said = [os.pread(one.fileno(), 1 << 26, 0).decode() for one in files[1:]]
        print(json.dumps([code, *said]), flush=True)


def _be(words: list[str], files: list[IO[bytes]], environment: dict[str, str] | None) -> None:
    code: object = 1
    try:
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        for descriptor, file in enumerate(files):
            os.dup2(file.fileno(), descriptor)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.argv = ["gpuscalectl", *words]
        program.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
