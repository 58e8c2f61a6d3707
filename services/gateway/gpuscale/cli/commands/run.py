"""`gpuscalectl run`: a command on GPUs of this host that are reserved while it runs.

`Keeper` renews the lease in the background, and stops the command before the lease is lost. It counts the lease from before
the call that renewed it, by this host's clock: the server holds the GPUs for longer than is assumed here, however long the
answer took. SIGTERM comes early enough for SIGKILL to come no later than the end of the lease.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from gpuscale.cli.commands.asking import Asking, Requesting
from gpuscale.cli.commands.processes import PAUSE, STDERR, Forwarding, Offspring, exit_code, named, start
from gpuscale.cli.commands.recordings import recording_of
from gpuscale.cli.commands.reserve import grant
from gpuscale.cli.console.command import command
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import format_duration, option, takes
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from gpuscale.common.names import node_name

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Ask, Reservation, ReserveRequest, ReserveResponse
    from gpuscale.client import Client

RESERVATION = "GPUSCALE_RESERVATION"
"""Variable that names the reservation in the environment of the command."""
RENEWALS = 3
"""Fewest renewals in the time of one lease."""
LONGEST_PAUSE = 10.0
"""Most seconds between two renewals: the longest that a drain or a lost GPU goes unnoticed."""
STOP_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL; a quarter of the lease where that is less."""
SETTLE = 1.0
"""Seconds in which what a command leaves running may end by itself, such as the `tee` that it wrote to."""
RETRY = 1.0
"""Seconds until a renewal without an answer is tried again."""

_LOST = (FailedPreconditionError, NotFoundError, PermissionDeniedError, UnauthenticatedError)


@command("run --gpus 1 --wait 1h -- python train.py", context_settings={"allow_interspersed_args": False})
@takes("asking", Asking)
@takes("requesting", Requesting)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@option("--record", is_flag=True, help="Record the GPUs, and print what they did at the end.")
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
    this_node: str | None,
) -> None:
    """Run a command on GPUs of this host that are reserved while it runs: CUDA_VISIBLE_DEVICES names them by UUID.

    Processes that the command leaves running are stopped before the GPUs are given back. The exit code is the command's, or
    128 plus the number of the signal that ended it. Signals are passed on. With --record and -o json or yaml, the standard
    output of the command goes to standard error.
    """
    from gpuscale.client.this_host import admission, admit

    stdout = STDERR if record and not session.output.human else None
    with session.connect(node=this_node) as client:
        request = requesting.message(asking, client)
        here = _confine(client, request.ask)
        began = time.monotonic()
        granted = _grant(client, request, here)
        reservation = granted.reservation
        if request.HasField("wait"):
            began = time.monotonic()  # it was granted just now, however long ago it was asked for
        try:
            # This process, and all that the command starts, belongs to the reservation.
            asked = admission(reservation, granted.lease_token, here)
            if asked is not None and (why := admit(asked, client.work, client.address)):
                note(
                    f"gpuscalectl run: the agent does not count the command as the holder of its GPUs: {why}"
                )
            uuids = [gpu.uuid for gpu in reservation.gpus]
            with recording_of(session, client, uuids) if record else nullcontext():
                code = _run(client, reservation, command, began, stdout)
        finally:
            _release(client, reservation)
    leave(code)


def _confine(client: "Client", ask: "Ask") -> str:
    """Restrict an ask to this host, unless it excludes its GPUs (GPUS_ELSEWHERE); returns the node that it is."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.client.this_host import confine

    here = client.this_node(check=True)
    asked = [list(ask.nodes), sorted({name.partition("/gpus/")[0] for name in ask.gpus})]
    if here is None:
        some = client.fleet.ListNodes(monitor_api.ListNodesRequest(page_size=5)).nodes
        nodes = asked[0] or asked[1] or [one.name for one in some]
        raise _elsewhere(
            f"and no agent of the fleet runs here: {_run_it_on(nodes)};"
            " if this host is one of its nodes, pass --this-node NAME"
        )
    for nodes in asked:
        if nodes and node_name(here) not in nodes:
            raise _elsewhere(f"which is {here}: {_run_it_on(nodes)}")
    if node_name(here) in ask.excluded_nodes:
        raise _elsewhere(f"which is {here}, and --exclude-node {here} excludes it: drop that option")
    if ask.gang_strategy == api.GangStrategy.GANG_STRATEGY_STRICT_SPREAD and ask.member_count > 1:
        raise _elsewhere(
            f"which is {here}, and --strategy strict-spread needs {ask.member_count} nodes:"
            " run one command on each node, or use another strategy"
        )
    confine(ask, here)
    return here


def _elsewhere(why: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"run starts the command on this host, {why}", reason="GPUS_ELSEWHERE")


def _run_it_on(nodes: Sequence[str]) -> str:
    """What to do where the nodes are other hosts."""
    ids = [one.removeprefix("nodes/") for one in nodes]
    return f"run it on {' or '.join(ids)}" if ids else "the fleet has no node yet"


def _grant(client: "Client", request: "ReserveRequest", here: str) -> "ReserveResponse":
    """A reservation on this host and its lease token; where it is refused, or on another host, nothing is held."""
    from gpuscale.client.this_host import expect_here, only_here

    try:
        granted = grant(client, request)
    except GpuscaleError as error:
        raise only_here(error, here, "run starts the command there") from error.__cause__
    try:
        expect_here(granted.reservation, here, "run it on {node}")
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
    """Run the command until it ends, or its reservation is lost; returns its exit code."""
    simulated = any(gpu.simulated for gpu in reservation.gpus)
    uuids = ",".join(gpu.uuid for gpu in reservation.gpus)
    note(f"gpuscalectl run: {reservation.name} holds {'SIMULATED ' if simulated else ''}{uuids}")
    with Forwarding() as signals, Offspring() as offspring:
        variables = {
            "CUDA_VISIBLE_DEVICES": uuids,
            "GPUSCALE_GPU_UUIDS": uuids,
            RESERVATION: reservation.name,
            "GPUSCALE_FENCE": str(reservation.fence),
        }
        process = start(command, variables=variables, stdout=stdout, dies_with_us=True)
        if isinstance(process, int):
            return process
        signals.to(process)
        with Keeper(client, reservation, offspring, granted_at) as keeper:
            code = offspring.wait(process)
            keeper.end()
    if keeper.lost:
        raise FailedPreconditionError(
            f"the command was stopped because {reservation.name} was lost: {keeper.lost}", reason="LEASE_LOST"
        )
    return exit_code(code)


def _release(client: "Client", reservation: "Reservation") -> None:
    """Give the GPUs back; where that fails, the lease expires by itself."""
    from gpuscale.api.allocator import v1 as api

    request = api.ReleaseReservationRequest(name=reservation.name, fence=reservation.fence)
    try:
        client.allocator.ReleaseReservation(request)
    except GpuscaleError as error:
        note(
            f"gpuscalectl run: {reservation.name} was not given back, and expires by itself: {error.message}"
        )


class Keeper:
    """Keeps the lease of a reservation while its block runs; `lost` says why it could not, and is empty while it can.

    Args:
        offspring: the command and all that it started.
        granted_at: `time.monotonic()` from before the reservation was answered.
    """

    def __init__(
        self, client: "Client", reservation: "Reservation", offspring: Offspring, granted_at: float
    ) -> None:
        from gpuscale.common.wire import seconds

        self.lost = ""
        self._client = client
        self._reservation = reservation
        self._offspring = offspring
        self._ttl = seconds(reservation.ttl)
        self._pause = min(LONGEST_PAUSE, self._ttl / RENEWALS)
        self._grace = min(STOP_GRACE, self._ttl / 4)
        self._ends = granted_at + seconds(reservation.remaining)
        self._told = ""
        self._revoked = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keep the lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        pause = self._pause
        while not self._done.wait(max(0.0, min(pause, self._ends - self._grace - time.monotonic()))):
            pause = self._pause if self._renewed() else RETRY
            if self.lost or time.monotonic() >= self._ends - self._grace:
                self.lost = self.lost or self._revoked or "it was not renewed in time"
                note(f"gpuscalectl run: the reservation is lost, stopping the command: {self.lost}")
                left = max(RETRY, min(self._grace, self._ends - time.monotonic()))
                self._stop_by(time.monotonic() + left)
                return

    def _renewed(self) -> bool:
        """Renew the lease, and tell when it is going to be revoked; whether there was an answer."""
        from gpuscale.api.allocator import v1 as api
        from gpuscale.client.states import revoked_early

        request = api.RenewReservationRequest(name=self._reservation.name, fence=self._reservation.fence)
        sent = time.monotonic()
        try:
            renewed = self._client.allocator.RenewReservation(
                request, timeout=max(RETRY, min(self._pause, self._ends - self._grace - sent))
            ).reservation
        except _LOST as error:
            self.lost = error.message
            return True
        except GpuscaleError as error:
            self._tell(f"cannot renew the lease, trying again: {error.message}")
            return False
        self._ends = sent + self._ttl
        self._revoked = ""
        if (early := revoked_early(renewed)) is not None:
            left = self._ends - time.monotonic() - early
            self._ends = min(self._ends, time.monotonic() + left)
            self._revoked = renewed.end_reason
            self._tell(f"{renewed.end_reason}: the GPUs are revoked in {format_duration(left)}")
        return True

    def end(self) -> None:
        """Stop what the command left running, before its GPUs are given back."""
        settled = time.monotonic() + SETTLE
        while (left := [] if self.lost else self._offspring.alive()) and time.monotonic() < settled:
            time.sleep(PAUSE)
        if left:
            note(f"gpuscalectl run: stopping processes that the command left running: {named(left)}")
            self._stop_by(time.monotonic() + self._grace)

    def _tell(self, text: str) -> None:
        if text.partition(":")[0] != self._told:
            note(f"gpuscalectl run: {text}")
        self._told = text.partition(":")[0]

    def _stop_by(self, until: float) -> None:
        left = self._offspring.stop(until)
        if left:
            note(
                f"gpuscalectl run: cannot stop these, which may still use GPUs that are given to others: {named(left)}"
            )
