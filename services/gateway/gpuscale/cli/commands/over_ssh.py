"""Programs on other hosts, started by the system's own ssh: with the user's keys, settings and known hosts, none of ours."""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING, NamedTuple

from gpuscale.cli.commands.detaching import PROGRAM
from gpuscale.cli.commands.processes import Forwarding, dying_with_us, exit_code
from gpuscale.cli.console.terminal import TERMINAL
from gpuscale.client.orders import GREETING, Orders
from gpuscale.common.errors import FailedPreconditionError, UnavailableError

if TYPE_CHECKING:
    from gpuscale.client import Client

SSH_FAILED = 255
"""Exit code of ssh where it was ssh that failed."""
_PATIENCE = ("-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
"""A host that is gone is noticed: ssh itself waits for ever."""
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
    words = ["ssh", "-T", *_PATIENCE, *(() if sys.stdin.isatty() else ("-o", "BatchMode=yes"))]
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


def write_together(members: Sequence[Member], descriptor: int, *, in_turn: bool) -> list[int]:
    """Run something for each member, and write what they write, with the member in front where there are several; their exit codes.

    Either `in_turn`, or as it comes.
    """
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
        if in_turn:
            thread.join()
    for thread in copying:
        thread.join()
    return [process.wait() for process in started]


def _copy(process: "subprocess.Popen[bytes]", descriptor: int, prefix: bytes) -> None:
    """Write what a process writes, with a prefix in front of each line if there is one."""
    try:
        _copy_lines(process.stdout, descriptor, prefix)
    except BrokenPipeError:
        process.terminate()  # the command ends there, as one here would


def _copy_lines(source: IO[bytes] | None, descriptor: int, prefix: bytes) -> None:
    if source is None:
        raise RuntimeError("it has no pipe")
    left = b""
    while chunk := os.read(source.fileno(), CHUNK):
        if prefix:
            *lines, left = (left + chunk).split(b"\n")
            chunk = b"".join(prefix + line + b"\n" for line in lines)
        _write(descriptor, chunk)
    if left:
        _write(descriptor, prefix + left + b"\n")


class Supervised(NamedTuple):
    """A supervisor that is to run a member of a job: its orders, and the words that start it."""

    orders: Orders
    words: list[str]


def supervised(orders: Orders, forward: Sequence[str] = ()) -> Supervised:
    """A supervisor on the node of a member; that of the first one forwards the ports."""
    supervisor = shlex.join([*PROGRAM, "supervise"]) if orders.local else "gpuscalectl supervise"
    ports = () if orders.member else forward
    return Supervised(
        orders, words_on(orders.node, supervisor, user=orders.user, local=orders.local, forward=ports)
    )


def supervise_all(members: Sequence[Supervised], *, stdout: int, patience: float) -> list[int]:
    """Have supervisors run the members of a job; returns their exit codes. Nothing starts before all of them are there.

    Of several what they write gets the member in front; a single one gets our standard input.

    Args:
        members: what they run.
        stdout: where the commands' standard output goes.
        patience: seconds until they must be there.

    Raises:
        FailedPreconditionError: no ssh here (NO_SSH).
        UnavailableError: no supervisor came up on one of the nodes, so that nothing was started (NO_SUPERVISOR).
    """
    with Forwarding() as signals, ExitStack() as stack:
        started = [stack.enter_context(_started(one.words, alone=len(members) == 1)) for one in members]
        for process in started:
            signals.to(process)
            stack.callback(process.kill)
        _await_greetings(members, started, patience)
        own_input = len(members) == 1 and not members[0].orders.detached
        for one, process in zip(members, started, strict=True):
            feed = (process.stdin, one.orders.line(), own_input)
            threading.Thread(target=_feed, args=feed, daemon=True).start()
        if len(members) == 1:
            _copy(started[0], stdout, b"")
            return [exit_code(started[0].wait())]
        together = members[0].orders.stop_together
        following = [
            threading.Thread(target=_follow, args=(number, started, stdout, together), daemon=True)
            for number in range(len(started))
        ]
        for thread in following:
            thread.start()
        for thread in following:
            thread.join()
        return [exit_code(process.wait()) for process in started]


def _started(words: list[str], *, alone: bool) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            dying_with_us(words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if alone else subprocess.PIPE,
            bufsize=0,
            env=TERMINAL.callers_environment(),
        )
    except OSError as error:
        raise FailedPreconditionError(f"cannot start ssh: {error.strerror}", reason="NO_SSH") from error


def _await_greetings(
    members: Sequence[Supervised], started: "Sequence[subprocess.Popen[bytes]]", patience: float
) -> None:
    for one, process in zip(members, started, strict=True):
        impatient = threading.Timer(patience, process.kill)
        impatient.daemon = True
        impatient.start()
        greeted = process.stdout is not None and _greeted(process.stdout)
        impatient.cancel()
        if not greeted:
            if process.stderr is not None:
                process.kill()
                sys.stderr.write(process.stderr.read().decode(errors="replace"))
            raise UnavailableError(
                f"no supervisor came up on {one.orders.node}, so nothing was started there: {' '.join(one.words[:-1])} must"
                f" work, and find `{one.words[-1]}` in the PATH there",
                reason="NO_SUPERVISOR",
            )


def _follow(number: int, started: "Sequence[subprocess.Popen[bytes]]", stdout: int, together: bool) -> None:
    """Write what a member writes until it ends; where its connection ended, the others end `together` with it."""
    process, prefix = started[number], f"[{number}] ".encode()
    errors = threading.Thread(target=_copy_lines, args=(process.stderr, 2, prefix), daemon=True)
    errors.start()
    _copy(process, stdout, prefix)
    errors.join()
    if process.wait() == SSH_FAILED and together:
        for other in started:
            if other.poll() is None:
                other.terminate()


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


def _feed(sink: IO[bytes] | None, orders: bytes, own_input: bool) -> None:
    """Send the orders, then our own standard input if it is the command's."""
    if sink is None:
        raise RuntimeError("it has no pipe")
    with suppress(OSError, ValueError):  # it has ended
        _write(sink.fileno(), orders)
        while own_input and (chunk := os.read(0, CHUNK)):
            _write(sink.fileno(), chunk)
    with suppress(OSError, ValueError):
        sink.close()


def _write(descriptor: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]
