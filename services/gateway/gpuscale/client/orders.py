"""The orders of a supervisor on standard input: which command it runs, where, and under which lease."""

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.names import node_of

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation, ReserveResponse

GREETING = b"gpuscale supervisor 2\n"
"""What a supervisor writes before it reads its orders, with the number of their form: what a shell wrote before is none of the command's."""
READY, GO = b"ready\n", b"\n"
"""What the supervisor of a member writes once it can start its command, and what it is sent when all of them can."""
LONGEST_LINE = 1000
TO_STOP = 15.0
"""Seconds before the end of a reservation at which its command is stopped."""
FIRST_PORT, PORTS = 29_500, 1000
"""Ports for the members of jobs to meet at, by fence: no two jobs that run have the same one, unless there are more."""
_NAMED_SO = r"[\w-]*(?:token|secret|passw|api[-_]?key|credential)[\w-]*"
_SECRET_OPTION = f"(?i)-+{_NAMED_SO}"
_SECRET_VALUE = f"(?i)({_NAMED_SO}=)('[^']*'|\"[^\"]*\"|[^\\s'\";]+)"
_IN_URL = "://[^/@\\s]+@"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What is to run, and for which lease.

    Attributes:
        reservation: `reservations/{reservation}`.
        fence: of the grant.
        lease_token: of the grant.
        node: id of the node whose GPUs the command gets.
        command: the program and its arguments.
        environment: variables beside those of the host.
        directory: where it runs; empty for where it is started.
        address: the services as the caller reaches them, HOST:PORT.
        authority: who vouches for them, PEM; empty for plain text.
        local: whether they are reached so from the node too, where that is a loopback address.
        member: which of the members of the job it is; None for the only one.
        stop_together: whether it stops when another member fails.
        reports: whether the service keeps what is told of the job.
        detached: whether it goes on without its caller.
        time_limit: seconds after which the command is stopped; 0 for none.
        user: who logs in on the nodes of the members; whom ssh says when empty.
        waits: whether the reservation may be a place in the queue: then who gets the orders waits for its turn, and has
            supervisors run it as `of_members` says.
        adopts: processes of the node that run already, in place of a command.
        on_move: the signal that the command gets with a notice that its GPUs are taken away; 0 for none.
        move_grace: seconds after it in which the command has to end; 0 for until they are.
        attempt: how often the job was started, with this time.
        check: whether its GPUs are tested before the command starts; without a command, they are tested and that is all.
    """

    reservation: str = ""
    fence: int = 0
    lease_token: str = field(default="", repr=False)
    node: str
    command: Sequence[str]
    environment: Mapping[str, str]
    directory: str
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
        """The line that says it."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def of_grant(self, granted: "ReserveResponse", here: str | None) -> "list[Orders]":
        """What to start for a grant: its members, or who starts them in their turn; nothing of a detached job that began.

        An earlier call with the same request id may have started it.

        Raises:
            FailedPreconditionError: it has started a job that is not detached (JOB_STARTED).
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
        """The orders of each member of what was granted; what runs on the node `here`, as ourselves, needs no ssh."""
        made: list[Orders] = []
        limit = _limit(granted, self.time_limit)
        for member, node, variables in _members(granted):
            local = node == here and not self.user
            made.append(
                replace(
                    self,
                    fence=granted.fence,
                    attempt=granted.job.attempt or 1,
                    node=node,
                    environment={**variables, **self.environment},
                    directory=self.directory or ("" if local else str(Path.cwd())),
                    local=local,
                    member=member,
                    time_limit=limit,
                    waits=False,
                )
            )
        return made


def _limit(granted: "Reservation", typed: float) -> float:
    """The time limit of a command under a reservation that has one, as one in a booking has: the command stops before."""
    if not granted.HasField("limit_time"):
        return typed
    runs_on = wire.to_datetime(granted.limit_time) - wire.to_datetime(granted.expire_time)
    left = max(runs_on.total_seconds() + wire.seconds(granted.remaining) - TO_STOP, 1.0)
    return min(typed or left, left)


def _members(reservation: "Reservation") -> list[tuple[int | None, str, dict[str, str]]]:
    """Of each member its number, node and variables; of a single one neither number nor variables."""
    nodes = {gpu.member: node_of(gpu) for gpu in reservation.gpus}
    if reservation.member_count <= 1:
        return [(None, nodes[0], {})]
    counts = Counter(gpu.member for gpu in reservation.gpus)
    shared = {
        "NNODES": str(len(nodes)),
        "MASTER_ADDR": nodes[0] if len({*nodes.values()}) > 1 else "localhost",
        "MASTER_PORT": str(FIRST_PORT + reservation.fence % PORTS),
        "GPUSCALE_NODES": ",".join(nodes[number] for number in sorted(nodes)),
    }
    return [
        (number, nodes[number], {**shared, "NODE_RANK": str(number), "NPROC_PER_NODE": str(counts[number])})
        for number in sorted(nodes)
    ]


def jobs_folder() -> Path:
    """Where this user's supervisors keep what jobs write, in a folder for each member."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "gpuscale", "jobs")


def folder_name(reservation: str, member: int, attempt: int) -> str:
    """The name of a member's folder; of a job that is started again each attempt has one."""
    return f"{reservation}-{member}" + (f".{attempt}" if attempt > 1 else "")


def kept_output(reservation: str, members: Sequence[int], attempt: int) -> list[Path]:
    """The files with the output of a job's members, in turn; none unless this user has all of them on this host."""
    folders = [jobs_folder() / folder_name(reservation, one, attempt) for one in members]
    if not all((one / "output").is_file() for one in folders):
        return []
    return [file for one in folders for file in (one / "output.1", one / "output") if file.is_file()]


def started_before(reservation: str) -> FailedPreconditionError:
    """The error of a job that an earlier call has started."""
    return FailedPreconditionError(
        f"{reservation} was started by an earlier call with this request id; choose a new UUID for each job",
        reason="JOB_STARTED",
        metadata={"name": reservation},
    )


def shown(command: Sequence[str]) -> str:
    """A command line for people, without the values of what is named like a secret."""
    words: list[str] = []
    for word in command:
        hidden = bool(words) and re.fullmatch(_SECRET_OPTION, words[-1]) is not None
        words.append("***" if hidden else re.sub(_IN_URL, "://***@", re.sub(_SECRET_VALUE, r"\1***", word)))
    line = "".join(one if one.isprintable() else " " for one in shlex.join(words))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."
