"""Programs on other hosts, started by the system's ssh with the user's own keys, settings and known hosts."""

import os
import re
import select
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple, Self

from gpuscale.client.orders import GO, GREETING, READY, Orders
from gpuscale.common.errors import FailedPreconditionError, UnavailableError

SUPERVISOR = (sys.executable, "-m", "gpuscale.cli.commands.supervise")
"""`gpuscalectl supervise`, run by this Python."""
OF_SIGNAL = 128
"""Added to the number of a signal in exit codes."""
OnStart = Callable[["subprocess.Popen[bytes]"], object]
"""Called with each started process."""
SSH_FAILED = 255
"""Exit code of ssh when ssh itself fails."""
_QUIET = ("-o", "BatchMode=yes", "-o", "LogLevel=QUIET")
_SUPERVISE = "gpuscalectl supervise"
EARLY_SECONDS = 10.0
"""How long an early supervisor waits for its orders."""
_PATIENCE = ("-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
"""Detects a lost host, for which ssh would wait for ever."""
_TURNED_AWAY = re.compile(
    "(?s)(?!.*(Permission denied|open failed|forwarding failed|UNKNOWN port)).*exchange_identification: "
)
"""What ssh says of a connection that sshd closed before anything else, as when very many are opened at once (its MaxStartups); not
where the way there is closed, as that of a ProxyJump."""
TRIES, FIRST_PAUSE = 5, 2.0
"""How often ssh is tried where it was turned away; and most seconds before it is tried again, which double with each time."""
LINGER = 1.0
"""Seconds of silence that end the standard error of an ended process: a helper of ssh, as of ControlPersist, may hold it open."""
CHUNK = 65_536
MOST_LINES = 1000
"""Most lines of shell output before the supervisor's greeting."""


_DYING_WITH = """
import _signal, ctypes, os, sys  # `signal` takes longer than all else here
for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # as they were before Python changed them
    _signal.signal(number, _signal.SIG_DFL)
ctypes.CDLL(None).prctl(1, _signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG of linux/prctl.h
if os.getppid() != int(sys.argv[1]):
    sys.exit(137)  # it ended before the call
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"error: {sys.argv[2]}: {error.strerror}")
"""
"""Becomes a command that the kernel kills when this process ends. A separate program, since nothing may run between fork and exec in
a process with gRPC's threads."""


def dying_with_us(words: Sequence[str]) -> list[str]:
    """Wraps a command so that the kernel kills it when this process ends."""
    return [sys.executable, "-I", "-S", "-c", _DYING_WITH, str(os.getpid()), *words]


def exit_code(returned: int) -> int:
    """The exit code of an ended command; 128 plus the signal if one ended it."""
    return OF_SIGNAL - returned if returned < 0 else returned


def words_on(
    node: str, command: str, *, user: str = "", local: bool = False, forward: Sequence[str] = ()
) -> list[str]:
    """The arguments that run a shell command on a node, by its id as host name; without ssh if it is `local`.

    `user` is whom to log in as; empty: as ssh is configured. `forward` has ports of this host, PORT or LOCAL:REMOTE.
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
    """The process of one member of a job."""

    number: int
    node: str
    words: list[str]


def write_together(
    members: Sequence[Member], descriptor: int, *, in_turn: bool, on_start: OnStart = id
) -> list[tuple[int, bool]]:
    """Run a program for each member and write its output, prefixed with the member if there are several.

    Returns the exit code of each, and whether it wrote anything. Outputs are written `in_turn` or interleaved. Where a host
    turns ssh away, it is started again.
    """
    with ExitStack() as stack:

        def start(words: list[str]) -> "subprocess.Popen[bytes]":
            process = stack.enter_context(_started(words, None, inherit=False))
            if process.stdin:
                process.stdin.close()  # a profile may read it
            on_start(process)
            return process

        started = [start(one.words) for one in members]
        failed, began = list[OSError](), [False for _ in members]

        def copy(number: int) -> None:
            prefix = f"[{members[number].number}] ".encode() if len(members) > 1 else b""
            for pause in _pauses():
                process, beginning = started[number], bytearray()
                errors = _Errors(process, 2)
                _copy(process, process.stdout, descriptor, prefix, failed, beginning)
                began[number], code = bool(beginning), process.wait()
                # Asked of every end, since it waits for all that is said.
                turned_away = not failed and errors.turned_away() and code == SSH_FAILED and not beginning
                if not turned_away or not pause or start(["sleep", f"{pause:.3f}"]).wait():
                    return
                started[number] = start(members[number].words)

        copying = [
            threading.Thread(target=copy, args=(number,), daemon=True) for number in range(len(members))
        ]
        for thread in copying:
            thread.start()
            if in_turn:
                thread.join()
        for thread in copying:
            thread.join()
        return list(zip(_codes(started, failed), began, strict=True))


def _pauses() -> Iterator[float]:
    """After each try of ssh, how long to wait for the next; 0 after the last."""
    from gpuscale.common.runtime.tasks import Backoff  # only now: `run` starts ssh before it imports much

    waits = Backoff(FIRST_PAUSE)
    yield from (waits.next() for _ in range(TRIES - 1))
    yield 0.0


def _codes(started: "Sequence[subprocess.Popen[bytes]]", failed: Sequence[OSError]) -> list[int]:
    """The exit codes of processes, once all have ended. Raises OSError: their output could not be written."""
    for error in failed:
        raise error
    return [exit_code(process.wait()) for process in started]


def _copy(
    process: "subprocess.Popen[bytes]",
    source: IO[bytes] | None,
    descriptor: int,
    prefix: bytes,
    failed: list[OSError] | None,
    beginning: bytearray,
) -> None:
    """Copy an output, if it is piped, with a prefix before each line, and keep its beginning.

    A full disk or closed pipe ends the process, and is what `failed`.
    """
    left = b""
    try:
        while source and (chunk := _next_of(process, source, failed is None)) and not source.closed:
            beginning += chunk[: CHUNK - len(beginning)]
            if prefix:
                *lines, left = (left + chunk).split(b"\n")
                if len(left) > CHUNK:  # without an end, as of a progress bar
                    lines, left = [*lines, left], b""
                chunk = b"".join(prefix + line + b"\n" for line in lines)
            _write(descriptor, chunk)
        if left and source and not source.closed:
            _write(descriptor, prefix + left + b"\n")
    except OSError as error:
        if failed is not None:
            process.terminate()  # the command ends, like a local one would
            failed.append(error)
        elif source:  # nobody need read what it says of errors
            with Path(os.devnull).open("wb") as nowhere:
                _copy(process, source, nowhere.fileno(), b"", None, beginning)
    except ValueError:  # closed by us after the process ended: a helper of ssh held it open
        pass


def _next_of(process: "subprocess.Popen[bytes]", source: IO[bytes], errors: bool) -> bytes:
    """What an output says next; nothing at its end, or, of `errors`, once its process ended and then nothing came for LINGER seconds."""
    readable, ended = select.poll(), False
    readable.register(source, select.POLLIN)
    while errors and not readable.poll(LINGER * 1000):
        if ended:
            return b""
        ended = process.returncode is not None  # and once more: it may have written until then
    return os.read(source.fileno(), CHUNK)


class _Errors(threading.Thread):
    """Copies what a process says on standard error as it comes: ssh may ask a person there."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int, prefix: bytes = b"") -> None:
        self._beginning = bytearray()
        copied = (process, process.stderr, descriptor, prefix, None, self._beginning)
        super().__init__(target=_copy, args=copied, daemon=True)
        self.start()

    def turned_away(self) -> bool:
        """Whether an ended ssh says that its host turned it away."""
        self.join()
        return bool(_TURNED_AWAY.match(self._beginning.decode(errors="replace")))


class EarlyStart:
    """A supervisor started on a node while its GPUs are still being reserved. The end of the block kills it.

    It hides messages of ssh: if it fails, another supervisor is started, which shows them.
    """

    def __init__(self, node: str, user: str, forward: Sequence[str]) -> None:
        script = shlex.quote(f"command -v gpuscalectl >/dev/null && exec {_SUPERVISE}")
        ssh, *words = words_on(node, f"sh -c {script}", user=user, forward=forward)
        self.node: str = node
        self._user: str = user
        self._process: subprocess.Popen[bytes] = _started([ssh, *_QUIET, *words], None, inherit=True)
        self._limit: threading.Timer = threading.Timer(EARLY_SECONDS, self._process.kill)
        self._limit.daemon = True
        self._limit.start()

    def take(self, orders: Orders) -> "subprocess.Popen[bytes] | None":
        """The supervisor, if it started and matches the orders."""
        fits = (self.node, self._user, False, False) == (orders.node, orders.user, orders.local, orders.waits)
        there = fits and self._process.stdout is not None and _greeted(self._process.stdout)
        self._limit.cancel()
        return self._process if there and self._process.poll() is None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        with self._process:
            self._process.kill()


class Supervised(NamedTuple):
    """A supervisor that is to run a member of a job: its orders, the words that start it, and the one that may be there already."""

    orders: Orders
    words: list[str]
    early: EarlyStart | None = None


def supervised(orders: Orders, forward: Sequence[str] = (), early: EarlyStart | None = None) -> Supervised:
    """The supervisor of a member; that of the first one forwards the ports."""
    supervisor = shlex.join(SUPERVISOR) if orders.local else _SUPERVISE
    ports = () if orders.member else forward
    words = words_on(orders.node, supervisor, user=orders.user, local=orders.local, forward=ports)
    return Supervised(orders, words, early)


def supervise_all(
    members: Sequence[Supervised],
    *,
    stdout: int,
    patience: float,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    on_start: OnStart = id,
) -> list[int]:
    """Run the members of a job under supervisors; returns their exit codes. Commands start once all supervisors are ready.

    Output of several members is prefixed with the member; a single one gets our standard input. Supervisors have `patience`
    seconds to start. `environment` is that of ssh; `on_start` is called with each process started for a member.

    Raises:
        FailedPreconditionError: no ssh here (NO_SSH), or one of several members cannot start, so none did (MEMBER_NOT_READY).
        UnavailableError: no supervisor started on one of the nodes, so nothing runs (NO_SUPERVISOR).
    """
    failed, first, errors = list[OSError](), members[0].orders, list[_Errors]()
    alone = len(members) == 1 and stderr is None
    early = members[0].early.take(first) if members[0].early and alone else None
    together, outputs = first.stop_together, (stdout, 2 if stderr is None else stderr)
    with ExitStack() as stack:

        def start(words: list[str]) -> "subprocess.Popen[bytes]":
            process = stack.enter_context(_started(words, environment, inherit=alone and first.local))
            on_start(process)
            stack.callback(process.kill)
            if alone and not first.detached:
                errors[:] = [_Errors(process, outputs[1])]
            return process

        if early:
            on_start(early)
        there = [] if early else [(one, start(one.words)) for one in members]
        started = [early] if early else [_come_up(*pair, start, patience, errors) for pair in there]
        if len(members) == 1:
            feed = (started[0].stdin, first.line(), not first.detached)
            threading.Thread(target=_feed, args=feed, daemon=True).start()
            _follow(0, started, outputs, together, failed, errors)
            return _codes(started, failed)
        for one, process in zip(members, started, strict=True):
            if process.stdin is not None:
                with suppress(OSError):  # it has ended
                    _write(process.stdin.fileno(), one.orders.line())
        for one, process in zip(members, started, strict=True):
            if (said := _instead_of(READY, process, patience)) is not None:
                raise FailedPreconditionError(
                    f"no member was started, because one cannot start on {one.orders.node}: {said.removeprefix('error: ')}",
                    reason="MEMBER_NOT_READY",
                )
        for process in started:
            _feed(process.stdin, GO, own_input=False)
        following = [
            threading.Thread(
                target=_follow, args=(number, started, outputs, together, failed, []), daemon=True
            )
            for number in range(len(started))
        ]
        for thread in following:
            thread.start()
        for thread in following:
            thread.join()
        return _codes(started, failed)


def _started(
    words: list[str], environment: Mapping[str, str] | None, *, inherit: bool
) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            dying_with_us(words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if inherit else subprocess.PIPE,
            bufsize=0,
            env=environment,
        )
    except OSError as error:
        raise FailedPreconditionError(f"cannot start ssh: {error.strerror}", reason="NO_SSH") from error


def _come_up(
    one: Supervised,
    process: "subprocess.Popen[bytes]",
    start: Callable[[list[str]], "subprocess.Popen[bytes]"],
    patience: float,
    shown: list[_Errors],
) -> "subprocess.Popen[bytes]":
    """Its supervisor once it greets: this one, or another if the host turned ssh away.

    `shown` has the standard error of the latest, if it is shown already. Raises UnavailableError: none did (NO_SUPERVISOR).
    """
    until = time.monotonic() + patience
    for pause in _pauses():
        said = _instead_of(GREETING, process, until - time.monotonic(), shown)
        if said is None:
            break
        turned_away = shown[0].turned_away() if shown else _TURNED_AWAY.match(said)
        again = pause and time.monotonic() + pause < until and turned_away
        if not again or start(["sleep", f"{pause:.3f}"]).wait():  # a program: signals end it as they do ssh
            raise UnavailableError(
                f"no supervisor came up on {one.orders.node}, so nothing was started there: {' '.join(one.words[:-1])} must"
                f" work, and find `{one.words[-1]}` in the PATH there{': ' if said else ''}{said}."
                " On hosts of Slurm, Kubernetes or Ray use sbatch, kubectl or ray job submit (docs/jobs.md)",
                reason="NO_SUPERVISOR",
            )
        process = start(one.words)
    return process


def _instead_of(
    line: bytes, process: "subprocess.Popen[bytes]", patience: float, shown: Sequence[_Errors] = ()
) -> str | None:
    """The standard error, unless it is `shown`, of a supervisor that did not write this line in time, which is killed; None if it did."""
    impatient = threading.Timer(patience, process.kill)
    impatient.daemon = True
    impatient.start()
    there = process.stdout is not None and _greeted(process.stdout, line)
    impatient.cancel()
    if there:
        return None
    process.kill()
    process.wait()
    if process.stderr is None or shown:
        return ""
    os.set_blocking(process.stderr.fileno(), False)  # a helper of ssh may hold it open
    return (process.stderr.read() or b"").decode(errors="replace").strip()


def _follow(
    number: int,
    started: "Sequence[subprocess.Popen[bytes]]",
    outputs: tuple[int, int],
    together: bool,
    failed: list[OSError],
    shown: Sequence[_Errors],
) -> None:
    """Copy a member's output until it ends; if its connection is lost, the others end too (`together`)."""
    process, prefix = started[number], f"[{number}] ".encode() if len(started) > 1 else b""
    errors = shown[0] if shown else _Errors(process, outputs[1], prefix)
    _copy(process, process.stdout, outputs[0], prefix, failed, bytearray())
    if process.wait() == SSH_FAILED and together:
        for other in started:
            if other.poll() is None:
                other.terminate()
    errors.join()  # as long as its reader takes


def _greeted(source: IO[bytes], greeting: bytes = GREETING) -> bool:
    """Whether a supervisor greets; earlier shell output goes to standard error."""
    line = bytearray()
    for _ in range(MOST_LINES):
        line.clear()
        while not line.endswith(b"\n") and len(line) < CHUNK and (byte := source.read(1)):
            line += byte
        if bytes(line) == greeting or not line:
            return bool(line)
        with suppress(OSError):  # nobody need read it
            sys.stderr.write(line.decode(errors="replace"))
    return False


def _feed(sink: IO[bytes] | None, orders: bytes, own_input: bool) -> None:
    """Send the orders, then our standard input if it is the command's."""
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
