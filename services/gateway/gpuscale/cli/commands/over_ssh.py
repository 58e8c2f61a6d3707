"""A supervisor on another host, started by the system's own ssh: with the user's keys, settings and known hosts, none of ours."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

from gpuscale.cli.commands.processes import Forwarding, dying_with_us, exit_code
from gpuscale.cli.commands.supervise import GREETING, Orders
from gpuscale.common.errors import FailedPreconditionError, UnavailableError

SSH_FAILED = 255
"""Exit code of ssh where it was ssh that failed."""
CHUNK = 65_536
MOST_LINES = 1000
"""Lines that the shell of a host may write before the supervisor does."""


def supervise_over_ssh(orders: Orders, words: list[str], *, stdout: int, patience: float) -> int:
    """Have a supervisor on another host run the command; returns its exit code.

    Args:
        orders: what it runs.
        words: the ssh command that starts it.
        stdout: where the command's standard output goes.
        patience: seconds until it must be there.

    Raises:
        FailedPreconditionError: no ssh here (NO_SSH).
        UnavailableError: no supervisor came up there, so that nothing was started (NO_SUPERVISOR).
    """
    with Forwarding() as signals:
        try:
            process = subprocess.Popen(
                dying_with_us(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        except OSError as error:
            raise FailedPreconditionError(f"cannot start ssh: {error.strerror}", reason="NO_SSH") from error
        with process:
            signals.to(process)
            # PIPE makes both.
            source, sink = process.stdout, process.stdin
            if source is None or sink is None:
                raise RuntimeError("ssh has no pipes")
            impatient = threading.Timer(patience, process.kill)
            impatient.daemon = True
            impatient.start()
            greeted = _greeted(source)
            impatient.cancel()
            if not greeted:
                process.kill()
                raise UnavailableError(
                    f"no supervisor came up on {orders.node}, so nothing was started there: {' '.join(words[:-1])} must work,"
                    f" and find `{words[-1]}` in the PATH there",
                    reason="NO_SUPERVISOR",
                )
            threading.Thread(target=_feed, args=(sink, orders.line()), daemon=True).start()
            try:
                while chunk := source.read(CHUNK):
                    _write(stdout, chunk)
            except BrokenPipeError:
                process.terminate()  # the command ends there, as one here would
            return exit_code(process.wait())


def _greeted(source: IO[bytes]) -> bool:
    """Whether a supervisor says that it is there; what a shell wrote before goes to standard error."""
    line = bytearray()
    for _ in range(MOST_LINES):
        line.clear()
        while not line.endswith(b"\n") and len(line) < CHUNK and (byte := source.read(1)):
            line += byte
        if bytes(line) == GREETING or not line:
            return bool(line)
        sys.stderr.write(line.decode(errors="replace"))
    return False


def _feed(sink: IO[bytes], orders: bytes) -> None:
    """Send the orders, then our own standard input."""
    with suppress(OSError, ValueError):  # it has ended
        _write(sink.fileno(), orders)
        while chunk := os.read(0, CHUNK):
            _write(sink.fileno(), chunk)
    with suppress(OSError, ValueError):
        sink.close()


def _write(descriptor: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]
