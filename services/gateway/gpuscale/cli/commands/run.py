"""`gpuscalectl run`: a command on GPUs that are reserved while it runs, on the host that has them.

On this host it supervises the command itself; on another, a supervisor that ssh starts there as the user that ssh logs in.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuscale.cli.commands.asking import Asking, Requesting
from gpuscale.cli.commands.over_ssh import SSH_FAILED, supervise_over_ssh
from gpuscale.cli.commands.processes import STDERR
from gpuscale.cli.commands.recordings import recording_of
from gpuscale.cli.commands.reserve import grant
from gpuscale.cli.commands.supervise import LeaseHolder, Orders, run_under
from gpuscale.cli.console.command import command
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import option, repeated, takes
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


@command("run --gpus 1 --wait 1h -- python train.py", context_settings={"allow_interspersed_args": False})
@takes("asking", Asking)
@takes("requesting", Requesting)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@option("--record", is_flag=True, help="Record the GPUs, and print what they did at the end.")
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
    anywhere: bool,
    user: str,
    directory: str | None,
    env: tuple[str, ...],
    this_node: str | None,
) -> None:
    """Run a command on GPUs that are reserved while it runs: CUDA_VISIBLE_DEVICES names them by UUID.

    Where this host has GPUs it runs here, unless --anywhere, --node or --gpu say otherwise; else on the host that was granted,
    over your own ssh: NODE must be a host that `ssh NODE` reaches, with gpuscale and the same directory.

    Processes that the command leaves running are stopped before the GPUs are given back. The exit code is the command's, or
    128 plus the number of the signal that ended it. Signals are passed on; on another host those that end ssh stop the
    command. With --record and -o json or yaml, the standard output of the command goes to standard error.
    """
    environment = dict(map(_variable, env))
    stdout = STDERR if record and not session.output.human else None
    with session.connect(node=this_node) as client:
        request = requesting.message(asking, client)
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
            authority="" if local else session.authority(),
        )
        with (
            recording_of(session, client, [gpu.uuid for gpu in reservation.gpus]) if record else nullcontext()
        ):
            if local:
                code = run_under(LeaseHolder(orders, [client.allocator]), own=client.work, stdout=stdout)
            else:
                code = _elsewhere(client, reservation, orders, user, stdout)
    leave(code)


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
    try:
        here = client.this_node(check=True)
    except FailedPreconditionError as error:
        if error.reason != "NODE_AMBIGUOUS":
            raise
        here = None
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
    client: "Client", reservation: "Reservation", orders: Orders, user: str, stdout: int | None
) -> int:
    """Run the command on another host; nothing is held where nothing was started."""
    from gpuscale.common.wire import seconds

    words = ["ssh", "-T", *(() if sys.stdin.isatty() else ("-o", "BatchMode=yes"))]
    words += ["-l", user] if user else []
    words += ["--", orders.node, "gpuscalectl supervise"]
    try:
        code = supervise_over_ssh(
            orders, words, stdout=1 if stdout is None else stdout, patience=seconds(reservation.remaining)
        )
    except (FailedPreconditionError, UnavailableError):
        _release(client, reservation)
        raise
    if code == SSH_FAILED and _held(client, reservation.name):
        raise UnavailableError(
            f"the connection to {orders.node} ended: the command is stopped there, and then {reservation.name} is given back",
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
