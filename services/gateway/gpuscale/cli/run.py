"""`gpuscalectl run`: a command on GPUs that are its own for as long as it runs."""

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.asking import Asking
from gpuscale.cli.child import NOT_FOUND, NOT_RUN, RESERVATION, STDERR, Forwarding, exit_code
from gpuscale.cli.commands.granting import grant
from gpuscale.cli.commands.keeping import Keeper
from gpuscale.cli.commands.recorded import recording_of
from gpuscale.cli.commands.requesting import Requesting
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.typed import takes
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
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
) -> None:
    """Run a command on GPUs that are reserved while it runs: CUDA_VISIBLE_DEVICES names them by UUID.

    The exit code is the command's; 128 and its number where a signal ended it. Signals are passed on. With --record and
    -o json or yaml, what the command writes to standard output goes to standard error.
    """
    request = requesting.message(asking)
    session = session_of(context)
    stdout = STDERR if record and not session.output.human else None
    with session.connect() as client:
        began = time.monotonic()
        reservation = grant(client, request)
        if request.HasField("wait"):
            began = time.monotonic()  # it was granted just now, whenever it was asked for
        try:
            uuids = [gpu.uuid for gpu in reservation.gpus]
            with recording_of(session, client, uuids) if record else nullcontext():
                code = _run(client, reservation, command, began, stdout)
        finally:
            _release(client, reservation)
    raise typer.Exit(code)


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
    with Forwarding() as signals:
        try:
            process = subprocess.Popen(command, env=_environment(reservation, uuids), stdout=stdout)
        except OSError as error:
            note(f"error: {command[0]}: {error.strerror}")
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN
        signals.to(process)
        with Keeper(client, reservation, process, granted_at) as keeper:
            code = process.wait()
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
