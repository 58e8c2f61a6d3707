"""The program `gpuscalectl`: its commands, its global options, and the one place where errors become exit codes.

Whatever is slow to import (gRPC, the contract, YAML, the rooms behind `up`) is imported inside of the commands, so
that `--help` is there at once.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from gpuscale.cli import (
    apply,
    backtest,
    capacity,
    certs,
    change,
    completion,
    config,
    evaluate,
    events,
    explain,
    explain_field,
    forget,
    forgetting,
    get,
    global_options,
    maintenance,
    observed,
    preset,
    quotas,
    record,
    recordings,
    reserve,
    rules,
    run,
    tokens,
    top,
    tune,
    wait,
    watching,
    why,
)
from gpuscale.cli.arguments import format_of, normalise
from gpuscale.cli.faults import USAGE_ERRORS, report, report_interrupt, report_usage
from gpuscale.cli.formats import Form
from gpuscale.cli.global_options import PROGRAM
from gpuscale.cli.output import Output
from gpuscale.cli.session import Session
from gpuscale.cli.terminal import TERMINAL
from gpuscale.common.errors import GpuscaleError

EPILOG = "What is common to all commands, such as -o, --no-headers and --address: gpuscalectl --help"

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: gpuscalectl explain exit-codes",
)
app.add_typer(get.app, name="get", help="Show nodes, GPUs, reservations, endpoints and the rest.")
app.add_typer(explain.app, name="explain", help="Say why.")
app.add_typer(change.scale_app, name="scale", help="Set how many replicas an endpoint aims at.")
app.add_typer(
    change.delete_app,
    name="delete",
    help="Delete an endpoint, a rule, a queue watcher, a quota or a recording.",
)
app.add_typer(forget.app, name="forget", help="Give up an adapter or a node that will never come back.")
forget.app.command("node")(forgetting.forget_node)
app.add_typer(config.app, name="config", help="Servers by name: contexts.")
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
explain.app.command("field")(explain_field.explain_field)
explain.app.command("reservation")(why.explain_reservation)
explain.app.command("placement")(why.explain_placement)
app.command(context_settings={"allow_interspersed_args": False})(record.record)
app.add_typer(recordings.start_app, name="start", help="Begin to record what GPUs do.")
app.add_typer(recordings.stop_app, name="stop", help="End a recording.")
change.delete_app.command("recording")(recordings.delete_recording)
app.command()(observed.history)
get.app.command()(observed.recordings)
get.app.command()(observed.health)
app.command()(apply.apply)
app.command()(apply.diff)
app.command()(wait.wait)
app.command()(events.events)
app.add_typer(preset.app, name="preset", help="Known systems' policies, as manifests.")
app.add_typer(evaluate.app, name="evaluate", help="Say what an endpoint would scale to; nothing is changed.")
app.add_typer(rules.create_app, name="create", help="Add a rule to an endpoint.")
app.add_typer(rules.update_app, name="update", help="Change a rule of an endpoint.")
get.app.command("rules")(rules.get_rules)
get.app.command("quotas")(quotas.get_quotas)
app.add_typer(quotas.set_app, name="set", help="Set the quota of a tenant.")
change.delete_app.command("quota")(quotas.delete_quota)
change.delete_app.command("rule")(rules.delete_rule)
app.command()(completion.completion)
app.add_typer(tokens.app, name="token", help="Tokens of a server, in its tokens file.")
app.add_typer(certs.app, name="certs", help="An authority of your own, and certificates of it.")
app.command()(backtest.backtest)
app.command()(tune.tune)


for group in (app, *(one.typer_instance for one in app.registered_groups)):
    for registered in group.registered_commands if group is not None else ():
        registered.epilog = EPILOG

get.app.callback()(watching.options)
for registered in get.app.registered_commands:
    if registered.callback is not None:
        registered.callback = watching.repeated(registered.callback)


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


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def dashboard(context: typer.Context) -> None:
    """Serve what the services know to browsers; --help after it tells its own options."""
    try:
        from gpuscale.dashboard.main import main as run_dashboard
    except ModuleNotFoundError as error:
        message = (
            f"the dashboard is not installed ({error.name} is missing): pip install 'gpuscale[dashboard]'"
        )
        raise GpuscaleError(message, reason="NOT_INSTALLED") from error
    chosen = context.find_root().params.get("address")
    address = ["--gateway-address", str(chosen)] if chosen else []
    raise typer.Exit(run_dashboard([*address, *context.args]))


@app.callback()
def options(
    context: typer.Context,
    address: global_options.Address = None,
    token_file: global_options.TokenFile = None,
    ca_file: global_options.CaFile = None,
    cert_file: global_options.CertFile = None,
    key_file: global_options.KeyFile = None,
    context_name: global_options.ContextName = None,
    request_timeout: global_options.RequestTimeout = 10.0,
    dial_timeout: global_options.DialTimeout = 5.0,
    output: global_options.OutputForm = Form(),
    no_headers: global_options.NoHeaders = False,
    only_ascii: global_options.OnlyAscii = False,
    verbose: global_options.Verbose = False,
    _version: global_options.Version = False,
) -> None:
    """See every GPU, reserve GPUs, and scale workers from queue depth onto GPUs that are truly there.

    The options below may stand anywhere on the line.
    """
    TERMINAL.ascii, TERMINAL.verbose = only_ascii, verbose
    context.obj = Session(
        address=address,
        token_file=token_file,
        context=context_name,
        request_timeout=request_timeout,
        dial_timeout=dial_timeout,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
        output=Output(output.format, headers=not no_headers, form=output),
    )


@cache
def root() -> Any:
    """The tree of commands, made once: that takes longer than most commands."""
    return typer.main.get_command(app)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; its exit code, of the one table (or that of a command which it runs)."""
    TERMINAL.reset()
    if arguments[:1] == [completion.ENTRY]:
        from gpuscale.cli.completing import complete

        return complete(root(), arguments[1:])
    TERMINAL.json = format_of(arguments) in {"json", "jsonl"}
    try:
        ended = root().main(args=normalise(arguments), prog_name=PROGRAM, standalone_mode=False)
    except GpuscaleError as error:
        return report(error)
    except USAGE_ERRORS as error:
        return report_usage(error)
    except KeyboardInterrupt:
        return report_interrupt()
    return ended if isinstance(ended, int) else 0


def main() -> None:
    """Run one command and end the process with its exit code."""
    # What the core of gRPC would write to stderr, errors say better. Read when gRPC is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
