"""`gpuscalectl run`: run a command on reserved GPUs, on the host that has them.

On this host it supervises the command itself; on another, ssh starts a supervisor.
"""

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING, Any

import click

from gpuscale.cli.commands.processes import STDERR, Forwarding
from gpuscale.cli.commands.reserve import Asking, Requesting
from gpuscale.cli.console.command import Session, command
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.terminal import TERMINAL, note, note_of_run, write_lines
from gpuscale.cli.grammar.parameters import Parsed, option, repeated, takes
from gpuscale.client.orders import Orders, expect_directory, when_moved
from gpuscale.client.over_ssh import OF_SIGNAL, EarlyStart, supervised
from gpuscale.common.errors import UNANSWERED, FailedPreconditionError, GpuscaleError, InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.cli.commands.recordings import Recorded
    from gpuscale.client import Client

_NOT_BEGUN = {"NO_SSH", "NO_SUPERVISOR", "MEMBER_NOT_READY"}


def _ports(text: str) -> str:
    if not re.fullmatch(r"\d{1,5}(:\d{1,5})?", text) or not all(
        0 < int(one) < 65_536 for one in text.split(":")
    ):
        raise ValueError(f"{text!r} is not a port; write it like 8888, or LOCAL:REMOTE")
    return text


@command("run --gpus 1 --wait 1h -- python train.py", context_settings={"allow_interspersed_args": False})
@takes("asking", Asking)
@takes("requesting", Requesting)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@option("--record", is_flag=True, help="Record the GPUs, and print their readings at the end.")
@option("--detach", "-d", is_flag=True, help="Print the job's name and return; the job keeps running.")
@option("--name", "title", default="", help="What to call the job.")
@repeated(
    "--forward",
    type=Parsed("port", _ports),
    help="Forward a port of this host to the same port there, or LOCAL:REMOTE.",
)
@option("--check", is_flag=True, help="Test the GPUs before the command starts, which takes seconds.")
@option("--anywhere", is_flag=True, help="Allow GPUs of other hosts, even if this host has some.")
@option(
    "--user", default="", metavar="NAME", help="Unix user on another host; by default as ssh is configured."
)
@option(
    "--directory", metavar="PATH", help="Working directory of the command; the current directory by default."
)
@repeated(
    "--env", metavar="NAME[=VALUE]", help="Set a variable for the command; by default to your own value."
)
@option(
    "--on-member-failure",
    type=click.Choice(("stop", "continue")),
    default="stop",
    help="Whether a failed member stops the others.",
)
@option(
    "--on-move",
    type=Parsed("signal", when_moved),
    default={},
    metavar="signal:NAME[,grace:TIME]",
    help="A signal with which the command saves its work and ends when its GPUs are to be taken away (preempted, moved or"
    " drained), and how long it may take; as long as there is by default. Then it starts again on other GPUs.",
)
@option(
    "--via",
    default="",
    metavar="HOST",
    help="With --detach, the host that starts a job that has to wait; by default this host if it has GPUs, else that of the services.",
)
def run(
    session: Session,
    asking: Asking,
    requesting: Requesting,
    command: tuple[str, ...],
    record: bool,
    detach: bool,
    title: str,
    forward: tuple[str, ...],
    check: bool,
    anywhere: bool,
    user: str,
    directory: str | None,
    env: tuple[str, ...],
    on_member_failure: str,
    on_move: dict[str, Any],
    via: str,
) -> None:
    """Run a command on GPUs that are reserved while it runs; CUDA_VISIBLE_DEVICES has their UUIDs.

    If no GPUs are free, it waits in the queue for up to --wait. If this host has GPUs it runs here, unless --anywhere,
    --node, --gpu or --members is given; else on the granted host, over your own ssh: `ssh NODE` must reach it, and it
    needs gpuscale and the same directory.

    Processes that the command leaves running are stopped before the GPUs are released. The exit code is the command's, or
    128 plus the signal that ended it. Signals are forwarded, except SIGINT and SIGQUIT in the foreground of a
    terminal, whose Ctrl-C reaches the command itself; on another host, signals that end ssh stop the command.
    With --record and -o json or yaml, the standard output of the command goes to standard error.

    With --members, each member runs the command on its node, with its own GPUs, NODE_RANK, NNODES, MASTER_ADDR and
    MASTER_PORT; output lines begin with the member, and the exit code is that of the first that failed.

    With --detach it returns once the command has started or is queued, and the job keeps running: use get jobs, logs,
    attach, wait and stop. A queued job is started by a process of yours on the host of --via.

    With --check the command starts only if its GPUs are healthy and pass a test (if CUDA is installed). A GPU that fails
    is cordoned with the finding, if you may do so.
    """
    if detach and (record or forward):
        raise click.UsageError("--detach excludes --record and --forward")
    with ExitStack() as stack:
        early, elsewhere = None, {*asking.node} - {os.environ.get("GPUSCALE_NODE"), os.uname().nodename}
        if len(elsewhere) == 1 and not (detach or asking.members):
            early = stack.enter_context(EarlyStart(asking.node[0], user, forward))
        from gpuscale.cli.commands.reserve import grant  # only now, since all of these take long
        from gpuscale.client import asks, jobs

        client = stack.enter_context(session.connect())
        waiting = requesting if requesting.wait is not None else replace(requesting, wait=asks.LONGEST_WAIT)
        request = asks.of_a_job(waiting.message(asking, client), title, command, user, on_move)
        here = jobs.place(client, request.ask, anywhere=anywhere or bool(requesting.booking))
        request.keep_place = detach and request.HasField("wait")
        orders = Orders(
            node=jobs.starter(client, via, here),
            command=command,
            environment=dict(map(_variable, env)),
            directory=expect_directory(directory),
            address=client.address,
            authority=client.authority(),
            stop_together=on_member_failure == "stop",
            detached=detach,
            time_limit=requesting.time_limit or 0.0,
            user=user,
            check=check,
            **on_move,
        )
        try:
            granted = client.allocator.Reserve(request) if detach else grant(client, request)
        except GpuscaleError as error:
            raise jobs.refused(error, request.ask, here, "--anywhere asks all") from None
        reservation, made = granted.reservation, orders.of_grant(granted, here)
        if check:
            from gpuscale.cli.commands import probe

            stack.callback(probe.close_failed, client, reservation.name)
            probe.expect_well(client, reservation)
        stdout = STDERR if record and not session.output.human else None
        recorded: Recorded = nullcontext
        if record:
            from gpuscale.cli.commands.recordings import recording_attempts

            recorded = stack.enter_context(recording_attempts(session, client, reservation.name))
        begin = partial(_start, client, forward=forward, stdout=stdout, recorded=recorded)
        code = begin(reservation, made, early, once=not requesting.request_id) if made else 0
        while made and not detach and (again := _moved(client, made[0])) is not None:
            made = made[0].of_members(again, here)
            code = begin(again, made, None, once=False)
        if detach and not code:
            _tell(session, client, reservation, made)
    leave(code)


def _start(
    client: "Client",
    reservation: "Reservation",
    made: Sequence[Orders],
    early: EarlyStart | None,
    *,
    forward: Sequence[str],
    stdout: int | None,
    recorded: "Recorded",
    once: bool,
) -> int:
    """Run the command, supervised here if it is the only member and on this host; returns its exit code."""
    members, first = [supervised(one, forward, early) for one in made], made[0]
    if first.local and not first.detached and len(members) == 1:
        from gpuscale.cli.commands.holding import LeaseHolder
        from gpuscale.cli.commands.supervise import run_under

        with recorded(reservation):
            return run_under(LeaseHolder(first, [client.allocator]), own=client.work, stdout=stdout)
    from gpuscale.client.jobs import supervise

    with recorded(reservation), Forwarding() as signals:
        try:
            return supervise(
                client,
                reservation,
                members,
                stdout=1 if stdout is None else stdout,
                once=once,
                environment=TERMINAL.callers_environment(),
                on_start=signals.to,
            )
        except (FailedPreconditionError, *UNANSWERED) as error:
            if not signals.ending or first.detached:  # else it ended ssh
                raise
            began = "nothing was started" if error.reason in _NOT_BEGUN else "the command is stopped"
            where = ", ".join(one.node for one in made)
            note_of_run(f"{Signals(signals.ending).name}: {began} on {where}")
            return OF_SIGNAL + signals.ending


def _moved(client: "Client", ran: Orders) -> "Reservation | None":
    """The reservation of a job that has ended, once it has other GPUs; None if it is not to start again."""
    if not ran.on_move or not ran.reports:
        return None
    from gpuscale.cli.commands.logs import telling
    from gpuscale.client.jobs import Job
    from gpuscale.common.names import node_of

    with telling() as (tell, _):
        again = Job(client, ran.reservation).begun_anew(ran.attempt, tell)
    if again is not None:
        nodes = ", ".join(dict.fromkeys(map(node_of, again.gpus)))
        note_of_run(f"starting attempt {again.job.attempt} on {nodes}")
    return again


def _tell(session: Session, client: "Client", reservation: "Reservation", made: Sequence[Orders]) -> None:
    """Print the job's name, and who starts it if it is queued."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.allocator import JOBS

    if not session.output.human:
        session.output.write_one(lookup.job(client, reservation.name), JOBS)
        return
    short = reservation.name.partition("/")[2]
    write_lines([short])
    queued = made and made[0].waits
    note(
        f"queued; {made[0].node} starts it in its turn" if queued else "started" if made else "started before"
    )
    note(f"follow its output with: gpuscalectl logs -f {short}")


def _variable(typed: str) -> tuple[str, str]:
    name, equals, value = typed.partition("=")
    if not equals and name not in os.environ:
        raise InvalidArgumentError(
            f"--env {name}: this variable is not set here; give it a value", field="env"
        )
    if not name.isidentifier():
        raise InvalidArgumentError(f"--env {typed}: {name!r} is not the name of a variable", field="env")
    return name, value if equals else os.environ[name]
