"""Programs on other hosts, started by the system's own ssh: with the user's keys, settings and known hosts, none of ours."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NamedTuple

from gpuscale.cli.commands.processes import Forwarding, dying_with_us, exit_code
from gpuscale.cli.commands.supervise import GREETING, Orders
from gpuscale.cli.console.terminal import TERMINAL
from gpuscale.common.errors import FailedPreconditionError, UnavailableError

if TYPE_CHECKING:
    from gpuscale.client import Client

SSH_FAILED = 255
"""Exit code of ssh where it was ssh that failed."""
CHUNK = 65_536
MOST_LINES = 1000
"""Lines that the shell of a host may write before the supervisor does."""


def words_on(
    node: str, command: str, *, user: str = "", local: bool = False, forward: Sequence[str] = ()
) -> list[str]:
    """What runs a command of the shell on a node, as the user who logs in there.

    Args:
        node: its id, which ssh takes for a host.
        command: for the shell.
        user: who logs in; whom ssh says when empty.
        local: whether it is this host, where no ssh is needed.
        forward: ports, PORT or LOCAL:REMOTE, that lead there from this host.
    """
    if local:
        return ["sh", "-c", command]
    words = ["ssh", "-T", *(() if sys.stdin.isatty() else ("-o", "BatchMode=yes"))]
    words += ["-l", user] if user else []
    for one in forward:
        here, _, there = one.partition(":")
        words += ["-o", "ExitOnForwardFailure=yes", "-L", f"{here}:localhost:{there or here}"]
    return [*words, "--", node, command]


class Member(NamedTuple):
    """What runs for one member of a job, on its node."""

    number: int
    node: str
    words: list[str]


def this_node(client: "Client") -> str | None:
    """The node that this host is; None where it is none, or may be any of several."""
    try:
        return client.this_node(check=True)
    except FailedPreconditionError as error:
        if error.reason != "NODE_AMBIGUOUS":
            raise
        return None


def write_together(members: Sequence[Member], descriptor: int) -> list[int]:
    """Run something for each member, and write what they write, with the member in front where there are several; their exit codes."""
    started = [
        subprocess.Popen(dying_with_us(one.words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        for one in members
    ]
    copying = [
        threading.Thread(target=_copy, args=(process, descriptor, f"[{one.number}] ".encode()), daemon=True)
        for one, process in zip(members, started, strict=True)
    ]
    if len(members) == 1:
        _copy(started[0], descriptor, b"")
        return [started[0].wait()]
    for thread in copying:
        thread.start()
    for thread in copying:
        thread.join()
    return [process.wait() for process in started]


def _copy(process: "subprocess.Popen[bytes]", descriptor: int, prefix: bytes) -> None:
    """Write what a process writes, with a prefix in front of each line if there is one."""
    if process.stdout is None:
        raise RuntimeError("it has no pipe")
    try:
        while chunk := process.stdout.readline() if prefix else os.read(process.stdout.fileno(), CHUNK):
            _write(descriptor, prefix + chunk)
    except BrokenPipeError:
        process.terminate()


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
                dying_with_us(words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=TERMINAL.callers_environment(),
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
            own_input = not orders.detached
            threading.Thread(target=_feed, args=(sink, orders.line(), own_input), daemon=True).start()
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


def _feed(sink: IO[bytes], orders: bytes, own_input: bool) -> None:
    """Send the orders, then our own standard input if it is the command's."""
    with suppress(OSError, ValueError):  # it has ended
        _write(sink.fileno(), orders)
        while own_input and (chunk := os.read(0, CHUNK)):
            _write(sink.fileno(), chunk)
    with suppress(OSError, ValueError):
        sink.close()


def _write(descriptor: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]
