"""`gpuscalectl run`: a command on GPUs that are reserved while it runs, on the host that has them.

On this host it supervises the command itself; on another, a supervisor that ssh starts there as the user that ssh logs in.
"""

import os
import re
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuscale.cli.commands.asking import Asking, Requesting
from gpuscale.cli.commands.detaching import PROGRAM
from gpuscale.cli.commands.over_ssh import SSH_FAILED, supervise_over_ssh, this_node, words_on
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
_NAMED_SO = r"[\w-]*(?:token|secret|passw|api[-_]?key|credential)[\w-]*"
_SECRET_OPTION = re.compile(f"-+{_NAMED_SO}", re.IGNORECASE)
_SECRET_VALUE = re.compile(f"({_NAMED_SO}=)[^\\s'\"]+", re.IGNORECASE)
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
) -> None:
    """Run a command on GPUs that are reserved while it runs: CUDA_VISIBLE_DEVICES names them by UUID.

    Without room it waits in the queue, for as long as --wait says. Where this host has GPUs it runs here, unless --anywhere, --node or --gpu say otherwise; else on the host that was granted,
    over your own ssh: NODE must be a host that `ssh NODE` reaches, with gpuscale and the same directory.

    Processes that the command leaves running are stopped before the GPUs are given back. The exit code is the command's, or
    128 plus the number of the signal that ended it. Signals are passed on; on another host those that end ssh stop the
    command. With --record and -o json or yaml, the standard output of the command goes to standard error.

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
        node = reservation.gpus[0].node
        local = node == here and not user
        orders = Orders(
            reservation=reservation.name,
            fence=reservation.fence,
            lease_token=granted.lease_token,
            node=node,
            command=command,
            environment=environment,
            directory=directory or ("" if local else str(Path.cwd())),
            address=client.address,
            authority="" if local and not detach else session.authority(),
            local=local,
            detached=detach,
            time_limit=time_limit or 0.0,
        )
        with (
            recording_of(session, client, [gpu.uuid for gpu in reservation.gpus]) if record else nullcontext()
        ):
            if local and not detach:
                code = run_under(LeaseHolder(orders, [client.allocator]), own=client.work, stdout=stdout)
            else:
                supervisor = "gpuscalectl supervise" if not local else shlex.join([*PROGRAM, "supervise"])
                words = words_on(node, supervisor, user=user, local=local, forward=forward)
                code = _elsewhere(client, reservation, orders, words, stdout)
        if detach and not code:
            _tell(session, client, reservation)
    leave(code)


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
    """The node that this host is, if any; keeps an ask to it, or to any one node, unless it says where."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.client.this_host import confine

    if ask.gang_strategy == api.GangStrategy.GANG_STRATEGY_STRICT_SPREAD and ask.member_count > 1:
        raise FailedPreconditionError(
            f"run starts one command on one host, and --strategy strict-spread needs {ask.member_count} nodes:"
            " use another strategy",
            reason="GPUS_ELSEWHERE",
        )
    here = this_node(client)
    if here is not None and not (anywhere or ask.nodes or ask.gpus or node_name(here) in ask.excluded_nodes):
        confine(ask, here)
    elif ask.member_count > 1:
        ask.gang_strategy = api.GangStrategy.GANG_STRATEGY_STRICT_PACK
    return here


def _grant(client: "Client", request: "ReserveRequest", here: str | None) -> "ReserveResponse":
    """A reservation and its lease token; a refusal by this host alone says so."""
    from gpuscale.client.this_host import only_here

    confined = here if here is not None and list(request.ask.nodes) == [node_name(here)] else None
    try:
        return grant(client, request)
    except GpuscaleError as error:
        raise only_here(error, confined, "--anywhere asks the others too") from error.__cause__


def _elsewhere(
    client: "Client", reservation: "Reservation", orders: Orders, words: list[str], stdout: int | None
) -> int:
    """Have a supervisor run the command; nothing is held where nothing was started."""
    from gpuscale.common.wire import seconds

    try:
        code = supervise_over_ssh(
            orders, words, stdout=1 if stdout is None else stdout, patience=seconds(reservation.remaining)
        )
    except (FailedPreconditionError, UnavailableError):
        _release(client, reservation)
        raise
    if code == SSH_FAILED and _held(client, reservation.name):
        then = (
            f"whether the command runs, `gpuscalectl get jobs` says ({reservation.name})"
            if orders.detached
            else f"the command is stopped there, and then {reservation.name} is given back"
        )
        raise UnavailableError(
            f"the connection to {orders.node} ended: {then}",
            reason="CONNECTION_LOST",
        )
    return code


def _held(client: "Client", name: str) -> bool:
    from gpuscale.api.allocator import v1 as api

    found = client.allocator.GetReservation(api.GetReservationRequest(name=name)).reservation
    return found.state == api.Reservation.State.STATE_ACTIVE


def _release(client: "Client", reservation: "Reservation") -> None:
    from gpuscale.api.allocator import v1 as api

    request = api.ReleaseReservationRequest(name=reservation.name, fence=reservation.fence)
    try:
        client.allocator.ReleaseReservation(request)
    except GpuscaleError as error:
        note(
            f"gpuscalectl run: {reservation.name} was not given back, and expires by itself: {error.message}"
        )
