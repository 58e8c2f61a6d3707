"""`gpuscalectl run`: a command on GPUs that are its own for as long as it runs."""

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.asking import Asking
from gpuscale.cli.commands.child import (
    NOT_FOUND,
    NOT_RUN,
    RESERVATION,
    STDERR,
    Forwarding,
    Offspring,
    exit_code,
)
from gpuscale.cli.commands.granting import grant
from gpuscale.cli.commands.keeping import Keeper
from gpuscale.cli.commands.recorded import recording_of
from gpuscale.cli.commands.requesting import Requesting
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.typed import takes
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Ask, Reservation, ReserveRequest, ReserveResponse
    from gpuscale.client import Client


@takes("asking", Asking)
@takes("requesting", Requesting)
def run(
    context: typer.Context,
    asking: Asking,
    requesting: Requesting,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False)],
    record: Annotated[
        bool, typer.Option("--record", help="Record its GPUs, and print what they did at the end.")
    ] = False,
    this_node: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of the node that this host is; $GPUSCALE_NODE, or found out from the agents.",
        ),
    ] = "",
) -> None:
    """Run a command on GPUs of this host that are reserved while it runs: CUDA_VISIBLE_DEVICES names them by UUID.

    What the command leaves running when it ends is stopped before the GPUs are given back. The exit code is the command's; 128 and its number where a signal ended it. Signals are passed on. With --record and
    -o json or yaml, what the command writes to standard output goes to standard error.
    """
    request = requesting.message(asking)
    session = session_of(context)
    stdout = STDERR if record and not session.output.human else None
    with session.connect(node=this_node or None) as client:
        here = _confine(client, request.ask)
        began = time.monotonic()
        granted = _grant(client, request, here)
        reservation = granted.reservation
        if request.HasField("wait"):
            began = time.monotonic()  # it was granted just now, whenever it was asked for
        try:
            _admit(client, granted, here)
            uuids = [gpu.uuid for gpu in reservation.gpus]
            with recording_of(session, client, uuids) if record else nullcontext():
                code = _run(client, reservation, command, began, stdout)
        finally:
            _release(client, reservation)
    raise typer.Exit(code)


def _confine(client: "Client", ask: "Ask") -> str:
    """Keep an ask to this host; the node that it is.

    Raises:
        FailedPreconditionError: this host is no node, or its GPUs cannot be what is asked for (GPUS_ELSEWHERE).
    """
    from gpuscale.api.allocator import v1 as api
    from gpuscale.client.this_host import confine
    from gpuscale.common.names import node_name

    here = client.this_node(check=True)
    asked = [list(ask.nodes), sorted({name.partition("/gpus/")[0] for name in ask.gpus})]
    if here is None:
        named = asked[0] or asked[1] or _some_nodes(client)
        raise _elsewhere(
            f"and no agent of the fleet runs here: {_type_it_on(named)};"
            " where this host is one of its nodes, say --this-node NAME"
        )
    for nodes in asked:
        if nodes and node_name(here) not in nodes:
            raise _elsewhere(f"which is {here}: {_type_it_on(nodes)}")
    if node_name(here) in ask.excluded_nodes:
        raise _elsewhere(
            f"which is {here}, and --exclude-node {here} leaves none of its GPUs: leave that out"
        )
    if ask.gang_strategy == api.GangStrategy.GANG_STRATEGY_STRICT_SPREAD and ask.member_count > 1:
        raise _elsewhere(
            f"which is {here}, and --strategy strict-spread wants {ask.member_count} nodes:"
            " run one command on each node, or use another strategy"
        )
    confine(ask, here)
    return here


def _elsewhere(why: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"run starts the command on this host, {why}", reason="GPUS_ELSEWHERE")


def _type_it_on(nodes: Sequence[str]) -> str:
    """What to do about nodes, by name, that are other hosts."""
    ids = [one.removeprefix("nodes/") for one in nodes]
    return f"type it on {' or '.join(ids)}" if ids else "the fleet has no node yet"


def _some_nodes(client: "Client") -> list[str]:
    """Names of a few nodes of the fleet."""
    from gpuscale.api.monitor import v1 as api

    return [one.name for one in client.fleet.ListNodes(api.ListNodesRequest(page_size=5)).nodes]


def _admit(client: "Client", granted: "ReserveResponse", here: str) -> None:
    """Have this host's agent know this process, and with it all that the command starts; say so where none does.

    Raises:
        FailedPreconditionError: the reservation is over.
    """
    from gpuscale.client.this_host import admission, admit

    request = admission(granted.reservation, granted.lease_token, here)
    if request is not None and (why := admit(request, client.work, client.address)):
        note(f"gpuscalectl run: what runs counts as of nobody, since it was not admitted on its GPUs: {why}")


def _grant(client: "Client", request: "ReserveRequest", here: str) -> "ReserveResponse":
    """The reservation, on this host, and its lease token.

    Raises:
        GpuscaleError: it was refused, or is elsewhere; nothing is held then.
    """
    from gpuscale.client.this_host import expect_here, only_here

    try:
        granted = grant(client, request)
    except GpuscaleError as error:
        raise only_here(error, here, "run starts the command there") from error.__cause__
    try:
        expect_here(granted.reservation, here, "type it on {node}")
    except FailedPreconditionError:
        _release(client, granted.reservation)
        raise
    return granted


def _run(
    client: "Client",
    reservation: "Reservation",
    command: Sequence[str],
    granted_at: float,
    stdout: int | None,
) -> int:
    """Run the command until it ends; its exit code.

    Raises:
        FailedPreconditionError: the reservation was lost, and the command was stopped.
    """
    simulated = any(gpu.simulated for gpu in reservation.gpus)
    uuids = ",".join(gpu.uuid for gpu in reservation.gpus)
    note(f"gpuscalectl run: {reservation.name} holds {'SIMULATED ' if simulated else ''}{uuids}")
    with Forwarding() as signals, Offspring() as offspring:
        try:
            process = subprocess.Popen(command, env=_environment(reservation, uuids), stdout=stdout)
        except OSError as error:
            note(f"error: {command[0]}: {error.strerror}")
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN
        signals.to(process)
        with Keeper(client, reservation, offspring, granted_at) as keeper:
            code = offspring.wait(process)
            keeper.end()
    if keeper.lost:
        raise FailedPreconditionError(
            f"the command was stopped, since {reservation.name} was lost: {keeper.lost}", reason="LEASE_LOST"
        )
    return exit_code(code)


def _environment(reservation: "Reservation", uuids: str) -> dict[str, str]:
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": uuids,
        "GPUSCALE_GPU_UUIDS": uuids,
        RESERVATION: reservation.name,
        "GPUSCALE_FENCE": str(reservation.fence),
    }


def _release(client: "Client", reservation: "Reservation") -> None:
    """Give the GPUs back; where that fails the lease runs out by itself."""
    from gpuscale.api.allocator import v1 as api

    request = api.ReleaseReservationRequest(name=reservation.name, fence=reservation.fence)
    try:
        client.allocator.ReleaseReservation(request)
    except GpuscaleError as error:
        note(f"gpuscalectl run: {reservation.name} was not given back, its lease runs out: {error.message}")
