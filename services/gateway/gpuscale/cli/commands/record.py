"""`gpuscalectl record`: run a command, and say what GPUs did meanwhile."""

import subprocess
from collections.abc import Sequence
from typing import Annotated

import typer

from gpuscale.cli.commands.child import NOT_FOUND, NOT_RUN, STDERR, Forwarding, exit_code
from gpuscale.cli.commands.recorded import Wanted, begin, end
from gpuscale.cli.console.session import Session, note, session_of
from gpuscale.cli.grammar.typed import takes


@takes("wanted", Wanted)
def record(
    context: typer.Context,
    wanted: Wanted,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False)],
) -> None:
    """Run a command and print what GPUs did while it ran: minimum, mean, maximum and count of samples.

    Without --gpu, --node and --reservation: the GPUs that CUDA_VISIBLE_DEVICES names by UUID, else those of this host.
    The exit code is the command's. With -o json or yaml, what the command writes to standard output goes to standard
    error.
    """
    session = session_of(context)
    with session.connect() as client:
        recording = begin(client, *wanted.targets(client), interval=wanted.interval).name
        try:
            code = _run(session, command)
        finally:
            end(session, client, recording)
    raise typer.Exit(code)


def _run(session: Session, command: Sequence[str]) -> int:
    """Run the command until it ends; its exit code."""
    with Forwarding() as signals:
        try:
            process = subprocess.Popen(command, stdout=None if session.output.human else STDERR)
        except OSError as error:
            note(f"error: {command[0]}: {error.strerror}")
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN
        signals.to(process)
        return exit_code(process.wait())
