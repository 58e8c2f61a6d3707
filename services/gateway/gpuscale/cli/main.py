"""The program `gpuscalectl`: its commands, its global options, and the one place where errors become exit codes.

Whatever is slow to import (gRPC, the contract, YAML, the rooms behind `up`) is imported inside of the commands, so
that `--help` is there at once.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuscale.cli import (
    apply,
    backtest,
    capacity,
    change,
    evaluate,
    explain,
    get,
    maintenance,
    observed,
    preset,
    record,
    reserve,
    rules,
    run,
    top,
    tune,
    why,
)
from gpuscale.cli.arguments import normalise
from gpuscale.cli.exit_codes import exit_code
from gpuscale.cli.options import duration
from gpuscale.cli.output import Format, Output
from gpuscale.cli.session import Session, note
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError

PROGRAM = "gpuscalectl"
EPILOG = "What is common to all commands, such as -o, --no-headers and --address: gpuscalectl --help"

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: gpuscalectl explain exit-codes",
)
app.add_typer(get.app, name="get", help="Show nodes, GPUs, reservations, endpoints and the rest.")
app.add_typer(explain.app, name="explain", help="Say why.")
app.add_typer(change.scale_app, name="scale", help="Set how many replicas an endpoint aims at.")
app.add_typer(change.delete_app, name="delete", help="Delete an endpoint, a rule or a queue watcher.")
app.command()(top.top)
app.command()(reserve.reserve)
app.command()(reserve.renew)
app.command()(reserve.release)
app.command(context_settings={"allow_interspersed_args": False})(run.run)
app.command()(capacity.check)
app.command()(capacity.estimate)
app.add_typer(capacity.rank_app, name="rank", help="Rank nodes by how idle they are.")
app.command()(maintenance.cordon)
app.command()(maintenance.uncordon)
app.command()(maintenance.drain)
explain.app.command("reservation")(why.explain_reservation)
explain.app.command("placement")(why.explain_placement)
app.command(context_settings={"allow_interspersed_args": False})(record.record)
app.command()(observed.history)
get.app.command()(observed.recordings)
get.app.command()(observed.health)
app.command()(apply.apply)
app.add_typer(preset.app, name="preset", help="Known systems' policies, as manifests.")
app.add_typer(evaluate.app, name="evaluate", help="Say what an endpoint would scale to; nothing is changed.")
app.add_typer(rules.create_app, name="create", help="Add a rule to an endpoint.")
app.add_typer(rules.update_app, name="update", help="Change a rule of an endpoint.")
get.app.command("rules")(rules.get_rules)
change.delete_app.command("rule")(rules.delete_rule)
app.command()(backtest.backtest)
app.command()(tune.tune)


for group in (
    app,
    get.app,
    explain.app,
    preset.app,
    evaluate.app,
    rules.create_app,
    rules.update_app,
    capacity.rank_app,
    change.scale_app,
    change.delete_app,
):
    for registered in group.registered_commands:
        registered.epilog = EPILOG


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def up(context: typer.Context) -> None:
    """Start everything on this machine, in one process."""
    try:
        from gpuscale.up.main import main as run_up
    except ModuleNotFoundError as error:
        message = f"up needs more than the CLI ({error.name} is missing): pip install 'gpuscale[all]'"
        raise GpuscaleError(message, reason="NOT_INSTALLED") from error
    raise typer.Exit(run_up(context.args))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"{PROGRAM} {version('gpuscale')}\n")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to connect; $GPUSCALE_ADDRESS or 127.0.0.1:7070.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Bearer token to send; $GPUSCALE_TOKEN_FILE.", show_default=False),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Authority of the server, PEM; switches TLS on.", show_default=False
        ),
    ] = None,
    cert_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Client certificate, PEM.", show_default=False)
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key of the client certificate, PEM.", show_default=False),
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(parser=duration, metavar="DURATION", help="Time that one call may take.")
    ] = 10.0,
    output: Annotated[
        Format, typer.Option("--output", "-o", help="What to write to standard output.")
    ] = Format.TABLE,
    no_headers: Annotated[bool, typer.Option("--no-headers", help="Tables without headings.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """See every GPU, reserve GPUs, and scale workers from queue depth onto GPUs that are truly there.

    The options below may stand anywhere on the line.
    """
    context.obj = Session(
        address=address,
        token_file=token_file,
        request_timeout=request_timeout,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
        output=Output(output, headers=not no_headers),
    )


def main() -> None:
    """Run one command and end the process with a code of the one table."""
    # What the core of gRPC would write to stderr, errors say better. Read when gRPC is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app(args=normalise(sys.argv[1:]), prog_name=PROGRAM)
    except GpuscaleError as error:
        note(f"error: {error.message}")
        if isinstance(error, InvalidArgumentError):
            for violation in error.violations:
                note(f"  {violation.field}: {violation.description}")
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
