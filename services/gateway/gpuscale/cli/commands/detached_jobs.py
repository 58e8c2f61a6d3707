"""Supervisors of detached jobs, which outlive their caller and keep the output of their command.

Each has a private folder below the user's $XDG_STATE_HOME/gpuscale/jobs: `pid` of the supervisor, `job.json` with the state of the
member, and `output`, with earlier output in `output.1`. It is deleted when the service forgets the job. The starter of a member holds
`lock`, then its supervisor does, so that repeated orders start it once.

A queued job is started in its turn by a process of its user on the host of `run --via`, which has the lease token of this one
reservation and polls its state once a second. When a job is moved, the guard of its supervisor does the same after its command has ended:
it starts the next attempt, which has a folder of its own, and exits.
"""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpuscale.cli.console.terminal import TERMINAL, note
from gpuscale.client.orders import folder_name, jobs_folder
from gpuscale.client.over_ssh import SSH_FAILED, SUPERVISOR, supervise_all, supervised
from gpuscale.common import wire
from gpuscale.common.errors import UNANSWERED, FailedPreconditionError, GpuscaleError, UnavailableError
from gpuscale.common.names import RESERVATION, parse
from gpuscale.common.rpc import channel

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import JobMember, Reservation
    from gpuscale.cli.commands.holding import LeaseHolder
    from gpuscale.client.orders import Orders

MOST_BYTES = 16 << 20
"""Most bytes of each of the two parts of an output."""
KEPT_SECONDS = 14 * 86_400
"""How long a folder is kept after the job's end."""
LAST_WORDS = 1.0
"""Most seconds to wait for the last output of a command."""
LOOK = 0.1
"""Seconds between polls of a start in progress."""
LAST_BYTES, LAST_LINES = 500, 10
"""Most bytes and lines of output sent to the service, in case the host is lost."""
_CHUNK = 65_536
"""As much as a pipe holds."""


def folder_of(orders: "Orders") -> Path:
    """The folder of a member of a job."""
    return jobs_folder() / _name(orders)


def detach(orders: "Orders") -> int:
    """Start a supervisor that outlives this process; returns 0 once its command runs or already ran, else its exit code."""
    folder = folder_of(orders)
    os.umask(0o077)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    while True:  # wait for a start in progress
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / "output").exists():  # it was started before
                return 0
            break
        if orders.waits or (folder / "output").exists():
            return 0
        time.sleep(LOOK)
    # In a cgroup that outlives the login, if systemd provides one.
    scope = ["systemd-run", "--user", "--scope", "--quiet", "--collect", "--"]
    tried = shutil.which(scope[0]) and subprocess.run([*scope, "true"], check=False, capture_output=True)
    child = subprocess.Popen(
        [*(scope if tried and tried.returncode == 0 else ()), *SUPERVISOR, "--job", _name(orders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=TERMINAL.callers_environment(),
        pass_fds=[lock],
    )
    os.close(lock)
    # for type checkers
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the supervisor has no pipes")
    with suppress(BrokenPipeError):
        child.stdin.write(orders.line())
        child.stdin.close()
    return 0 if child.stdout.read(1) else child.wait()


def not_kept(orders: "Orders", error: OSError) -> FailedPreconditionError:
    """The error for a job without a folder, as in a home that is read-only or full."""
    return FailedPreconditionError(
        f"{orders.node} cannot keep the output of the job ({error.strerror}: {error.filename or folder_of(orders)}): nothing was"
        " started; XDG_STATE_HOME may name another folder there",
        reason="NO_JOB_FOLDER",
    )


def _name(orders: "Orders") -> str:
    name = parse(RESERVATION, orders.reservation)["reservation"]
    return f"{name}-queued" if orders.waits else folder_name(name, orders.member or 0, orders.attempt)


class JobFolder:
    """The folder of a running member, for its supervisor."""

    def __init__(self, orders: "Orders") -> None:
        self._orders = orders
        self._path = folder_of(orders)  # which `detach` made
        os.umask(0o077)
        old = time.time() - KEPT_SECONDS
        for one in self._path.parent.iterdir():
            with suppress(OSError):
                pid = one / "pid"
                if one.stat().st_mtime < old and not (
                    pid.exists() and Path("/proc", pid.read_text().strip()).exists()
                ):
                    shutil.rmtree(one)
        (self._path / "pid").write_text(f"{os.getpid()}\n")
        (self._path / "output").touch()  # so that `tail` works before the first output
        self._tail, self._size, self._taking = b"", 0, threading.Lock()
        self._reading, self.writing = os.pipe()
        self._copying = threading.Thread(target=self._copy, name="output", daemon=True)
        self._copying.start()

    def last_lines(self) -> list[str]:
        """The end of its output, for readers without access to the file; also what was written just now."""
        with self._taking:
            self._take()
        lines = self._tail.decode(errors="ignore").splitlines()[-LAST_LINES:]
        return ["".join(one for one in line if one.isprintable()) for line in lines]

    def started(self) -> None:
        """Report to the waiting starter that the command runs, and redirect our own output to the file."""
        with suppress(BrokenPipeError):
            os.write(1, b"1")
        self._write_to(self.writing)
        os.close(self.writing)

    def put(self, member: "JobMember") -> None:
        """Save the state of the member."""
        from gpuscale.cli.console.output import to_dict

        known = {"command": [*self._orders.command], "directory": self._orders.directory, **to_dict(member)}
        with suppress(OSError):  # a full disk stops no job
            (self._path / "job.json").write_text(json.dumps(known) + "\n")

    def close(self) -> None:
        """Wait until all output is written."""
        self._write_to(os.open(os.devnull, os.O_RDWR))
        self._copying.join(LAST_WORDS)
        (self._path / "pid").unlink(missing_ok=True)

    @staticmethod
    def _write_to(descriptor: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for one in (1, 2):
            os.dup2(descriptor, one)

    def _copy(self) -> None:
        going = True
        while going:
            select.select([self._reading], [], [])
            with self._taking:
                going = self._take()

    def _take(self) -> bool:
        """Keep what is in the pipe, if anything; False at its end."""
        if not select.select([self._reading], [], [], 0)[0]:
            return True
        chunk, path = os.read(self._reading, _CHUNK), self._path / "output"
        self._tail = (self._tail + chunk)[-LAST_BYTES:]
        with suppress(OSError):  # a full disk stops no job
            if self._size + len(chunk) > MOST_BYTES:
                path.replace(path.with_suffix(".1"))
                self._size = 0
            with path.open("ab") as file:
                self._size += file.write(chunk)
        return bool(chunk)


LONGEST_START = 300.0
"""Seconds to try to reach the granted hosts."""
PERIOD = 1.0
"""Seconds between polls."""


def start_in_turn(holder: "LeaseHolder") -> int:
    """Wait for a grant, then start its members; returns the exit code of the first that did not start.

    Once the services have answered, it writes to `log` in its folder only. Raises GpuscaleError: the services did not answer.
    """
    placed = holder.renew(channel.RPC_TIMEOUT)
    os.write(1, b"1")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(os.open(folder_of(holder.orders) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    return start_granted(holder, placed)


def start_granted(holder: "LeaseHolder", placed: "Reservation") -> int:
    """Wait until a reservation is granted that was `placed` in the queue, then start its members; the same exit code."""
    granted = _granted(holder, placed)
    if granted is None:
        return 0
    members = [supervised(one) for one in holder.orders.of_members(granted, holder.orders.node)]
    started = threading.Event()
    keeping = (holder, wire.seconds(granted.ttl), len(members), started)
    threading.Thread(target=keep_until_started, args=keeping, daemon=True).start()
    until = time.monotonic() + LONGEST_START
    codes: list[int] = []
    while True:
        try:
            left = until - time.monotonic()
            codes = supervise_all(
                members, stdout=1, patience=left, environment=TERMINAL.callers_environment()
            )
        except (FailedPreconditionError, UnavailableError) as error:
            if time.monotonic() >= until or not isinstance(error, UnavailableError):
                if not codes:  # otherwise a member may run
                    for one in members:
                        holder.of(one.orders).failed(error)
                    holder.of(members[0].orders).release()
                return 1
        else:
            if SSH_FAILED not in codes or time.monotonic() >= until:
                started.set()
                return next((code for code in codes if code), 0)
        time.sleep(PERIOD)  # the host may come back; a member is never started twice


def keep_until_started(holder: "LeaseHolder", ttl: float, members: int, started: threading.Event) -> None:
    """Renew the lease until the supervisors of all members do, which report their start with it.

    If a host dies right after its start, the lease then expires, even before ssh notices.
    """
    while not started.wait(min(ttl / 8, PERIOD)):
        with suppress(GpuscaleError):
            known = holder.renew(ttl / 8).job.members
            if sum(one.HasField("start_time") for one in known) >= members:
                return


def _granted(holder: "LeaseHolder", placed: "Reservation") -> "Reservation | None":
    """The reservation once it is granted; None if the wait is over. Reports that nothing answers, ever more rarely."""
    from gpuscale.cli.grammar.parameters import format_duration

    known, silent_since, told_at = placed, 0.0, 0.0
    until = time.monotonic() + wire.seconds(placed.remaining) + wire.seconds(placed.ttl)
    while known.state == known.STATE_WAITING:
        time.sleep(PERIOD)
        try:
            known = holder.renew(channel.RPC_TIMEOUT)
            silent_since = 0.0
        except UNANSWERED as error:
            now = time.monotonic()
            silent_since = silent_since or now
            if now > until:
                _tell("gave up, since the wait is over", error)
                return None
            if silent_since == now or now - silent_since >= 2 * (told_at - silent_since) + PERIOD:
                told_at = now
                _tell(f"trying again for up to {format_duration(until - now)}", error)
        except GpuscaleError as error:
            _tell("ended", error)
            return None
    return known


def _tell(what: str, error: GpuscaleError) -> None:
    from gpuscale.cli.grammar.parameters import utc_text

    note(f"{utc_text(datetime.now(UTC))} {what}: {error.message}")
