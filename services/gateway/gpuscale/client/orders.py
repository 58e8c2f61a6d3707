"""The orders a supervisor reads from standard input: which command to run, where, and under which lease."""

import json
import os
import re
import shlex
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.names import node_of
from gpuscale.common.sizes import to_seconds

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation, ReserveResponse

GREETING = b"gpuscale supervisor 2\n"
"""Written by a supervisor before it reads its orders, with their format version. Separates earlier shell output from the command's."""
READY, GO = b"ready\n", b"\n"
"""Written by a member's supervisor once it can start its command, and sent to it once all members can."""
LONGEST_LINE = 1000
TO_STOP = 15.0
"""Seconds before the end of a reservation at which to stop its command."""
FIRST_PORT, PORTS = 29_500, 1000
"""Rendezvous ports for the members of a job, by fence: running jobs share none while there are enough."""
# A look ahead is not tried again, and no name is looked at from its middle: each takes time by its length alone.
_NAMED_SO = r"(?=[\w-]*?(?:token|secret|passw|api[-_]?key|credential))[\w-]+"
_SECRET_OPTION = f"(?i)-{_NAMED_SO}"
_SECRET_VALUE = f"(?i)(?<![\\w-])({_NAMED_SO}=)('[^']*'|\"[^\"]*\"|[^\\s'\";]+)"
_IN_URL = "://[^/@\\s]+@"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What to run, and under which lease.

    Attributes:
        reservation: `reservations/{reservation}`.
        fence: fence of the grant.
        lease_token: lease token of the grant.
        node: id of the node whose GPUs the command gets.
        command: the program and its arguments.
        environment: variables to add to those of the host.
        directory: working directory; empty for where the supervisor starts.
        address: address of the services as seen by the caller, HOST:PORT.
        authority: their certificate authority, PEM; empty without TLS.
        local: whether a loopback `address` is valid on the node too.
        member: number of the member; None for the only one.
        stop_together: whether it stops when another member fails.
        reports: whether the service stores reports about the job.
        detached: whether it keeps running without its caller.
        time_limit: seconds after which to stop the command; 0 for none.
        user: user to log in as on the members' nodes; empty: as ssh is configured.
        waits: whether the reservation may be queued: the receiver then waits for its turn, and starts the supervisors of
            `of_members`.
        adopts: running processes to adopt in place of a command.
        on_move: signal to send the command when its GPUs are to be revoked; 0 for none.
        move_grace: seconds the command then has to end; 0: until they are revoked.
        attempt: number of this start of the job, from 1.
        check: whether to test the GPUs before the command starts; without a command, only test them.
    """

    reservation: str = ""
    fence: int = 0
    lease_token: str = field(default="", repr=False)
    node: str
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    directory: str = ""
    address: str
    authority: str
    local: bool = False
    member: int | None = None
    stop_together: bool = True
    reports: bool = False
    detached: bool = False
    time_limit: float = 0.0
    user: str = ""
    waits: bool = False
    adopts: Sequence[int] = ()
    on_move: int = 0
    move_grace: float = 0.0
    attempt: int = 1
    check: bool = False

    def line(self) -> bytes:
        """The orders as a line of text."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def of_grant(self, granted: "ReserveResponse", here: str | None) -> "list[Orders]":
        """The orders for a grant: of its members, or of the starter if it is queued; none for a detached job already started.

        That can happen with a repeated request id.

        Raises FailedPreconditionError: an earlier call started it, not detached (JOB_STARTED).
        """
        from gpuscale.common.rpc.channel import is_local

        one = granted.reservation
        started = sum(member.HasField("start_time") for member in one.job.members)
        if self.detached and (one.HasField("end_time") or started == one.member_count):
            return []
        if started and not self.detached:
            raise started_before(one.name)
        orders = replace(
            self,
            reservation=one.name,
            fence=one.fence,
            lease_token=granted.lease_token,
            reports=one.HasField("job"),
        )
        if one.state != one.STATE_WAITING:
            return orders.of_members(one, here)
        local = not self.user and (self.node == here or is_local(f"{self.node}:0"))
        return [replace(orders, waits=True, local=local, directory=self.directory or str(Path.cwd()))]

    def of_members(self, granted: "Reservation", here: str | None) -> "list[Orders]":
        """The orders of each member of a grant. On the node `here`, as the same user, no ssh is needed."""
        made: list[Orders] = []
        limit = self.time_limit
        if granted.HasField("limit_time"):  # the command stops before the time limit of its reservation
            runs_on = wire.to_datetime(granted.limit_time) - wire.to_datetime(granted.expire_time)
            left = max(runs_on.total_seconds() + wire.seconds(granted.remaining) - TO_STOP, 1.0)
            limit = min(limit or left, left)
        nodes = {gpu.member: node_of(gpu) for gpu in granted.gpus}
        alone = granted.member_count <= 1  # a single member has neither number nor variables
        counts = Counter(gpu.member for gpu in granted.gpus)
        shared = {
            "NNODES": str(len(nodes)),
            "MASTER_ADDR": nodes[0] if len({*nodes.values()}) > 1 else "localhost",
            "MASTER_PORT": str(FIRST_PORT + granted.fence % PORTS),
            "GPUSCALE_NODES": ",".join(nodes[number] for number in sorted(nodes)),
        }
        for number in [0] if alone else sorted(nodes):
            own = {**shared, "NODE_RANK": str(number), "NPROC_PER_NODE": str(counts[number])}
            node = nodes[number]
            local = node == here and not self.user
            made.append(
                replace(
                    self,
                    fence=granted.fence,
                    attempt=granted.job.attempt or 1,
                    node=node,
                    environment=self.environment if alone else {**own, **self.environment},
                    directory=self.directory or ("" if local else str(Path.cwd())),
                    local=local,
                    member=None if alone else number,
                    time_limit=limit,
                    waits=False,
                )
            )
        return made


def jobs_folder() -> Path:
    """Where this user's supervisors keep the output of jobs, in a folder per member."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "gpuscale", "jobs")


def folder_name(reservation: str, member: int, attempt: int) -> str:
    """The name of a member's folder; each further attempt of a restarted job has its own."""
    return f"{reservation}-{member}" + (f".{attempt}" if attempt > 1 else "")


def kept_output(reservation: str, members: Sequence[int], attempt: int) -> list[Path]:
    """The output files of a job's members, in order; none unless this user has all of them on this host."""
    folders = [jobs_folder() / folder_name(reservation, one, attempt) for one in members]
    if not all((one / "output").is_file() for one in folders):
        return []
    return [file for one in folders for file in (one / "output.1", one / "output") if file.is_file()]


def started_before(reservation: str) -> FailedPreconditionError:
    """The error for a job that an earlier call started."""
    return FailedPreconditionError(
        f"{reservation} was started by an earlier call with this request id; choose a new UUID for each job",
        reason="JOB_STARTED",
        metadata={"name": reservation},
    )


def expect_directory(named: str | None) -> str:
    """The given directory, empty for the current one. Raises FailedPreconditionError: the current one was deleted."""
    if not named and not Path().stat().st_nlink:  # the command would fail once its GPUs are granted
        raise FailedPreconditionError(
            "the current directory was deleted: nothing was reserved; cd to another, or say one with --directory",
            reason="DIRECTORY_NOT_FOUND",
        )
    return named or ""


def when_moved(text: str) -> dict[str, Any]:
    """`on_move` and `move_grace` of orders, from a text such as `signal:USR1,grace:120s`. Raises ValueError: it cannot be parsed."""
    found = re.fullmatch(r"signal:(?:SIG)?(USR1|USR2|HUP|INT|TERM)(?:,grace:(.+))?", text)
    if not found:
        raise ValueError(
            f"{text!r} is not like signal:USR1,grace:120s; signals are USR1, USR2, HUP, INT and TERM"
        )
    grace = to_seconds(found[2]) if found[2] else 0.0
    if found[2] and grace <= 0:
        raise ValueError("grace must be longer than 0 s")
    return {"on_move": signal.Signals[f"SIG{found[1]}"], "move_grace": grace}


def shown(command: Sequence[str]) -> str:
    """A command line for display, without the values of arguments named like secrets."""
    words: list[str] = []
    for word in command:
        hidden = bool(words) and re.fullmatch(_SECRET_OPTION, words[-1]) is not None
        words.append("***" if hidden else re.sub(_IN_URL, "://***@", re.sub(_SECRET_VALUE, r"\1***", word)))
    line = "".join(one if one.isprintable() else " " for one in shlex.join(words))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."
