"""`gpuscalectl run`: a command on GPUs that are reserved while it runs, on the host that has them.

On this host it supervises the command itself; on another, a supervisor that ssh starts there as the user that ssh logs in.
"""

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuscale.cli.commands.asking import Asking, Requesting
from gpuscale.cli.commands.detaching import PROGRAM
from gpuscale.cli.commands.over_ssh import SSH_FAILED, Supervised, supervise_all, this_node, words_on
from gpuscale.cli.commands.processes import STDERR
from gpuscale.cli.commands.recordings import recording_of
from gpuscale.cli.commands.reserve import grant
from gpuscale.cli.commands.supervise import LeaseHolder, Orders, run_under
from gpuscale.cli.console.command import command
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.parameters import DURATION, Parsed, option, repeated, takes
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    InvalidArgumentError,
    UnavailableError,
)
from gpuscale.common.names import node_name

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Ask, Reservation, ReserveRequest, ReserveResponse
    from gpuscale.client import Client

LONGEST_WAIT = 604_800.0
"""Seconds; the contract has no longer one."""
LONGEST_LINE = 1000
FIRST_PORT, PORTS = 29_500, 1000
"""Ports for the members of jobs to meet at, by fence: no two jobs that run have the same one, unless there are more."""
_NAMED_SO = r"[\w-]*(?:token|secret|passw|api[-_]?key|credential)[\w-]*"
_SECRET_OPTION = re.compile(f"-+{_NAMED_SO}", re.IGNORECASE)
_SECRET_VALUE = re.compile(f"({_NAMED_SO}=)('[^']*'|\"[^\"]*\"|[^\\s'\";]+)", re.IGNORECASE)
_IN_URL = re.compile("://[^/@\\s]+@")


def _ports(text: str) -> str:
    if not re.fullmatch(r"\d{1,5}(:\d{1,5})?", text):
        raise ValueError(f"{text!r} is not a port; write it like 8888, or LOCAL:REMOTE")
    return text


@command("run --gpus 1 --wait 1h -- python train.py", context_settings={"allow_interspersed_args": False})
@takes("asking", Asking)
@takes("requesting", Requesting)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@option("--record", is_flag=True, help="Record the GPUs, and print what they did at the end.")
@option("--detach", "-d", is_flag=True, help="Print the job's name and return; the job goes on without you.")
@option("--name", "title", default="", metavar="TEXT", help="What to call the job.")
@option("--time-limit", type=DURATION, help="Stop the command after this time; it is warned before.")
@repeated(
    "--forward",
    type=Parsed("port", _ports),
    help="A port of this host that leads to the same one of the other, or LOCAL:REMOTE.",
)
@option("--anywhere", is_flag=True, help="Take GPUs of other hosts too, where this host has some.")
@option(
    "--user", default="", metavar="NAME", help="Unix user on another host; the one that ssh says by default."
)
@option(
    "--directory", metavar="PATH", help="Where the command runs; the directory that you are in by default."
)
@repeated("--env", metavar="NAME[=VALUE]", help="A variable of the command, with your own value by default.")
@option(
    "--this-node",
    metavar="NAME",
    help="The node that this host is; $GPUSCALE_NODE, or what the agents say, by default.",
)
@option(
    "--on-member-failure",
    type=click.Choice(("stop", "continue")),
    default="stop",
    help="Whether a member that fails stops the others.",
)
def run(
    session: Session,
    asking: Asking,
    requesting: Requesting,
    command: tuple[str, ...],
    record: bool,
    detach: bool,
    title: str,
    time_limit: float | None,
    forward: tuple[str, ...],
    anywhere: bool,
    user: str,
    directory: str | None,
    env: tuple[str, ...],
    this_node: str | None,
    on_member_failure: str,
) -> None:
    """Run a command on GPUs that are reserved while it runs: CUDA_VISIBLE_DEVICES names them by UUID.

    Without room it waits in the queue, for as long as --wait says. Where this host has GPUs it runs here, unless --anywhere,
    --node, --gpu or --members say otherwise; else on the host that was granted, over your own ssh: NODE must be a host that
    `ssh NODE` reaches, with gpuscale and the same directory.

    Processes that the command leaves running are stopped before the GPUs are given back. The exit code is the command's, or
    128 plus the number of the signal that ended it. Signals are passed on; on another host those that end ssh stop the
    command. With --record and -o json or yaml, the standard output of the command goes to standard error.

    With --members each member runs the command once, on its node, with its own GPUs, NODE_RANK, NNODES, MASTER_ADDR and
    MASTER_PORT; what they write has the member in front, and the exit code is that of the one that failed first.

    With --detach it returns when the command has started, and the command runs on: get jobs, logs, attach, wait and stop show
    and end it.
    """
    if detach and (record or forward):
        raise click.UsageError("--detach excludes --record and --forward")
    environment = dict(map(_variable, env))
    from gpuscale.api.allocator import v1 as api

    stdout = STDERR if record and not session.output.human else None
    with session.connect(node=this_node) as client:
        waiting = requesting if requesting.wait is not None else replace(requesting, wait=LONGEST_WAIT)
        request = waiting.message(asking, client)
        request.job.CopyFrom(api.Job(title=title, command=shown(command), user=user))
        here = _place(client, request.ask, anywhere)
        granted = _grant(client, request, here)
        reservation = granted.reservation
        order = partial(
            Orders,
            reservation=reservation.name,
            fence=reservation.fence,
            lease_token=granted.lease_token,
            command=command,
            address=client.address,
            authority=session.authority(),
            stop_together=on_member_failure == "stop",
            reports=reservation.HasField("job"),
            detached=detach,
            time_limit=time_limit or 0.0,
        )
        made = [
            order(
                node=node,
                member=member,
                environment={**variables, **environment},
                local=(local := node == here and not user),
                directory=directory or ("" if local else str(Path.cwd())),
            )
            for member, node, variables in _members(reservation)
        ]
        with (
            recording_of(session, client, [gpu.uuid for gpu in reservation.gpus]) if record else nullcontext()
        ):
            if made[0].local and not detach and len(made) == 1:
                code = run_under(LeaseHolder(made[0], [client.allocator]), own=client.work, stdout=stdout)
            else:
                code = _supervised(
                    client, reservation, [_on_node(one, user, forward) for one in made], stdout
                )
        if detach and not code:
            _tell(session, client, reservation)
    leave(code)


def _members(reservation: "Reservation") -> list[tuple[int | None, str, dict[str, str]]]:
    """Of each member its number, node and variables; of a single one neither number nor variables."""
    nodes = {gpu.member: gpu.node.removeprefix("nodes/") for gpu in reservation.gpus}
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


def _on_node(orders: Orders, user: str, forward: tuple[str, ...]) -> Supervised:
    """A supervisor on the node of a member; the first one forwards the ports."""
    supervisor = shlex.join([*PROGRAM, "supervise"]) if orders.local else "gpuscalectl supervise"
    ports = () if orders.member else forward
    return Supervised(orders, words_on(orders.node, supervisor, user=user, local=orders.local, forward=ports))


def _tell(session: Session, client: "Client", reservation: "Reservation") -> None:
    """Say what the job is called."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.allocator import JOBS

    if not session.output.human:
        session.output.write_one(lookup.job(client, reservation.name), JOBS)
        return
    short = reservation.name.partition("/")[2]
    write_lines([short])
    note(f"it runs on; to see what it writes:  gpuscalectl logs -f {short}")


def shown(command: Sequence[str]) -> str:
    """A command line for people, without the values of what is named like a secret."""
    words: list[str] = []
    for word in command:
        hidden = bool(words) and _SECRET_OPTION.fullmatch(words[-1]) is not None
        words.append("***" if hidden else _IN_URL.sub("://***@", _SECRET_VALUE.sub(r"\1***", word)))
    line = "".join(one if one.isprintable() else " " for one in shlex.join(words))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


def _variable(typed: str) -> tuple[str, str]:
    name, equals, value = typed.partition("=")
    if not equals and name not in os.environ:
        raise InvalidArgumentError(
            f"--env {name}: there is no such variable here; give it a value", field="env"
        )
    if not name.isidentifier():
        raise InvalidArgumentError(f"--env {name}: not the name of a variable", field="env")
    return name, value if equals else os.environ[name]


def _place(client: "Client", ask: "Ask", anywhere: bool) -> str | None:
    """The node that this host is, if any; keeps an ask to it, unless it says where or is of several members."""
    from gpuscale.client.this_host import confine

    here = this_node(client)
    free = anywhere or ask.nodes or ask.gpus or ask.member_count > 1
    if here is not None and not free and node_name(here) not in ask.excluded_nodes:
        confine(ask, here)
    return here


def _grant(client: "Client", request: "ReserveRequest", here: str | None) -> "ReserveResponse":
    """A reservation and its lease token; a refusal by this host alone says so."""
    from gpuscale.client.this_host import only_here

    confined = here if here is not None and list(request.ask.nodes) == [node_name(here)] else None
    try:
        return grant(client, request)
    except GpuscaleError as error:
        raise only_here(error, confined, "--anywhere asks the others too") from error.__cause__


def _supervised(
    client: "Client", reservation: "Reservation", members: list[Supervised], stdout: int | None
) -> int:
    """Have supervisors run the command; nothing is held where nothing was started. The exit code of the member that failed first."""
    from gpuscale.cli.console import lookup
    from gpuscale.common.wire import seconds

    try:
        codes = supervise_all(
            members, stdout=1 if stdout is None else stdout, patience=seconds(reservation.remaining)
        )
    except (FailedPreconditionError, UnavailableError):
        _release(client, reservation)
        raise
    first = next((code for code in codes if code), 0)
    if len(members) == 1 and SSH_FAILED not in codes:
        return first
    [found] = lookup.reservations(client, [reservation.name])
    if SSH_FAILED in codes and not found.HasField("end_time"):
        orders = members[codes.index(SSH_FAILED)].orders
        then = (
            f"whether the command runs, `gpuscalectl get jobs` says ({reservation.name})"
            if orders.detached
            else f"the command is stopped there, and then {reservation.name} is given back"
        )
        raise UnavailableError(f"the connection to {orders.node} ended: {then}", reason="CONNECTION_LOST")
    return found.job.exit_code or first


def _release(client: "Client", reservation: "Reservation") -> None:
    from gpuscale.api.allocator import v1 as api

    request = api.ReleaseReservationRequest(name=reservation.name, fence=reservation.fence)
    try:
        client.allocator.ReleaseReservation(request)
    except GpuscaleError as error:
        note(
            f"gpuscalectl run: {reservation.name} was not given back, and expires by itself: {error.message}"
        )
